"""Replay a training step of the real schedule in virtual time, at a device's rates: seconds, stall, what is busy.

`Prefetcher` and `schedule.training_tasks` run as in `step.train_step`, on the ``meta`` device; kernels are those that
the layers were seen to need there (`layer_cost`), transfers those that the schedule asks the stores for.

On a CPU the program waits for each kernel, layers take the seconds that they were timed to take, files are read into
the tensors themselves, and what moves takes processor time from what computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind
from gptj_ft.planning.layer_cost import KernelCost, LayerCost, LayerInput, embedding_cost, measure_blocks
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.traffic import CountedUpdates, bytes_to_update, model_without_data
from gptj_ft.planning.virtual_machine import (
    Clock,
    CopyEngines,
    Direction,
    Hazards,
    Processor,
    VirtualQueue,
    VirtualStore,
    Work,
)
from gptj_ft.planning.working_memory import head_chunk, head_cost
from gptj_ft.planning.workload import Workload
from gptj_ft.streaming.activations import OffloadedActivations, boundary_layout
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import LayerTask, training_tasks
from gptj_ft.streaming.stores.placement import Place, Placement
from gptj_ft.streaming.update_pump import Updated
from gptj_ft.system.accelerator import META
from gptj_ft.system.direct_io import TRANSFERS

ISSUE_SECONDS = 10e-6  # of the program, to give the device a kernel
LAUNCH_SECONDS = 3e-6  # of the device, to begin one
BACKWARD_PIECES = 6  # between which updates of other layers may come
HOST_TRANSFERS = 2  # threads of a host store, each way
FOLDER_TRANSFERS = 8  # threads that read a model's folder
REPLAYED_STEPS = 2  # the first has no update pending
ZEROED_ON_CPU = 5  # passes over a gradient that setting it to zero takes, with the faults of its pages


@dataclass(frozen=True)
class PassTimes:
    """A pass over the layers in virtual time.

    Attributes:
        seconds: seconds of the pass.
        compute, link_in, link_out, disk: seconds of them that the processor, each direction of the link, and the disk
            work.
    """

    seconds: float
    compute: float
    link_in: float
    link_out: float
    disk: float

    @property
    def bound(self) -> float:
        """Seconds that it takes at least: those of what works longest."""
        return max(self.compute, self.moving)

    @property
    def moving(self) -> float:
        """Seconds of what moves bytes longest."""
        return max(self.link_in, self.link_out, self.disk)


@dataclass(frozen=True)
class Timeline:
    """A training step in virtual time.

    Attributes:
        tokens: tokens of the step.
        forward: pass upwards, until the head begins.
        backward: head and pass downwards.
        waits: seconds that the computation stands still, by what works meanwhile: ``disk``, ``link``, or the
            ``program``, which gives the device its kernels.
    """

    tokens: float
    forward: PassTimes
    backward: PassTimes
    waits: Mapping[str, float]

    @property
    def step(self) -> PassTimes:
        """Both passes together."""
        first, second = asdict(self.forward), asdict(self.backward)
        return PassTimes(**{name: first[name] + second[name] for name in first})

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.step.seconds

    @property
    def share_of_bound(self) -> float:
        """What works longest in the step, as a share of its seconds; 1: nothing could be overlapped better."""
        return self.step.bound / self.seconds

    @property
    def bound_by_pass(self) -> float:
        """Seconds that it takes at least if no pass does work of the other.

        With clipping none can: updates need the norm of all gradients, so that the next forward pass makes them.
        """
        return self.forward.bound + self.backward.bound

    @property
    def share_by_pass(self) -> float:
        """That bound as a share of the seconds."""
        return self.bound_by_pass / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def stall(self) -> float:
        """Share of a step in which the computation stands still."""
        return sum(self.waits.values()) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for ``--json``."""
        derived = ("share_of_bound", "bound_by_pass", "share_by_pass", "tokens_per_second", "stall")
        return {
            **asdict(self.step),
            "bound": self.step.bound,
            **asdict(self),
            **{name: getattr(self, name) for name in derived},
        }


@dataclass(frozen=True)
class ScheduleInputs:
    """What decides a step's schedule.

    Attributes:
        placement: places of the kinds.
        stored: the kinds that have a store, and their types.
        budget: buffer budget.
        num_deferred: leading blocks whose updates are deferred, see `PendingUpdates`.
    """

    placement: Placement
    stored: tuple[tuple[Kind, torch.dtype], ...]
    budget: BufferBudget
    num_deferred: int = 0


