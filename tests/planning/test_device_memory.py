"""Memory forecasts: kept graphs, the peak of a step, the reserve of accelerators, holes in a CPU's heap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.small_run import new_run, small_session, train

from gptj_ft.config.options import Recipe
from gptj_ft.models.batch import NO_TARGET, PackedBatch
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.functional import FunctionalLayer
from gptj_ft.models.gptj import GPTJConfig, build_layers
from gptj_ft.models.layout import Layout
from gptj_ft.models.published import find_published
from gptj_ft.models.registry import Architecture, families
from gptj_ft.models.trainable import select
from gptj_ft.planning.constants import (
    DISK_STAGING_BYTES,
    FRAGMENTED_SHARE,
    HOLES_OF_DROPOUT,
    LIBRARY_BYTES,
    LOGITS,
    PACKED_SHARES,
    SAVED_PER_TOKEN,
)
from gptj_ft.planning.layer_cost import LayerInput, Meter, measure_block, parameters_of, rounded
from gptj_ft.planning.memory import Free, WorkingMemory, allocator_limit, forecast_memory, usable
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload
from gptj_ft.streaming.stores.placement import Placement
from gptj_ft.system.machine import bf16_unit
from gptj_ft.training import loop
from gptj_ft.training.restore import open_state

GB = 10**9
ON_HOST = Placement("host", "host")


def make_workload(recipe: Recipe = Recipe(), tokens: int = 8192, dtype: torch.dtype = torch.bfloat16) -> Workload:
    """Return GPT-J 6B, documents of 1,024 tokens, micro-batches of 2,048."""
    published = find_published("EleutherAI/gpt-j-6b")
    assert published is not None
    selection = select(published.architecture, recipe)
    return Workload(
        selection.trained, 4096, dtype, StepTokens(2048, tokens, tokens, tokens), None, RowLengths(1024),
        frozen=selection.frozen if recipe.method == "lora" else (), layers=selection.build(),
    )  # fmt: skip


def free(device: float) -> Free:
    return Free(int(device * GB), 10**12, 10**14, is_shared=False)


def test_gptj_graph_keeps_thirteen_tensors_per_token() -> None:
    layer = build_layers(GPTJConfig(n_layer=1))[1]
    given = LayerInput((1024, 1024), 4096, torch.bfloat16)
    cost = measure_block(layer, Layout.of(layer), given)
    # Inputs of the linear layers 1 + 1 + 4, GELU's input 4, rotated q and k 2, v 1; and norms of 16 heads in fp32.
    assert cost.kept_bytes == pytest.approx(13 * 2048 * 4096 * 2, rel=5e-3)
    assert cost.kept_bytes < cost.graph_bytes < cost.backward_bytes
    assert sum(kernel.flops for piece in cost.forward for kernel in piece) == pytest.approx(
        2 * 2048 * Layout.of(layer).num_parameters, rel=0.05
    )


def test_frozen_matrices_keep_no_inputs() -> None:
    recipes = Recipe(), Recipe(method="lora", lora={"targets": ["q_proj", "v_proj"]})
    full, lora = (WorkingMemory(make_workload(recipe)) for recipe in recipes)
    assert lora.kept_bytes(1) < full.kept_bytes(1)
    assert lora.blocks[0].backward_bytes < full.blocks[0].backward_bytes - 4096 * 16384


def test_padding_is_forecast_on_accelerators_only() -> None:
    workload = replace(make_workload(dtype=torch.float32), rows=RowLengths(300))  # in fp32, devices pad documents
    one = WorkingMemory(replace(workload, rows=RowLengths(2048))).kept_bytes(1)
    assert WorkingMemory(workload, is_on_cpu=True).kept_bytes(1) == one
    assert WorkingMemory(workload).kept_bytes(1) > 1.01 * one


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("model_type", ["gptj", "gpt2"])
@pytest.mark.parametrize("drops", [0.0, 0.1])
def test_cpu_graphs_match_the_meta_device(drops: float, model_type: str, method: str, dtype: torch.dtype) -> None:
    family = families()[model_type]
    raw = {"vocab_size": 99, "n_positions": 512, "n_embd": 256, "n_layer": 1, "n_head": 4, "rotary_dim": 32}
    raw |= {"attn_pdrop": 0.0, "resid_pdrop": drops}
    recipe = Recipe.model_validate({"method": method, "lora": {"dropout": drops}})
    selection = select(Architecture(family, family.read_config(raw), raw), recipe)
    layer, layout = selection.build()[1], selection.trained[1]
    given = LayerInput((128, 128), 256, dtype)  # of one length, since devices pad in fp32
    ids = torch.full((given.tokens,), NO_TARGET)
    batch = PackedBatch(ids, ids.abs(), ids, given.batch().cu_seqlens, seeds=(0, 1))
    parameters = parameters_of(layer, layout, dtype, torch.device("cpu"))
    x = torch.zeros(given.tokens, given.width, dtype=dtype, requires_grad=True)
    run = FunctionalLayer(layer).run
    with torch.no_grad():
        run(parameters, x, batch, lambda: None)  # the batch caches what all layers share
    with Meter(given.documents) as meter:
        output = run(parameters, x, batch, lambda: None)
        kept = meter.bytes - rounded(output)
    assert kept <= measure_block(layer, layout, given).kept_bytes <= 1.1 * kept


@pytest.mark.parametrize(("dtype", "holes"), [(torch.float32, 2.5), (torch.bfloat16, (16 * 6.4 - 8 * 3.2) / 8)])
def test_holes_between_graphs_depend_on_the_type(dtype: torch.dtype, holes: float) -> None:
    workload = narrow_workload(dtype)
    sixteen, eight = (cpu_bytes(workload, activations=kept) for kept in (16, 8))
    measured = WorkingMemory(workload, is_on_cpu=True).measured_kept_bytes(8)
    packed = 1.0 if dtype == torch.float32 else 1 + PACKED_SHARES[bf16_unit()]
    of_hidden = 8 * packed * workload.step.most * workload.width * dtype.itemsize
    assert (sixteen - eight - packed * measured) / of_hidden == pytest.approx(holes, abs=0.01)


def test_dropout_adds_holes_to_kept_graphs() -> None:
    plain, dropping = narrow_workload(torch.float32), narrow_workload(torch.float32)
    for layer in dropping.layers[1:-1]:
        layer.add_module("dropout", Dropout(0.1))  # of no input: the graph stays as it is
    more = cpu_bytes(dropping, activations=8) - cpu_bytes(plain, activations=8)
    assert more == 8 * HOLES_OF_DROPOUT * plain.step.most * plain.width * 4


def test_logits_share_memory_with_backward_if_nothing_runs_again() -> None:
    workload = narrow_workload(torch.float32)
    most, fewer, fewest = (cpu_bytes(workload, activations=kept) for kept in (32, 31, 30))
    of_head = LOGITS * workload.logits_bytes
    of_block = SAVED_PER_TOKEN * workload.step.most * workload.width * 4
    assert most - fewer == fewer - fewest - min(of_head, of_block)


def narrow_workload(dtype: torch.dtype) -> Workload:
    """Return 32 blocks, steps of one micro-batch."""
    layers = build_layers(GPTJConfig(vocab_size=1000, n_layer=32, n_embd=256, n_head=2))
    layouts = [Layout.of(layer) for layer in layers]
    return Workload(layouts, 256, dtype, StepTokens(2048, 2048, 2048, 2048), None, RowLengths(2048), layers=layers)


def cpu_bytes(workload: Workload, **options: int) -> int:
    """Return the memory that a run needs on a CPU."""
    shared = Free(10**12, 10**12, 10**14, is_shared=True)
    return forecast_memory(Placement("device", "device"), workload, Recipe(**options), shared).device_bytes


def test_plan_fills_memory_up_to_the_reserve() -> None:
    workload = make_workload()
    of_block = WorkingMemory(workload).kept_bytes(1)
    for cap in (8, 16, 24):
        plan = forecast_memory(ON_HOST, workload, Recipe(moments="bf16", gradients="bf16"), free(cap))
        tensors = usable(plan.device_bytes)
        assert plan.device_bytes <= cap * GB
        assert tensors <= (1 - FRAGMENTED_SHARE) * (cap * GB - LIBRARY_BYTES)
        assert tensors + 1.1 * of_block > usable(cap * GB) or plan.budget.num_kept_layers == 28
        assert tensors < allocator_limit(plan.device_bytes) < plan.device_bytes
    assert not plan.lack


def test_reserve_counts_as_needed_memory() -> None:
    workload, recipe = make_workload(), Recipe(moments="bf16", gradients="bf16")
    least = forecast_memory(ON_HOST, workload, recipe, free(1)).device_bytes
    assert forecast_memory(ON_HOST, workload, recipe, free(least / GB)).lack == 0
    assert forecast_memory(ON_HOST, workload, recipe, free((least - LIBRARY_BYTES / 10) / GB)).lack > 0


def test_offloaded_boundaries_leave_three_buffers() -> None:
    workload, recipe = make_workload(tokens=65536), Recipe(activations="recompute")
    resident, away = (
        forecast_memory(replace(ON_HOST, boundaries=place), workload, recipe, free(80)) for place in ("device", "host")
    )
    hidden = 65536 * 4096 * 2
    saved = usable(resident.device_bytes) - usable(away.device_bytes)
    assert saved == pytest.approx((28 - 3) * hidden, rel=0.05)
    assert away.host_bytes - resident.host_bytes == 28 * hidden


def test_training_limits_torch_before_allocating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[torch.device, int]] = []
    for name, function in (
        ("limit_memory", lambda *args: limits.append(args)),
        ("open_state", lambda *args: open_state(*args) if limits else pytest.fail("limit memory first")),
    ):
        monkeypatch.setattr(loop, name, function)
    session = small_session(tmp_path, num_steps=1)
    train(session, new_run(tmp_path))
    assert limits == [(torch.device("cpu"), allocator_limit(session.plan.have.device))]


def test_disk_staging_locks_host_memory() -> None:
    workload, recipe, on_disk = make_workload(), Recipe(), Placement("disk", "disk")
    host = forecast_memory(on_disk, workload, recipe, free(24)).host_bytes
    assert (
        host - forecast_memory(on_disk, workload, recipe, replace(free(24), is_shared=True)).host_bytes
        == DISK_STAGING_BYTES
    )
