"""Plan a run before it starts: placement, memory, disk, time. Refuse a run that cannot fit."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.errors import ResourceError
from gptj_ft.models.layer_sampling import EVERY_LAYER
from gptj_ft.models.layout import FROZEN
from gptj_ft.planning.costs import Costs, Pass, cost, num_checkpoints
from gptj_ft.planning.kernel_times import with_kernel_times
from gptj_ft.planning.machine_profile import QUIET, reason_for
from gptj_ft.planning.memory import Free, MemoryForecast, forecast_memory, stored_kinds
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.scaling_law import ScalingForecast
from gptj_ft.planning.step_replay import ScheduleInputs
from gptj_ft.planning.suggestions import HARMLESS, ON_CPU, TRAINING, Candidate, suggest
from gptj_ft.planning.timeline import Timeline, replay
from gptj_ft.planning.workload import Workload
from gptj_ft.streaming.stores.placement import Place, Placement
from gptj_ft.system.dtypes import PRECISION_NAMES
from gptj_ft.system.units import gigabytes

NUM_REPLAYED = 3  # placements: the fastest by bytes and FLOPs; a replay takes up to a second
SAME = 0.01  # of a step's seconds: a placement that moves more bytes must save more than this
PLACES_FASTEST_FIRST: list[Place] = ["device", "host", "disk"]
PRICE_OF_EVERY_STEP = 1.25  # how many times as long steps may take if each is on disk when it ends


@dataclass(frozen=True)
class Plan(MemoryForecast):
    """Placement and memory of a run. Its bytes and seconds are forecast when they are first asked for."""

    workload: Workload = field(compare=False, repr=False)
    recipe: Recipe = field(repr=False)
    rates: Rates  # of the machine
    device: str = ""  # name of a device that is not in this machine

    @property
    def precision(self) -> str:
        """Data type of the computation."""
        return PRECISION_NAMES[self.workload.dtype]

    @property
    def reason(self) -> str:
        """Reason for that precision."""
        is_unclipped = self.workload.dtype == torch.float16 and self.recipe.clip_norm is None
        waiting = "; gradients are stored though none is clipped: any may overflow" if is_unclipped else ""
        return reason_for(self.recipe.precision, self.workload, self.rates.compute) + waiting

    @property
    def products(self) -> str:
        """Libraries of matrix products on a CPU, and why; empty on accelerators and for oneDNN's own products alone."""
        products, gain = self.workload.products, self.workload.times.products_gain
        if products is None or not (products.uses_mkl or products.widens):
            return ""
        if self.recipe.products != "auto":
            return f"{products} for gradients of inputs/weights: as asked for"
        reasons = ["bf16 is multiplied in fp32, since this CPU has no bf16 unit"] if products.widens else []
        reasons += [f"{gain:.2g} times as fast as oneDNN here"] if products.uses_mkl else []
        return f"{products} for gradients of inputs/weights: {'; '.join(reasons)}"

    @property
    def is_busy(self) -> bool:
        """Whether other programs slowed its measurements, so that its seconds are too long."""
        return max(self.rates.compute.load, self.rates.disk.load, self.workload.times.load) > QUIET

    @property
    def outlook(self) -> ScalingForecast:
        return ScalingForecast.of(self.workload)

    @property
    def costs(self) -> Costs:
        """Bytes and seconds, of the replayed step if there is one."""
        return self._timed[0]

    @property
    def num_deferred(self) -> int:
        """Leading blocks with deferred updates, see `PendingUpdates`."""
        return self.costs.num_deferred

    @property
    def timeline(self) -> Timeline | None:
        """A replayed step, on an accelerator or from disk; `costs` has its seconds."""
        return self._timed[1]

    @property
    def tokens_to_hide_stall(self) -> int:
        """Further tokens of a step whose computation would hide its transfers."""
        if self.timeline is None:
            return 0
        passes, tokens = (self.costs.forward, self.costs.backward), self.workload.step.mean
        return max(_tokens_to_hide(each, tokens, self.rates) for each in passes)

    @cached_property
    def estimate(self) -> Costs:
        """Bytes and seconds by rates alone, with the best number of deferred blocks; good enough to rank placements."""
        placement, workload, rates = self.placement, self.workload, self.rates
        costs = self._cost(0)
        # See `OffloadedModel.can_defer`: weights next to a stored master are only written.
        has_master = "master" in stored_kinds(placement, workload, self.recipe)
        can_defer = placement.optimizer_state != "device" and (placement.weights != "device" or has_master)
        can_defer = can_defer and workload.choice == EVERY_LAYER  # see `PendingUpdates.of`
        if not can_defer or costs.forward.transfer_seconds(rates) <= costs.forward.compute_seconds(rates):
            return costs
        # Embedding, head and last block are never deferred, and blocks in memory gain little.
        every = self._cost(max(len(workload.layouts) - 3 - len(placement.in_memory), 0))
        options = [costs, every, *map(self._cost, _balanced(costs, every, rates))]
        return min(options, key=lambda costs: costs.seconds_per_step)

    @cached_property
    def _timed(self) -> tuple[Costs, Timeline | None]:
        """Replay a step of a plan that fits: on an accelerator, and on a CPU if the step uses the disk.

        If updates are deferred, the replay without deferral is tried, too.
        """
        workload, rates = self.workload, self.rates
        uses_disk = rates.on_cpu and bool(workload.layers) and kinds_on_disk(self.placement)
        is_replayed = _compares_replays(self.have, workload) or uses_disk
        if self.lack or not is_replayed:
            return self.estimate, None
        numbers = dict.fromkeys((self.estimate.num_deferred, 0))
        timelines = {number: replay(workload, self._schedule(number), rates) for number in numbers}
        chosen = min(timelines, key=lambda number: timelines[number].seconds)
        best, costs = timelines[chosen], self._cost(chosen)
        saves = 0 if self.placement.is_durable else num_checkpoints(self.recipe, workload, best.seconds)
        costs = replace(
            costs,
            checkpoints=replace(costs.checkpoints, number=saves),
            seconds_per_step=best.seconds,
            compute_seconds=best.step.compute,
            transfer_seconds=best.step.moving,
        )
        return costs, best

    def _schedule(self, num_deferred: int) -> ScheduleInputs:
        stored = tuple(stored_kinds(self.placement, self.workload, self.recipe).items())
        return ScheduleInputs(self.placement, stored, self.budget, num_deferred)

    def _cost(self, num_deferred: int) -> Costs:
        return cost(self.workload, self.recipe, self._schedule(num_deferred), self.rates)

    def to_dict(self) -> dict[str, Any]:
        workload, budget = self.workload, self.budget
        own = {
            "placement": self.placement.to_dict(),
            "precision": self.precision,
            "products": str(self.workload.products or ""),
            "reason": self.reason,
            "num_parameters": workload.num_parameters,
            "num_trained": workload.num_trained,
            "tokens_per_step": workload.step.mean,
            **{name: getattr(self, name) for name in ("device_bytes", "host_bytes", "disk_bytes")},
            "room": {
                "read_ahead": budget.read_ahead,
                "gradients": budget.num_gradients,
                "parts": budget.num_chunks,
                "part_numel": budget.update_numel,
                "kept": budget.num_kept_layers,
                "pass_tokens": budget.pass_tokens,
            },
            "rates": asdict(self.rates),
            "outlook": self.outlook.to_dict(),
            "needs": [asdict(need) for need in self.needs],
        }
        more = {"tokens_to_hide_stall": self.tokens_to_hide_stall}
        replayed = {"timeline": self.timeline.to_dict() | more} if self.timeline else {}
        named = {"device": self.device} if self.device else {}
        return {**own, **self.costs.to_dict(), **replayed, **named, **({"is_busy": True} if self.is_busy else {})}