def replay(workload: Workload, schedule: ScheduleInputs, rates: Rates) -> Timeline:
    """Replay a step in the steady state.

    Args:
        workload: workload, with its layers.
        schedule: inputs of the schedule.
        rates: rates of the device and of the disk.
    """
    return _Replay(workload, schedule, rates).run()


@dataclass(frozen=True)
class _Piece:
    """Kernels that are given one after the other; bound by memory, or not known to be."""

    seconds: float
    number: int
    by_memory: bool = False


class _Prices:
    """Seconds of kernels and updates at a device's rates."""

    def __init__(self, workload: Workload, rates: Rates) -> None:
        self._load, self._compute = workload, rates.compute
        self._products = rates.compute.matmul(workload.dtype, workload.width)

    def piece(self, kernels: Sequence[KernelCost]) -> _Piece:
        """Add up kernels."""
        return _Piece(sum(self._seconds(kernel) for kernel in kernels), len(kernels))

    def bytes_moved(self, num_bytes: float, number: int = 1) -> _Piece:
        """Return kernels that read and write so many bytes."""
        return _Piece(num_bytes / self._compute.memory + number * LAUNCH_SECONDS, number, by_memory=True)

    def _seconds(self, kernel: KernelCost) -> float:
        rate = self._compute.attention if kernel.is_attention else self._products
        memory = self._compute.memory_for(kernel.num_bytes / 2)
        return max(kernel.flops / rate, kernel.num_bytes / memory) + LAUNCH_SECONDS


