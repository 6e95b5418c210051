"""Timed layers of a model on a CPU, the forecasts and the data type that follow from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import assumed_rates
from support.rates import FakeMachine

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Rows
from gptj_ft.distributed.pipeline import assign_layers
from gptj_ft.distributed.traffic import local_workload, replica_workload
from gptj_ft.errors import ResourceError
from gptj_ft.models import bert, gpt2, gptj
from gptj_ft.models.layout import Layout
from gptj_ft.models.registry import Architecture, families
from gptj_ft.models.trainable import Selection, select
from gptj_ft.planning import layer_times, machine_profile
from gptj_ft.planning.costs import Costs, cost
from gptj_ft.planning.layer_times import LayerKind, Seconds, Timing
from gptj_ft.planning.machine_profile import rates, with_times
from gptj_ft.planning.step_replay import ScheduleInputs
from gptj_ft.planning.workload import LayerTimes, ModelTimes, RowLengths, SecondsByTokens, StepTokens, Workload
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.system.paths import home
from gptj_ft.training.setup import workload_of

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 101, "n_positions": 512, "n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4}
GPT2_SHAPE = {name: value for name, value in SHAPE.items() if name != "rotary_dim"}
PLENTY = 10**12
NOTHING = LayerTimes(SecondsByTokens(0.0, 0.0), SecondsByTokens(0.0, 0.0))
RESIDENT = Placement("device", "device")
REAL = layer_times.time_kinds  # before a fixture replaces it


def make_workload(family: str = "gptj", recipe: Recipe = Recipe(), **different: object) -> Workload:
    """Return eight rows of 50 tokens, 10 of them targets, in micro-batches of two rows."""
    shape = SHAPE if family == "gptj" else GPT2_SHAPE
    found = families()[family]
    selection = select(Architecture(found, found.read_config(shape), shape), recipe)
    return replace(of(selection), **different)


def of(selection: Selection) -> Workload:
    return Workload(
        selection.trained, 32, torch.float32, StepTokens(128, 400, 400.0, 80.0, micro_batches=4.0), 10, RowLengths(50),
        frozen=selection.frozen, layers=selection.build(),
    )  # fmt: skip


def costs_of(workload: Workload, kept: int = 0) -> Costs:
    budget = BufferBudget(num_kept_layers=kept)
    schedule = ScheduleInputs(RESIDENT, tuple(training_dtypes(workload.dtype).items()), budget)
    return cost(workload, Recipe(), schedule, assumed_rates())


@pytest.fixture
def machine() -> FakeMachine:
    """A quiet machine that notes the layers that it times."""
    return FakeMachine(assumed_rates())


@pytest.mark.parametrize(("bf16", "chosen"), [(0.5, "bf16"), (0.7, "bf16"), (0.8, "fp32"), (4.0, "fp32")])
def test_auto_chooses_type_by_layer_times(bf16: float, chosen: str, machine: FakeMachine) -> None:
    # This machine's products are five times as slow in bf16: they must not decide.
    def time_layers(kinds: Sequence[LayerKind]) -> list[Seconds]:
        return [Seconds(bf16, 2 * bf16) if kind.shape.dtype == torch.bfloat16 else Seconds(1.0, 2.0) for kind in kinds]

    machine.time_layers = time_layers
    workload = with_times(make_workload(), "auto", CPU, PLENTY, machine)
    assert str(workload.dtype) == {"bf16": "torch.bfloat16", "fp32": "torch.float32"}[chosen]
    assert workload.times.gain == pytest.approx(1 / bf16)
    reason = machine_profile.reason_for("auto", workload, assumed_rates().compute)
    assert reason == f"its layers are {1 / bf16:.2g} times as fast in bf16 here"
    assert with_times(make_workload(), "bf16", CPU, PLENTY, machine).dtype == torch.bfloat16, "explicit"


def test_layers_are_timed_on_typical_micro_batches(machine: FakeMachine) -> None:
    with_times(make_workload(), "auto", CPU, PLENTY, machine)
    # 100 tokens and 20 targets in a micro-batch.
    blocks, heads = ([kind.shape for kind in machine.timed if kind.is_head == is_head] for is_head in (False, True))
    assert {given.dtype for given in blocks} == {torch.float32, torch.bfloat16}
    assert {given.documents for given in blocks} == {(50, 14), (50, 50, 28)}
    assert {given.documents for given in heads} == {(16,), (32,)}
    assert len(machine.timed) == 2 * (2 + 2), "all blocks are alike, and timed once"


def test_timing_layers_leaves_random_state_alone() -> None:
    state = torch.get_rng_state()
    workload = make_workload()
    kinds = Timing(workload, torch.bfloat16, 1e12).kinds + Timing(workload, torch.float32, 1e12).kinds
    found = REAL(kinds)
    assert all(each.forward > 0 and each.backward >= 0 for each in found)
    assert sum(each.backward for each in found) > 0
    assert torch.equal(torch.get_rng_state(), state), "a run after this would draw other numbers"


def test_cached_layers_are_not_timed_again(machine: FakeMachine, tmp_path: Path, monkeypatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise OSError("read-only")

    first, workload = with_times(make_workload(), "fp32", CPU, PLENTY, machine), make_workload()
    count = len(machine.timed)
    assert with_times(workload, "fp32", CPU, PLENTY, machine).times == first.times
    assert with_times(workload.with_step(mean=440.0), "fp32", CPU, PLENTY, machine).times == first.times
    assert len(machine.timed) == count, "between the same two numbers of tokens"
    with_times(workload.with_step(micro_batches=2.0), "fp32", CPU, PLENTY, machine)
    assert len(machine.timed) > count, "micro-batches of another size"
    count = len(machine.timed)
    with_times(workload, "bf16", CPU, PLENTY, machine)
    assert len(machine.timed) == count + 4, "another type"
    with_times(make_workload("gpt2"), "fp32", CPU, PLENTY, machine)
    assert len(machine.timed) == count + 8, "another model"
    rates(CPU, tmp_path, again=True, machine=machine)
    with_times(workload, "fp32", CPU, PLENTY, machine)
    assert len(machine.timed) == count + 12, "plan --measure"
    monkeypatch.setattr(machine_profile, "replace_shared", refuse)
    rates(CPU, tmp_path, again=True, machine=machine)
    with_times(workload, "fp32", CPU, PLENTY, machine)
    assert len(machine.timed) == count + 16, "also if the measurements cannot be written"


def test_quiet_machine_repeats_busy_layer_timings(machine: FakeMachine) -> None:
    counts = []
    for machine.load in (0.9, 0.6, 0.1, 0.1):
        with_times(make_workload(), "fp32", CPU, PLENTY, machine)
        counts.append(len(machine.timed))
    assert counts == [4, 4, 8, 8]


def test_new_programs_make_timings_outdated(machine: FakeMachine) -> None:
    machine.others = 0.8  # the load average does not show them yet
    assert with_times(make_workload(), "fp32", CPU, PLENTY, machine).times.load == 0.8
    machine.others = 0.0
    assert with_times(make_workload(), "fp32", CPU, PLENTY, machine).times.load == 0.0
    assert len(machine.timed) == 8


@pytest.mark.parametrize(
    "entry", [[0.0, 1.0, 0.0], [1.0, 1.0], [1.0, -1.0, 0.0], ["a", 1.0, 0.0], [1e9, 1e9, 0.0], None, {"forward": 1.0}]
)
def test_implausible_cached_times_are_measured_again(entry: object, machine: FakeMachine) -> None:
    from gptj_ft.system.digests import read_sealed, sealed

    known = with_times(make_workload(), "fp32", CPU, PLENTY, machine)
    count, file = len(machine.timed), home() / "machine.json"
    text = read_sealed(file)
    (layers,) = text["layers"].values()
    layers[next(iter(layers))] = entry
    file.write_text(json.dumps(sealed({name: each for name, each in text.items() if name != "sha256"})))
    assert with_times(make_workload(), "fp32", CPU, PLENTY, machine) == known
    assert len(machine.timed) == count + 1


def test_step_takes_its_layers_times() -> None:
    block = LayerTimes(SecondsByTokens(0.5, 0.01), SecondsByTokens(1.0, 0.02))
    head = LayerTimes(SecondsByTokens(0.25, 0.0), SecondsByTokens(0.5, 0.1))
    workload = make_workload(times=ModelTimes((NOTHING, *(block,) * 4, head)))
    up, down, of_head = 4 * (0.5 + 1.0), 4 * (1.0 + 2.0), 0.25 + 0.5 + 2.0
    for kept in (0, 3, 4):
        seconds = costs_of(workload, kept).compute_seconds
        # Updates, and what sets gradients to zero and takes their norm, take 0.2 ms.
        expected = 4 * (up + down + of_head + up * (4 - kept) / 4)
        assert 0.0 < seconds - expected < 0.001


def test_head_time_counts_chunks() -> None:
    head = LayerTimes(SecondsByTokens(1.0, 0.0), SecondsByTokens(0.0, 0.0))
    workload = make_workload(times=ModelTimes((*(NOTHING,) * 5, head)))
    assert workload.head_seconds(0.0, trains=True) == 0.0
    assert workload.head_seconds(80.0, trains=True) == 4.0
    assert workload.head_seconds(4.0 * workload.head_chunk + 4, trains=True) == 8.0
    assert workload.head_seconds(4.0 * workload.head_chunk, trains=False) == 4.0


def test_parts_and_replicas_sum_to_whole() -> None:
    blocks = tuple(LayerTimes(SecondsByTokens(0.5, 0.01 * n), SecondsByTokens(1.0, 0.02 * n)) for n in range(4))
    workload = make_workload(
        times=ModelTimes((NOTHING, *blocks, LayerTimes(SecondsByTokens(0.25, 0.0), SecondsByTokens(0.5, 0.1))))
    )
    owners = assign_layers(workload.layouts, 2)
    parts = [
        local_workload(workload, [layer for layer, owner in enumerate(owners) if owner == rank]) for rank in range(2)
    ]
    assert sum(part.layer_seconds for part in parts) == pytest.approx(workload.layer_seconds)
    assert 2 * replica_workload(workload, 2).layer_seconds == pytest.approx(workload.layer_seconds)
    assert replica_workload(workload, 8).step.num_micro_batches == 1, "there is no half of one"


def test_frozen_layers_have_cheaper_or_no_backward(machine: FakeMachine) -> None:
    upper = with_times(make_workload(recipe=Recipe(train=["transformer.h.[23].*"])), "fp32", CPU, PLENTY, machine)
    assert [each.backward.per_token > 0 for each in upper.times.layers[1:5]] == [False, False, True, True]
    assert upper.layer_seconds < with_times(make_workload(), "fp32", CPU, PLENTY, machine).layer_seconds
    lora = with_times(make_workload(recipe=Recipe(method="lora")), "fp32", CPU, PLENTY, machine)
    assert all(each.backward.per_token > 0 for each in lora.times.layers[1:5])
    assert len({kind.name for kind in machine.timed}) == len(machine.timed), "each has a name of its own"


def test_only_language_model_heads_are_timed(machine: FakeMachine) -> None:
    assert with_times(make_workload("gpt2"), "fp32", CPU, PLENTY, machine).times.layers[-1].backward.per_token > 0
    layers = bert.FAMILY.build_layers(
        bert.read_config({"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 64})
    )
    workload = make_workload(layouts=[Layout.of(layer) for layer in layers], layers=layers, frozen=())
    assert with_times(workload, "fp32", CPU, PLENTY, machine).times.layers[-1] == NOTHING
    assert REAL(Timing(workload, torch.float32, 1e12).kinds)


def test_nothing_is_timed_without_memory_or_cpu(machine: FakeMachine) -> None:
    for workload in (
        with_times(make_workload(), "auto", CPU, 1000, machine),
        with_times(make_workload(), "bf16", torch.device("meta"), PLENTY, machine),
        with_times(make_workload(layers=()), "fp32", CPU, PLENTY, machine),
    ):
        assert not workload.times.layers
        assert not workload.times.gain
    assert not machine.timed


def test_slow_machine_extrapolates_from_few_tokens() -> None:
    workload = make_workload().with_step(mean=16384.0, micro_batch=4096, most=16384)
    slow, fast = (Timing(workload, torch.float32, rate) for rate in (1.0, 1e15))
    assert {kind.shape.tokens for kind in slow.kinds if not kind.is_head} == {256, 512}
    assert {kind.shape.tokens for kind in fast.kinds if not kind.is_head} == {2048, 4096}
    found = {kind.name: Seconds(1.0 + kind.shape.tokens, 2.0 * kind.shape.tokens) for kind in slow.kinds}
    (_, block, *_) = slow.times(found).layers
    assert (block.forward.at(4096), block.backward.at(4096)) == (4097.0, 8192.0)


def test_workload_counts_packed_micro_batches() -> None:
    lengths = [200, 100, 150, 120, 220, 90, 250, 30] * 3
    rows = Rows([list(range(length + 1)) for length in lengths], [5] * len(lengths))
    recipe = Recipe(batch_size=8, micro_batch_tokens=256, epochs=1.0)
    selection = select(Architecture(gptj.FAMILY, gptj.read_config(SHAPE), SHAPE), recipe)
    architecture = Architecture(gptj.FAMILY, gptj.read_config(SHAPE), SHAPE)
    workload = workload_of(recipe, architecture, selection, rows, Rows([], []))
    packed = [len(rows.batches(range(start, start + 8), 256)) for start in (0, 8, 16)]
    assert workload.step.micro_batches == pytest.approx(sum(packed) / 3, abs=0.7)
    assert workload.step.micro_batches > workload.step.mean / 256
    batches = [rows.batches(range(start, start + 8), 256) for start in (0, 8, 16)]
    fillers = [len(batch.padded().tokens_T) - len(batch.tokens_T) for step in batches for batch in step]
    assert workload.step.fillers == pytest.approx(sum(fillers) / 3, rel=0.3)
    assert workload.step.computed == workload.step.mean + workload.step.fillers
    assert workload.rows.typical == round(sum(length**2 for length in rows.lengths) / sum(rows.lengths))


@pytest.mark.thorough
def test_too_large_run_is_refused_untimed(shell, rows_file: Path) -> None:
    done = shell(
        "finetune --recipe summarization --data rows.jsonl --model tiny --max-steps 1 --output run --device-memory 1000"
    )
    assert done.code == ResourceError.exit_code
    assert "layers" not in json.loads((home() / "machine.json").read_text(encoding="utf-8"))


def test_gpt2_and_gptj_layers_have_other_names(machine: FakeMachine) -> None:
    names = set()
    for family, width in (("gptj", 4), ("gptj", 2), ("gpt2", 4)):
        shape = (SHAPE if family == "gptj" else GPT2_SHAPE) | {"n_head": width}
        module = gptj if family == "gptj" else gpt2
        layers = module.FAMILY.build_layers(module.FAMILY.read_config(shape))
        workload = make_workload(layouts=[Layout.of(layer) for layer in layers], layers=layers, frozen=())
        names |= {kind.name for kind in Timing(workload, torch.float32, 1e12).kinds if not kind.is_head}
    assert len(names) == 6, "heads are no parameters, and count"
