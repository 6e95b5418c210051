"""What a step moves, counted by its own schedule."""

from __future__ import annotations

import pytest
import torch

from gptj_ft.models.gptj import GPTJConfig, build_layers
from gptj_ft.models.layout import Layout
from gptj_ft.planning.traffic import CountedUpdates, counting_model
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import flush_tasks, training_tasks
from gptj_ft.streaming.stores.fake import CountingStore, Request
from gptj_ft.streaming.stores.placement import Placement, training_dtypes


def counted(store: CountingStore) -> OffloadedModel:
    config = GPTJConfig(n_layer=2, n_embd=32, n_head=2, rotary_dim=4, vocab_size=90)
    layouts = [Layout.of(layer) for layer in build_layers(config)]
    load = Workload(layouts, 32, torch.float32, StepTokens(40, 74, 74.0, 50.0), 3)
    dtypes = training_dtypes(torch.float32)
    return counting_model(Placement("disk", "disk"), load, dtypes, BufferBudget(), {"disk": store})


def flush(model: OffloadedModel, layers: set[int]) -> None:
    optimizer = CountedUpdates(model, 0)
    optimizer.updates.step, optimizer.updates.layers = 1, layers
    for _ in Prefetcher(model, flush_tasks(optimizer.updates), optimizer):
        pass


def test_a_flush_asks_for_the_state_of_each_layer_once_and_gives_it_back() -> None:
    store = CountingStore()
    model = counted(store)
    flush(model, {1, 2})
    asked = [request[:3] for request in store.requests if request.operation != "commit"]
    state = ("weight", "exp_avg", "exp_avg_sq")
    expected = [("read", kind, layer) for layer in (1, 2) for kind in (*state, "grad")]
    expected += [("write", kind, layer) for layer in (1, 2) for kind in state]
    assert sorted(asked) == sorted(expected)
    assert all(request.num_bytes in (0, 4 * model.layouts[request.layer].numel) for request in store.requests)


@pytest.mark.parametrize(("operation", "kind"), [("read", "exp_avg"), ("read", "grad")])
def test_a_store_that_fails_stops_the_pass_that_needs_it(operation: str, kind: str) -> None:
    def fails(request: Request) -> OSError | None:
        return OSError("gone") if request[:3] == (operation, kind, 2) else None

    with pytest.raises(OSError, match="gone"):
        flush(counted(CountingStore(fails)), {1, 2})


def test_without_clipping_what_an_update_needs_is_asked_for_before_the_gradient_is_there() -> None:
    layouts = [Layout.of(layer) for layer in build_layers(GPTJConfig())]
    workload = Workload(layouts, 4096, torch.bfloat16, StepTokens(512, 512, 512.0, 512.0), None)
    stored = {kind: dtype for kind, dtype in training_dtypes(torch.bfloat16).items() if kind != "grad"}
    host, gradients = CountingStore(), {}
    model = counting_model(Placement("host", "host"), workload, stored, BufferBudget(), {"host": host, "disk": host})
    updates = CountedUpdates(model, 0)
    for load in Prefetcher(model, training_tasks(model, updates.updates), updates):
        if load.task.gradient:
            gradients[load.index] = len(host.requests)
            load.gradient.begin()
            load.use_gradient(1)
    first = {
        request.layer: number for number, request in reversed([*enumerate(host.requests)]) if request.kind == "master"
    }
    assert gradients.keys() == first.keys() == {*range(len(layouts))}
    assert all(first[layer] < gradients[layer] for layer in gradients)


def test_gradients_that_stay_on_the_device_take_no_buffers_beside() -> None:
    layouts = [Layout.of(layer) for layer in build_layers(GPTJConfig())]
    workload = Workload(layouts, 4096, torch.float32, StepTokens(512, 512, 512.0, 512.0), None)
    none = CountingStore()
    model = counting_model(
        Placement("device", "device"), workload, training_dtypes(torch.float32), BufferBudget(),
        {"host": none, "disk": none},
    )  # fmt: skip
    updates = CountedUpdates(model, 0)
    for load in Prefetcher(model, training_tasks(model, updates.updates), updates):
        if load.task.gradient:
            load.gradient.begin()
            load.use_gradient(1)
    assert not model.pools.allocated
