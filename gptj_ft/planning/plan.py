"""Plan a run before it starts: placement, memory, disk, time. Refuse what cannot fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.errors import ResourceError
from gptj_ft.models.batch import rounded_up
from gptj_ft.models.layout import Kind
from gptj_ft.planning.costs import Costs, cost, exported_elements
from gptj_ft.planning.machine_profile import reason_for
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.scaling_law import ScalingForecast
from gptj_ft.planning.suggestions import HARMLESS, TRAINING, Candidate, suggest
from gptj_ft.planning.timeline import ScheduleInputs, Timeline, replay
from gptj_ft.planning.traffic import Pass
from gptj_ft.planning.working_memory import TOKEN_BYTES, WorkingMemory, reserve, usable
from gptj_ft.planning.workload import Workload
from gptj_ft.streaming.activations import NUM_BUFFERS
from gptj_ft.streaming.buffers import PASS_TOKENS, BufferBudget, pool_shapes
from gptj_ft.streaming.stores.base import CHUNK_NUMEL
from gptj_ft.streaming.stores.placement import Place, Placement, training_dtypes
from gptj_ft.system.block_reader import STAGING_BYTES
from gptj_ft.system.direct_io import TRANSFERS
from gptj_ft.system.dtypes import PRECISION_NAMES, PRECISIONS
from gptj_ft.system.units import gigabytes

PROCESS_BYTES = 560 * 2**20  # the interpreter, torch, transformers, the rows
FREE_SHARE = 0.8  # of the memory that is left goes to kept activations at most
SAVED_PER_TOKEN = 20  # tensors of [tokens, width] at once in one block's backward, the MLP's counted by 4
# Holes in the heap, left by graphs of small blocks that come and go with micro-batches of many lengths; measured with
# encoders, whose blocks are small. Where graphs are kept, they fill them.
HOLES, MOST_HOLES = 6, 260 * 10**6
# Between kept graphs of causal blocks, too, in tensors of [tokens, width] a block: so many for each block that is kept,
# fitted to runs of 8 blocks (2 to 4 each) and of 24 (6 to 16). Fewer where the MLP's tensors are so large that glibc
# maps them outside the heap.
HOLES_A_BLOCK, HOLES_BETWEEN_MAPPED, MAPPED_BYTES = 0.4, 1.5, 32 * 2**20
LOGITS = 4  # tensors of [targets, vocabulary] in fp32: a chunk's logits, their softmax, gradients
HEAP_SHARE = 0.05  # and what else is between their tensors, kernels that oneDNN makes for shapes included
DISK_STAGING_BYTES = 2 * 2 * TRANSFERS * 4 * CHUNK_NUMEL  # locked, by the threads of two stores that read and write
UPDATE_BYTES = 4 * 4 * CHUNK_NUMEL  # on an accelerator: of resident moments in fp32, random bits, a first step's copies
NUM_REPLAYED = 3  # placements, the fastest by their bytes and FLOPs; a replay takes up to a second
SAME = 0.01  # of a step's seconds: what is no more than that faster, and moves more, is not taken
FASTEST_FIRST: list[tuple[Place, Place]] = [
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
class Free:
    """Free resources of the machine, in bytes; on a CPU, device and host are the same memory."""

    device: int
    host: int
    disk: int
    is_shared: bool

    def capped(self, recipe: Recipe) -> Free:
        """Apply the caps of a recipe; on a shared memory the smaller one holds."""
        device = _least(self.device, device_cap(recipe, self.is_shared))
        host = device if self.is_shared else _least(self.host, recipe.host_memory)
        return Free(device, host, _least(self.disk, recipe.disk_space), self.is_shared)


@dataclass(frozen=True)
class Need:
    """Needed and available bytes of one resource."""

    resource: str
    need: int
    have: int


def needs_of(device_bytes: int, host_bytes: int, disk_bytes: int, have: Free) -> list[Need]:
    """Compare needed with available bytes, resource by resource."""
    if have.is_shared:
        memory = [Need("memory", device_bytes + host_bytes, have.device)]
    else:
        memory = [Need("device memory", device_bytes, have.device), Need("host memory", host_bytes, have.host)]
    return [*memory, Need("disk", disk_bytes, have.disk)]


class Requirements:
    """Needed and available bytes of every resource."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    have: Free

    @property
    def needs(self) -> list[Need]:
        """Needed and available bytes, resource by resource."""
        return needs_of(self.device_bytes, self.host_bytes, self.disk_bytes, self.have)

    @property
    def lacking(self) -> list[Need]:
        """The resources of which there is too little."""
        return [each for each in self.needs if each.need > each.have]

    @property
    def lack(self) -> int:
        """Bytes that are missing, over all resources; 0 if the run fits."""
        return sum(each.need - each.have for each in self.lacking)


