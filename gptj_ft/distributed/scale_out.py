"""Forecast a run on several machines like this one, for every way to share it.

Shared layers: neighbouring blocks are on different machines, and hidden states travel between them. Shared rows: each
machine trains the whole model on its share of a step's rows, and gradients are summed over the network. Both: replicas,
whose layers are shared. The forecast includes neither stragglers nor the CPU work of the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from gptj_ft.config.options import Recipe
from gptj_ft.distributed.network import Network, bits_text
from gptj_ft.distributed.pipeline import assign_layers
from gptj_ft.distributed.traffic import (
    FP32,
    all_reduce_bytes,
    local_workload,
    migrated_bytes,
    pass_bytes,
    replica_workload,
    with_mirrors,
)
from gptj_ft.errors import UsageError
from gptj_ft.planning.memory import Free, Requirements, keeps_gradients
from gptj_ft.planning.plan import DoesNotFit, Plan, choose
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.workload import Workload, exported_elements
from gptj_ft.training.forecast import Forecast

SOLD = (1e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 4e10, 1e11, 2e11, 4e11)  # bits/s of networks on the market
MOST_MORE = 64  # most times as many rows a step to advise
WAITS = 0.1  # share of the computation from which on waiting is worth advice
Bound = Literal["compute", "waiting", "transfer", "network"]


@dataclass(frozen=True)
class NodePass:
    """One pass over the layers on one machine."""

    compute: float  # seconds
    waiting: float  # seconds without work: micro-batches or the last gradient sums are in transfer
    transfer: float  # seconds of disk and device link
    sent: float  # bytes over the network
    received: float  # bytes
    network: float  # seconds of these bytes
    stall: float  # seconds in which the replayed schedule neither computes nor moves bytes at full rate

    @property
    def seconds(self) -> float:
        return max(self.compute + self.waiting, self.transfer, self.network) + self.stall

    @property
    def bound(self) -> Bound:
        if max(self.transfer, self.network) > self.compute + self.waiting:
            return "transfer" if self.transfer > self.network else "network"
        return "waiting" if self.waiting > self.compute else "compute"

    @property
    def waits_for_network(self) -> bool:
        return self.network > max(self.compute, self.transfer)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "bound": self.bound}


@dataclass(frozen=True)
class NodeRequirements(Requirements):
    """The requirements of machines with equal shares. Bytes include those that only a shared run needs."""

    ranks: tuple[int, ...]  # in a replica
    layers: tuple[int, ...]  # of the first rank
    plan: Plan
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    have: Free
    forward: NodePass
    backward: NodePass

    @property
    def memory_bytes(self) -> int:
        return self.device_bytes + self.host_bytes

    @property
    def sent(self) -> float:
        """Bytes a step."""
        return self.forward.sent + self.backward.sent

    @property
    def received(self) -> float:
        """Bytes a step."""
        return self.forward.received + self.backward.received

    def to_dict(self) -> dict[str, Any]:
        own = ("ranks", "layers", "device_bytes", "host_bytes", "disk_bytes", "memory_bytes", "sent", "received")
        return {
            **{name: getattr(self, name) for name in own},
            "placement": self.plan.placement.to_dict(),
            "needs": [asdict(need) for need in self.needs],
            "forward": self.forward.to_dict(),
            "backward": self.backward.to_dict(),
        }


@dataclass(frozen=True)
class Share:
    """One way to share a run, with its forecast."""

    stages: int  # machines that share the layers of a replica
    replicas: int
    owners: tuple[int, ...]  # stage of each layer
    micro_batches: int  # of a replica in an average step
    nodes: tuple[NodeRequirements, ...]  # one for each kind of machine
    start_seconds: float  # to send the weights, if only the first machine has them
    end_seconds: float  # to send the tuned layers to the first machine
    moved: int  # bytes of layer files, if a run that one machine has started is shared

    @property
    def name(self) -> str:
        if self.stages == 1:
            return "rows" if self.replicas > 1 else "alone"
        return "layers" if self.replicas == 1 else "layers x rows"

    @property
    def settings(self) -> str:
        """Options of `finetune` for this way."""
        if self.stages == 1:
            return "--set share=rows" if self.replicas > 1 else ""
        return f"--set share=layers --set replicas={self.replicas}"

    @property
    def fits(self) -> bool:
        return not any(node.lack for node in self.nodes)

    @property
    def forward(self) -> NodePass:
        """Forward pass of the slowest machine."""
        return max((node.forward for node in self.nodes), key=lambda each: each.seconds)

    @property
    def backward(self) -> NodePass:
        """Backward pass of the slowest machine."""
        return max((node.backward for node in self.nodes), key=lambda each: each.seconds)

    @property
    def seconds_per_step(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def bound(self) -> Bound:
        """Bound of the longer pass."""
        return max(self.forward, self.backward, key=lambda each: each.seconds).bound

    @property
    def waits_for_network(self) -> bool:
        return any(each.waits_for_network for node in self.nodes for each in (node.forward, node.backward))

    @property
    def seconds(self) -> float | None:
        """Seconds of the run if every machine has the model; None without a number of steps."""
        costs = [node.plan.costs for node in self.nodes]
        num_steps = costs[0].num_steps
        if num_steps is None:
            return None
        # Start, validations, checkpoints and end; each machine waits for the slowest.
        other = max((each.seconds or 0.0) - num_steps * each.seconds_per_step for each in costs)
        return num_steps * self.seconds_per_step + other + self.end_seconds

    def most(self, amount: str) -> float:
        """Return the maximum of an attribute over all machines."""
        return float(max(getattr(node, amount) for node in self.nodes))

    def to_dict(self) -> dict[str, Any]:
        own = (
            "name", "stages", "replicas", "settings", "owners", "micro_batches", "fits", "seconds_per_step", "seconds",
            "bound",
        )  # fmt: skip
        most = ("memory_bytes", "disk_bytes", "sent", "received")
        return {
            **{name: getattr(self, name) for name in own},
            **{name: self.most(name) for name in most},
            "start_seconds": self.start_seconds,
            "end_seconds": self.end_seconds,
            "moved": self.moved,
            "forward": self.forward.to_dict(),
            "backward": self.backward.to_dict(),
            "nodes": [node.to_dict() for node in self.nodes],
        }


@dataclass(frozen=True)
class ScaleOut:
    """Forecast of a run on several machines."""

    num_nodes: int
    network: Network
    alone: Share  # on one machine
    shares: tuple[Share, ...]
    chosen: Share  # the fastest that fits; else the one that lacks least
    advice: tuple[str, ...] = ()

    @property
    def problem(self) -> DoesNotFit | None:
        """The error if nothing fits."""
        if self.chosen.fits:
            return None
        node = max(self.chosen.nodes, key=lambda each: each.lack)
        advice = "try more --nodes, or what gptj-ft plan says of one machine"
        if all(share.stages == 1 for share in self.shares):
            advice = "so many can share only rows; by an even --nodes layers are shared, too"
        return DoesNotFit(
            node.plan,
            f"does not fit on {self.num_nodes:,} machines: with {self.chosen.name} shared, of one of them "
            f"{node.shortage(node.have)}; {advice}",
        )

    def speedup(self, share: Share) -> float:
        """Return the speedup over one machine, even if the run does not fit on one."""
        return self.alone.seconds_per_step / share.seconds_per_step

    def to_dict(self) -> dict[str, Any]:
        shares = [each.to_dict() | {"speedup": self.speedup(each)} for each in self.shares]
        return {
            "num_nodes": self.num_nodes,
            "network": asdict(self.network) | {"bytes_per_second": self.network.rate},
            "alone": self.alone.to_dict(),
            "shares": shares,
            "chosen": self.shares.index(self.chosen) if self.chosen.fits else None,
            "advice": list(self.advice),
        }


@dataclass(frozen=True)
class SharedForecast(Forecast):
    """Forecast of a run on several machines; its ``plan`` is that of one machine alone."""

    machines: ScaleOut = field(kw_only=True)

    @classmethod
    def of(cls, forecast: Forecast, recipe: Recipe, num_nodes: int, network: Network) -> SharedForecast:
        """Extend the forecast of one machine to several."""
        plan = forecast.plan
        machines = scale_out(Job(recipe, plan.workload, plan.have, plan.rates, network), num_nodes)
        return cls(plan, machines.problem, forecast.notes, forecast.published, machines=machines)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "machines": self.machines.to_dict()}


@dataclass(frozen=True)
class Job:
    """The run to share, and the machines."""

    recipe: Recipe
    workload: Workload  # of the whole run
    have: Free  # of each machine
    rates: Rates  # of each machine
    network: Network


def scale_out(job: Job, num_nodes: int) -> ScaleOut:
    """Forecast every way to share a run, and choose the fastest that fits."""
    rows = job.recipe.batch_size
    blocks = len(job.workload.layouts) - 2 if job.recipe.shares_layers else 0
    splits = [split for split in divisions(num_nodes, blocks) if split[1] <= rows]
    if not splits:
        least = min(replicas for _, replicas in divisions(num_nodes, blocks))
        raise UsageError(
            f"{num_nodes:,} machines are at least {least:,} replicas of the model, and {rows:,} rows a step are too "
            f"few for them: use --batch-size {least} or more, or other --nodes"
        )
    alone = forecast_share(job, 1, 1)
    shares = tuple(alone if split == (1, 1) else forecast_share(job, *split) for split in splits)
    fitting = [each for each in shares if each.fits]
    if fitting:
        chosen = min(fitting, key=lambda each: each.seconds_per_step)
    else:
        chosen = min(shares, key=lambda each: max(node.lack for node in each.nodes))
    return ScaleOut(num_nodes, job.network, alone, shares, chosen, tuple(advise(job, chosen, alone)) if fitting else ())


def divisions(num_nodes: int, num_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield the possible (stages, replicas); each stage has at least two blocks."""
    for stages in range(1, num_nodes + 1):
        if num_nodes % stages == 0 and (stages == 1 or 2 * stages <= num_blocks):
            yield stages, num_nodes // stages


