"""Compute the seconds and the written bytes of a run: its steps, validations, checkpoints and results.

A pass takes as long as the slower of its computation and its transfers. `timeline` says how well they overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.planning.constants import RESTORED, ZEROED_ON_CPU
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.step_replay import Bytes, ScheduleInputs, count_step, state_kinds
from gptj_ft.planning.workload import FP32_BYTES, Workload, exported_elements
from gptj_ft.streaming.stores.placement import Place, Placement

# Written to an SSD before its warranty ends: the rating of the Samsung 990 PRO 1 TB (600 TBW in its data sheet) and of
# most of its class. Most 2 TB drives are rated for twice as much, server drives for much more.
WARRANTED_BYTES = 600e12


@dataclass(frozen=True)
class Pass:
    """Work of one pass over the layers."""

    layers: float = 0.0  # seconds of the layers
    updated: int = 0  # bytes that AdamW reads and writes in the device's memory
    touched: int = 0  # bytes of other operations on tensors as large as the weights
    read: Mapping[Place, int] = field(default_factory=dict)  # bytes by place off the device
    written: Mapping[Place, int] = field(default_factory=dict)

    def compute_seconds(self, rates: Rates) -> float:
        """Return the seconds of the computation alone; on a CPU, with the processor time of transfers."""
        moving = rates.disk.cpu_seconds(self.read.get("disk", 0), self.written.get("disk", 0)) if rates.on_cpu else 0.0
        return self.layers + (self.updated + self.touched) / rates.compute.memory + moving

    def transfer_seconds(self, rates: Rates) -> float:
        """Return the seconds of the transfers alone; disk and both directions of the link overlap."""
        disk = rates.disk.seconds(self.read.get("disk", 0), self.written.get("disk", 0))
        # Bytes from and to the disk cross the link, too.
        incoming = sum(self.read.values()) / rates.compute.to_device
        outgoing = sum(self.written.values()) / rates.compute.from_device
        return max(disk, incoming, outgoing)

    def seconds(self, rates: Rates) -> float:
        return max(self.compute_seconds(rates), self.transfer_seconds(rates))


def training_passes(workload: Workload, schedule: ScheduleInputs, on_cpu: bool) -> tuple[Pass, Pass, Pass]:
    """Return forward, backward, and a flush of the updates that a mean step leaves pending."""
    shares = [step.share for step in workload.typical_steps]
    passes = [
        _passes_of_step(workload, step.workload, replace(schedule, choice=step.choice), on_cpu)
        for step in workload.typical_steps
    ]
    forward, backward, flush = (_mean(shares, same) for same in zip(*passes, strict=True))
    return forward, backward, flush


def _mean(shares: Sequence[float], passes: Sequence[Pass]) -> Pass:
    """Return the weighted mean of passes."""
    if len(passes) == 1:
        return passes[0]

    def mean(values: Iterable[float]) -> float:
        return sum(share * value for share, value in zip(shares, values, strict=True))

    def by_place(every: Sequence[Mapping[Place, int]]) -> Bytes:
        places = {place for each in every for place in each}
        return {place: round(mean(each.get(place, 0) for each in every)) for place in places}

    return Pass(
        layers=mean(each.layers for each in passes),
        updated=round(mean(each.updated for each in passes)),
        touched=round(mean(each.touched for each in passes)),
        read=by_place([each.read for each in passes]),
        written=by_place([each.written for each in passes]),
    )


def _passes_of_step(
    stored: Workload, workload: Workload, schedule: ScheduleInputs, on_cpu: bool
) -> tuple[Pass, Pass, Pass]:
    """Return the passes of one typical step.

    Args:
        stored: workload of the run.
        workload: the step's own; layers that it does not train are frozen.
    """
    placement, kept = schedule.placement, schedule.budget.num_kept_layers
    # Plans that differ in tokens or kept activations share a count.
    shared = replace(schedule.budget, num_kept_layers=0, pass_tokens=0, forward_bytes=None)
    schedule = replace(schedule, placement=replace(placement, boundaries="device"), budget=shared)
    frozen = tuple(stored.frozen)
    up, down, flush = count_step(tuple(stored.layouts), frozen, workload.width, workload.dtype, schedule)
    # The layer inputs of the largest step have their memory reserved; a mean step moves its share of them.
    share = workload.step.mean / workload.step.most
    away: Bytes = {} if placement.boundaries == "device" else {
        placement.boundaries: round(workload.boundary_bytes(kept) * share)
    }  # fmt: skip
    restored = RESTORED * sum(workload.restored(placement))
    # Passes over a sum of gradients: it is set to zero, its norm is taken, and it may be rounded to be stored.
    is_rounded = dict(schedule.stored).get("grad", torch.float32) != torch.float32
    times = (ZEROED_ON_CPU if on_cpu else 1) + 1 + 2 * is_rounded
    summed = times * FP32_BYTES * workload.num_trained
    forward = Pass(workload.forward_seconds, up.updated, restored, up.read, _added(up.written, away))
    backward = Pass(
        workload.backward_seconds(kept), down.updated, restored + summed, _added(down.read, away), down.written
    )
    return forward, backward, Pass(updated=flush.updated, read=flush.read, written=flush.written)


@dataclass(frozen=True)
class Overhead:
    """Work of a run outside its steps."""

    number: int  # of repetitions in the whole run
    seconds: float  # each time
    disk_bytes: int = 0  # written each time


@dataclass(frozen=True)
class Costs:
    """Bytes that a run moves, and its seconds."""

    num_steps: int | None  # remaining optimizer steps; None: not counted yet
    num_deferred: int  # leading blocks with deferred updates, see `PendingUpdates`
    forward: Pass  # of a mean step
    backward: Pass
    compute_seconds: float  # of a step's computation alone
    transfer_seconds: float  # of a step's transfers alone
    seconds_per_step: float
    start: Overhead  # fills the stores
    validations: Overhead
    checkpoints: Overhead  # in folders of their own; a run on disk needs none
    end: Overhead  # writes the tuned model

    @property
    def bytes_read_per_step(self) -> int:
        return sum((*self.forward.read.values(), *self.backward.read.values()))

    @property
    def bytes_written_per_step(self) -> int:
        return sum((*self.forward.written.values(), *self.backward.written.values()))

    @property
    def disk_bytes_written_per_step(self) -> int:
        return self.forward.written.get("disk", 0) + self.backward.written.get("disk", 0)

    @property
    def seconds(self) -> float | None:
        """Seconds of the whole run."""
        if self.num_steps is None:
            return None
        return self.num_steps * self.seconds_per_step + sum(each.number * each.seconds for each in self._overheads)

    @property
    def disk_bytes_written(self) -> int | None:
        """Bytes that the whole run writes to disk."""
        if self.num_steps is None:
            return None
        overheads = sum(each.number * each.disk_bytes for each in self._overheads)
        return self.num_steps * self.disk_bytes_written_per_step + overheads

    @property
    def ssd_wear(self) -> float | None:
        """Bytes written to disk, as a share of the endurance of a typical 1 TB consumer SSD."""
        return None if self.disk_bytes_written is None else self.disk_bytes_written / WARRANTED_BYTES

    @property
    def _overheads(self) -> tuple[Overhead, ...]:
        return self.start, self.validations, self.checkpoints, self.end

    def to_dict(self) -> dict[str, Any]:
        sums = (
            "bytes_read_per_step",
            "bytes_written_per_step",
            "disk_bytes_written_per_step",
            "disk_bytes_written",
            "ssd_wear",
            "seconds",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in sums}}


def cost(workload: Workload, recipe: Recipe, schedule: ScheduleInputs, rates: Rates) -> Costs:
    """Compute the bytes that a run moves and its seconds."""
    placement, stored = schedule.placement, dict(schedule.stored)
    forward, backward, flush = training_passes(workload, schedule, rates.on_cpu)
    passes = forward, backward
    state = {kind: stored[kind] for kind in state_kinds(stored)}
    state_by_place = placement.bytes_by_place(state, [layout.numel for layout in workload.layouts])
    state_bytes = state_by_place.total()
    del state_by_place["device"]
    model_bytes = exported_elements(recipe, workload) * torch.float32.itemsize
    read = 0 if recipe.method == "lora" else workload.stored_elements * torch.float32.itemsize
    filled: Bytes = state_by_place
    for layer, layout in enumerate(workload.frozen):
        if (place := placement.of("frozen", layer)) != "disk":  # those on disk stay in the model folder
            read += layout.bytes_in("disk", torch.float32)
            filled = _added(filled, {place: layout.bytes_in(place, workload.dtype)} if place == "host" else {})
    filling = Pass(read={"disk": read}, written=filled)
    saving = Pass(read=state_by_place, written={"disk": state_bytes})
    writing = Pass(written={"disk": model_bytes})
    per_step = sum(each.seconds(rates) for each in passes)
    num_saves = 0 if placement.is_durable else num_checkpoints(recipe, workload, per_step)
    per_validation = seconds_per_validation(placement, workload, flush, rates, schedule.budget.pass_tokens)
    return Costs(
        num_steps=workload.num_steps,
        num_deferred=schedule.num_deferred,
        forward=forward,
        backward=backward,
        compute_seconds=sum(each.compute_seconds(rates) for each in passes),
        transfer_seconds=sum(each.transfer_seconds(rates) for each in passes),
        seconds_per_step=per_step,
        start=Overhead(1, filling.transfer_seconds(rates), state_by_place.get("disk", 0)),
        validations=Overhead(num_validations(recipe, workload), per_validation),
        checkpoints=Overhead(num_saves, saving.transfer_seconds(rates), state_bytes),
        end=Overhead(1, writing.transfer_seconds(rates), model_bytes),
    )


def num_validations(recipe: Recipe, workload: Workload) -> int:
    """Count the validations of a run: before, after, and every ``validate_every`` steps."""
    if not workload.validation.tokens:
        return 0
    between = ((workload.num_steps or 1) - 1) // recipe.validate_every if recipe.validate_every else 0
    return 2 + between


def seconds_per_validation(
    placement: Placement, workload: Workload, flush: Pass, rates: Rates, pass_tokens: int
) -> float:
    """Return the seconds of one validation: a flush of the pending updates, then passes over the weights."""
    tokens, targets = workload.validation
    passes = -(-tokens // pass_tokens)
    trained = [*(layout.numel for layout in workload.layouts), workload.lent_elements]
    once = placement.bytes_by_place({"weight": workload.dtype}, trained)
    weights: Bytes = {place: passes * size for place, size in once.items() if place != "device"}
    frozen = {place: passes * size for place, size in workload.frozen_per_pass(placement).items()}
    layers = tokens / workload.step.mean * workload.forward_seconds + workload.head_seconds(targets, trains=False)
    touched = RESTORED * passes * sum(workload.restored(placement))
    scoring = Pass(layers, touched=touched, read=_added(weights, frozen))
    return flush.seconds(rates) + scoring.seconds(rates)


def num_checkpoints(recipe: Recipe, workload: Workload, seconds_per_step: float) -> int:
    """Count the checkpoints of a run in memory: by steps or by minutes, whichever gives more."""
    steps = workload.num_steps or 0
    by_steps = (steps - 1) // recipe.save_every if steps and recipe.save_every else 0
    return max(by_steps, int(steps * seconds_per_step / (recipe.save_minutes * 60)))


def _added(some: Bytes, more: Bytes) -> Bytes:
    return {place: some.get(place, 0) + more.get(place, 0) for place in {**some, **more}}
