"""Replay a training step in virtual time, at the rates of a device and a disk.

On an accelerator, a layer takes the seconds of the kernels that its own code runs on the meta device (`layer_cost`).
On a CPU it takes its timed seconds (`layer_times`); the program waits for each kernel, files are read into the device's
own memory, and transfers take processor time from the computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gptj_ft.models.batch import Poll
from gptj_ft.models.layout import FROZEN, Kind
from gptj_ft.models.quantization.form import NUMBERS_AT_ONCE
from gptj_ft.planning.constants import (
    BACKWARD_PIECES,
    CHUNK_SECONDS,
    FOLDER_TRANSFERS,
    HOST_TRANSFERS,
    LAUNCH_SECONDS,
    RESTORED,
    ZEROED_ON_CPU,
)
from gptj_ft.planning.kernel_times import kernel_seconds, layer_costs
from gptj_ft.planning.layer_cost import KernelCost, LayerCost
from gptj_ft.planning.memory import largest_chunk
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.step_replay import ScheduleInputs, StepReplay, UntimedDevice, bytes_to_update, moved_bytes
from gptj_ft.planning.virtual_machine import (
    Clock,
    CopyEngines,
    Direction,
    Hazards,
    Processor,
    Stream,
    VirtualQueue,
    VirtualStore,
    Work,
)
from gptj_ft.planning.workload import TypicalStep, Workload
from gptj_ft.streaming.activations import OffloadedActivations, boundary_layout
from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.stores.placement import Place
from gptj_ft.system.accelerator import META
from gptj_ft.system.direct_io import TRANSFERS

REPLAYED_STEPS = 2  # the first step has no pending update


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a pass over the layers, and the busy seconds of each part of the machine."""

    seconds: float
    compute: float
    link_in: float
    link_out: float
    disk: float

    @property
    def bound(self) -> float:
        """Lower bound of the seconds: those of the busiest part."""
        return max(self.compute, self.moving)

    @property
    def moving(self) -> float:
        """Busy seconds of the busiest transfer engine."""
        return max(self.link_in, self.link_out, self.disk)


@dataclass(frozen=True)
class Timeline:
    """A training step in virtual time."""

    tokens: float
    forward: PassTimes  # until the head starts
    backward: PassTimes
    waits: Mapping[str, float]  # idle seconds of the computation while the "disk", "link" or "program" works

    @property
    def step(self) -> PassTimes:
        first, second = asdict(self.forward), asdict(self.backward)
        return PassTimes(**{name: first[name] + second[name] for name in first})

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def share_of_bound(self) -> float:
        """Busiest part of the machine, as a share of the step's seconds; 1: perfect overlap."""
        return self.step.bound / self.seconds

    @property
    def bound_by_pass(self) -> float:
        """Lower bound of the seconds if no work moves between the passes.

        With clipping none can: updates need the norm of all gradients, so the next forward pass applies them.
        """
        return self.forward.bound + self.backward.bound

    @property
    def share_by_pass(self) -> float:
        return self.bound_by_pass / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def stall(self) -> float:
        """Share of the step in which the computation is idle."""
        return sum(self.waits.values()) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        derived = ("share_of_bound", "bound_by_pass", "share_by_pass", "tokens_per_second", "stall")
        return {
            **asdict(self.step),
            "bound": self.step.bound,
            **asdict(self),
            **{name: getattr(self, name) for name in derived},
        }


def replay(workload: Workload, schedule: ScheduleInputs, rates: Rates) -> Timeline:
    """Replay a step in the steady state, in virtual time; the workload needs its layers, on a CPU with their times.

    Returns:
        The step; if steps train different layers, the mean of typical ones.
    """
    shares = [step.share for step in workload.typical_steps]
    each = [_replay(workload, step, schedule, rates) for step in workload.typical_steps]
    return each[0] if len(each) == 1 else _mean(shares, each)