def forecast_share(job: Job, stages: int, replicas: int) -> Share:
    """Forecast one way to share a run."""
    workload = replica_workload(job.workload, replicas)
    owners = tuple(assign_layers(workload.layouts, stages))
    parts: dict[tuple[Workload, bool], list[int]] = {}
    for rank in range(stages):
        own = [layer for layer, owner in enumerate(owners) if owner == rank]
        # Machines with equal shares are planned once; the first one also writes the tuned model.
        parts.setdefault((local_workload(workload, own), rank == 0), []).append(rank)
    replica = _Replica(job, workload, owners, stages, replicas)
    nodes = tuple(replica.node(part, ranks) for (part, _), ranks in parts.items())
    first = nodes[0].plan.workload
    weights = FP32 * (replicas * _elements(workload) - _elements(first))
    results = FP32 * (exported_elements(job.recipe, workload) - exported_elements(job.recipe, first))
    rate = job.network.rate
    moved = sum(migrated_bytes(nodes[0].plan, job.recipe, workload, [0] * len(owners), owners).values())
    return Share(stages, replicas, owners, replica.micro_batches, nodes, weights / rate, results / rate, moved)


@dataclass(frozen=True)
class _Replica:
    job: Job
    workload: Workload  # of the replica
    owners: tuple[int, ...]  # stage of each layer
    stages: int
    replicas: int

    @property
    def micro_batches(self) -> int:
        return max(1, math.ceil(self.workload.step.num_micro_batches))

    def node(self, part: Workload, ranks: Sequence[int]) -> NodeRequirements:
        """Plan the layers of a machine, and forecast its passes.

        Args:
            part: workload of the machine's layers.
            ranks: stages whose machines have equal layers, and so the same plan.
        """
        job, workload = self.job, self.workload
        largest = max(layout.numel for layout in part.layouts)
        # Hidden states in both directions. Four gradients: sent, received, sum, and that of the next layer.
        extra = 2 * workload.width * workload.dtype.itemsize * workload.step.most if self.stages > 1 else 0
        extra += 4 * FP32 * largest if self.replicas > 1 else 0
        recipe, have = with_mirrors(job.recipe, self.stages), job.have
        exported = exported_elements(recipe, workload) if 0 in ranks else 0  # the first machine writes the tuned model
        on_disk = FP32 * (exported - exported_elements(recipe, part))
        free = Free(
            have.device - (extra if have.is_shared else 0), have.host - extra, have.disk - on_disk, have.is_shared
        )
        try:
            plan = choose(recipe, part, free, job.rates)
        except DoesNotFit as problem:
            plan = problem.nearest
        layers = tuple(layer for layer, owner in enumerate(self.owners) if owner == ranks[0])
        forward, backward = self._passes(plan, ranks)
        need = plan.device_bytes, plan.host_bytes + extra, plan.disk_bytes + on_disk
        return NodeRequirements(tuple(ranks), layers, plan, *need, have, forward, backward)

    def _passes(self, plan: Plan, ranks: Sequence[int]) -> tuple[NodePass, NodePass]:
        own, workload, network = plan.workload, self.workload, self.job.network
        blocks = len(own.layouts) - 2
        hop_bytes = workload.width * workload.dtype.itemsize * workload.step.computed
        hop = hop_bytes / self.micro_batches / network.rate + network.latency
        lowest = next((layout.numel for layout in own.layouts if layout.numel), 0)
        waits = keeps_gradients(self.job.recipe, plan.placement, own.dtype)
        passes = []
        for is_backward, (compute, transfer, stall) in enumerate(_own_seconds(plan)):
            ways = [pass_bytes(workload, own, self.owners, rank, self.replicas)[is_backward] for rank in ranks]
            sent, received = (max(each[way] for each in ways) for way in (0, 1))
            # No computation overlaps with the last all-reduce, or with any if updates follow at once.
            exchanged = all_reduce_bytes(self.replicas) / network.rate if is_backward else 0.0
            waiting = exchanged * ((lowest if waits else own.stored_elements) + own.lent_elements)
            waiting += waiting_seconds(self.stages, blocks, self.micro_batches, compute, hop)
            used = max(sent, received) / network.rate
            passes.append(NodePass(compute, waiting, transfer, sent, received, used, stall))
        forward, backward = passes
        return forward, backward