class DoesNotFit(ResourceError):
    """No allowed plan fits; contains the nearest one."""

    def __init__(self, nearest: Plan, message: str) -> None:
        super().__init__(message)
        self.nearest = nearest


def choose(recipe: Recipe, workload: Workload, free: Free, rates: Rates, has_begun: bool = False) -> Plan:
    """Choose the fastest placement that the recipe allows and that fits; on an accelerator, of `NUM_REPLAYED`.

    Args:
        has_begun: the run is resumed: suggest only options that change no number.

    Raises:
        DoesNotFit: no allowed placement fits. The message names the missing bytes and two options that help.
    """
    workload = with_kernel_times(workload, rates.compute)
    if chosen := fastest_within(recipe, workload, free.capped(recipe), rates):
        return chosen

    def lack(recipe: Recipe, workload: Workload) -> int:
        return min(each.lack for each in _forecasts(recipe, workload, free.capped(recipe)))

    too_large = [*_forecasts(recipe, workload, free.capped(recipe))]
    best = min(too_large, key=lambda each: each.lack)
    nearest = _plan(best, workload, recipe, rates)
    only_disk = [each for each in too_large if [need.resource for need in each.lacking] == ["disk"]]
    least = min((each.disk_bytes for each in only_disk), default=0)
    elsewhere = [f"--output on a disk with {gigabytes(least)} free"] if least > free.disk else []
    knobs = HARMLESS if has_begun else ON_CPU if free.is_shared else TRAINING
    hint = suggest(Candidate(recipe, workload), knobs, lack, elsewhere)
    raise DoesNotFit(nearest, f"does not fit: with {nearest.placement} {nearest.shortage(free)}; {hint}")


