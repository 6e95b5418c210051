"""Ghost mode: the schedule of a model that is not there, its bytes and its trace."""

from __future__ import annotations

from typing import Any

import pytest
from support.fork_server import ForkServer

GHOST = "support.accelerator.ghost_cases"


# Both are about the simulator alone; the slow test runs the product on it.
pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def small(server: ForkServer) -> list[dict[str, Any]]:
    (found,) = server.run_module(GHOST)
    return found


def test_ghost_ledger_equals_real_ledger(small: list[dict[str, Any]]) -> None:
    for case in small:
        assert case["ghost"] == pytest.approx(case["real"], rel=0.01), case


def test_replay_lasts_as_long_as_busiest_engine(small: list[dict[str, Any]]) -> None:
    for case in small:
        assert max(case["busy"].values()) <= case["seconds"] <= sum(case["busy"].values()) + 10e-6 * case["operations"]


@pytest.mark.slow
def test_gptj_6b_step_fits_8_gb(server: ForkServer) -> None:
    (found,) = server.run_module(GHOST, "whole")
    assert found["peak"] < 8.5e9, found["at_peak"]
    for _, _, _, moved in found["steps"].values():  # weights twice, and the state once each way
        assert 68e9 < moved["h2d"] < 76e9
        assert 68e9 < moved["d2h"] < 78e9