@dataclass(frozen=True)
class _LayerPieces:
    """A layer's kernels on one micro-batch: forward, between its polls, and backward."""

    forward: tuple[_Piece, ...]
    backward: tuple[_Piece, ...]

    @classmethod
    def of(cls, cost: LayerCost, prices: _Prices) -> _LayerPieces:
        size = -(-len(cost.backward) // BACKWARD_PIECES) or 1
        parts = [cost.backward[start : start + size] for start in range(0, len(cost.backward), size)]
        return cls(tuple(map(prices.piece, cost.forward)), tuple(map(prices.piece, parts)))

    def lasting(self, forward: float, backward: float) -> _LayerPieces:
        """Return the same pieces, each way so many seconds together."""
        return _LayerPieces(_scaled(self.forward, forward), _scaled(self.backward, backward))


def _scaled(pieces: Sequence[_Piece], seconds: float) -> tuple[_Piece, ...]:
    total = sum(piece.seconds for piece in pieces)
    return tuple(replace(piece, seconds=piece.seconds * seconds / total) for piece in pieces) if total else ()


class _Updates(CountedUpdates):
    """An optimizer whose updates take the time of their bytes."""

    def __init__(self, replay: _Replay, num_deferred: int, stored: Mapping[Kind, torch.dtype]) -> None:
        super().__init__(replay.model, num_deferred)
        self._replay, self._bytes = replay, bytes_to_update(stored)
        narrow = sum(dtype != torch.float32 for dtype in stored.values())
        self._kernels = 4 + 6 * narrow

    def apply(self, task: LayerTask, span: slice, tensors: Mapping[Kind, Tensor], updated: Updated) -> None:
        super().apply(task, span, tensors, updated)
        piece = self._replay.prices.bytes_moved(self._bytes * (span.stop - span.start), self._kernels)
        self._replay.update(piece, tensors)

    def add_gradient(self, load: LoadedLayer) -> None:
        """Take the norm of a layer's gradient, and use it as the task says."""
        gradient = load.gradient.flat
        self._replay.compute(self._replay.prices.bytes_moved(gradient.nbytes))
        if load.task.gradient == "write" and self._replay.model.dtypes["grad"] != gradient.dtype:
            number = 2 * -(-gradient.numel() // self._replay.model.budget.chunk_numel)
            self._replay.compute(self._replay.prices.bytes_moved(2 * gradient.nbytes, number))
        self._replay.used([gradient], writes=True)
        load.use_gradient(self.updates.step + 1)


class _Replay:
    """A model on the ``meta`` device, virtual stores and a virtual device."""

    def __init__(self, workload: Workload, schedule: ScheduleInputs, rates: Rates) -> None:
        self._load, self._schedule = workload, schedule
        self.prices, self._disk, self._on_cpu = _Prices(workload, rates), rates.disk, rates.on_cpu
        self._by_memory = False  # what is computed on a CPU
        self._clock = clock = Clock()
        self._earlier: list[Work] = []  # that what is computed next comes after
        self._turn: tuple[float, ...] = ()  # what had been done when the head began
        budget, placement = schedule.budget, schedule.placement
        self._link = CopyEngines(clock, rates.compute.to_device, rates.compute.from_device, rates.disk)
        self._processor, self._hazards = Processor(clock, self._link.at_work), Hazards(budget.chunk_numel)
        if rates.on_cpu:
            self._link.delays = self._delay
        disk = VirtualQueue(clock, TRANSFERS)
        stored = dict(schedule.stored)
        stores: dict[Kind, VirtualStore] = {}
        on_host = self._store("host", VirtualQueue(clock, HOST_TRANSFERS))
        for kind in stored:
            place = placement.of(kind)
            if place == "disk":
                stores[kind] = self._store(place, disk)
            elif place == "host":  # gradients, written at other times, have a store of their own
                stores[kind] = self._store(place, VirtualQueue(clock, HOST_TRANSFERS)) if kind == "grad" else on_host
        place = placement.of("frozen")
        threads = FOLDER_TRANSFERS if place == "disk" else HOST_TRANSFERS
        stores["frozen"] = self._store(place, VirtualQueue(clock, threads))
        self.model = model_without_data(placement, workload, stored, budget, stores.__getitem__)
        self._updates = _Updates(self, schedule.num_deferred, stored)
        self._tokens = workload.step.mean
        self._micro_batches = max(1, -(-int(self._tokens) // workload.step.micro_batch))
        if placement.boundaries != "device":
            layout = boundary_layout(workload.step.most, workload.width, self._micro_batches)
            store = self._store(placement.boundaries, VirtualQueue(clock, HOST_TRANSFERS))
            self.model.boundaries = OffloadedActivations(
                store, layout.numel, budget.chunk_numel, workload.dtype, META, self.model.meter
            )
        self._costs = [_LayerPieces.of(cost, self.prices) for cost in self._layer_costs()]
        if rates.on_cpu:
            tokens, share = workload.step.micro_batch_mean, workload.step.num_micro_batches / self._micro_batches
            self._costs[1:-1] = [
                pieces.lasting(share * times.forward.at(tokens), share * times.backward.at(tokens))
                for pieces, times in zip(self._costs[1:-1], workload.times.layers[1:-1], strict=True)
            ]

    def _store(self, place: Place, queue: VirtualQueue) -> VirtualStore:
        part = self._schedule.budget.chunk_numel if place == "disk" else 0
        return VirtualStore(queue, self._link, self._hazards, part, lambda: [self._processor.last["compute"]])

    def _layer_costs(self) -> list[LayerCost]:
        workload = self._load
        tokens = max(1, round(self._tokens / self._micro_batches))
        attended = workload.rows.attended
        row = min(tokens, max(1, round(2 * attended) if attended else workload.rows.longest))
        number, rest = divmod(tokens, row)
        given = LayerInput((row,) * number + ((rest,) if rest else ()), workload.width, workload.dtype)
        blocks = measure_blocks(workload.layers, workload.layouts, given, workload.lowest_trained)
        return [embedding_cost(workload.layouts[0], given), *blocks, head_cost(workload)]

    def run(self) -> Timeline:
        """Replay steps up to the steady state, and return the last."""
        for _ in range(REPLAYED_STEPS):
            start = self._counters()
            self._processor.idle.clear()
            self._step()
        forward, backward = _between(start, self._turn), _between(self._turn, self._counters())
        idle, total = self._processor.idle, sum(self._processor.idle.values()) or 1.0
        still = forward.seconds + backward.seconds - forward.compute - backward.compute
        return Timeline(
            self._tokens, forward, backward, {name: max(0.0, still) * each / total for name, each in idle.items()}
        )

    def compute(self, piece: _Piece) -> None:
        """Give the compute stream kernels; the first after `use` come after what still touches that memory."""
        self._give("compute", piece, self._earlier)
        self._earlier = []

    def update(self, piece: _Piece, tensors: Mapping[Kind, Tensor]) -> None:
        """Give the update stream an update of some elements."""
        earlier = [work for tensor in tensors.values() for work in self._hazards.earlier(tensor, writes=True)]
        work = self._give("update", piece, earlier)
        for tensor in tensors.values():
            self._hazards.note(tensor, work, writes=True)

    def use(self, tensors: Sequence[Tensor], writes: bool = False) -> None:
        """Have what is computed from now on read this memory, or write it."""
        for tensor in tensors:
            self._earlier += self._hazards.earlier(tensor, writes)

    def used(self, tensors: Sequence[Tensor], writes: bool = False) -> None:
        """Note that what has been computed so far has read this memory, or written it."""
        for tensor in tensors:
            self._hazards.note(tensor, self._processor.last["compute"], writes)

    def _give(self, stream: Literal["compute", "update"], piece: _Piece, earlier: Sequence[Work]) -> Work:
        if self._on_cpu:  # updates, too, are computed by the thread that polls
            self._by_memory = piece.by_memory
            work = self._processor.give("compute", piece.seconds, earlier)
            self._clock.wait(work)
            return work
        issue = piece.number * ISSUE_SECONDS
        work = self._processor.give(stream, max(piece.seconds, issue), earlier)
        self._clock.advance(issue)
        return work

    def _delay(self, direction: Direction, num_bytes: int) -> None:
        """Have what is computed take as much longer as bytes that were moved take of cores or of memory."""
        read, written = (num_bytes, 0) if direction == "in" else (0, num_bytes)
        taken = self._disk.cpu_seconds(read, written)
        self._processor.delay(self._disk.update_delay * num_bytes if self._by_memory else taken)

    def _step(self) -> None:
        """Run one step: the counterpart of `step.train_step`."""
        model, updates = self.model, self._updates
        top = len(model.layers) - 1
        layers = Prefetcher(model, training_tasks(model, updates.updates), updates)
        kept = range(max(1, model.lowest_trained, top - model.budget.num_kept_layers), top)
        model.boundaries.begin()
        hidden = [
            torch.empty(  # rounded down: together they have their place where an average step's are kept
                max(1, int(self._tokens / self._micro_batches)), self._load.width, dtype=self._load.dtype, device=META
            )
            for _ in range(self._micro_batches)
        ]
        for load in layers:
            index = load.index
            self.use(_weights(load))
            if index == top and not load.task.descends:
                self._clock.after([self._processor.last["compute"], *self._earlier], self._note_turn)
                self._head(load)
            elif not load.task.descends:
                if index not in kept and load.is_in_backward and index:
                    model.boundaries.put(index, hidden)
                self._forward(load, layers)
            else:
                if index not in kept and index:
                    model.boundaries.take(index)
                self._backward(load, layers, recomputes=index not in kept)
            self.used(_weights(load))
        self._clock.wait(self._processor.last["compute"])  # for the norm
        updates.updates.step += 1
        if updates.updates.waits:
            updates.updates.layers = set(model.trained)

    def _note_turn(self) -> None:
        self._turn = self._counters()

    def _forward(self, load: LoadedLayer, layers: Prefetcher) -> None:
        for _ in range(self._micro_batches):
            self._run_forward(load, layers)

    def _run_forward(self, load: LoadedLayer, layers: Prefetcher) -> None:
        for piece in self._costs[load.index].forward:
            layers.poll()
            self.compute(piece)

    def _backward(self, load: LoadedLayer, layers: Prefetcher, recomputes: bool) -> None:
        for b in range(self._micro_batches):
            layers.poll()
            if recomputes:
                self._run_forward(load, layers)
            if b == 0 and load.is_trained:
                self._zero_gradients(load)
            for piece in self._costs[load.index].backward:
                self.compute(piece)
        if load.task.gradient:
            self._updates.add_gradient(load)

    def _head(self, load: LoadedLayer) -> None:
        if load.is_trained:
            self._zero_gradients(load)
        self._compute_head(load)
        self._clock.wait(self._processor.last["compute"])  # for the loss
        if load.task.gradient:
            self._updates.add_gradient(load)

    def _compute_head(self, load: LoadedLayer) -> None:
        if self._on_cpu:
            return self.compute(_Piece(self._load.head_seconds(self._load.step.targets, trains=True), 1))
        chunk = head_chunk(self._load).tokens
        left = self._load.step.targets
        cost = self._costs[load.index]
        while left > 0:
            share = min(1.0, left / chunk)
            for piece in (*cost.forward, *cost.backward):
                self.compute(_Piece(share * piece.seconds, piece.number))
            left -= chunk

    def _zero_gradients(self, load: LoadedLayer) -> None:
        """Take the buffers that a layer's gradients are summed in, and set them to zero."""
        load.gradient.begin()
        if load.layout.numel:
            gradient = load.gradient.flat
            self.use([gradient], writes=True)
            self.compute(self.prices.bytes_moved((ZEROED_ON_CPU if self._on_cpu else 1) * gradient.nbytes))

    def _counters(self) -> tuple[float, ...]:
        engines = self._link.engines
        busy = (engines[name].busy for name in ("in", "out", "disk"))
        return self._clock.now, self._processor.busy, *busy


def _between(before: Sequence[float], after: Sequence[float]) -> PassTimes:
    return PassTimes(*(new - old for new, old in zip(after, before, strict=True)))


def _weights(load: LoadedLayer) -> list[Tensor]:
    return [tensor for tensor in (load.weights.trained, load.weights.frozen) if tensor.numel()]
