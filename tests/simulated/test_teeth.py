"""The simulator has teeth: a wait, an event or a mark that is taken out of the accelerator path is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def run_mutations(*arguments: str) -> list[dict[str, Any]]:
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    done = subprocess.run(
        [sys.executable, "-m", "support.accelerator.mutations", *arguments], capture_output=True, text=True,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}, cwd=TESTS.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def missed(found: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['path']}:{each['line']} {each['function']} {each['what']}: {each['before']}"
        for each in found
        if not each["found_by"] and not each["changes_nothing"]
    ]


def test_a_sample_of_missing_waits_is_found() -> None:
    found = run_mutations("--only", "block_reader", "--cases", "2")
    assert len(found) >= 2
    assert missed(found) == []


@pytest.mark.slow
def test_every_missing_wait_is_found() -> None:
    found = run_mutations()
    assert len(found) >= 60
    assert missed(found) == []
