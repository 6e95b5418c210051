"""Deterministic kernels are selected on CUDA devices, for a step alone."""

from __future__ import annotations

import os

import pytest
import torch

from gptj_ft.system import accelerator
from gptj_ft.system.accelerator import allow_deterministic_products, deterministic_kernels

CUDA = torch.device("cuda", 0)


def flags() -> tuple[bool, bool, bool]:
    """Return whether torch is deterministic, only warns, and fills new memory."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_deterministic_kernels_are_selected_in_the_block_alone() -> None:
    before = flags()
    with deterministic_kernels(CUDA):
        # Strict: with a warning alone, attention would keep its other backward kernel.
        assert flags() == (True, False, False)
    assert flags() == before


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_other_devices_are_left_alone(device: str) -> None:
    before = flags()
    with deterministic_kernels(torch.device(device)):
        assert flags() == before


def test_rocm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    before = flags()
    with deterministic_kernels(CUDA):
        assert flags() == before


@pytest.mark.parametrize(("before", "after"), [(None, ":4096:8"), (":4096:2:16:8", ":4096:8"), (":16:8", ":16:8")])
def test_workspaces_of_products_are_reproducible(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = accelerator.WORKSPACES
    monkeypatch.setenv(name, "") if before is None else monkeypatch.setenv(name, before)
    allow_deterministic_products(CUDA)
    assert os.environ[name] == after
