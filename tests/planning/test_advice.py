"""Advice on options that make a run much faster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.rates import round_rates

from gptj_ft.config.options import Recipe
from gptj_ft.models.gptj import GPTJConfig, build_layers
from gptj_ft.models.layout import Layout
from gptj_ft.models.registry import architecture_of
from gptj_ft.models.trainable import select
from gptj_ft.planning.advice import MUCH, advise, quantized
from gptj_ft.planning.memory import Free
from gptj_ft.planning.plan import Plan, choose
from gptj_ft.planning.probe import DiskRates
from gptj_ft.planning.workload import StepTokens, Workload

GB = 10**9
RATES = round_rates(DiskRates(read=2e9, write=1e9, mixed=1.5e9), to_device=2e10, from_device=1e10)


@pytest.fixture(scope="module")
def workload() -> Workload:
    layers = build_layers(GPTJConfig(n_layer=4, n_embd=1024, n_head=8, rotary_dim=16, vocab_size=5000))
    layouts = [Layout.of(layer) for layer in layers]
    return Workload(layouts, 1024, torch.float32, StepTokens(512, 512, 512.0, 128.0), 10**5, layers=layers)


def plan_with(recipe: Recipe, workload: Workload, host: int) -> Plan:
    return choose(recipe, workload, Free(2 * GB, host * GB, 10**14, is_shared=False), RATES)


def test_waiting_run_gets_options_that_pay(workload: Workload) -> None:
    plan = plan_with(Recipe(optimizer_state="disk"), workload, 64)
    advice = advise(plan)
    larger = f"--batch-size {4 * plan.recipe.batch_size}"
    both = {f"--set moments={narrow} --set gradients=bf16" for narrow in ("bf16", "int8")}
    assert {*both, larger} <= {each.typed for each in advice}
    assert advise(plan_with(plan.recipe, replace(workload, num_steps=10), 64)) == [], "the run is short"
    few_rows = plan_with(plan.recipe.model_copy(update={"epochs": 5e4}), workload, 64)
    assert larger not in {each.typed for each in advise(few_rows)}, "two steps an epoch"
    for each in advice:
        assert each.speedup >= MUCH
        narrow = dict(option.split("=") for option in each.typed.split() if option.startswith(("moments", "gradients")))
        if narrow:
            with_it = plan_with(plan.recipe.model_copy(update=narrow), workload, 64)
            assert each.speedup == pytest.approx(plan.costs.seconds_per_step / with_it.costs.seconds_per_step)
            assert "rounded" in each.cost


def test_run_without_waits_gets_no_advice(workload: Workload) -> None:
    assert advise(plan_with(Recipe(), replace(workload, step=StepTokens(512, 8192, 8192.0, 2048.0)), 64)) == []


@pytest.mark.thorough
def test_adapters_that_wait_for_the_disk_get_a_quantized_model() -> None:
    config = {"n_layer": 4, "n_embd": 1024, "n_head": 8, "rotary_dim": 16, "vocab_size": 5000, "n_positions": 512}
    architecture = architecture_of({"model_type": "gptj", **config}, Path("config.json"))
    recipe = Recipe(method="lora", weights="disk", lora={"targets": ["all-linear"]})
    selection = select(architecture, recipe)
    work = Workload(
        selection.trained, 1024, torch.float32, StepTokens(128, 128, 128.0, 32.0), 10**5, frozen=selection.frozen,
        layers=selection.build(),
    )  # fmt: skip
    plan = plan_with(recipe, work, 64)
    found = {each.typed: each for each in advise(plan)}
    nf4 = found["--model of `gptj-ft convert --quantize nf4`"]
    assert nf4.cost == "frozen weights are rounded to 4.5 bits"
    smaller = quantized(work, "nf4")
    read, before = (each.costs.bytes_read_per_step for each in (plan_with(recipe, smaller, 64), plan))
    assert 0.14 < read / before < 0.3  # 4.5 of 32 bits, and the head and adapters as before
    assert nf4.speedup == pytest.approx(
        plan.costs.seconds_per_step / plan_with(recipe, smaller, 64).costs.seconds_per_step
    )
    assert not {
        typed for typed in (each.typed for each in advise(plan_with(recipe, smaller, 64))) if "quantize" in typed
    }
