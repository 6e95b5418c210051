"""Traffic that a replayed step requests from counting stores."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from gptj_ft.models.gptj import GPTJConfig, build_layers
from gptj_ft.models.layout import Layout
from gptj_ft.planning.step_replay import (
    STEPS_TO_STEADY,
    ReplayedOptimizer,
    ScheduleInputs,
    StepReplay,
    UntimedDevice,
    count_step,
    model_without_data,
)
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import flush_tasks, training_tasks
from gptj_ft.streaming.stores.fake import CountingStore, Request
from gptj_ft.streaming.stores.placement import Placement, training_dtypes


def schedule(place: str, dtype: torch.dtype, clips: bool = True) -> ScheduleInputs:
    stored = {kind: each for kind, each in training_dtypes(dtype).items() if clips or kind != "grad"}
    return ScheduleInputs(Placement(place, place), tuple(stored.items()), BufferBudget())  # type: ignore[arg-type]


def gptj(dtype: torch.dtype) -> Workload:
    layouts = [Layout.of(layer) for layer in build_layers(GPTJConfig())]
    return Workload(layouts, 4096, dtype, StepTokens(512, 512, 512.0, 512.0), None)


def small_model(store: CountingStore) -> OffloadedModel:
    config = GPTJConfig(n_layer=2, n_embd=32, n_head=2, rotary_dim=4, vocab_size=90)
    layouts = [Layout.of(layer) for layer in build_layers(config)]
    workload = Workload(layouts, 32, torch.float32, StepTokens(40, 74, 74.0, 50.0), 3)
    return model_without_data(workload, schedule("disk", torch.float32), lambda *_: store)


def flush(model: OffloadedModel, layers: set[int]) -> None:
    optimizer = ReplayedOptimizer(model, UntimedDevice(), 0)
    optimizer.updates.step, optimizer.updates.layers = 1, layers
    for _ in Prefetcher(model, flush_tasks(optimizer.updates), optimizer):
        pass


def test_flush_moves_each_layers_state_once() -> None:
    store = CountingStore()
    model = small_model(store)
    flush(model, {1, 2})
    requests = [request[:3] for request in store.requests if request.operation != "commit"]
    state = ("weight", "exp_avg", "exp_avg_sq")
    expected = [("read", kind, layer) for layer in (1, 2) for kind in (*state, "grad")]
    expected += [("write", kind, layer) for layer in (1, 2) for kind in state]
    assert sorted(requests) == sorted(expected)
    assert all(request.num_bytes in (0, 4 * model.layouts[request.layer].numel) for request in store.requests)


@pytest.mark.parametrize(("operation", "kind"), [("read", "exp_avg"), ("read", "grad")])
def test_failing_store_stops_the_pass(operation: str, kind: str) -> None:
    def fails(request: Request) -> OSError | None:
        return OSError("gone") if request[:3] == (operation, kind, 2) else None

    with pytest.raises(OSError, match="gone"):
        flush(small_model(CountingStore(fails)), {1, 2})


def test_update_state_is_requested_before_the_gradient() -> None:
    workload = gptj(torch.bfloat16)
    host, gradients = CountingStore(), {}
    model = model_without_data(workload, schedule("host", torch.bfloat16, clips=False), lambda *_: host)
    updates = ReplayedOptimizer(model, UntimedDevice(), 0)
    for layer in Prefetcher(model, training_tasks(model, updates.updates), updates):
        if layer.task.gradient:
            gradients[layer.index] = len(host.requests)
            layer.gradient.begin()
            layer.use_gradient(1)
    first = {
        request.layer: number for number, request in reversed([*enumerate(host.requests)]) if request.kind == "low_bits"
    }
    assert gradients.keys() == first.keys() == {*range(len(workload.layouts))}
    assert all(first[layer] < gradients[layer] for layer in gradients)


def test_resident_gradients_need_no_buffers() -> None:
    steps = StepReplay(gptj(torch.float32), schedule("device", torch.float32), lambda *_: CountingStore())
    steps.run_step()
    assert not steps.model.pools.allocated


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_chunks", [4, 5, 40])  # the smallest layer has 4 chunks; all have 31
def test_count_equals_replay_in_chunks(num_chunks: int) -> None:
    layouts = tuple(replace(Layout.of(nn.Linear(1, 1)), numel=numel) for numel in (64, 100, 110, 100, 96))
    for (place, clips), late in product((("host", True), ("disk", True), ("host", False)), (0, 2)):
        inputs = schedule(place, torch.bfloat16, clips)
        inputs = replace(inputs, budget=BufferBudget(num_chunks=num_chunks, chunk_numel=16), num_deferred=late)
        store = CountingStore()
        workload = Workload(layouts, 8, torch.bfloat16, StepTokens(1, 1, 1.0, 1.0), None)
        steps = StepReplay(workload, inputs, lambda *_, store=store: store)
        steps.counters = {place: store}
        passes = [steps.count_step() for _ in range(STEPS_TO_STEADY + 1)]  # nothing is pending before the first
        assert count_step(layouts, (), 8, torch.bfloat16, inputs) == (*passes[-1], steps.count_flush())