def waiting_seconds(stages: int, blocks: int, micro_batches: int, compute: float, hop: float) -> float:
    """Return the pipeline bubble of one stage, in seconds a pass.

    Args:
        micro_batches: micro-batches of a step.
        compute: seconds of its computation in the pass.
        hop: seconds for a micro-batch to reach the next stage.
    """
    if stages == 1:
        return 0.0
    one = compute / (micro_batches * blocks) + hop
    # Fill: the first micro-batch passes all other stages. Steady state: each passes them between two local blocks.
    return (stages - 1) * one + max(0.0, stages * blocks * one - compute)


def _own_seconds(plan: Plan) -> list[tuple[float, float, float]]:
    """Return the seconds of forward and backward: computing, moving bytes, stall."""
    if plan.timeline:
        both = (plan.timeline.forward, plan.timeline.backward)
        return [(each.compute, each.moving, each.seconds - each.bound) for each in both]
    passes, rates = (plan.costs.forward, plan.costs.backward), plan.rates
    return [(each.compute_seconds(rates), each.transfer_seconds(rates), 0.0) for each in passes]


def _elements(workload: Workload) -> int:
    return workload.stored_elements + workload.frozen_elements


def advise(job: Job, chosen: Share, alone: Share) -> Iterator[str]:
    """Yield suggestions for a faster step: a faster network, more rows, smaller micro-batches."""
    if alone.fits and alone.seconds_per_step < chosen.seconds_per_step:
        yield "one machine alone is faster"
    passes = [each for node in chosen.nodes for each in (node.forward, node.backward)]
    if waiting := [each for each in passes if each.waits_for_network]:
        needed = max(each.network / max(each.compute, each.transfer) for each in waiting) * job.network.bits
        enough = next((bits for bits in SOLD if bits >= needed), None)
        yield f"a network of {bits_text(enough)} would not be waited for" if enough else "no network is as fast as this"
    if waiting and chosen.replicas > 1 and (factor := _rows_that_hide(job, chosen)):
        yield f"nor would this one with --batch-size {factor * job.recipe.batch_size}"
    few, tokens = chosen.stages + 1, chosen.nodes[0].plan.workload.step.mean
    if chosen.backward.waiting > WAITS * chosen.backward.compute and chosen.micro_batches < few:
        smaller = int(tokens / few)
        if smaller >= job.workload.rows.longest:
            yield f"machines wait for each other: --set micro_batch_tokens={smaller} gives them {few} micro-batches"
        else:
            yield "machines wait for each other: more rows a step, --batch-size, would give them more micro-batches"


def _rows_that_hide(job: Job, chosen: Share) -> int | None:
    """Return how many times as many rows a step would hide the all-reduce; None: not below the limit."""
    factor = 2
    while factor <= MOST_MORE:
        workload = job.workload
        more = replace(workload, step=workload.step.scaled(Fraction(factor), workload.rows.longest))
        share = forecast_share(replace(job, workload=more), chosen.stages, chosen.replicas)
        if not share.fits:
            return None
        if not share.waits_for_network:
            return factor
        factor *= 2
    return None