def fastest_within(recipe: Recipe, workload: Workload, have: Free, rates: Rates) -> Plan | None:
    """Choose the fastest placement within capped resources; None if none fits.

    Adapters stay on disk, where no step is lost, unless the steps of an accelerator wait long for the disk.
    """
    on_disk = _fastest_as_asked(recipe, workload, have, rates)
    if (recipe.method, recipe.optimizer_state) != ("lora", "auto") or have.is_shared:
        return on_disk
    if on_disk is not None and on_disk.costs.seconds_per_step <= PRICE_OF_EVERY_STEP * on_disk.costs.compute_seconds:
        return on_disk
    for place in ("device", "host"):
        in_memory = _fastest_as_asked(recipe.model_copy(update={"optimizer_state": place}), workload, have, rates)
        if in_memory is not None:
            slowest = PRICE_OF_EVERY_STEP * in_memory.costs.seconds_per_step
            is_worth_it = on_disk is not None and on_disk.costs.seconds_per_step <= slowest
            return on_disk if is_worth_it else replace(in_memory, recipe=recipe)
    return on_disk


def _fastest_as_asked(recipe: Recipe, workload: Workload, have: Free, rates: Rates) -> Plan | None:
    fitting: list[MemoryForecast] = []
    for each in _forecasts(recipe, workload, have):
        if each.lack:
            continue
        fitting.append(each)
        # Candidates come fastest first: unless replays compare them, the first that fits is the choice.
        if not _compares_replays(have, workload):
            plans = [_plan(memory, workload, recipe, rates) for memory in with_layers_in_memory(each, workload, recipe)]
            return min(reversed(plans), key=lambda plan: plan.costs.seconds_per_step)
    return _fastest(fitting, workload, recipe, rates) if fitting else None


def _forecasts(recipe: Recipe, workload: Workload, have: Free) -> Iterator[MemoryForecast]:
    is_quantized = any(layout.is_quantized for layout in workload.frozen)
    places = candidates(recipe, have, is_quantized)
    return (forecast_memory(placement, workload, recipe, have) for placement in places)


def _compares_replays(have: Free, workload: Workload) -> bool:
    """Tell whether placements are compared by replays: on accelerators, if the layers are known."""
    return bool(workload.layers) and not have.is_shared


def _fastest(fitting: Sequence[MemoryForecast], workload: Workload, recipe: Recipe, rates: Rates) -> Plan:
    """Return the plan with the fastest replay, of those that fit.

    It need not be the first: weights in host memory leave device memory for kept activations. But no disk is as fast
    as memory, so kinds that fit into memory never go to disk.
    """
    # `candidates` puts kinds on disk last, so the first that fits has the fewest there.
    least_on_disk = kinds_on_disk(fitting[0].placement)
    closest = (each for each in fitting if kinds_on_disk(each.placement) <= least_on_disk)
    # Layers in host memory take nothing from the device, so as many as fit are best.
    filled = (with_layers_in_memory(each, workload, recipe)[-1] for each in closest)
    plans = [_plan(each, workload, recipe, rates) for each in filled]
    by_seconds = sorted(range(len(plans)), key=lambda number: plans[number].estimate.seconds_per_step)
    # In the order of the candidates again: of equally fast ones, the first moves the fewest bytes.
    replayed = [plans[number] for number in sorted(by_seconds[:NUM_REPLAYED])]
    least = min(plan.costs.seconds_per_step for plan in replayed)
    return next(plan for plan in replayed if plan.costs.seconds_per_step <= (1 + SAME) * least)


def kinds_on_disk(placement: Placement) -> set[str]:
    """Return the kinds that a placement keeps on disk."""
    return {name for name, place in asdict(placement).items() if place == "disk"}


def candidates(recipe: Recipe, free: Free, is_quantized: bool = False) -> list[Placement]:
    """Return the placements that the recipe allows, fastest first.

    Args:
        is_quantized: the frozen weights are quantized, and smaller in host memory than on the device.
    """

    boundaries = allowed_places(recipe.boundaries, free.is_shared)
    if recipe.method == "lora":
        # Adapters and their state are small, and on disk no step is ever lost.
        state = "disk" if recipe.optimizer_state == "auto" else recipe.optimizer_state
        frozen = allowed_places(recipe.weights, free.is_shared, is_quantized)
        return [Placement(state, state, inputs, frozen=place) for place in frozen for inputs in boundaries]
    weights, states = (allowed_places(each, free.is_shared) for each in (recipe.weights, recipe.optimizer_state))
    fastest_first = sorted(product(weights, states), key=lambda pair: pair.count("disk"))
    return [Placement(weight, state, inputs) for weight, state in fastest_first for inputs in boundaries]


