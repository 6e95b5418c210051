"""A device that fails, by the command line: one line, nothing lost, and the resumed run ends with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
OF_MEMORY = ("out of memory", "out of memory at once", "memory is taken")


@pytest.fixture(
    scope="module",
    params=[["host"], pytest.param(["device", "disk", "host"], marks=pytest.mark.slow)],
    ids=["in host memory", "anywhere"],
)
def cases(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Each fault, what was said, and the numbers of the run in the end."""
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    done = subprocess.run(
        [sys.executable, "-m", "support.accelerator.fault_cases", *request.param], capture_output=True, text=True,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def chosen(cases: list[dict[str, Any]], *faults: str) -> list[dict[str, Any]]:
    found = [case for case in cases if case["fault"] in faults]
    assert found
    return found


@pytest.fixture(scope="module")
def numbers(cases: list[dict[str, Any]]) -> str:
    """Digest of the model that runs without a fault end with, wherever they are."""
    (found,) = {case["numbers"] for case in chosen(cases, "none")}
    return found


def test_a_refused_registration_costs_speed_and_nothing_else(cases: list[dict[str, Any]], numbers: str) -> None:
    for case in chosen(cases, "no memory is locked", "some memory is locked"):
        assert case["code"] == 0, case
        assert "locks no more pages" in case["said"]
        assert case["numbers"] == numbers


def test_a_device_without_memory_ends_a_run_in_one_line_and_a_resume_in_the_same_bits(
    cases: list[dict[str, Any]], numbers: str
) -> None:
    for case in chosen(cases, *OF_MEMORY):
        assert case["code"] == 4, case
        assert "gptj-ft: device memory ran out: CUDA out of memory" in case["said"]
        assert "Traceback" not in case["said"]
        assert case["after"]["code"] == 0, case
        assert case["numbers"] == numbers, case


def test_a_lost_device_ends_a_run_in_one_line_and_a_resume_in_the_same_bits(
    cases: list[dict[str, Any]], numbers: str
) -> None:
    for case in chosen(cases, "lost"):
        assert case["code"] == 4, case
        assert "gptj-ft: the device failed: CUDA error: unspecified launch failure" in case["said"]
        assert "finetune --resume" in case["said"]
        assert "Traceback" not in case["said"]
        assert case["after"]["code"] == 0, case
        assert case["numbers"] == numbers, case


@pytest.mark.parametrize("device", ["sim:9", "sim:1", "cuda:0"])
def test_a_device_that_is_not_there_is_refused(device: str, cases: list[dict[str, Any]]) -> None:
    (case,) = chosen(cases, f"--device {device}")
    assert case["code"] == 2
    assert device.split(":")[0] in case["said"]
    assert "Traceback" not in case["said"]


def test_no_fault_makes_a_race(cases: list[dict[str, Any]]) -> None:
    assert [case for case in cases if case["races"]] == []
