"""Every part of the check-up runs on the simulated device, passes there, and finds what is planted for it."""

from __future__ import annotations

from typing import Any

import pytest
from support.fork_server import ForkServer

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def lines(server: ForkServer) -> list[dict[str, Any]]:
    return server.run_module("support.simulated_checkup")


def test_accelerator_passes_every_part(lines: list[dict[str, Any]]) -> None:
    found = lines[0]
    assert found["works"], found["verdict"]
    assert found["races"] == 0
    parts = {part["name"]: part for part in found["parts"]}
    assert {name for name, part in parts.items() if part["state"] != "passed"} == {"sanitizer"}  # of CUDA alone
    assert found["verdict"][0].endswith("the same bits in every placement, and under 3 shaken schedules")
    device = found["facts"]["device"]
    assert (device["name"], device["lockable"], device["is_in_build"]) == ("simulated accelerator", 1 << 31, True)
    memory = parts["memory"]["found"]
    assert 0 < memory["allocated"] <= memory["reserved"] <= memory["cap"]
    assert [step["tokens"] for step in parts["overlap"]["found"]["steps"]] == [64, 128]
    assert parts["attention"]["found"]["256"]["kernel"] == "ragged"


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("copies wait for nothing", 1, "with random waits of seed"),
        ("a loss is off", 1, "the loss differs from the CPU's by 0.01 (relative)"),
        ("more memory than planned", 4, "out of memory under a cap of"),
        ("a cap that nothing enforces", 4, "were taken under a cap of"),
    ],
)
def test_planted_fault_is_found(fault: str, code: int, says: str, lines: list[dict[str, Any]]) -> None:
    (part,) = (line for line in lines[1:] if line["fault"] == fault)
    assert (part["state"], part["exit_code"]) == ("failed", code)
    assert says in part["problem"]