@dataclass(frozen=True)
class MemoryForecast(Requirements):
    """Memory forecast of a placement, with its buffer budget; bytes.

    Attributes:
        placement: places of the training state.
        device_bytes: bytes needed on the device.
        host_bytes: bytes needed in host memory.
        disk_bytes: bytes needed on the disk at most, with a checkpoint and the tuned model.
        have: available resources.
        budget: buffer budget.
    """

    placement: Placement
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    have: Free
    budget: BufferBudget


@dataclass(frozen=True)
class Plan(Requirements):
    """A forecast; bytes and seconds.

    Attributes:
        placement: placement of the training state.
        precision: data type of the computation.
        reason: reason for that precision.
        num_parameters: parameters of the model.
        num_trained: trained parameters, those of adapters included.
        tokens_per_step: tokens of an average step.
        device_bytes: bytes needed on the device.
        host_bytes: bytes needed in host memory.
        disk_bytes: bytes needed on the disk at most, with a checkpoint and the tuned model.
        have: available resources.
        budget: buffer budget.
        costs: bytes moved and seconds.
        rates: rates of the machine that the costs are computed from.
        load: workload that is planned.
        outlook: compute beside that of pre-training.
        timeline: a step replayed in virtual time, on an accelerator or from disk; the seconds of `costs` are then its.
        device: name of a device that is not here.
        tokens_to_hide_stall: further tokens of a step that would take as long to compute as its transfers take.
    """

    placement: Placement
    precision: str
    reason: str
    num_parameters: int
    num_trained: int
    tokens_per_step: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    have: Free
    budget: BufferBudget
    costs: Costs
    rates: Rates
    load: Workload = field(compare=False, repr=False)
    outlook: ScalingForecast
    timeline: Timeline | None = None
    device: str = ""
    tokens_to_hide_stall: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast for `--json`."""
        apart = ("costs", "have", "load", "timeline", "device", "tokens_to_hide_stall")
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in apart}
        own |= {"placement": asdict(self.placement), "rates": asdict(self.rates), "outlook": self.outlook.to_dict()}
        own = {("room" if name == "budget" else name): value for name, value in own.items()}
        own |= {"room": _budget_dict(self.budget), "needs": [asdict(need) for need in self.needs]}
        more = {"tokens_to_hide_stall": self.tokens_to_hide_stall}
        replay = {"timeline": self.timeline.to_dict() | more} if self.timeline else {}
        return {**own, **self.costs.to_dict(), **replay, **({"device": self.device} if self.device else {})}


class DoesNotFit(ResourceError):
    """No allowed plan fits; holds the nearest one."""

    def __init__(self, nearest: Plan, message: str) -> None:
        super().__init__(message)
        self.nearest = nearest


def choose(recipe: Recipe, workload: Workload, free: Free, rates: Rates, has_begun: bool = False) -> Plan:
    """Choose the fastest placement that the recipe allows and that fits; on an accelerator, of `NUM_REPLAYED`.

    Args:
        recipe: recipe with places (or ``auto``) and memory caps.
        workload: workload of the run.
        free: free resources of the machine.
        rates: rates of the machine.
        has_begun: whether the run is resumed, so that only options that change no number are suggested.

    Raises:
        DoesNotFit: nothing allowed fits; says by how much, and the two knobs that help most.
    """

    def forecasts(recipe: Recipe, workload: Workload) -> Iterator[MemoryForecast]:
        have = free.capped(recipe)
        return (forecast_memory(placement, workload, recipe, have) for placement in candidates(recipe, free))

    def lack(recipe: Recipe, workload: Workload) -> int:
        return min(each.lack for each in forecasts(recipe, workload))

    tried: list[MemoryForecast] = []
    fitting: list[MemoryForecast] = []
    for each in forecasts(recipe, workload):
        (tried if each.lack else fitting).append(each)
        if fitting and not _compares_replays(free, workload):
            return with_replay(forecast(each.placement, workload, recipe, rates, each.have), workload, recipe)
    if fitting:
        return _fastest(fitting, workload, recipe, rates)
    best = min(tried, key=lambda each: each.lack)
    nearest = forecast(best.placement, workload, recipe, rates, best.have)
    lacks_disk_alone = [plan for plan in tried if [need.resource for need in plan.lacking] == ["disk"]]
    least = min((plan.disk_bytes for plan in lacks_disk_alone), default=0)
    elsewhere = [f"--output on a disk with {gigabytes(least)} free"] if least > free.disk else []
    hint = suggest(Candidate(recipe, workload), HARMLESS if has_begun else TRAINING, lack, elsewhere)
    raise DoesNotFit(nearest, f"does not fit: with {nearest.placement} {shortage(nearest.lacking, free)}; {hint}")


def _compares_replays(have: Free, workload: Workload) -> bool:
    """Tell whether placements are compared by replays: on accelerators, if it is known what layers compute there."""
    return bool(workload.layers) and not have.is_shared


def _is_replayed(plan: Plan, workload: Workload) -> bool:
    """Tell whether a plan's step is replayed in virtual time: there, and on CPUs that move what is on disk."""
    timed_on_cpu = plan.rates.on_cpu and bool(workload.layers and workload.times.layers)
    return _compares_replays(plan.have, workload) or (timed_on_cpu and bool(kinds_on_disk(plan.placement)))


