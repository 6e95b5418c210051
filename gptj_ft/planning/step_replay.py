"""Replay a training step without data, and count the bytes that it moves.

The engine itself runs: `step.forward`, `step.backward`, `Prefetcher` and the schedule, on the meta device. Only the
layers, the head's loss and the optimizer's arithmetic are replaced, by calls of a device. The device here takes no
time; that of `timeline` takes the seconds of each kernel and transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from gptj_ft.models.batch import PackedBatch, Poll
from gptj_ft.models.embedding import Embedding
from gptj_ft.models.layer_sampling import EVERY_LAYER, EveryLayer
from gptj_ft.models.layout import FROZEN, MOMENTS, TIED_SOURCE_LAYER, Kind, Layout
from gptj_ft.planning.layer_cost import LayerInput
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.exchange import GradientReducer
from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.moments import form_of
from gptj_ft.streaming.objective import CrossEntropy
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import LayerTask, PendingUpdates, flush_tasks, lowest_trained, training_tasks
from gptj_ft.streaming.split_master import LOW_BITS
from gptj_ft.streaming.step import Step, attach_gradients, backward, forward, kept_layers, open_channel
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.stores.device import DeviceStore
from gptj_ft.streaming.stores.fake import CountingStore
from gptj_ft.streaming.stores.placement import Place, Placement
from gptj_ft.streaming.stores.split import SplitStore
from gptj_ft.streaming.update_pump import Updated
from gptj_ft.system.accelerator import META

STEPS_TO_STEADY = 2  # the first step finds nothing of an update in buffers

Bytes = dict[Place, int]


@dataclass(frozen=True)
class ScheduleInputs:
    """Settings that determine a step's schedule."""

    placement: Placement
    stored: tuple[tuple[Kind, torch.dtype], ...]  # kinds with a store; without "grad" backward applies the updates
    budget: BufferBudget
    num_deferred: int = 0  # leading blocks with deferred updates, see `PendingUpdates`
    choice: EveryLayer = EVERY_LAYER  # layers that each step trains


class ReplayedOptimizer:
    """An optimizer with pending updates but without arithmetic; it counts the updated elements of each pass."""

    loss_scale = None

    def __init__(self, model: OffloadedModel, device: UntimedDevice, num_deferred: int) -> None:
        self._model, self._device = model, device
        self.updates = PendingUpdates.of(model, 0, num_deferred)
        self.forward = self.backward = 0

    def apply(self, task: LayerTask, span: slice, tensors: Mapping[Kind, Tensor], updated: Updated) -> None:
        numel = span.stop - span.start
        if self.updates.waits and not task.descends:
            self.forward += numel
        else:
            self.backward += numel
        self._device.update(numel, tensors)

    def applied(self, task: LayerTask) -> None:
        if task.writes:
            self.updates.layers.discard(task.layer)

    def add_gradient(self, layer: LoadedLayer) -> None:
        """Take the norm of a layer's gradient, then store it or update the layer, as the task says."""
        self._device.take_norm(layer)
        layer.use_gradient(self.updates.step + 1)

    def end_step(self) -> None:
        if self.updates.waits:
            self.updates.layers = set(filter(self.updates.trains, self._model.trained))
        self.updates.step += 1


class UntimedDevice:
    """A device on which nothing takes time."""

    micro_batches, micro_batch_tokens = 1, 1

    def run_forward(self, layer: LoadedLayer, poll: Poll) -> None:
        """Compute a layer's forward pass on a micro-batch."""

    def run_backward(self, layer: LoadedLayer) -> None:
        """Compute a layer's backward pass on a micro-batch."""

    def start_head(self, head: LoadedLayer) -> None:
        """Note that the forward pass ends here."""

    def run_head(self, head: LoadedLayer) -> None:
        """Compute the loss and the head's backward pass, and wait for the loss."""

    def zero_gradients(self, layer: LoadedLayer) -> None:
        """Set a layer's gradient sums to zero."""

    def take_norm(self, layer: LoadedLayer) -> None:
        """Compute the norm of a layer's gradient, and round it for its store."""

    def update(self, numel: int, tensors: Mapping[Kind, Tensor]) -> None:
        """Update some elements."""

    def end_step(self) -> None:
        """Wait for the norm of all gradients."""


