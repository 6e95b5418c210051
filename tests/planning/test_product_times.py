"""Test the choice of libraries for matrix products: what is timed, cached, chosen and shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from conftest import assumed_rates
from support.rates import FakeMachine

from gptj_ft.config.options import Recipe
from gptj_ft.models import products
from gptj_ft.models.layout import NO_PARAMETERS
from gptj_ft.models.products import Libraries, Products, has_mkl
from gptj_ft.models.registry import Architecture, families
from gptj_ft.models.trainable import select
from gptj_ft.planning import product_times
from gptj_ft.planning.machine_profile import choose_products, rates, with_times
from gptj_ft.planning.product_times import Choice, ProductKind, kinds_of
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.system.digests import read_sealed, sealed
from gptj_ft.system.paths import home

CPU, PLENTY, RATE = torch.device("cpu"), 10**12, 1e12
FP32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.skipif(not has_mkl(BF16), reason="this torch offers no MKL for bf16")


def make_workload(recipe: Recipe = Recipe(), width: int = 256, family: str = "gptj") -> Workload:
    shape = {"vocab_size": 101, "n_positions": 512, "n_embd": width, "n_layer": 2, "n_head": 4}
    found = families()[family]
    config = found.read_config(shape | ({"rotary_dim": 4} if family == "gptj" else {}))
    selection = select(Architecture(found, config, shape), recipe)
    return Workload(
        selection.trained, width, FP32, StepTokens(512, 2048, 2048.0, 80.0, micro_batches=4.0), 10,
        frozen=selection.frozen, layers=selection.build(),
    )  # fmt: skip


def mkl_gains(gain: float) -> object:
    def choose(kinds: Sequence[ProductKind]) -> list[Choice]:
        return [Choice(Libraries("onednn", "mkl" if kind.is_trained else "onednn"), 1.0, gain) for kind in kinds]

    return choose


@pytest.fixture
def machine() -> FakeMachine:
    return FakeMachine(assumed_rates())


def test_wide_matrices_are_timed_once_per_shape() -> None:
    counts = kinds_of(make_workload(), BF16, RATE)
    found = {(kind.shape, kind.is_transposed, kind.tokens): count for kind, count in counts.items()}
    # Four of attention and two of the MLP in each of two blocks; the head's 101 rows are too few.
    assert found == {((256, 256), False, 512): 8, ((1024, 256), False, 512): 2, ((256, 1024), False, 512): 2}
    assert not kinds_of(make_workload(width=128), BF16, RATE)
    gpt2 = kinds_of(make_workload(family="gpt2"), BF16, RATE)
    assert {(kind.shape, kind.is_transposed) for kind in gpt2} == {
        ((256, 768), True), ((256, 256), True), ((256, 1024), True), ((1024, 256), True)
    }  # fmt: skip


def test_frozen_matrices_are_timed_in_fp32_only() -> None:
    lora = make_workload(Recipe(method="lora", lora={"targets": "all-linear"}))
    assert not kinds_of(lora, BF16, RATE)
    assert {kind.is_trained for kind in kinds_of(lora, FP32, RATE)} == {False}
    inference = replace(lora, layouts=[NO_PARAMETERS] * len(lora.layouts))
    assert not kinds_of(inference, FP32, RATE), "no gradients"


@pytest.mark.parametrize("trained", ["transformer.h.0.*", "transformer.h.1.*"])
def test_trained_weights_decide_for_frozen_ones_of_their_shape(trained: str, machine: FakeMachine) -> None:
    machine.choose_products = mkl_gains(1.5)  # type: ignore[assignment]
    partly = make_workload(Recipe(train=[trained]))
    assert {kind.is_trained for kind in kinds_of(partly, FP32, RATE)} == {True, False}
    assert choose_products(partly, FP32, RATE, CPU, machine)[0].of(torch.empty(256, 256)) == Libraries("onednn", "mkl")


def test_products_without_a_bf16_unit_are_widened(machine: FakeMachine) -> None:
    machine.choose_products, machine.emulates = mkl_gains(1.5), True  # type: ignore[assignment]
    workload = with_times(make_workload(), "bf16", CPU, PLENTY, machine)
    assert str(workload.products) == "widened onednn/mkl"
    assert {kind.dtype for kind in machine.timed_products} == {FP32}
    assert {(str(kind.products), kind.shape.dtype) for kind in machine.timed} == {("widened onednn/mkl", BF16)}
    assert str(with_times(make_workload(), "fp32", CPU, PLENTY, machine).products) == "onednn/mkl"


def test_slow_products_are_timed_with_fewer_tokens() -> None:
    assert {kind.tokens for kind in kinds_of(make_workload(), BF16, RATE / 1e3)} == {256}
    few = make_workload().with_step(mean=400.0)
    assert {kind.tokens for kind in kinds_of(few, BF16, RATE)} == {128}, "as many as the run has"


def test_choice_is_cached_and_planned(machine: FakeMachine) -> None:
    machine.choose_products = mkl_gains(1.5)  # type: ignore[assignment]
    workload = with_times(make_workload(), "bf16", CPU, PLENTY, machine)
    assert str(workload.products) == "onednn/mkl"
    assert workload.times.products_gain == 1.5
    number = len(machine.timed_products)
    assert number == 3
    # Its layers are timed with it.
    assert {str(kind.products) for kind in machine.timed} == {"onednn/mkl"}
    assert with_times(make_workload(), "bf16", CPU, PLENTY, machine) == workload
    assert len(machine.timed_products) == number, "from the cache"
    rates(CPU, home(), again=True, machine=machine)
    with_times(make_workload(), "bf16", CPU, PLENTY, machine)
    assert len(machine.timed_products) == 2 * number, "forgotten"


def test_choice_of_a_busy_machine_stays_when_it_is_quiet(machine: FakeMachine) -> None:
    machine.choose_products, machine.load = mkl_gains(1.5), 0.9  # type: ignore[assignment]
    busy = with_times(make_workload(), "bf16", CPU, PLENTY, machine)
    number, machine.load = len(machine.timed_products), 0.0
    assert with_times(make_workload(), "bf16", CPU, PLENTY, machine).products == busy.products
    assert len(machine.timed_products) == number, "not timed again"


def test_given_products_are_not_timed(machine: FakeMachine) -> None:
    given = Products.parse("mkl 256x256=onednn")
    workload = with_times(replace(make_workload(), products=given), "bf16", CPU, PLENTY, machine)
    assert workload.products == given
    assert not machine.timed_products


def test_other_shapes_keep_their_own_libraries(machine: FakeMachine) -> None:
    def choose(kinds: Sequence[ProductKind]) -> list[Choice]:
        return [
            Choice(Libraries("onednn", "onednn" if kind.shape == (256, 256) else "mkl"), 1.0, 2.0) for kind in kinds
        ]

    machine.choose_products = choose  # type: ignore[assignment]
    chosen, gain = choose_products(make_workload(), BF16, RATE, CPU, machine)
    assert str(chosen) == "onednn/mkl 256x256=onednn"
    assert gain == 2.0


@pytest.mark.parametrize("entry", [None, [], ["blis", 1.0, 1.0, 0.0], ["mkl", -1.0, 1.0, 0.0], ["mkl", "1", 1.0, 0.0]])
def test_damaged_cached_choice_is_measured_again(entry: object, machine: FakeMachine) -> None:
    choose_products(make_workload(), BF16, RATE, CPU, machine)
    known = read_sealed(home() / "machine.json")
    for choices in known["products"].values():
        choices.update(dict.fromkeys(choices, entry))
    (home() / "machine.json").write_text(json.dumps(sealed(known)))
    choose_products(make_workload(), BF16, RATE, CPU, machine)
    assert len(machine.timed_products) == 6


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_timing_computes_both_gradients(dtype: torch.dtype, is_transposed: bool) -> None:
    choice = ProductKind((192, 200), is_transposed, True, dtype, 64).choose()
    assert 0 < choice.seconds <= choice.onednn_seconds
    assert (choice.libraries == Libraries()) == (choice.seconds == choice.onednn_seconds)


def test_library_with_wrong_results_is_not_chosen(monkeypatch) -> None:
    def wrong(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, libraries: Libraries) -> None:
        if libraries.weights == "onednn":
            products.add_product(total, left, right, Libraries())  # MKL is infinitely faster: it does nothing

    monkeypatch.setattr(product_times, "add_product", wrong)
    assert ProductKind((192, 200), False, True, BF16, 64).choose().libraries.weights == "onednn"


def test_small_gains_do_not_choose_mkl() -> None:
    assert product_times._fastest({"onednn": 1.0, "mkl": 0.95}) == "onednn"
    assert product_times._fastest({"onednn": 1.0, "mkl": 0.85}) == "mkl"
