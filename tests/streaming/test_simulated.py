"""The accelerator path on a simulated device: no race, the same numbers in every placement, near those of the CPU.

The device stands in CUDA's place; its work is done as late as the program's own waits allow, so that a wait that is
missing shows. What it cannot show is what a real driver and real kernels do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "simulated.py"


def run_scenarios(*names: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *names], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def quick() -> list[dict[str, Any]]:
    """The least of each scenario, in one process."""
    return run_scenarios("numbered", "lora", "score", "write")


def check(cases: list[dict[str, Any]], least: int) -> None:
    assert len(cases) >= least
    for case in cases:
        assert case["error"] is None, case
        assert case["races"] == [], case
    assert len({case["numbers"] for case in cases}) == 1, cases


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param("numbered", id="every placement trains on a device named auto or without a number"),
        pytest.param("lora", id="frozen weights are not overwritten while the device computes with them"),
        pytest.param("score", id="weights that are only read are whole when the device computes with them"),
        pytest.param("write", id="writing first does not switch the kernel for ragged batches off"),
    ],
)
def test_on_an_accelerator(scenario: str, quick: list[dict[str, Any]]) -> None:
    check([case for case in quick if case["scenario"] == scenario], 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "lora", "score", "write"])
def test_no_schedule_of_an_accelerator_changes_a_number(name: str) -> None:
    check(run_scenarios(name, "--all"), 15)
