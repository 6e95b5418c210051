"""Runs on a device that are killed or stopped: the resumed run ends with the bits of an undisturbed one."""

from __future__ import annotations

from typing import Any

import pytest
from support.fork_server import ForkServer

CASES = "support.accelerator.cut_cases"
STOPPED, KILLED = 130, -9  # exit codes


def check(cases: list[dict[str, Any]]) -> None:
    (numbers,) = {case["numbers"] for case in cases if case["cut"] == "none"}
    for case in cases:
        assert case["races"] == 0, case
        assert "Traceback" not in case["said"], case
        if case["cut"] == "none":
            assert case["code"] == 0, case
            continue
        assert case["code"] == (KILLED if case["cut"] == "killed" else STOPPED), case
        assert (case["after"]["code"], case["after"]["races"]) == (0, 0), case
        assert case["numbers"] == numbers, case


@pytest.mark.thorough
def test_cut_run_resumes_with_equal_bits(server: ForkServer) -> None:
    cases = server.run_module(CASES, "1", "disk")
    assert {case["cut"] for case in cases} == {"none", "killed", "stopped"}
    check(cases)


@pytest.mark.slow
def test_no_cut_changes_a_bit_in_any_placement(server: ForkServer) -> None:
    cases = server.run_module(CASES, "4")
    assert len(cases) == 3 * (1 + 2 * 4)
    check(cases)
