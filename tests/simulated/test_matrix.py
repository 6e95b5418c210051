"""The accelerator path on a simulated device: no race, the same bits in every placement, near those of the CPU.

Its work is done as late, as early or as oddly as the program's own waits allow, so that a wait that is missing shows.
What it cannot show is what a real driver and real kernels do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
LEAST_CASES = 400


def run_cases(*arguments: str) -> list[dict[str, Any]]:
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    done = subprocess.run(
        [sys.executable, "-m", "support.simulated", *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(cases: list[dict[str, Any]]) -> None:
    numbers = defaultdict(set)
    for case in cases:
        assert case["error"] is None, case
        assert case["races"] == [], case
        numbers[case["scenario"], case["group"]].add(case["numbers"])
    assert {group for group, found in numbers.items() if len(found) > 1} == set()


@pytest.fixture(scope="module")
def reduced() -> list[dict[str, Any]]:
    return run_cases()


@pytest.mark.parametrize("scenario", ["full", "tied", "lora", "part", "read", "write", "run"])
def test_an_accelerator_gives_the_same_bits_wherever_the_model_is(scenario: str, reduced: list[dict[str, Any]]) -> None:
    cases = [case for case in reduced if case["scenario"] == scenario]
    assert len(cases) >= 3
    check(cases)


def test_every_copy_beside_the_computation_is_of_locked_memory(reduced: list[dict[str, Any]]) -> None:
    # Single rows of an embedding that stays off the device are gathered into memory of their own.
    found = {where for case in reduced for _, where, _ in case["pageable"]}
    assert {where for where in found if "read_rows" not in where} == set()


def test_an_accelerator_agrees_with_the_cpu() -> None:
    (found,) = run_cases("--agreement")
    for name, (ours, theirs) in found.items():
        assert ours == pytest.approx(theirs, rel=1e-4 if "fp32" in name else 5e-2), name


@pytest.mark.slow
def test_no_schedule_of_an_accelerator_changes_a_bit() -> None:
    cases = run_cases("--all")
    assert len(cases) >= LEAST_CASES
    check(cases)