def _mean(shares: Sequence[float], steps: Sequence[Timeline]) -> Timeline:
    """Return the weighted mean of steps."""

    def mean(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = {name for part in parts for name in part}
        return {name: sum(w * part.get(name, 0.0) for w, part in zip(shares, parts, strict=True)) for name in names}

    forward, backward = (
        PassTimes(**mean([asdict(each) for each in passes]))
        for passes in ([step.forward for step in steps], [step.backward for step in steps])
    )
    return Timeline(steps[0].tokens, forward, backward, mean([step.waits for step in steps]))


def _replay(stored: Workload, step: TypicalStep, schedule: ScheduleInputs, rates: Rates) -> Timeline:
    schedule = replace(schedule, choice=step.choice)
    device = VirtualDevice(step.workload, schedule, rates)
    steps = StepReplay(stored, schedule, device.store, device)
    device.attach(steps.model)
    for _ in range(REPLAYED_STEPS):
        device.start_step()
        steps.run_step()
    return device.timeline()


@dataclass(frozen=True)
class _Piece:
    """Kernels that are submitted together."""

    seconds: float
    number: int
    by_memory: bool = False  # bound by memory bandwidth


@dataclass(frozen=True)
class _LayerPieces:
    """A layer's kernels on a micro-batch; the layer polls between the pieces of forward."""

    forward: tuple[_Piece, ...]
    backward: tuple[_Piece, ...]


def _lasting(pieces: Sequence[_Piece], seconds: float) -> tuple[_Piece, ...]:
    """Return the same pieces with other total seconds."""
    total = sum(piece.seconds for piece in pieces)
    return tuple(replace(piece, seconds=piece.seconds * seconds / total) for piece in pieces) if total else ()


class VirtualDevice(UntimedDevice):
    """A device in virtual time, with the stores that it moves tensors from and to."""

    def __init__(self, workload: Workload, schedule: ScheduleInputs, rates: Rates) -> None:
        self._workload, self._schedule, self._rates = workload, schedule, rates
        self._tokens = workload.step.mean
        self.micro_batches = max(1, -(-int(self._tokens) // workload.step.micro_batch))
        # Rounded down: all micro-batches together must fit the buffer of a mean step.
        self.micro_batch_tokens = max(1, int(self._tokens / self.micro_batches))
        self._clock = clock = Clock()
        compute, on_cpu = rates.compute, rates.on_cpu
        delays = self._delay if on_cpu else None
        self._link = CopyEngines(clock, compute.to_device, compute.from_device, rates.disk, delays)
        self._processor = Processor(clock, self._link.blocker)
        self._hazards = Hazards(schedule.budget.chunk_numel)
        self._by_memory = False  # whether memory bandwidth bounds the running kernels
        self._earlier: list[Work] = []  # that the next kernels wait for
        self._start: tuple[float, ...] = ()
        self._turn: tuple[float, ...] = ()  # counters when the head started
        # Gradients are written at other times than the rest: in host memory they have a store of their own.
        threads: dict[Place, int] = {"host": HOST_TRANSFERS, "disk": TRANSFERS}
        self._queues = {place: VirtualQueue(clock, number) for place, number in threads.items()}
        self._update_bytes = bytes_to_update(dict(schedule.stored))
        self._update_kernels = 4 + 6 * sum(dtype != torch.float32 for _, dtype in schedule.stored)
        costs = layer_costs(workload, max(1, round(self._tokens / self.micro_batches)))
        self._layers = [self._pieces(cost) for cost in costs]
        self._restored = workload.restored(schedule.placement)
        if on_cpu:
            tokens, share = workload.step.micro_batch_mean, workload.step.num_micro_batches / self.micro_batches
            self._layers[1:-1] = [
                _LayerPieces(
                    _lasting(pieces.forward, share * times.forward.at(tokens)),
                    _lasting(pieces.backward, share * times.backward.at(tokens)),
                )
                for pieces, times in zip(self._layers[1:-1], workload.times.layers[1:-1], strict=True)
            ]

    def store(self, kind: Kind, place: Place) -> VirtualStore:
        """Return the store of a kind in a place off the device."""
        clock = self._clock
        if kind == FROZEN:
            queue = VirtualQueue(clock, FOLDER_TRANSFERS if place == "disk" else HOST_TRANSFERS)
        elif place == "host" and kind == "grad":
            queue = VirtualQueue(clock, HOST_TRANSFERS)
        else:
            queue = self._queues[place]
        return self._store(place, queue)

    def _store(self, place: Place, queue: VirtualQueue) -> VirtualStore:
        chunk = self._schedule.budget.chunk_numel if place == "disk" else 0
        size_of = moved_bytes(self._workload, self._schedule.placement)
        return VirtualStore(queue, self._link, self._hazards, chunk, lambda: [self._processor.last["compute"]], size_of)

    def attach(self, model: OffloadedModel) -> None:
        """Prepare the model: layer inputs may leave the device."""
        self._model, workload, place = model, self._workload, self._schedule.placement.boundaries
        if place != "device":
            numel = boundary_layout(workload.step.most, workload.width, self.micro_batches).numel
            store = self._store(place, VirtualQueue(self._clock, HOST_TRANSFERS))
            model.boundaries = OffloadedActivations(
                store, numel, model.budget.chunk_numel, workload.dtype, META, model.meter
            )

    def _pieces(self, cost: LayerCost) -> _LayerPieces:
        size = -(-len(cost.backward) // BACKWARD_PIECES) or 1
        parts = [cost.backward[start : start + size] for start in range(0, len(cost.backward), size)]
        return _LayerPieces(tuple(map(self._piece, cost.forward)), tuple(map(self._piece, parts)))

    def _piece(self, kernels: Sequence[KernelCost]) -> _Piece:
        workload, compute = self._workload, self._rates.compute
        return _Piece(sum(kernel_seconds(kernel, workload, compute) for kernel in kernels), len(kernels))

    def _moving(self, num_bytes: float, number: int = 1) -> _Piece:
        """Return kernels that read and write this many bytes."""
        return _Piece(num_bytes / self._rates.compute.memory + number * LAUNCH_SECONDS, number, by_memory=True)

    def start_step(self) -> None:
        self._start = self._counters()
        self._processor.idle.clear()

    def _restore(self, layer: LoadedLayer) -> None:
        """Restore the values of quantized weights that are not on the device."""
        if numbers := self._restored[layer.index]:
            self._compute(self._moving(RESTORED * numbers, -(-numbers // NUMBERS_AT_ONCE)))

    def run_forward(self, layer: LoadedLayer, poll: Poll) -> None:
        self._restore(layer)
        self._use(_weights(layer))
        for number, piece in enumerate(self._layers[layer.index].forward):
            if number:
                poll()
            self._compute(piece)
        self._note(_weights(layer))

    def run_backward(self, layer: LoadedLayer) -> None:
        self._restore(layer)
        self._use(_weights(layer))
        for piece in self._layers[layer.index].backward:
            self._compute(piece)
        self._note(_weights(layer))

    def start_head(self, head: LoadedLayer) -> None:
        self._use(_weights(head))
        self._clock.after([self._processor.last["compute"], *self._earlier], self._note_turn)

    def _note_turn(self) -> None:
        self._turn = self._counters()

    def run_head(self, head: LoadedLayer) -> None:
        workload, pieces = self._workload, self._layers[head.index]
        if self._rates.on_cpu:
            self._compute(_Piece(workload.head_seconds(workload.step.targets, trains=True), 1))
        else:
            chunk, left = largest_chunk(workload), workload.step.targets
            while left > 0:
                share = min(1.0, left / chunk)
                for piece in (*pieces.forward, *pieces.backward):
                    self._compute(_Piece(share * piece.seconds, piece.number))
                left -= chunk
        self._note(_weights(head))
        self._clock.wait(self._processor.last["compute"])  # for the loss

    def zero_gradients(self, layer: LoadedLayer) -> None:
        if layer.layout.numel:
            gradient = layer.gradient.flat
            self._use([gradient], writes=True)
            self._compute(self._moving((ZEROED_ON_CPU if self._rates.on_cpu else 1) * gradient.nbytes))

    def take_norm(self, layer: LoadedLayer) -> None:
        gradient, model = layer.gradient.flat, self._model
        self._compute(self._moving(gradient.nbytes))
        if layer.task.gradient == "write" and model.dtypes["grad"] != gradient.dtype:
            number = 2 * -(-gradient.numel() // model.budget.update_numel)
            self._compute(self._moving(2 * gradient.nbytes, number))
        self._note([gradient], writes=True)

    def update(self, numel: int, tensors: Mapping[Kind, Tensor]) -> None:
        # An update reads and writes all of its tensors in place: count them as written.
        earlier = [work for tensor in tensors.values() for work in self._hazards.earlier(tensor, writes=True)]
        work = self._submit("update", self._moving(self._update_bytes * numel, self._update_kernels), earlier)
        for tensor in tensors.values():
            self._hazards.note(tensor, work, writes=True)
        if self._schedule.placement.optimizer_state != "device" and not self._rates.on_cpu:
            self._clock.advance(CHUNK_SECONDS)

    def end_step(self) -> None:
        self._clock.wait(self._processor.last["compute"])

    def timeline(self) -> Timeline:
        """Return the step since the last `start_step`."""
        up, down = _between(self._start, self._turn), _between(self._turn, self._counters())
        idle, total = self._processor.idle, sum(self._processor.idle.values()) or 1.0
        # Idle intervals are attributed at their ends; scale them to the step's total, which two streams may overlap in.
        still = up.seconds + down.seconds - up.compute - down.compute
        waits = {name: max(0.0, still) * each / total for name, each in idle.items()}
        return Timeline(self._tokens, up, down, waits)

    def _use(self, tensors: Sequence[Tensor], writes: bool = False) -> None:
        """Have the next kernels wait for the work that still touches this memory."""
        for tensor in tensors:
            self._earlier += self._hazards.earlier(tensor, writes)

    def _note(self, tensors: Sequence[Tensor], writes: bool = False) -> None:
        """Note that the last kernels read this memory, or wrote it."""
        for tensor in tensors:
            self._hazards.note(tensor, self._processor.last["compute"], writes)

    def _compute(self, piece: _Piece) -> None:
        self._submit("compute", piece, self._earlier)
        self._earlier = []

    def _submit(self, stream: Stream, piece: _Piece, earlier: Sequence[Work]) -> Work:
        if self._rates.on_cpu:  # the program computes, updates included
            self._by_memory = piece.by_memory
            work = self._processor.submit("compute", piece.seconds, earlier)
            self._clock.wait(work)
            return work
        # The device cannot run ahead of the program. While it is behind, the program submits without delaying it.
        issue = piece.number / self._rates.compute.kernels
        work = self._processor.submit(stream, piece.seconds, earlier, self._clock.now + issue)
        self._clock.advance(issue)
        return work

    def _delay(self, direction: Direction, num_bytes: int) -> None:
        """Slow the computation down by the cores or the memory bandwidth that a transfer has taken."""
        disk = self._rates.disk
        read, written = (num_bytes, 0) if direction == "in" else (0, num_bytes)
        taken = disk.update_delay * num_bytes if self._by_memory else disk.cpu_seconds(read, written)
        self._processor.delay(taken)

    def _counters(self) -> tuple[float, ...]:
        busy = (self._link.engines[name].busy_seconds for name in ("in", "out", "disk"))
        return self._clock.now, self._processor.busy_seconds, *busy


def _between(before: Sequence[float], after: Sequence[float]) -> PassTimes:
    return PassTimes(*(new - old for new, old in zip(after, before, strict=True)))


def _weights(layer: LoadedLayer) -> list[Tensor]:
    return [tensor for tensor in (layer.weights.trained, layer.weights.frozen) if tensor.numel()]
