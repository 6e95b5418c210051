"""A device that fails, by the command line: one line, nothing lost, and the resumed run ends with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
from support.fork_server import ForkServer

pytestmark = pytest.mark.thorough

OF_MEMORY = ("out of memory at once", "memory is taken")
OF_A_STEP = ("out of memory", "out of memory in a step")


@pytest.fixture(
    scope="module",
    params=[["host"], pytest.param(["device", "disk", "host"], marks=pytest.mark.slow)],
    ids=["in host memory", "anywhere"],
)
def cases(request: pytest.FixtureRequest, server: ForkServer) -> list[dict[str, Any]]:
    """Each fault, what was said, and the numbers of the run in the end."""
    return server.run_module("support.accelerator.fault_cases", *request.param)


def chosen(cases: list[dict[str, Any]], *faults: str) -> list[dict[str, Any]]:
    found = [case for case in cases if case["fault"] in faults]
    assert found
    return found


@pytest.fixture(scope="module")
def numbers(cases: list[dict[str, Any]]) -> str:
    """Digest of the model that runs without a fault end with, wherever they are."""
    (found,) = {case["numbers"] for case in chosen(cases, "none")}
    return found


def test_refused_pinning_costs_only_speed(cases: list[dict[str, Any]], numbers: str) -> None:
    for case in chosen(cases, "no memory is locked", "some memory is locked"):
        assert case["code"] == 0, case
        assert "refuses to pin more host memory (" in case["said"]
        assert "are pinned): the rest is copied more slowly" in case["said"]
        assert case["numbers"] == numbers


def test_run_resumes_after_device_memory_error(cases: list[dict[str, Any]], numbers: str) -> None:
    for case in chosen(cases, *OF_MEMORY):
        assert case["code"] == 4, case
        assert "gptj-ft: device memory ran out: CUDA out of memory" in case["said"]
        assert "Traceback" not in case["said"]
        assert case["after"]["code"] == 0, case
        assert case["numbers"] == numbers, case


def test_step_is_repeated_after_device_memory_error(cases: list[dict[str, Any]], numbers: str) -> None:
    for case in chosen(cases, *OF_A_STEP):
        assert case["code"] == 0, case
        assert "repeating it with the activations of 1 blocks kept instead of 2; no number changes" in case["said"]
        assert case["numbers"] == numbers, case


def test_run_resumes_after_device_loss(cases: list[dict[str, Any]], numbers: str) -> None:
    for case in chosen(cases, "lost"):
        assert case["code"] == 4, case
        assert "gptj-ft: the device failed: CUDA error: unspecified launch failure" in case["said"]
        assert "finetune --resume" in case["said"]
        assert "Traceback" not in case["said"]
        assert case["after"]["code"] == 0, case
        assert case["numbers"] == numbers, case


@pytest.mark.parametrize("device", ["sim:9", "sim:1", "cuda:0"])
def test_missing_device_is_rejected(device: str, cases: list[dict[str, Any]]) -> None:
    (case,) = chosen(cases, f"--device {device}")
    assert case["code"] == 2
    assert device.split(":")[0] in case["said"]
    assert "Traceback" not in case["said"]


def test_no_fault_causes_a_race(cases: list[dict[str, Any]]) -> None:
    assert [case for case in cases if case["races"]] == []
