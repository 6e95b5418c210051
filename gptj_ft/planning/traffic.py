"""Count what a step moves: its schedule, run against stores that only count, on a device without memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from gptj_ft.models.embedding import Embedding
from gptj_ft.models.layout import FROZEN, TIED_SOURCE_LAYER, Kind
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import LayerTask, PendingUpdates, flush_tasks, training_tasks
from gptj_ft.streaming.stores.base import LayerStore
from gptj_ft.streaming.stores.device import DeviceStore
from gptj_ft.streaming.stores.fake import CountingStore
from gptj_ft.streaming.stores.placement import Place, Placement
from gptj_ft.streaming.update_pump import Updated
from gptj_ft.system.accelerator import META

NOTHING: Mapping[Place, int] = {}
STEPS_TO_STEADY = 3  # the first has no update pending, the second finds nothing of an update in buffers


@dataclass(frozen=True)
class Pass:
    """One pass over the layers: its arithmetic, and the bytes read from and written to each place off the device.

    Attributes:
        flops: FLOPs of matrix products.
        updated: bytes that AdamW reads and writes in the device's memory.
        touched: bytes that the operations between products read and write there, in tensors as large as the weights.
        times: passes of the blocks' operations between products; backward counts as two.
        read: bytes, by place.
        written: bytes, by place.
        layers: seconds that the layers were measured to take, instead of what flops, touched logits and times say; 0:
            they were not measured.
    """

    flops: float = 0.0
    updated: int = 0
    touched: float = 0.0
    times: float = 0.0
    read: Mapping[Place, int] = field(default_factory=dict)
    written: Mapping[Place, int] = field(default_factory=dict)
    layers: float = 0.0

    def plus(self, read: Mapping[Place, int] = NOTHING, written: Mapping[Place, int] = NOTHING) -> Pass:
        """Return the pass with more bytes read and written."""
        return replace(self, read=added(self.read, read), written=added(self.written, written))

    def compute_seconds(self, workload: Workload, rates: Rates) -> float:
        """Return the seconds of the computation alone; on a CPU, with the work that transfers make for it."""
        compute = rates.compute
        moving = rates.disk.cpu_seconds(self.read.get("disk", 0), self.written.get("disk", 0)) if rates.on_cpu else 0.0
        beside = (self.updated + self.touched) / compute.memory + moving
        if self.layers:
            return self.layers + beside
        products = self.flops / compute.matmul(workload.dtype, workload.width)
        return products + self.times * workload.seconds_between_products(compute) + beside

    def transfer_seconds(self, rates: Rates) -> float:
        """Return the seconds of the transfers alone: over the disk, and beside that over the link."""
        disk = rates.disk.seconds(self.read.get("disk", 0), self.written.get("disk", 0))
        arriving = sum(self.read.values()) / rates.compute.to_device
        leaving = sum(self.written.values()) / rates.compute.from_device
        return max(disk, arriving, leaving)

    def seconds(self, workload: Workload, rates: Rates) -> float:
        """Return the seconds of the pass."""
        return max(self.compute_seconds(workload, rates), self.transfer_seconds(rates))


class CountedUpdates:
    """Stand in for an optimizer: the same pending updates, without arithmetic.

    Attributes:
        updates: layers that lack the last step's update, and when they get it.
        forward, backward: elements that are updated in each pass.
    """

    def __init__(self, model: OffloadedModel, num_deferred: int) -> None:
        self._model = model
        self.updates = PendingUpdates.of(model, 0, num_deferred)
        self.forward = self.backward = 0

    def apply(self, task: LayerTask, span: slice, tensors: Mapping[Kind, Tensor], updated: Updated) -> None:
        if self.updates.waits and not task.descends:
            self.forward += span.stop - span.start
        else:
            self.backward += span.stop - span.start

    def applied(self, task: LayerTask) -> None:
        if task.writes:
            self.updates.layers.discard(task.layer)


def training_passes(
    placement: Placement,
    workload: Workload,
    stored: Mapping[Kind, torch.dtype],
    budget: BufferBudget,
    num_deferred: int,
) -> tuple[Pass, Pass, Pass]:
    """Count an average step: its forward pass, its backward pass, and a flush of the updates that it leaves pending.

    Args:
        placement: places of the kinds.
        workload: workload of the run.
        stored: the kinds that have a store, and their types; without ``grad`` backward applies the updates.
        budget: buffer budget.
        num_deferred: leading blocks whose updates are deferred, see `PendingUpdates`.
    """
    kept = budget.num_kept_layers
    # Neither tokens nor kept activations change what moves of the model, so plans that differ in them share a count.
    model = Workload(
        tuple(workload.layouts),
        workload.width,
        workload.dtype,
        StepTokens(0, 0, 0.0, 0.0),
        None,
        frozen=tuple(workload.frozen),
    )
    buffers = replace(budget, num_kept_layers=0, pass_tokens=0)
    where = replace(placement, boundaries="device")
    forward, backward, flush = count_step(where, model, tuple(stored.items()), buffers, num_deferred)
    flops = 2.0 * workload.block_parameters * workload.step.mean
    forward = replace(forward, flops=flops, times=1.0, layers=workload.forward_seconds)
    backward = replace(
        backward,
        flops=workload.flops(kept).hardware - flops,
        touched=workload.touched_by_backward,
        times=workload.times_again(kept),
        layers=workload.backward_seconds(kept),
    )
    if placement.boundaries == "device":
        return forward, backward, flush
    share = workload.step.mean / workload.step.most
    away: dict[Place, int] = {placement.boundaries: round(workload.boundary_bytes(kept) * share)}
    return forward.plus(written=away), backward.plus(read=away), flush


@lru_cache(maxsize=64)  # half a second each for a model of 6 billion parameters; advice asks for the same ones again
def count_step(
    placement: Placement,
    workload: Workload,
    stored: tuple[tuple[Kind, torch.dtype], ...],
    budget: BufferBudget,
    num_deferred: int,
) -> tuple[Pass, Pass, Pass]:
    """Count the bytes of a step in the steady state: see `StepCounter`."""
    return StepCounter(placement, workload, dict(stored), budget, num_deferred).passes()


@dataclass
class StepCounter:
    """Run the schedule of training steps and count the bytes of each pass.

    Args:
        placement: places of the kinds.
        workload: the model's layouts.
        stored: the kinds that have a store, and their types; without ``grad`` backward applies updates.
        budget: buffer budget.
        num_deferred: leading blocks whose updates are deferred, see `PendingUpdates`.
    """

    placement: Placement
    workload: Workload
    stored: Mapping[Kind, torch.dtype]
    budget: BufferBudget
    num_deferred: int = 0

    def __post_init__(self) -> None:
        self._stores: dict[Place, CountingStore] = {"host": CountingStore(), "disk": CountingStore()}
        self.model = counting_model(self.placement, self.workload, self.stored, self.budget, self._stores)
        self._optimizer = CountedUpdates(self.model, self.num_deferred)

    def passes(self) -> tuple[Pass, Pass, Pass]:
        """Count a step in the steady state: forward, backward, and a flush of what it leaves pending."""
        for _ in range(STEPS_TO_STEADY):
            forward, backward = self._step()
        return forward, backward, self._flush()

    def _step(self) -> tuple[Pass, Pass]:
        model, optimizer = self.model, self._optimizer
        top, turns = len(model.layers) - 1, dict[tuple[Place, int], int]()
        self._forget()
        for load in Prefetcher(model, training_tasks(model, optimizer.updates), optimizer):
            is_up = not load.task.descends
            if is_up:
                turns |= {(place, load.index): len(store.requests) for place, store in self._stores.items()}
            if load.is_trained and (not is_up or load.index == top):
                load.gradient.begin()
            if load.task.gradient:
                load.use_gradient(optimizer.updates.step + 1)
        optimizer.updates.step += 1
        if optimizer.updates.waits:
            optimizer.updates.layers = set(model.trained)
        return self._counted(turns)

    def _flush(self) -> Pass:
        self._forget()
        for _ in Prefetcher(self.model, flush_tasks(self._optimizer.updates), self._optimizer):
            pass
        whole, _ = self._counted({})
        return whole

    def _counted(self, turns: Mapping[tuple[Place, int], int]) -> tuple[Pass, Pass]:
        """Sum up the requests: after a layer has come on the way up, what is asked for of it belongs to backward."""
        moved: list[dict[str, dict[Place, int]]] = [{"read": {}, "write": {}} for _ in range(2)]
        num_tied = sum(
            bool(layout.tied) for layout in self.model.layouts
        )  # read once more, with the layer that is tied
        for place, store in self._stores.items():
            for number, request in enumerate(store.requests):
                if request.operation == "commit":
                    continue
                is_down = number >= turns.get((place, request.layer), len(store.requests))
                if not self._optimizer.updates.waits and request.kind not in ("weight", FROZEN):
                    is_down = True  # what backward updates with, though it is asked for a layer ahead
                if is_down and request[:3] == ("read", "weight", TIED_SOURCE_LAYER) and num_tied:
                    num_tied, is_down = num_tied - 1, False
                by_place = moved[is_down][request.operation]
                by_place[place] = by_place.get(place, 0) + request.num_bytes
        optimizer = self._optimizer
        up, down = (Pass(read=each["read"], written=each["write"]) for each in moved)
        size = bytes_to_update(self.stored)
        return replace(up, updated=size * optimizer.forward), replace(down, updated=size * optimizer.backward)

    def _forget(self) -> None:
        self._optimizer.forward = self._optimizer.backward = 0
        for store in self._stores.values():
            store.requests.clear()


def counting_model(
    placement: Placement,
    workload: Workload,
    stored: Mapping[Kind, torch.dtype],
    budget: BufferBudget,
    counters: Mapping[Place, LayerStore],
) -> OffloadedModel:
    """Return the model of a workload on the ``meta`` device, with stores that count in the place of host and disk."""
    return model_without_data(placement, workload, stored, budget, lambda kind: counters[placement.of(kind)])


def model_without_data(
    placement: Placement,
    workload: Workload,
    stored: Mapping[Kind, torch.dtype],
    budget: BufferBudget,
    store_of: Callable[[Kind], LayerStore],
) -> OffloadedModel:
    """Return the model of a workload on the ``meta`` device, with stores for the kinds that are not on the device."""
    kept = {kind: dtype for kind, dtype in stored.items() if placement.of(kind) == "device"}
    on_device = DeviceStore(workload.layouts, kept, META)
    stores: dict[Kind, LayerStore] = {kind: on_device if kind in kept else store_of(kind) for kind in stored}
    if workload.frozen_elements:
        place, dtypes = placement.of("frozen"), {FROZEN: workload.dtype}
        stores["frozen"] = DeviceStore(workload.frozen, dtypes, META) if place == "device" else store_of(FROZEN)
    layers = [_embedding(workload), *(nn.Identity() for _ in workload.layouts[1:])]
    return OffloadedModel(layers, stored, stores, META, budget, workload.layouts, workload.frozen)


def _embedding(workload: Workload) -> nn.Module:
    """Return a layer with nothing but the first layer's embeddings: of these come rows, where they are not trained.

    One that has more, like the norm of an encoder's, is read whole: nothing is returned of it.
    """
    layer, frozen = nn.Module(), workload.frozen[0].shapes if workload.frozen else {}
    if all(len(shape) == 2 for shape in (*frozen.values(), *workload.layouts[0].shapes.values())):
        with META:
            for name, (rows, width) in frozen.items():
                layer.add_module(name.removesuffix(".weight"), Embedding(rows, width))
    return layer


def bytes_to_update(stored: Mapping[Kind, torch.dtype]) -> int:
    """Compute the bytes that an update reads and writes in the device's memory, per element.

    A gradient that had to wait is clipped into a copy; what is not fp32 becomes that first, and moments are rounded
    with noise (see `adamw.round_stochastically`): the noise is read and added, and the lower bits are masked.
    """
    state = state_kinds(stored)
    # A master copy makes the weights anew: they are not read for an update.
    old = tuple(kind for kind in state if kind != "weight" or "master" not in state)
    fp32, noise = torch.float32.itemsize, torch.int32.itemsize
    size = 2 * fp32 * len(old) + (3 if "grad" in stored else 1) * fp32
    for kind in (*old, "grad"):
        if (narrow := stored.get(kind, torch.float32).itemsize) < fp32:
            size += narrow + fp32 + (0 if kind == "grad" else 4 * fp32 + noise + fp32 + narrow)
    if "weight" not in old:
        size += fp32 + stored["weight"].itemsize  # the master copy, rounded to weights
    return size


def added(some: Mapping[Place, int], more: Mapping[Place, int]) -> dict[Place, int]:
    """Add up bytes by place."""
    return {place: some.get(place, 0) + more.get(place, 0) for place in {**some, **more}}


def state_kinds(stored: Mapping[Kind, torch.dtype]) -> tuple[Kind, ...]:
    """Return the kinds that an update changes and a checkpoint holds."""
    return tuple(kind for kind in stored if kind != "grad")


def bytes_moved(
    placement: Placement, kinds: Mapping[Kind, torch.dtype], elements: int | Mapping[Kind, int]
) -> dict[Place, int]:
    """Return the bytes of so many elements of some kinds, or of each kind its own, by place but the device."""
    moved: dict[Place, int] = {}
    for kind, dtype in kinds.items():
        if (place := placement.of(kind)) != "device":
            number = elements if isinstance(elements, int) else elements[kind]
            moved[place] = moved.get(place, 0) + number * dtype.itemsize
    return moved
