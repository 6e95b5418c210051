"""Forecasts of GPT-J 6B on accelerators beside the step itself: its memory by the ledger, its seconds by a replay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fork_server import ForkServer

CAPS = (6, 8, 12, 16, 24, 40, 80)  # GB


def forecasts(server: ForkServer, what: str, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    return server.run_module("support.ghost_forecasts", what, *map(json.dumps, cases))


def check_memory(case: dict[str, Any]) -> None:
    assert case["need"] <= case["have"], case
    assert case["ledger"] <= case["forecast"] <= 1.1 * case["ledger"], case


def test_a_few_blocks_take_the_memory_that_was_forecast_and_the_seconds(server: ForkServer) -> None:
    found = forecasts(
        server, "memory", *({"cap": 6, "tokens": 4096, "method": each, "layers": 2} for each in ("full", "lora"))
    )
    for case in found:
        check_memory(case)
    (step,) = forecasts(server, "time", {"device": "RTX 4060 8GB", "tokens": 8192, "layers": 3})
    assert step["forecast"] == pytest.approx(step["replay"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [4096, 16384, 32768])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_no_step_takes_more_memory_than_forecast_or_a_tenth_less(server: ForkServer, method: str, tokens: int) -> None:
    cases = forecasts(server, "memory", *({"cap": cap, "tokens": tokens, "method": method} for cap in CAPS))
    for case in cases:
        if case["need"] <= case["have"]:
            check_memory(case)
    assert sum(case["need"] <= case["have"] for case in cases) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "cap"), [("RTX 4060 8GB", 8), ("RTX 4090 24GB", 24), ("H100 80GB", 40), ("H200 141GB", 80)]
)
def test_the_timeline_takes_as_long_as_the_operations_of_a_step(server: ForkServer, device: str, cap: int) -> None:
    (step,) = forecasts(server, "time", {"device": device, "tokens": 16384, "cap": cap})
    assert step["forecast"] == pytest.approx(step["replay"], rel=0.05)