class _ReplayedLayer:
    """A loaded layer whose computation is replayed."""

    def __init__(self, layer: LoadedLayer, replay: StepReplay) -> None:
        self._layer, self._replay = layer, replay
        self._anchor = torch.empty(0, device=META, requires_grad=True)  # makes autograd visit layers without inputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def parameters_for(self, batches: Sequence[PackedBatch]) -> Mapping[str, Tensor]:
        return {}

    def run(self, parameters: Mapping[str, Tensor], x: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        self._replay.device.run_forward(self._layer, poll)
        arguments = self._replay.run_backward, x, self._anchor, self._replay.hidden
        output: Tensor = _Backward.apply(*arguments)  # type: ignore[no-untyped-call]
        return output


class _Backward(torch.autograd.Function):
    """Call a function when autograd reaches it in backward."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], x: Tensor, anchor: Tensor, hidden: Tensor) -> Tensor:
        ctx.call = call
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.call()
        return None, gradients[0] if ctx.needs_input_grad[1] else None, None, None


class _ReplayedLayers(Prefetcher):
    """The real prefetcher; it yields layers whose computation is replayed."""

    def __init__(self, replay: StepReplay) -> None:
        tasks = training_tasks(replay.model, replay.optimizer.updates)
        super().__init__(replay.model, tasks, replay.optimizer)
        self._replay = replay

    def __next__(self) -> LoadedLayer:
        layer = super().__next__()
        self._replay.visit(layer)
        return cast("LoadedLayer", _ReplayedLayer(layer, self._replay))


class _Reducer(GradientReducer):
    def __init__(self, replay: StepReplay) -> None:
        super().__init__(replay.optimizer.add_gradient)
        self._device = replay.device

    def begin(self, layer: LoadedLayer) -> None:
        self._device.zero_gradients(layer)


class StepReplay:
    """A model without data, its stores, and the device that computes; runs steps and counts the bytes of each pass."""

    def __init__(
        self,
        workload: Workload,
        schedule: ScheduleInputs,
        store_of: Callable[[Kind, Place], LayerStore],
        device: UntimedDevice | None = None,
    ) -> None:
        self._stored = dict(schedule.stored)
        self.model = model_without_data(workload, schedule, store_of)
        self.device = device or UntimedDevice()
        self.optimizer = ReplayedOptimizer(self.model, self.device, schedule.num_deferred)
        self.hidden = torch.empty(self.device.micro_batch_tokens, workload.width, dtype=workload.dtype, device=META)
        self.counters: dict[Place, CountingStore] = {}
        self._visits: dict[tuple[Place, int], int] = {}  # requests before a layer's visit in forward
        self._visited: LoadedLayer | None = None
        batch = LayerInput((self.device.micro_batch_tokens,), workload.width, workload.dtype).batch()
        self._batches = [batch] * self.device.micro_batches

    def visit(self, layer: LoadedLayer) -> None:
        """Note the visit of a layer; after the one in forward, its requests belong to backward."""
        self._visited = layer
        if not layer.task.descends:
            self._visits |= {(place, layer.index): len(store.requests) for place, store in self.counters.items()}

    def run_backward(self) -> None:
        """Compute backward of the visited layer. Its weights may have another slot than when its graph was kept."""
        assert self._visited is not None
        self.device.run_backward(self._visited)

    def run_step(self) -> None:
        """Run one step; the counterpart of `step.train_step`."""
        model, batches, top = self.model, self._batches, len(self.model.layers) - 1
        up, down = open_channel(model, range(top + 1), batches), open_channel(model, range(top, -1, -1), batches)
        step = Step(batches, CrossEntropy(), None, up, down, _Reducer(self))
        kept = kept_layers(model, lowest_trained(model, self.optimizer.updates))
        layers = _ReplayedLayers(self)
        model.boundaries.begin()
        forward(layers, batches, up, kept, model.boundaries)
        head = next(layers)
        self.device.start_head(head)
        if head.task.trains and not head.tiles:
            attach_gradients(head, head.leaf_parameters())
            step.reducer.begin(head)
        self.device.run_head(head)
        for tile in head.tiles:
            head.gradient.begin_tile(tile)
            step.reducer.begin(head)
            step.reducer.end(head)
        if not head.tiles:
            step.reducer.end(head)
        backward(step, layers, [torch.empty_like(self.hidden) for _ in batches], kept)
        self.device.end_step()
        self.optimizer.end_step()

    def count_step(self) -> tuple[PassBytes, PassBytes]:
        """Run a step; return the bytes of forward and of backward."""
        self._forget()
        self.run_step()
        return self._counted()

    def count_flush(self) -> PassBytes:
        """Apply the pending updates; return their bytes."""
        self._forget()
        for _ in Prefetcher(self.model, flush_tasks(self.optimizer.updates), self.optimizer):
            pass
        return self._counted()[0]

    def _counted(self) -> tuple[PassBytes, PassBytes]:
        size, optimizer = bytes_to_update(self._stored), self.optimizer
        up, down = PassBytes({}, {}, size * optimizer.forward), PassBytes({}, {}, size * optimizer.backward)
        num_tied = sum(bool(layout.tied) for layout in self.model.layouts)
        for place, store in self.counters.items():
            for number, request in enumerate(store.requests):
                if request.operation == "commit":
                    continue
                is_down = number >= self._visits.get((place, request.layer), len(store.requests))
                if not optimizer.updates.waits and request.kind not in ("weight", FROZEN):
                    is_down = True  # an update in backward; its first reads are requested one layer ahead
                if is_down and request[:3] == ("read", "weight", TIED_SOURCE_LAYER) and num_tied:
                    num_tied, is_down = num_tied - 1, False  # read once more, for the layer that is tied to it
                moved = down if is_down else up
                by_place = moved.read if request.operation == "read" else moved.written
                by_place[place] = by_place.get(place, 0) + request.num_bytes
        return up, down

    def _forget(self) -> None:
        self._visits = {}
        self.optimizer.forward = self.optimizer.backward = 0
        for store in self.counters.values():
            store.requests.clear()


@dataclass(frozen=True)
class PassBytes:
    """Bytes that a pass moves."""

    read: Bytes  # by place off the device
    written: Bytes
    updated: int  # read and written by updates, in the device's memory


@lru_cache(maxsize=64)  # half a second for 6 billion parameters; suggestions ask for the same ones again
def count_step(
    layouts: tuple[Layout, ...],
    frozen: tuple[Layout, ...],
    width: int,
    dtype: torch.dtype,
    schedule: ScheduleInputs,
) -> tuple[PassBytes, PassBytes, PassBytes]:
    """Count the bytes of a step in the steady state: forward, backward, and a flush of the pending updates.

    Neither tokens nor kept activations change them; see `costs.training_passes`.
    """
    workload = Workload(layouts, width, dtype, StepTokens(1, 1, 1.0, 1.0), None, frozen=frozen)
    schedule = replace(schedule, budget=_in_whole_layers(schedule, layouts))
    size_of = moved_bytes(workload, schedule.placement)
    places: tuple[Place, ...] = ("host", "disk")
    counters = {place: CountingStore(size_of=size_of) for place in places}
    replay = StepReplay(workload, schedule, lambda _, place: counters[place])
    replay.counters = counters
    replay.optimizer.end_step()  # all updates are pending, as after a step
    for _ in range(STEPS_TO_STEADY):
        up, down = replay.count_step()
    return up, down, replay.count_flush()


def _in_whole_layers(schedule: ScheduleInputs, layouts: Sequence[Layout]) -> BufferBudget:
    """Return a budget with one chunk per layer, if that moves the same bytes; a count is then many times faster."""
    budget = schedule.budget
    # A read is saved only if the pool still has the chunk: fewer others must have come since than it has buffers. No
    # layer is updated twice in a row (the head is between forward and backward), so if every trained layer has at least
    # as many chunks as the pool has buffers, none is ever saved, however large the chunks are.
    sizes = [layout.numel for layer, layout in enumerate(layouts) if layout.numel and schedule.choice.trains(layer, 0)]
    if len(sizes) < 2 or not layouts[-1].numel or -(-min(sizes) // budget.update_numel) < budget.num_chunks:
        return budget
    return replace(budget, chunk_numel=max(sizes), chunks_at_once=1, num_chunks=1)


def moved_bytes(workload: Workload, placement: Placement) -> Callable[[Span, Tensor], int]:
    """Return a function that gives the bytes of a transfer: frozen weights move as they are in their place."""
    sizes = [
        layout.bytes_in(placement.of(FROZEN, layer), workload.dtype) for layer, layout in enumerate(workload.frozen)
    ]

    def size_of(span: Span, values: Tensor) -> int:
        is_layer = span.kind == FROZEN and values.numel() == workload.frozen[span.layer].numel
        return sizes[span.layer] if is_layer else values.nbytes

    return size_of


def model_without_data(
    workload: Workload, schedule: ScheduleInputs, store_of: Callable[[Kind, Place], LayerStore]
) -> OffloadedModel:
    """Return the model of a workload on the meta device; ``store_of`` returns the store of a kind off the device."""
    placement = schedule.placement

    def open_store(kind: Kind, dtype: torch.dtype, layouts: Sequence[Layout]) -> LayerStore:
        def open_at(place: Place) -> LayerStore:
            return DeviceStore(layouts, {kind: dtype}, META) if place == "device" else store_of(kind, place)

        if placement.in_memory and placement.splits(kind):
            return SplitStore(open_at(placement.memory), open_at("disk"), placement.in_memory)
        return open_at(placement.of(kind))

    stores = {kind: open_store(kind, dtype, workload.layouts) for kind, dtype in schedule.stored}
    if workload.frozen_elements:
        stores[FROZEN] = open_store(FROZEN, workload.dtype, workload.frozen)
    layers = [_embedding(workload), *(nn.Identity() for _ in workload.layouts[1:])]
    budget = replace(schedule.budget, forward_bytes=None)
    return OffloadedModel(
        layers, dict(schedule.stored), stores, META, budget, workload.layouts, workload.frozen, choice=schedule.choice
    )


def _embedding(workload: Workload) -> nn.Module:
    """Return a layer with the embeddings of the first layer, if it has nothing else: frozen ones are read by rows."""
    layer, frozen = nn.Module(), workload.frozen[0].shapes if workload.frozen else {}
    if all(len(shape) == 2 for shape in (*frozen.values(), *workload.layouts[0].shapes.values())):
        with META:
            for name, (rows, width) in frozen.items():
                layer.add_module(name.removesuffix(".weight"), Embedding(rows, width))
    return layer


def bytes_to_update(stored: Mapping[Kind, torch.dtype]) -> int:
    """Return the bytes per element that an update reads and writes in the device's memory.

    A stored gradient is clipped into a copy. Narrow kinds become fp32 first. The form of the moments states its share.
    """
    fp32, weight = torch.float32.itemsize, stored["weight"]
    size = 2 * fp32 * (1 + len(MOMENTS)) + (3 if "grad" in stored else 1) * fp32
    size += len(MOMENTS) * form_of(stored["exp_avg"]).moved
    if (narrow := stored.get("grad", torch.float32).itemsize) < fp32:
        size += narrow + fp32
    if weight != torch.float32:
        size += fp32 + weight.itemsize  # the master weights, rounded to weights
    if weight == torch.bfloat16:
        size += 2 * 2 * fp32  # half a unit is added, and the sum shifted, see `split_master`
    if LOW_BITS in stored:  # weights and low bits become fp32, and its low half is stored
        low = stored[LOW_BITS].itemsize
        size += weight.itemsize + fp32 + 2 * fp32 + low + fp32 + low
    return size


def state_kinds(stored: Mapping[Kind, torch.dtype]) -> tuple[Kind, ...]:
    """Return the kinds that an update changes and a checkpoint contains."""
    return tuple(kind for kind in stored if kind != "grad")
