"""Forecasts of GPT-J 6B on accelerators, compared with a simulated step: memory ledger and replayed seconds."""

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


@pytest.mark.thorough
def test_few_blocks_match_memory_and_time_forecasts(server: ForkServer) -> None:
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
def test_memory_forecast_is_tight_upper_bound(server: ForkServer, method: str, tokens: int) -> None:
    cases = forecasts(server, "memory", *({"cap": cap, "tokens": tokens, "method": method} for cap in CAPS))
    for case in cases:
        if case["need"] <= case["have"]:
            check_memory(case)
    assert sum(case["need"] <= case["have"] for case in cases) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "cap"), [("RTX 4060 8GB", 8), ("RTX 4090 24GB", 24), ("H100 80GB", 40), ("H200 141GB", 80)]
)
def test_timeline_matches_a_steps_operations(server: ForkServer, device: str, cap: int) -> None:
    (step,) = forecasts(server, "time", {"device": device, "tokens": 16384, "cap": cap})
    assert step["forecast"] == pytest.approx(step["replay"], rel=0.06)  # the replay has no time to request chunks