def _fastest(fitting: Sequence[MemoryForecast], workload: Workload, recipe: Recipe, rates: Rates) -> Plan:
    """Return the plan whose replay is fastest, of those that fit.

    The first is not always it: what streams from host memory leaves the device's for activations that need not be
    computed again. But no disk is as fast as the rest: what need not be there is elsewhere.
    """
    least_on_disk = kinds_on_disk(fitting[0].placement)
    plans = [
        forecast(each.placement, workload, recipe, rates, each.have)
        for each in fitting
        if kinds_on_disk(each.placement) <= least_on_disk
    ]
    by_seconds = sorted(range(len(plans)), key=lambda number: plans[number].costs.seconds_per_step)
    replays = [with_replay(plans[number], workload, recipe) for number in sorted(by_seconds[:NUM_REPLAYED])]
    least = min(plan.costs.seconds_per_step for plan in replays)
    return next(plan for plan in replays if plan.costs.seconds_per_step <= (1 + SAME) * least)


def kinds_on_disk(placement: Placement) -> set[str]:
    """Name the kinds that a placement keeps on disk."""
    return {name for name, place in asdict(placement).items() if place == "disk"}


def candidates(recipe: Recipe, free: Free) -> list[Placement]:
    """Return the placements that the recipe allows, fastest first.

    Where the device is the CPU, "host" is its own memory with a copy on top, and only for those who ask for it.
    """

    def allows(choice: str, place: Place) -> bool:
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


