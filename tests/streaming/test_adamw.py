"""Test the stochastic rounding of bf16 moments; test_streaming compares AdamW with torch."""

from __future__ import annotations

import pytest
import torch

from gptj_ft.streaming.adamw import round_stochastically


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    exact = torch.full((4096,), 1.0 + 1 / 1024)  # an eighth of the way from 1 to the next bf16 number
    rounded = torch.empty(4096, dtype=torch.bfloat16)
    sums = torch.zeros(4096)
    for step in range(400):
        round_stochastically(exact.clone(), rounded, (0, step), 0)
        assert set(rounded.tolist()) <= {1.0, 1.0078125}
        sums += rounded.float()
    assert (sums / 400).mean().item() == pytest.approx(exact[0].item(), abs=2e-5)
    assert (sums / 400).std().item() < 4e-4  # different noise for every element and call
    again = torch.empty_like(rounded)
    for start in (0, 1024):  # in chunks or at once
        part = slice(start, start + 1024 if start == 0 else None)
        round_stochastically(exact[part].clone(), again[part], (0, 399), start)
    assert torch.equal(rounded, again)


def test_bf16_moments_keep_small_changes() -> None:
    value, target = torch.ones(1024, dtype=torch.bfloat16), 2.0
    for step in range(2000):
        exact = value.float().mul_(0.999).add_(0.001 * target)
        round_stochastically(exact, value, (1, step), 0)
    assert value.float().mean().item() == pytest.approx(2 - 0.999**2000, abs=0.01)
