"""Plan a run before it starts: placement, memory, disk, time. Refuse a run that cannot fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.errors import ResourceError
from gptj_ft.planning.costs import Costs, Pass, cost
from gptj_ft.planning.machine_profile import reason_for
from gptj_ft.planning.memory import Free, MemoryForecast, Requirements, forecast_memory, stored_kinds
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.scaling_law import ScalingForecast
from gptj_ft.planning.step_replay import ScheduleInputs
from gptj_ft.planning.suggestions import HARMLESS, TRAINING, Candidate, suggest
from gptj_ft.planning.timeline import Timeline, replay
from gptj_ft.planning.workload import Workload
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.stores.placement import Place, Placement
from gptj_ft.system.dtypes import PRECISION_NAMES
from gptj_ft.system.units import gigabytes

NUM_REPLAYED = 3  # placements: the fastest by bytes and FLOPs; a replay takes up to a second
SAME = 0.01  # of a step's seconds: a placement that moves more bytes must save more than this
FASTEST_FIRST: list[tuple[Place, Place]] = [  # of weights and optimizer state
    ("device", "device"),
    ("device", "host"),
    ("host", "device"),
    ("host", "host"),
    ("device", "disk"),
    ("host", "disk"),
    ("disk", "device"),
    ("disk", "host"),
    ("disk", "disk"),
]
PLACES_FASTEST_FIRST: list[Place] = ["device", "host", "disk"]


@dataclass(frozen=True)
class Plan(Requirements):
    """Forecast of a run; bytes and seconds."""

    placement: Placement
    precision: str  # data type of the computation
    reason: str  # for that precision
    num_parameters: int
    num_trained: int  # adapters included
    tokens_per_step: float  # mean
    device_bytes: int
    host_bytes: int
    disk_bytes: int  # at most, with a checkpoint and the tuned model
    have: Free
    budget: BufferBudget
    costs: Costs
    rates: Rates  # of the machine
    workload: Workload = field(compare=False, repr=False)
    outlook: ScalingForecast
    timeline: Timeline | None = None  # a replayed step, on an accelerator or from disk; `costs` has its seconds
    device: str = ""  # name of a device that is not in this machine
    tokens_to_hide_stall: int = 0  # further tokens of a step whose computation would hide its transfers

    def to_dict(self) -> dict[str, Any]:
        separate = ("costs", "have", "workload", "timeline", "device", "tokens_to_hide_stall")
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in separate}
        own |= {"placement": asdict(self.placement), "rates": asdict(self.rates), "outlook": self.outlook.to_dict()}
        own = {("room" if name == "budget" else name): value for name, value in own.items()}
        own |= {"room": _budget_dict(self.budget), "needs": [asdict(need) for need in self.needs]}
        more = {"tokens_to_hide_stall": self.tokens_to_hide_stall}
        replayed = {"timeline": self.timeline.to_dict() | more} if self.timeline else {}
        return {**own, **self.costs.to_dict(), **replayed, **({"device": self.device} if self.device else {})}


def _budget_dict(budget: BufferBudget) -> dict[str, int]:
    """Return a buffer budget under its names in `--json`."""
    names = {
        "num_gradients": "gradients",
        "num_chunks": "parts",
        "chunk_numel": "part_numel",
        "num_kept_layers": "kept",
    }
    # `forward_bytes` follows from the memory of the device, which the plan contains.
    return {names.get(name, name): value for name, value in asdict(budget).items() if name != "forward_bytes"}


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

    def forecasts(recipe: Recipe, workload: Workload) -> Iterator[MemoryForecast]:
        have = free.capped(recipe)
        return (forecast_memory(placement, workload, recipe, have) for placement in candidates(recipe, free))

    def lack(recipe: Recipe, workload: Workload) -> int:
        return min(each.lack for each in forecasts(recipe, workload))

    too_large: list[MemoryForecast] = []
    fitting: list[MemoryForecast] = []
    for each in forecasts(recipe, workload):
        (too_large if each.lack else fitting).append(each)
        # Candidates come fastest first: unless replays compare them, the first that fits is the choice.
        if fitting and not _compares_replays(free, workload):
            return with_replay(_forecast(each, workload, recipe, rates), workload, recipe)
    if fitting:
        return _fastest(fitting, workload, recipe, rates)
    best = min(too_large, key=lambda each: each.lack)
    nearest = _forecast(best, workload, recipe, rates)
    only_disk = [each for each in too_large if [need.resource for need in each.lacking] == ["disk"]]
    least = min((each.disk_bytes for each in only_disk), default=0)
    elsewhere = [f"--output on a disk with {gigabytes(least)} free"] if least > free.disk else []
    hint = suggest(Candidate(recipe, workload), HARMLESS if has_begun else TRAINING, lack, elsewhere)
    raise DoesNotFit(nearest, f"does not fit: with {nearest.placement} {nearest.shortage(free)}; {hint}")


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
    plans = [
        _forecast(each, workload, recipe, rates) for each in fitting if kinds_on_disk(each.placement) <= least_on_disk
    ]
    # The closed forms of `costs` are good enough to rank placements, and need no replay.
    by_seconds = sorted(range(len(plans)), key=lambda number: plans[number].costs.seconds_per_step)
    # In the order of the candidates again: of equally fast ones, the first moves the fewest bytes.
    replayed = [with_replay(plans[number], workload, recipe) for number in sorted(by_seconds[:NUM_REPLAYED])]
    least = min(plan.costs.seconds_per_step for plan in replayed)
    return next(plan for plan in replayed if plan.costs.seconds_per_step <= (1 + SAME) * least)


def kinds_on_disk(placement: Placement) -> set[str]:
    """Return the kinds that a placement keeps on disk."""
    return {name for name, place in asdict(placement).items() if place == "disk"}


def candidates(recipe: Recipe, free: Free) -> list[Placement]:
    """Return the placements that the recipe allows, fastest first."""

    def allows(choice: str, place: Place) -> bool:
        # On a CPU, "host" is a second copy in the same memory: only if the recipe says so.
        return choice == place or (choice == "auto" and not (free.is_shared and place == "host"))

    if recipe.method == "lora":
        # Adapters and their state are small, and on disk no step is ever lost.
        state = "disk" if recipe.optimizer_state == "auto" else recipe.optimizer_state
        return [
            Placement(state, state, boundaries, frozen=place)
            for place in PLACES_FASTEST_FIRST
            if allows(recipe.weights, place)
            for boundaries in PLACES_FASTEST_FIRST
            if allows(recipe.boundaries, boundaries)
        ]
    return [
        Placement(weights, state, boundaries)
        for weights, state in FASTEST_FIRST
        if allows(recipe.weights, weights) and allows(recipe.optimizer_state, state)
        for boundaries in PLACES_FASTEST_FIRST
        if allows(recipe.boundaries, boundaries)
    ]


def forecast(placement: Placement, workload: Workload, recipe: Recipe, rates: Rates, have: Free) -> Plan:
    """Forecast memory and costs of a placement."""
    return _forecast(forecast_memory(placement, workload, recipe, have), workload, recipe, rates)


def _forecast(memory: MemoryForecast, workload: Workload, recipe: Recipe, rates: Rates) -> Plan:
    """Complete a memory forecast by the costs."""
    placement, step = memory.placement, workload.step
    stored = tuple(stored_kinds(placement, workload, recipe).items())

    def cost_of(num_deferred: int) -> Costs:
        return cost(workload, recipe, ScheduleInputs(placement, stored, memory.budget, num_deferred), rates)

    costs = cost_of(0)
    can_defer = placement.weights != "device" and placement.optimizer_state != "device"  # see `PendingUpdates`
    if can_defer and costs.forward.transfer_seconds(rates) > costs.forward.compute_seconds(workload, rates):
        # Embedding, head and last block are never deferred.
        every = cost_of(max(len(workload.layouts) - 3, 0))
        options = [costs, every, *map(cost_of, _balanced(costs, every, workload, rates))]
        costs = min(options, key=lambda costs: costs.seconds_per_step)
    is_unclipped = workload.dtype == torch.float16 and recipe.clip_norm is None
    waiting = "; gradients are stored though none is clipped: any may overflow" if is_unclipped else ""
    return Plan(
        placement=placement,
        precision=PRECISION_NAMES[workload.dtype],
        reason=reason_for(recipe.precision, workload, rates.compute) + waiting,
        num_parameters=workload.num_parameters,
        num_trained=workload.num_trained,
        tokens_per_step=step.mean,
        device_bytes=memory.device_bytes,
        host_bytes=memory.host_bytes,
        disk_bytes=memory.disk_bytes,
        have=memory.have,
        budget=memory.budget,
        costs=costs,
        rates=rates,
        workload=workload,
        outlook=ScalingForecast.of(
            workload.model_layouts,
            workload.width,
            workload.context,
            (step.mean, step.targets),
            workload.num_steps,
            workload.flops().model,
        ),
    )


def _balanced(none: Costs, every: Costs, workload: Workload, rates: Rates) -> list[int]:
    """Return the best number of blocks with deferred updates, given the costs of none and of all; empty if it is one.

    Each deferred block moves bytes from forward to backward and adds some, in proportion. So a step is shortest with
    none, with all, or where a pass takes as long to move its bytes as to compute.
    """
    most = every.num_deferred
    ends = [
        (none.forward.compute_seconds(workload, rates), every.forward.compute_seconds(workload, rates)),
        (none.forward.transfer_seconds(rates), every.forward.transfer_seconds(rates)),
        (none.backward.compute_seconds(workload, rates), every.backward.compute_seconds(workload, rates)),
        (none.backward.transfer_seconds(rates), every.backward.transfer_seconds(rates)),
    ]

    def seconds(number: int) -> float:
        up, moved_up, down, moved_down = (a + (b - a) * number / max(most, 1) for a, b in ends)
        return max(up, moved_up) + max(down, moved_down)

    best = min(range(most + 1), key=seconds)
    return [best] if 0 < best < most else []


def with_replay(plan: Plan, workload: Workload, recipe: Recipe) -> Plan:
    """Return a plan with a replayed step: on an accelerator, and on a CPU if the step uses the disk.

    If updates are deferred, the replay without deferral is tried, too.
    """
    timed_on_cpu = plan.rates.on_cpu and bool(workload.layers and workload.times.layers)
    if not (_compares_replays(plan.have, workload) or (timed_on_cpu and kinds_on_disk(plan.placement))):
        return plan
    stored, rates = tuple(stored_kinds(plan.placement, workload, recipe).items()), plan.rates
    schedule = ScheduleInputs(plan.placement, stored, plan.budget, plan.costs.num_deferred)
    best = replay(workload, schedule, rates)
    at_once = replace(schedule, num_deferred=0)
    if schedule.num_deferred and (other := replay(workload, at_once, rates)).seconds < best.seconds:
        schedule, best = at_once, other
    costs = cost(workload, recipe, schedule, rates)
    more = max(_tokens_to_hide(each, workload, rates) for each in (costs.forward, costs.backward))
    costs = replace(
        costs, seconds_per_step=best.seconds, compute_seconds=best.step.compute, transfer_seconds=best.step.moving
    )
    return replace(plan, costs=costs, timeline=best, tokens_to_hide_stall=more)


def _tokens_to_hide(moved: Pass, workload: Workload, rates: Rates) -> int:
    """Return the further tokens of a step that a pass could compute while its bytes move."""
    computing, updates = moved.compute_seconds(workload, rates), moved.updated / rates.compute.memory
    hidden = moved.transfer_seconds(rates) - computing
    # Updates take as long for any number of tokens: only the rest grows with them.
    return max(0, math.ceil(workload.step.mean * hidden / (computing - updates) / 256) * 256)