def forecast_memory(placement: Placement, workload: Workload, recipe: Recipe, have: Free) -> MemoryForecast:
    """Forecast the memory of a placement, and choose its buffer budget."""
    dtypes, stored = _dtypes(workload, recipe), stored_kinds(placement, workload, recipe)
    total, largest = workload.stored_elements, max(layout.numel for layout in workload.layouts)
    by_place: dict[Place, int] = {"device": 0, "host": 0, "disk": 0}
    for kind, dtype in stored.items():
        by_place[placement.of(kind)] += total * dtype.itemsize
    if placement.of("frozen") != "disk":
        by_place[placement.of("frozen")] += workload.frozen_elements * workload.dtype.itemsize
    elif workload.frozen_elements:  # it is there already
        by_place["host"] += STAGING_BYTES
    by_place[placement.boundaries] += workload.boundary_bytes()
    device, budget = _on_device(_Demand(placement, workload, recipe, stored), by_place, have)
    if not have.is_shared and "disk" in (placement.of(kind) for kind in stored):
        by_place["host"] += DISK_STAGING_BYTES
    state = total * sum(dtype.itemsize for kind, dtype in dtypes.items() if kind != "grad")
    # A run on disk is its own checkpoint and replaces a layer at a time; others write one before they remove one.
    one = largest * sum(dtype.itemsize for dtype in dtypes.values())
    saved = (2 * one if placement.is_durable else 2 * state) + exported_elements(recipe, workload) * 4
    saved += kept_checkpoints(recipe, workload.num_steps) * state
    if recipe.mirror:  # as much of another machine in each checkpoint; and a run on disk has one beside its state
        saved += (2 + kept_checkpoints(recipe, workload.num_steps) + placement.is_durable) * state
    return MemoryForecast(placement, device, by_place["host"] + PROCESS_BYTES, by_place["disk"] + saved, have, budget)


@dataclass(frozen=True)
class _Demand:
    """What is asked of a device: a placement of a workload, with the kinds that are stored."""

    placement: Placement
    load: Workload
    recipe: Recipe
    stored: Mapping[Kind, torch.dtype]

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.load.width * self.load.dtype.itemsize

    def buffers_within(self, free: int) -> tuple[BufferBudget, int]:
        """Return the roomiest budget of buffers that fits, else the leanest, and its bytes."""
        budgets = [BufferBudget(self.recipe.read_ahead, *numbers) for numbers in ((2, 48), (2, 24), (1, 16), (1, 6))]
        sizes = [_buffer_bytes(each, self.placement, self.stored, self.load) for each in budgets]
        fitting = (each for each in zip(budgets, sizes, strict=True) if each[1] <= free)
        return next(fitting, (budgets[-1], sizes[-1]))


def _on_device(demand: _Demand, by_place: Mapping[Place, int], have: Free) -> tuple[int, BufferBudget]:
    """Return the bytes that a run needs on the device, and its buffer budget."""
    if demand.load.layers and not have.is_shared:
        return _on_accelerator(demand, by_place["device"], have.device)
    return _on_cpu(demand, by_place, have)


