"""Train on ranks with a simulated accelerator each: no race, and the bits of one rank.

Each rank has a device of its own. What a rank hands on goes through host memory, as it does with gloo, or from device
to device, as it does with NCCL. What this cannot show is what drivers, NCCL and a network do.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from support.fork_server import ForkServer


@pytest.fixture(scope="module")
def lines(server: ForkServer) -> list[dict[str, Any]]:
    return server.run_module("support.simulated_several")


@pytest.fixture(scope="module")
def few(server: ForkServer) -> list[dict[str, Any]]:
    """Two of these cases, and one with a fault."""
    return server.run_module("support.simulated_several", "--few")


def check(cases: list[dict[str, Any]]) -> None:
    numbers = defaultdict(set)
    for case in cases:
        assert case["error"] is None, case
        assert case["races"] == [], case
        numbers[case["group"]].add(case["numbers"])
    assert {group for group, found in numbers.items() if len(found) > 1} == set()


@pytest.mark.thorough
def test_one_accelerator_per_rank_keeps_bits(lines: list[dict[str, Any]]) -> None:
    cases = [line for line in lines if "fault" not in line]
    assert len(cases) == 6
    check(cases)
    assert len({case["numbers"] for case in cases}) == 2  # one lane and two differ: the digests see rounding


@pytest.mark.thorough
def test_sending_before_copy_is_race(lines: list[dict[str, Any]]) -> None:
    (found,) = (line for line in lines if line.get("fault") == "a hidden state is sent before its copy has ended")
    assert any("copy d2h" in race and "send at" in race for race in found["races"]), found


@pytest.mark.thorough
def test_direct_activations_skip_host(few: list[dict[str, Any]]) -> None:
    check([line for line in few if "fault" not in line])
    copies = {line["case"]: line["through_host"] for line in few if "through_host" in line}
    assert copies["direct, device"] == 0 < copies["layers, disk"]


def test_early_reuse_of_sent_memory_is_race(few: list[dict[str, Any]]) -> None:
    (found,) = (line for line in few if line.get("fault") == "what is sent is let go before it has left")
    assert any("send at" in race and " send <" in race for race in found["races"]), found


@pytest.mark.slow
def test_any_schedule_keeps_bits(server: ForkServer) -> None:
    cases = server.run_module("support.simulated_several", "--all")
    assert len(cases) >= 150
    check(cases)
