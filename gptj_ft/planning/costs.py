"""Compute the duration and the writes of a run: its steps, and its overhead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.models.layout import Kind
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.traffic import Pass, bytes_moved, state_kinds, training_passes
from gptj_ft.planning.workload import Workload
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.stores.placement import Placement

WARRANTED_BYTES = 600e12  # written to an SSD; see `Costs.ssd_wear`


@dataclass(frozen=True)
class Overhead:
    """Overhead of a run: something that it does beside its steps.

    Attributes:
        number: number of times in the whole run.
        seconds: seconds each time.
        disk_bytes: bytes written to disk each time.
    """

    number: int
    seconds: float
    disk_bytes: int = 0


@dataclass(frozen=True)
class Costs:
    """Bytes that a run moves, and seconds that it takes.

    Attributes:
        num_steps: optimizer steps to do; ``None`` while they are not counted.
        num_deferred: leading blocks whose updates are applied in forward and again in backward, to be written there.
        forward: forward pass of an average step.
        backward: backward pass of an average step.
        compute_seconds: seconds of a step's computation alone.
        transfer_seconds: seconds of a step's transfers alone.
        seconds_per_step: seconds of a step, with computation and transfers overlapping in each pass.
        start: filling the stores.
        validations: the loss on rows that are not trained on.
        checkpoints: the state written to a folder of its own; a run on disk needs none.
        end: writing the tuned model.
    """

    num_steps: int | None
    num_deferred: int
    forward: Pass
    backward: Pass
    compute_seconds: float
    transfer_seconds: float
    seconds_per_step: float
    start: Overhead
    validations: Overhead
    checkpoints: Overhead
    end: Overhead

    @property
    def bytes_read_per_step(self) -> int:
        """Bytes from any place off the device."""
        return sum((*self.forward.read.values(), *self.backward.read.values()))

    @property
    def bytes_written_per_step(self) -> int:
        """Bytes to any place off the device."""
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
        asides = sum(each.number * each.disk_bytes for each in self._overheads)
        return self.num_steps * self.disk_bytes_written_per_step + asides

    @property
    def ssd_wear(self) -> float | None:
        """Bytes written to disk, as a share of the warranted endurance of a typical 1 TB consumer SSD.

        600 TB, the endurance rating of the Samsung 990 PRO 1 TB (its data sheet: 600 TBW) and of most of its class;
        a 2 TB model is mostly rated for twice as much, a drive for servers for much more.
        """
        return None if self.disk_bytes_written is None else self.disk_bytes_written / WARRANTED_BYTES

    @property
    def _overheads(self) -> tuple[Overhead, ...]:
        return self.start, self.validations, self.checkpoints, self.end

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for `--json`."""
        sums = (
            "bytes_read_per_step",
            "bytes_written_per_step",
            "disk_bytes_written_per_step",
            "disk_bytes_written",
            "ssd_wear",
            "seconds",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in sums}}


def cost(
    placement: Placement,
    workload: Workload,
    recipe: Recipe,
    stored: Mapping[Kind, torch.dtype],
    rates: Rates,
    budget: BufferBudget = BufferBudget(),
    num_deferred: int = 0,
) -> Costs:
    """Compute the bytes that a run moves and the seconds that it takes.

    Args:
        placement: placement of the stored kinds.
        workload: workload of the run.
        recipe: recipe, for the intervals of validations and checkpoints.
        stored: the kinds that have a store, and their types; without ``grad`` updates are applied in backward.
        rates: rates of the machine.
        budget: buffer budget.
        num_deferred: leading blocks whose updates are applied in forward and again in backward, to be written there.
    """
    forward, backward, flush = training_passes(placement, workload, stored, budget, num_deferred)
    passes = forward, backward
    state = {kind: stored[kind] for kind in state_kinds(stored)}
    by_place = bytes_moved(placement, state, workload.stored_elements)
    state_bytes = workload.stored_elements * sum(dtype.itemsize for dtype in state.values())
    frozen: dict[Kind, torch.dtype] = {"frozen": workload.dtype}
    model_bytes = exported_elements(recipe, workload) * torch.float32.itemsize
    stays = placement.of("frozen") == "disk"  # where it is already
    num_read = (0 if recipe.method == "lora" else workload.stored_elements) + (0 if stays else workload.frozen_elements)
    filling = Pass(read={"disk": num_read * torch.float32.itemsize}, written=by_place)
    filling = filling.plus(written={} if stays else bytes_moved(placement, frozen, workload.frozen_elements))
    saving = Pass(read=by_place, written={"disk": state_bytes})
    writing = Pass(written={"disk": model_bytes})
    per_step = sum(each.seconds(workload, rates) for each in passes)
    num_saves = 0 if placement.is_durable else num_checkpoints(recipe, workload, per_step)
    per_validation = seconds_per_validation(placement, workload, flush, rates, budget.pass_tokens)
    return Costs(
        num_steps=workload.num_steps,
        num_deferred=num_deferred,
        forward=forward,
        backward=backward,
        compute_seconds=sum(each.compute_seconds(workload, rates) for each in passes),
        transfer_seconds=sum(each.transfer_seconds(rates) for each in passes),
        seconds_per_step=per_step,
        start=Overhead(1, filling.transfer_seconds(rates), by_place.get("disk", 0)),
        validations=Overhead(num_validations(recipe, workload), per_validation),
        checkpoints=Overhead(num_saves, saving.transfer_seconds(rates), state_bytes),
        end=Overhead(1, writing.transfer_seconds(rates), model_bytes),
    )


def exported_elements(recipe: Recipe, workload: Workload) -> int:
    """Count the elements that a run exports: a model, or an adapter, or both."""
    whole = workload.stored_elements + workload.frozen_elements
    return whole if recipe.method == "full" or recipe.lora.merge else workload.stored_elements


def num_validations(recipe: Recipe, workload: Workload) -> int:
    """Count the validations of a run: before, after, and in between if asked to."""
    if not workload.validation.tokens:
        return 0
    between = ((workload.num_steps or 1) - 1) // recipe.validate_every if recipe.validate_every else 0
    return 2 + between


def seconds_per_validation(
    placement: Placement, workload: Workload, flush: Pass, rates: Rates, pass_tokens: int
) -> float:
    """Compute the seconds of one validation: the pending update of every layer, then passes over the weights."""
    passes = -(-workload.validation.tokens // pass_tokens)
    flops = (
        2.0 * workload.block_parameters * workload.validation.tokens
        + 2.0 * workload.head_parameters * workload.validation.targets
    )
    weights = bytes_moved(
        placement, {"weight": workload.dtype}, passes * (workload.stored_elements + workload.lent_elements)
    )
    frozen = bytes_moved(placement, {"frozen": workload.dtype}, passes * sum(workload.frozen_per_pass))
    layers = 0.0
    if workload.times.layers:
        layers = workload.validation.tokens / workload.step.mean * workload.forward_seconds
        layers += workload.head_seconds(workload.validation.targets, trains=False)
    computed = Pass(flops, layers=layers, read=weights).plus(read=frozen)
    return flush.seconds(workload, rates) + computed.seconds(workload, rates)


def num_checkpoints(recipe: Recipe, workload: Workload, seconds_per_step: float) -> int:
    """Count the checkpoints of a run that is not its own: by steps, by minutes, whichever is sooner."""
    steps = workload.num_steps or 0
    by_steps = (steps - 1) // recipe.save_every if steps and recipe.save_every else 0
    return max(by_steps, int(steps * seconds_per_step / (recipe.save_minutes * 60)))
