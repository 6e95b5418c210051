"""Ghost mode: the schedule of a model that is not there, its bytes and its trace."""

from __future__ import annotations

from typing import Any

import pytest
from support.accelerator.replay import DeviceRates
from support.fork_server import ForkServer

GHOST = "support.accelerator.ghost_cases"
PARAMETERS = 6.05e9  # of GPT-J 6B


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
        submitting = DeviceRates.issue * case["operations"]
        assert max(case["busy"].values()) <= case["seconds"] <= sum(case["busy"].values()) + submitting


@pytest.mark.slow
def test_gptj_6b_step_fits_8_gb(server: ForkServer) -> None:
    (found,) = server.run_module(GHOST, "whole")
    assert found["peak"] < 8.5e9, found["at_peak"]
    # Once each way: bf16 weights, their low bits, two moments and gradients, 10 bytes a parameter. Backward reads the
    # weights of the blocks once more, unless they are still there.
    for _, _, _, moved in found["steps"].values():
        assert 10 * PARAMETERS < moved["h2d"] < 12 * PARAMETERS
        assert moved["d2h"] == pytest.approx(10 * PARAMETERS, rel=0.01)