def _on_accelerator(demand: _Demand, resident: int, have: int) -> tuple[int, BufferBudget]:
    """Return the same where the device's memory is its own: by the ledger of a step."""
    workload, recipe, stays = demand.load, demand.recipe, demand.placement.boundaries == "device"
    working, free = WorkingMemory(workload, recipe.z_loss > 0, stays), usable(have)
    # A placement keeps the inputs of recomputed layers; those of kept ones stay in any case.
    resident += UPDATE_BYTES - (workload.boundary_bytes() if stays else 0)
    least = resident + working.peak(0)
    budget, buffers = demand.buffers_within(free - least)
    kept = _kept_within(
        recipe, workload.num_backward_blocks, lambda kept: resident + buffers + working.peak(kept) <= free
    )
    needed = resident + buffers + working.peak(kept)
    # A validation has the place of all that a step works in, and what is free.
    of_token = 2 * demand.hidden_bytes + TOKEN_BYTES
    validating = working.forward_bytes
    spare = max(needed, free) - resident - buffers - validating
    pass_tokens = min(PASS_TOKENS, max(spare // of_token, workload.step.micro_batch))
    needed = max(needed, resident + buffers + validating + of_token * min(pass_tokens, workload.validation.tokens))
    return needed + reserve(needed), replace(budget, num_kept_layers=kept, pass_tokens=pass_tokens)


def _on_cpu(demand: _Demand, by_place: Mapping[Place, int], have: Free) -> tuple[int, BufferBudget]:
    """Return the same where it is the host's memory: by measured graphs of causal blocks, else by rules of thumb."""
    placement, workload, recipe, hidden = demand.placement, demand.load, demand.recipe, demand.hidden_bytes
    rows, working = workload.step.most_rows, WorkingMemory(workload)
    graph = SAVED_PER_TOKEN * hidden * min(rounded_up(workload.step.micro_batch), rows)
    activations = graph + workload.weights_bytes(workload.micro_batch_pairs) + workload.bucket_bytes
    # Beside those of the blocks there are what the head takes, its gradient, and what a block is just giving; where the
    # others are elsewhere, there are buffers.
    beside = 3 + (NUM_BUFFERS if placement.boundaries != "device" else 0)
    boundaries = beside * hidden * rows
    head = LOGITS * torch.float32.itemsize * workload.vocabulary * workload.most_logits
    fixed = by_place["device"] + activations + boundaries + head
    free = have.device - fixed - (by_place["host"] + PROCESS_BYTES if have.is_shared else 0)
    budget, buffers = demand.buffers_within(free)
    room = int(FREE_SHARE * (free - buffers))
    kept = _kept_within(recipe, workload.num_backward_blocks, lambda kept: _kept_bytes(working, kept) <= room)
    graphs = _kept_bytes(working, kept)
    device = fixed + buffers + graphs
    if workload.step.pairs:
        device += min(MOST_HOLES, HOLES * graph) if kept < workload.num_backward_blocks else 0
        device += int(HEAP_SHARE * device)
    # A validation has the place of a step's hidden states and kept activations, and some of what is free.
    of_step = boundaries - (beside - 3) * hidden * rows + graphs
    of_step += workload.boundary_bytes() if placement.boundaries == "device" else 0
    spare = max(0, room - graphs)
    of_token = 2 * hidden + TOKEN_BYTES  # what a layer takes and what it gives
    pass_tokens = min(PASS_TOKENS, max((of_step + spare) // of_token, workload.step.micro_batch))
    device += max(0, of_token * min(pass_tokens, workload.validation.tokens) - of_step)
    # The head's logits come when the forward pass has all that it keeps, and then the gradients of a block.
    forward_bytes = have.device - head - activations if kept and have.is_shared else None
    return device, replace(budget, num_kept_layers=kept, pass_tokens=pass_tokens, forward_bytes=forward_bytes)


def _kept_bytes(working: WorkingMemory, kept: int) -> int:
    """Compute the memory on a CPU that the graphs of the last blocks keep over a whole step, in bytes.

    Those of causal blocks are measured: 13 to 16 tensors a token, 8 to 10 with adapters. To them come holes between
    them in the heap, more per block as more blocks are kept. For encoders a rule of thumb counts 20 tensors.
    """
    workload, rows = working.load, working.load.step.most_rows
    of_token = workload.width * workload.dtype.itemsize
    if kept and workload.layers and not workload.step.pairs:
        is_mapped = 4 * of_token * min(workload.step.micro_batch, rows) >= MAPPED_BYTES  # the MLP's tensors
        holes = HOLES_BETWEEN_MAPPED if is_mapped else min(HOLES_A_BLOCK * kept, SAVED_PER_TOKEN)
        graphs = math.ceil(working.measured_kept_bytes(kept) * rows / workload.step.most)
        return graphs + int(kept * holes * of_token * rows)
    return kept * (SAVED_PER_TOKEN * of_token * rows + workload.weights_bytes(workload.step.pairs))


def forecast(placement: Placement, workload: Workload, recipe: Recipe, rates: Rates, have: Free) -> Plan:
    """Forecast memory and costs of a placement."""
    memory = forecast_memory(placement, workload, recipe, have)
    stored, budget = stored_kinds(placement, workload, recipe), memory.budget
    costs = cost(placement, workload, recipe, stored, rates, budget)
    can_be_late = placement.weights != "device" and placement.optimizer_state != "device"  # see `PendingUpdates`
    if can_be_late and costs.forward.transfer_seconds(rates) > costs.forward.compute_seconds(workload, rates):
        late = cost(placement, workload, recipe, stored, rates, budget, max(len(workload.layouts) - 3, 0))
        between = _balanced(costs, late, workload, rates)
        tried = [costs, late, *(cost(placement, workload, recipe, stored, rates, budget, number) for number in between)]
        costs = min(tried, key=lambda costs: costs.seconds_per_step)
    is_unclipped = workload.dtype == torch.float16 and recipe.clip_norm is None
    waiting = "; gradients are stored though none is clipped: any may overflow" if is_unclipped else ""
    return Plan(
        placement=placement,
        precision=PRECISION_NAMES[workload.dtype],
        reason=reason_for(recipe.precision, workload, rates.compute) + waiting,
        num_parameters=workload.num_parameters,
        num_trained=workload.num_trained,
        tokens_per_step=workload.step.mean,
        device_bytes=memory.device_bytes,
        host_bytes=memory.host_bytes,
        disk_bytes=memory.disk_bytes,
        have=have,
        budget=budget,
        costs=costs,
        rates=rates,
        load=workload,
        outlook=ScalingForecast.of(
            workload.model_layouts,
            workload.width,
            workload.context,
            (workload.step.mean, workload.step.targets),
            workload.num_steps,
            workload.flops().model,
        ),
    )


def _balanced(none: Costs, every: Costs, workload: Workload, rates: Rates) -> list[int]:
    """Return the best number of blocks with deferred updates, from the costs of none and of all; empty: one of these.

    Each deferred one takes bytes off forward and puts more on backward, all in proportion. So a step is shortest where
    one of the passes takes as long to move its bytes as to compute, or with none or all of them.
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
    """Return a plan with a step replayed in virtual time, where that tells more than sums do; otherwise as it is.

    Where the step waits for transfers, deferred updates are tried, too, and taken if that is faster.
    """
    if not _is_replayed(plan, workload):
        return plan
    stored, rates = stored_kinds(plan.placement, workload, recipe), plan.rates

    def timeline(num_deferred: int) -> Timeline:
        schedule = ScheduleInputs(plan.placement, tuple(stored.items()), plan.budget, num_deferred)
        return replay(workload, schedule, rates)

    num_deferred = plan.costs.num_deferred
    best = timeline(num_deferred)
    if num_deferred and (other := timeline(0)).seconds < best.seconds:
        num_deferred, best = 0, other
    costs = cost(plan.placement, workload, recipe, stored, rates, plan.budget, num_deferred)
    more = max(_tokens_to_hide(each, workload, rates) for each in (costs.forward, costs.backward))
    costs = replace(
        costs, seconds_per_step=best.seconds, compute_seconds=best.step.compute, transfer_seconds=best.step.moving
    )
    return replace(plan, costs=costs, timeline=best, tokens_to_hide_stall=more)


def _tokens_to_hide(moved: Pass, workload: Workload, rates: Rates) -> int:
    """Count the further tokens of a step that a pass could compute with while its bytes move."""
    updates = moved.updated / rates.compute.memory  # which take as long, however many tokens there are
    hidden = moved.transfer_seconds(rates) - moved.compute_seconds(workload, rates)
    tokens = workload.step.mean * hidden / (moved.compute_seconds(workload, rates) - updates)
    return max(0, math.ceil(tokens / 256) * 256)


def _budget_dict(budget: BufferBudget) -> dict[str, int]:
    """Return a buffer budget under the names that `--json` has had since its first version."""
    names = {
        "num_gradients": "gradients",
        "num_chunks": "parts",
        "chunk_numel": "part_numel",
        "num_kept_layers": "kept",
    }
    # Left out: `forward_bytes`, which follows from what the device has, told beside it.
    return {names.get(name, name): value for name, value in asdict(budget).items() if name != "forward_bytes"}


def _dtypes(workload: Workload, recipe: Recipe) -> dict[Kind, torch.dtype]:
    """Return the kinds of a training run and their types."""
    return training_dtypes(workload.dtype, PRECISIONS[recipe.moments], PRECISIONS[recipe.gradients])


def stored_kinds(placement: Placement, workload: Workload, recipe: Recipe) -> dict[Kind, torch.dtype]:
    """Return the kinds of a training run that have a store, and their types."""
    keeps = keeps_gradients(recipe, placement, workload.dtype)
    return {kind: dtype for kind, dtype in _dtypes(workload, recipe).items() if kind != "grad" or keeps}


def _buffer_bytes(
    budget: BufferBudget, placement: Placement, stored: Mapping[Kind, torch.dtype], workload: Workload
) -> int:
    """Return the bytes of the buffers on the device: of the pools that are needed, and those an update computes in."""
    fp32, shapes = torch.float32, pool_shapes(budget, workload.layouts, workload.frozen, stored)
    streamed = [kind for kind in stored if placement.of(kind) != "device"]
    chunked = [kind for kind in streamed if kind != "weight"]
    needed: list[str] = ["weights", *chunked] if "weight" in streamed else [*chunked]
    if "grad" in streamed or stored.get("grad") != fp32:
        needed += ["gradients", "tied gradient"]
    if workload.frozen_elements and placement.of("frozen") != "device":
        needed.append("frozen")
    scratch = 1 + sum(stored[kind] != fp32 for kind in chunked)
    return sum(shapes[name].num_bytes for name in needed) + scratch * shapes["exp_avg"].numel * fp32.itemsize


def _kept_within(recipe: Recipe, num_blocks: int, fits: Callable[[int], bool]) -> int:
    """Count the blocks that keep their activations: as many as the recipe says, or as there is room for."""
    if isinstance(recipe.activations, int):
        return min(recipe.activations, num_blocks)
    if recipe.activations == "auto":
        return max((kept for kept in range(num_blocks + 1) if fits(kept)), default=0)
    return {"keep": num_blocks, "recompute": 0}[recipe.activations]


def kept_checkpoints(recipe: Recipe, num_steps: int | None) -> int:
    """Count the checkpoints that a run keeps at most, beside the one that it would resume from."""
    regular = (num_steps or 0) // recipe.save_every if recipe.save_every else 0
    newest = regular if recipe.num_newest_kept is None else min(regular, recipe.num_newest_kept)
    return newest + recipe.keeps_best


def keeps_gradients(recipe: Recipe, placement: Placement, dtype: torch.dtype) -> bool:
    """Tell whether gradients have a store: to wait for the global norm or for an overflow, or to survive a crash."""
    return recipe.clip_norm is not None or dtype == torch.float16 or placement.is_durable


def device_cap(recipe: Recipe, is_shared: bool) -> int | None:
    """Return the cap on the device's memory; where that is host memory too, the smaller of both."""
    caps = (recipe.device_memory, recipe.host_memory if is_shared else None)
    return min((cap for cap in caps if cap is not None), default=None)


def shortage(needs: Sequence[Need], free: Free) -> str:
    """Describe the missing bytes, resource by resource."""
    there = {"disk": free.disk, "host memory": free.host}
    parts = []
    for each in needs:
        if each.need <= each.have:
            continue
        limit = "free" if each.have == there.get(each.resource, free.device) else "allowed"
        parts.append(f"{gigabytes(each.need)} of {each.resource}, {gigabytes(each.have)} is {limit}")
    return "it needs " + ", and ".join(parts)


def _least(free: int, cap: int | None) -> int:
    return free if cap is None else min(free, cap)
