"""Ghost mode: the schedule of a model that is not there, its bytes and its trace."""

from __future__ import annotations

from typing import Any

import pytest
from support.fork_server import ForkServer

GHOST = "support.accelerator.ghost_cases"


@pytest.fixture(scope="module")
def small(server: ForkServer) -> list[dict[str, Any]]:
    (found,) = server.run_module(GHOST)
    return found


def test_the_ledger_without_numbers_is_that_of_a_run_with_them(small: list[dict[str, Any]]) -> None:
    for case in small:
        assert case["ghost"] == pytest.approx(case["real"], rel=0.01), case


def test_a_replay_takes_at_least_what_its_busiest_engine_takes(small: list[dict[str, Any]]) -> None:
    for case in small:
        assert max(case["busy"].values()) <= case["seconds"] <= sum(case["busy"].values()) + 10e-6 * case["operations"]


@pytest.mark.slow
def test_a_step_of_gptj_6b_fits_into_8_gb_of_device_memory(server: ForkServer) -> None:
    (found,) = server.run_module(GHOST, "whole")
    assert found["peak"] < 8.5e9, found["at_peak"]
    for _, _, _, moved in found["steps"].values():  # weights twice, and the state once each way
        assert 68e9 < moved["h2d"] < 76e9
        assert 68e9 < moved["d2h"] < 78e9
