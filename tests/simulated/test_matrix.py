"""The accelerator path on a simulated device: no race, the same bits in every placement, near those of the CPU.

Its work is done as late, as early or as oddly as the program's own waits allow, so that a wait that is missing shows.
What it cannot show is what a real driver and real kernels do.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from support.fork_server import ForkServer
from support.simulated import NARROW_AGREEMENT

SCENARIOS = (
    "full", "overflow", "moments", "tied", "sampled", "lora", "quantized", "part", "split", "newer", "encoder", "read",
    "write", "run",
)  # fmt: skip
LEAST_CASES = 400


def check(cases: list[dict[str, Any]]) -> None:
    numbers = defaultdict(set)
    for case in cases:
        assert case["error"] is None, case
        assert case["races"] == [], case
        numbers[case["scenario"], case["group"]].add(case["numbers"])
    assert {group for group, found in numbers.items() if len(found) > 1} == set()


def test_placement_changes_no_bit_of_whole_runs(server: ForkServer) -> None:
    cases = server.run_module("support.simulated", "--reduced", "run", "--dtypes", "fp16")
    assert len(cases) >= 4  # straight and resumed, with and without steps that overflow
    check(cases)


@pytest.fixture(scope="module")
def lines(server: ForkServer) -> list[dict[str, Any]]:
    """The reduced matrix, and what is compared and counted beside it."""
    return server.run_module("support.simulated")


@pytest.fixture(scope="module")
def reduced(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "scenario" in line]


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_placement_changes_no_bit(scenario: str, reduced: list[dict[str, Any]]) -> None:
    cases = [case for case in reduced if case["scenario"] == scenario]
    assert len(cases) >= 2
    check(cases)


@pytest.mark.thorough
def test_overlapped_copies_use_pinned_memory(reduced: list[dict[str, Any]]) -> None:
    # Single rows of an embedding that stays off the device are gathered into memory of their own, and so are
    # strided tensors, which are not contiguous in their file.
    cases = [case for case in reduced if "strided" not in case["group"]]
    found = {where for case in cases for _, where, _ in case["pageable"]}
    assert {where for where in found if "read_rows" not in where} == set()


@pytest.mark.thorough
def test_accelerator_agrees_with_cpu(lines: list[dict[str, Any]]) -> None:
    (found,) = (line["agreement"] for line in lines if "agreement" in line)
    for case, (ours, theirs) in found.items():
        assert ours == pytest.approx(theirs, rel=1e-4 if "fp32" in case else NARROW_AGREEMENT), case


@pytest.mark.thorough
def test_wrong_causal_flag_is_noticed(lines: list[dict[str, Any]]) -> None:
    (found,) = (line["misdirected"] for line in lines if "misdirected" in line)
    assert set(found) == {"llama", "bert", "roberta"}
    for model, (ours, theirs) in found.items():
        assert ours != pytest.approx(theirs, rel=NARROW_AGREEMENT), model


@pytest.fixture(scope="module")
def waits(lines: list[dict[str, Any]]) -> dict[tuple[str, str, int], dict[str, int]]:
    """Where the program waits for the device in a step, by method, model and number of micro-batches."""
    (found,) = (line["waits"] for line in lines if "waits" in line)
    return {(each["method"], each["model"], each["micro_batches"]): dict(each["waits"]) for each in found}


@pytest.mark.thorough
def test_layer_loop_never_waits_for_device(waits: dict[Any, dict[str, int]]) -> None:
    assert waits["full", "deep gptj", 3] == waits["full", "gptj", 3]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["full", "lora"])
def test_step_waits_once_per_micro_batch(method: str, waits: dict[Any, dict[str, int]]) -> None:
    assert sum(waits[method, "gptj", 3].values()) <= 3 + 2
    one, three = waits["full", "gptj", 1], waits["full", "gptj", 3]
    assert sum(three.values()) - sum(one.values()) <= 2


@pytest.mark.slow
def test_no_schedule_changes_a_bit(server: ForkServer) -> None:
    cases = server.run_module("support.simulated", "--all")
    assert len(cases) >= LEAST_CASES
    check(cases)