def allowed_places(choice: str, is_shared: bool, is_quantized: bool = False) -> list[Place]:
    """Return the places that a recipe's choice allows, fastest first.

    Args:
        is_shared: device and host are the same memory.
        is_quantized: the tensors are quantized, and smaller in host memory than on the device.
    """
    # On a CPU, "host" is a second copy in the same memory: only if the recipe says so, or codes are smaller.
    is_copy = is_shared and not is_quantized
    every = PLACES_FASTEST_FIRST
    return [place for place in every if choice == place or (choice == "auto" and not (is_copy and place == "host"))]


def with_layers_in_memory(memory: MemoryForecast, workload: Workload, recipe: Recipe) -> list[MemoryForecast]:
    """Return a forecast, and those with blocks in memory instead of on disk: from few to many.

    Args:
        memory: forecast of a placement that fits.
    """
    placement, have = memory.placement, memory.have
    stored = [*stored_kinds(placement, workload, recipe), *([FROZEN] if workload.frozen_elements else [])]
    kinds = [kind for kind in stored if placement.splits(kind)]
    blocks = [
        layer for layer in range(1, len(workload.layouts) - 1)
        if workload.layouts[layer].numel or (workload.frozen and workload.frozen[layer].numel)
    ]  # fmt: skip
    choices = [recipe.weights if kind in ("weight", FROZEN) else recipe.optimizer_state for kind in kinds]
    if set(choices) != {"auto"}:  # nothing can be split, or the user wants all of it on disk
        return [memory]

    def forecast_with(number: int) -> MemoryForecast:
        # Spread evenly over the depth, so that the disk always has work.
        ends = [at * number // len(blocks) for at in range(len(blocks) + 1)]
        chosen = [layer for layer, (start, end) in zip(blocks, pairwise(ends), strict=True) if end > start]
        place: Place = "device" if have.is_shared else "host"
        return forecast_memory(replace(placement, in_memory=tuple(chosen), memory=place), workload, recipe, have)

    def most(fits: Callable[[MemoryForecast], bool]) -> int:
        return bisect_left(range(1, len(blocks) + 1), True, key=lambda number: not fits(forecast_with(number)))

    def leaves_rest(each: MemoryForecast) -> bool:
        same = replace(each.budget, pass_tokens=memory.budget.pass_tokens, forward_bytes=memory.budget.forward_bytes)
        return not each.lack and same == memory.budget

    # Between them, memory for blocks is taken from kept activations: a third plan is in the middle.
    few, many = most(leaves_rest), most(lambda each: not each.lack)
    return [memory, *(forecast_with(number) for number in sorted({few, (few + many) // 2, many} - {0}))]


def forecast(placement: Placement, workload: Workload, recipe: Recipe, rates: Rates, have: Free) -> Plan:
    """Forecast memory and costs of a placement."""
    workload = with_kernel_times(workload, rates.compute)
    return _plan(forecast_memory(placement, workload, recipe, have), workload, recipe, rates)


def _plan(memory: MemoryForecast, workload: Workload, recipe: Recipe, rates: Rates) -> Plan:
    return Plan(**vars(memory), workload=workload, recipe=recipe, rates=rates)


def _balanced(none: Costs, every: Costs, rates: Rates) -> list[int]:
    """Return the best number of blocks with deferred updates, given the costs of none and of all; empty if it is one.

    Each deferred block moves bytes from forward to backward and adds some, in proportion. So a step is shortest with
    none, with all, or where a pass takes as long to move its bytes as to compute.
    """
    most = every.num_deferred
    ends = [
        (none.forward.compute_seconds(rates), every.forward.compute_seconds(rates)),
        (none.forward.transfer_seconds(rates), every.forward.transfer_seconds(rates)),
        (none.backward.compute_seconds(rates), every.backward.compute_seconds(rates)),
        (none.backward.transfer_seconds(rates), every.backward.transfer_seconds(rates)),
    ]

    def seconds(number: int) -> float:
        up, moved_up, down, moved_down = (a + (b - a) * number / max(most, 1) for a, b in ends)
        return max(up, moved_up) + max(down, moved_down)

    best = min(range(most + 1), key=seconds)
    return [best] if 0 < best < most else []


def _tokens_to_hide(moved: Pass, tokens: float, rates: Rates) -> int:
    """Return the further tokens of a step, of this many now, that a pass could compute while its bytes move."""
    # Updates and sums take as long for any number of tokens: only the layers' time grows with them.
    hidden = moved.transfer_seconds(rates) - moved.compute_seconds(rates)
    return max(0, math.ceil(tokens * hidden / moved.layers / 256) * 256)
