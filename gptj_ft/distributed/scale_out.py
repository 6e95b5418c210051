"""Forecast a run that several machines share: by layers, by rows, or both.

*Layers*: each block belongs to another machine than its neighbours, with its state, its files and its computation; the
hidden states of micro-batches travel from block to block, and their gradients back. *Rows*: each machine is a whole run
on its share of a step's rows, and gradients are added up over the network. Both: replicas of such chains.

Accelerators and CPUs are taken to be all like this one. Stragglers and the work that a network makes for a CPU are not
in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.distributed.pipeline import assign_layers
from gptj_ft.errors import UsageError
from gptj_ft.models.layout import NO_PARAMETERS, Kind, Layout
from gptj_ft.planning.memory import Free, Requirements, keeps_gradients, stored_kinds
from gptj_ft.planning.plan import DoesNotFit, Plan, choose
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.step_replay import state_kinds
from gptj_ft.planning.workload import Workload, exported_elements
from gptj_ft.streaming.stores.state_file import StateFile

LATENCY = 2e-4  # seconds of a message beside its bytes: a LAN's, and two threads that wake up; assumed
PAYLOAD = 0.94  # of a link's rate; the rest are headers, in packets of 1,500 bytes
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SOLD = (1e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10, 4e10, 1e11, 2e11, 4e11)  # bits/s of networks that one can buy
MOST_MORE = 64  # times as many rows a step, beyond which that is no advice
WAITS = 0.1  # of the computation, from which on waiting for other machines is worth a word
FP32 = torch.float32.itemsize
Bound = Literal["compute", "waiting", "transfer", "network"]


@dataclass(frozen=True)
class Network:
    """Network between machines.

    Attributes:
        bits: bits/s of a machine's link, each way.
        latency: seconds of a message beside its bytes.
    """

    bits: float
    latency: float = LATENCY

    @classmethod
    def parse(cls, text: str) -> Network:
        """Read a rate as networks are sold by: ``10Gbit``, ``100Mbit``.

        Raises:
            UsageError: not a rate.
        """
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmg]bit)(/s)?", text.strip(), re.IGNORECASE)
        if match is None or not float(match[1]):
            raise UsageError(
                f"--network '{text}' is no rate: it is a number with kbit, Mbit or Gbit, such as 10Gbit or 100Mbit"
            )
        return cls(float(match[1]) * BITS[match[2].lower()])

    @property
    def rate(self) -> float:
        """Bytes/s of what is sent, headers left out."""
        return PAYLOAD * self.bits / 8


def bits_text(bits: float) -> str:
    """Return bits/s as networks are sold by."""
    return f"{bits / 1e9:.3g}Gbit" if bits >= 1e9 else f"{bits / 1e6:.3g}Mbit"


@dataclass(frozen=True)
class NodePass:
    """One pass over the layers on one machine.

    Attributes:
        compute: seconds of its own computation.
        waiting: seconds in which it cannot go on: micro-batches, or the last sums of gradients, are still on their way.
        transfer: seconds of its disk and its link to the device.
        sent, received: bytes over the network.
        network: seconds of these.
        stall: seconds in which a replay of the schedule has neither computed nor moved all it could.
    """

    compute: float
    waiting: float
    transfer: float
    sent: float
    received: float
    network: float
    stall: float

    @property
    def seconds(self) -> float:
        return max(self.compute + self.waiting, self.transfer, self.network) + self.stall

    @property
    def bound(self) -> Bound:
        """What takes longest."""
        if max(self.transfer, self.network) > self.compute + self.waiting:
            return "transfer" if self.transfer > self.network else "network"
        return "waiting" if self.waiting > self.compute else "compute"

    @property
    def waits_for_network(self) -> bool:
        return self.network > max(self.compute, self.transfer)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for ``--json``."""
        return {**asdict(self), "seconds": self.seconds, "bound": self.bound}


@dataclass(frozen=True)
class NodeRequirements(Requirements):
    """What a share asks of a machine; bytes.

    Attributes:
        ranks: machines of a replica of which as much is asked.
        layers: layers of the first of them.
        plan: plan of these layers, on the rows of the replica.
        device_bytes, host_bytes, disk_bytes: bytes needed, with those that only a shared run needs.
        have: available resources.
        forward, backward: passes of a step.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    plan: Plan
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    have: Free
    forward: NodePass
    backward: NodePass

    @property
    def memory_bytes(self) -> int:
        """Bytes needed of device and host together."""
        return self.device_bytes + self.host_bytes

    @property
    def sent(self) -> float:
        """Bytes that a step sends."""
        return self.forward.sent + self.backward.sent

    @property
    def received(self) -> float:
        """Bytes that a step receives."""
        return self.forward.received + self.backward.received

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for ``--json``."""
        own = ("ranks", "layers", "device_bytes", "host_bytes", "disk_bytes", "memory_bytes", "sent", "received")
        return {
            **{name: getattr(self, name) for name in own},
            "placement": asdict(self.plan.placement),
            "needs": [asdict(need) for need in self.needs],
            "forward": self.forward.to_dict(),
            "backward": self.backward.to_dict(),
        }


@dataclass(frozen=True)
class Share:
    """A way to share a run, and its forecast.

    Attributes:
        stages: machines that share the layers.
        replicas: groups of as many machines that share the rows.
        owners: rank in its group of the machine that each layer belongs to.
        micro_batches: micro-batches of a replica in an average step.
        nodes: machines, one for all that are alike.
        start_seconds: seconds to send the weights, where only the first machine has them.
        end_seconds: seconds to send the first machine what it has not of the tuned model.
        moved: bytes of files that go from machine to machine if one has begun the run, and these go on with it.
    """

    stages: int
    replicas: int
    owners: tuple[int, ...]
    micro_batches: int
    nodes: tuple[NodeRequirements, ...]
    start_seconds: float
    end_seconds: float
    moved: int

    @property
    def name(self) -> str:
        """What is shared."""
        if self.stages == 1:
            return "rows" if self.replicas > 1 else "alone"
        return "layers" if self.replicas == 1 else "layers x rows"

    @property
    def settings(self) -> str:
        """Options of `finetune` that share a run like this; with whatever is in the recipe."""
        if self.stages == 1:
            return "--set share=rows" if self.replicas > 1 else ""
        return f"--set share=layers --set replicas={self.replicas}"

    @property
    def fits(self) -> bool:
        return not any(node.lack for node in self.nodes)

    @property
    def forward(self) -> NodePass:
        """Forward pass of the machine that takes longest."""
        return max((node.forward for node in self.nodes), key=lambda each: each.seconds)

    @property
    def backward(self) -> NodePass:
        """Backward pass of the machine that takes longest."""
        return max((node.backward for node in self.nodes), key=lambda each: each.seconds)

    @property
    def seconds_per_step(self) -> float:
        return self.forward.seconds + self.backward.seconds

    @property
    def bound(self) -> Bound:
        """What bounds the longer pass."""
        return max(self.forward, self.backward, key=lambda each: each.seconds).bound

    @property
    def waits_for_network(self) -> bool:
        return any(each.waits_for_network for node in self.nodes for each in (node.forward, node.backward))

    @property
    def seconds(self) -> float | None:
        """Seconds of the whole run, where each machine has the model; ``None`` while its steps are not counted."""
        costs = [node.plan.costs for node in self.nodes]
        num_steps = costs[0].num_steps
        if num_steps is None:
            return None
        beside = max((each.seconds or 0.0) - num_steps * each.seconds_per_step for each in costs)
        return num_steps * self.seconds_per_step + beside + self.end_seconds

    def most(self, amount: str) -> float:
        """Return the largest amount that is asked of a machine, by its name."""
        return float(max(getattr(node, amount) for node in self.nodes))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for ``--json``."""
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
    """Forecast of a run on several machines.

    Attributes:
        num_nodes: number of machines.
        network: network between them.
        alone: the run on one machine.
        shares: ways to share it.
        chosen: the fastest that fits on every machine; if none does, the one that lacks least.
        advice: suggestions that would make it faster.
    """

    num_nodes: int
    network: Network
    alone: Share
    shares: tuple[Share, ...]
    chosen: Share
    advice: tuple[str, ...] = ()

    @property
    def problem(self) -> DoesNotFit | None:
        """Why it does not fit."""
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
        """Return the speedup of a share over one machine; if need be, over one with enough memory and disk."""
        return self.alone.seconds_per_step / share.seconds_per_step

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for ``--json``."""
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
class Job:
    """What is shared: a run, as it is planned for one machine.

    Attributes:
        recipe: recipe of the run.
        load: its workload.
        have: available resources of each machine.
        rates: rates of each machine.
        network: network between them.
    """

    recipe: Recipe
    load: Workload
    have: Free
    rates: Rates
    network: Network


def scale_out(job: Job, num_nodes: int) -> ScaleOut:
    """Forecast every way to share a run, and choose the fastest that fits.

    Raises:
        UsageError: there are fewer rows in a step than replicas of the model.
    """
    rows = job.recipe.batch_size
    blocks = len(job.load.layouts) - 2 if job.recipe.shares_layers else 0
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
    """Yield stages and replicas: every divisor of the machines that leaves each stage two blocks at least."""
    for stages in range(1, num_nodes + 1):
        if num_nodes % stages == 0 and (stages == 1 or 2 * stages <= num_blocks):
            yield stages, num_nodes // stages


def replica_of(load: Workload, replicas: int) -> Workload:
    """Return the workload of a share of the rows; those of validations are not shared."""
    if replicas == 1:
        return load
    return replace(load, step=load.step.scaled(Fraction(1, replicas), load.rows.longest))


def with_mirrors(recipe: Recipe, stages: int) -> Recipe:
    """Return a recipe without mirrors if so few processes share the layers that there are none: one."""
    return recipe if stages > 1 else recipe.model_copy(update={"mirror": False})


def part_of(load: Workload, layers: Sequence[int]) -> Workload:
    """Return the workload of some layers: these blocks alone, below and above them an embedding and a head or nothing.

    Of layers that are not trained, those below the lowest own one that is are left out of backward: where a pattern
    leaves gaps, others may have to pass gradients through them.
    """
    top, own = len(load.layouts) - 1, set(layers)
    kept = [index for index in range(top + 1) if index in own or index in (0, top)]

    def pick(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
        return tuple(layouts[index] if index in own else NO_PARAMETERS for index in kept) if layouts else ()

    return replace(
        load,
        layouts=pick(load.layouts),
        frozen=pick(load.frozen),
        layers=tuple(load.layers[index] for index in kept) if load.layers else (),
        times=load.times._replace(layers=tuple(load.times.layers[index] for index in kept if load.times.layers)),
        step=load.step if top in own else replace(load.step, targets=0.0),
        validation=load.validation if top in own else load.validation._replace(targets=0),
    )


def forecast_share(job: Job, stages: int, replicas: int) -> Share:
    """Forecast a way to share a run."""
    load = replica_of(job.load, replicas)
    owners = tuple(assign_layers(load.layouts, stages))
    parts: dict[tuple[Workload, bool], list[int]] = {}
    for rank in range(stages):
        own = [layer for layer, owner in enumerate(owners) if owner == rank]
        parts.setdefault((part_of(load, own), rank == 0), []).append(rank)
    chain = _Chain(job, load, owners, stages, replicas)
    nodes = tuple(chain.node(part, ranks) for (part, _), ranks in parts.items())
    first = nodes[0].plan.workload
    weights = FP32 * (replicas * _elements(load) - _elements(first))
    results = FP32 * (exported_elements(job.recipe, load) - exported_elements(job.recipe, first))
    rate = job.network.rate
    moved = sum(moved_bytes(nodes[0].plan, job.recipe, load, [0] * len(owners), owners).values())
    return Share(stages, replicas, owners, chain.micro_batches, nodes, weights / rate, results / rate, moved)


def moved_bytes(
    plan: Plan, recipe: Recipe, load: Workload, before: Sequence[int], after: Sequence[int]
) -> dict[int, int]:
    """Return the bytes of files that each process gets from others when a run goes on that others have begun.

    They are on machines of their own; on one disk nothing moves. Of a run on disk it is the most: gradients of a step
    go along with their layers, but those of layers that have been updated with them already, as after a clean stop.

    Args:
        plan: plan of a process: what is stored, and where.
        recipe: recipe of the run.
        load: workload of the whole run, or of a replica.
        before: rank of the process that has had each layer.
        after: rank of the process that gets each.
    """
    stored = stored_kinds(plan.placement, load, recipe)
    files: list[dict[Kind, torch.dtype]] = [{kind: stored[kind] for kind in state_kinds(stored)}]
    if plan.placement.is_durable:
        files.append({"grad": stored["grad"]})
    moved = dict.fromkeys(after, 0)
    for layout, old, new in zip(load.layouts, before, after, strict=True):
        if layout.numel and old != new:
            moved[new] += sum(StateFile(layout, kinds, plan.budget.chunk_numel).num_bytes for kinds in files)
    return moved


@dataclass(frozen=True)
class _Chain:
    """Machines that share the layers of a replica.

    Attributes:
        job: run that is shared.
        load: workload of a replica.
        owners: rank of each layer.
        stages: number of machines.
        replicas: number of replicas.
    """

    job: Job
    load: Workload
    owners: tuple[int, ...]
    stages: int
    replicas: int

    @property
    def micro_batches(self) -> int:
        return max(1, math.ceil(self.load.step.num_micro_batches))

    def node(self, part: Workload, ranks: Sequence[int]) -> NodeRequirements:
        """Plan the layers of a machine, and forecast its passes."""
        job, load = self.job, self.load
        largest = max(layout.numel for layout in part.layouts)
        # Hidden states that come and that leave while others are computed with; gradients of a layer: those
        # that are sent, that come and that are summed up, and those of the next layer.
        beside = 2 * load.width * load.dtype.itemsize * load.step.most if self.stages > 1 else 0
        beside += 4 * FP32 * largest if self.replicas > 1 else 0
        recipe, have = with_mirrors(job.recipe, self.stages), job.have
        exported = exported_elements(recipe, load) if 0 in ranks else 0  # the first machine writes the tuned model
        on_disk = FP32 * (exported - exported_elements(recipe, part))
        free = Free(
            have.device - (beside if have.is_shared else 0), have.host - beside, have.disk - on_disk, have.is_shared
        )
        try:
            plan = choose(recipe, part, free, job.rates)
        except DoesNotFit as problem:
            plan = problem.nearest
        layers = tuple(layer for layer, owner in enumerate(self.owners) if owner == ranks[0])
        forward, backward = self._passes(plan, ranks)
        need = plan.device_bytes, plan.host_bytes + beside, plan.disk_bytes + on_disk
        return NodeRequirements(tuple(ranks), layers, plan, *need, have, forward, backward)

    def _passes(self, plan: Plan, ranks: Sequence[int]) -> tuple[NodePass, NodePass]:
        own, load, network = plan.workload, self.load, self.job.network
        blocks = len(own.layouts) - 2
        hop_bytes = load.width * load.dtype.itemsize * load.step.computed
        hop = hop_bytes / self.micro_batches / network.rate + network.latency
        lowest = next((layout.numel for layout in own.layouts if layout.numel), 0)
        waits = keeps_gradients(self.job.recipe, plan.placement, own.dtype)
        passes = []
        for descends, (compute, transfer, stall) in enumerate(_own_seconds(plan)):
            ways = [_wire_bytes(load, own, self.owners, rank, self.replicas)[descends] for rank in ranks]
            sent, received = (max(each[way] for each in ways) for way in (0, 1))
            # Nothing is left to compute while the last gradient is summed up, nor where they are used at once.
            exchanged = _exchanged(self.replicas) / network.rate if descends else 0.0
            waiting = exchanged * ((lowest if waits else own.stored_elements) + own.lent_elements)
            waiting += waiting_seconds(self.stages, blocks, self.micro_batches, compute, hop)
            used = max(sent, received) / network.rate
            passes.append(NodePass(compute, waiting, transfer, sent, received, used, stall))
        forward, backward = passes
        return forward, backward


def wire_bytes(load: Workload, owners: Sequence[int], replicas: int) -> tuple[float, float]:
    """Return the most bytes that a process sends in a step, and the most that one receives.

    Args:
        load: workload of the whole run.
        owners: rank of each layer among the processes of a replica.
        replicas: number of replicas.
    """
    load, ways = replica_of(load, replicas), list[tuple[float, float]]()
    for rank in sorted(set(owners)):
        own = part_of(load, [layer for layer, owner in enumerate(owners) if owner == rank])
        up, down = _wire_bytes(load, own, owners, rank, replicas)
        ways.append((up[0] + down[0], up[1] + down[1]))
    return max(sent for sent, _ in ways), max(received for _, received in ways)


def _wire_bytes(
    load: Workload, own: Workload, owners: Sequence[int], rank: int, replicas: int
) -> list[tuple[float, float]]:
    """Return the bytes that a process of a replica sends and receives in forward, and those in backward."""
    hop_bytes = load.width * load.dtype.itemsize * load.step.computed
    found = []
    for descends in (False, True):
        pairs = list(pairwise(owners))[load.lowest_trained if descends else 0 :]
        ways = [(high, low) if descends else (low, high) for low, high in pairs if low != high]
        gradients = _exchanged(replicas) * (own.stored_elements + own.lent_elements) if descends else 0.0
        sent, received = (sum(way[end] == rank for way in ways) for end in (0, 1))
        found.append((hop_bytes * sent + gradients, hop_bytes * received + gradients))
    return found


def _exchanged(replicas: int) -> float:
    """Return the bytes an element that each way are for others to sum, and sums: (R - 1) / R of all of it."""
    return 2 * FP32 * (replicas - 1) / replicas


def waiting_seconds(stages: int, blocks: int, micro_batches: int, compute: float, hop: float) -> float:
    """Return the seconds in which a machine waits for micro-batches from those that it shares the layers with.

    Args:
        stages: machines that share the layers.
        blocks: blocks of this one.
        micro_batches: micro-batches of a step.
        compute: seconds of its computation in a pass.
        hop: seconds in which a micro-batch gets from one machine to the next.
    """
    if stages == 1:
        return 0.0
    one = compute / (micro_batches * blocks) + hop
    # The first one has to come to the last machine, and each goes round all machines before its next turn.
    return (stages - 1) * one + max(0.0, stages * blocks * one - compute)


def _own_seconds(plan: Plan) -> list[tuple[float, float, float]]:
    """Return the seconds of a plan's two passes: computing, moving bytes, and what a replay has beside the longer."""
    if plan.timeline:
        both = (plan.timeline.forward, plan.timeline.backward)
        return [(each.compute, each.moving, each.seconds - each.bound) for each in both]
    costs, load, rates = plan.costs, plan.workload, plan.rates
    return [
        (each.compute_seconds(load, rates), each.transfer_seconds(rates), 0.0)
        for each in (costs.forward, costs.backward)
    ]


def _elements(load: Workload) -> int:
    return load.stored_elements + load.frozen_elements


def advise(job: Job, chosen: Share, alone: Share) -> Iterator[str]:
    """Yield suggestions that would make a share faster: a faster network, more rows, other micro-batches."""
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
        if smaller >= job.load.rows.longest:
            yield f"machines wait for each other: --set micro_batch_tokens={smaller} gives them {few} micro-batches"
        else:
            yield "machines wait for each other: more rows a step, --batch-size, would give them more micro-batches"


def _rows_that_hide(job: Job, chosen: Share) -> int | None:
    """Return the factor of rows with which a step no longer waits for gradients; found by forecasting again."""
    factor = 2
    while factor <= MOST_MORE:
        load = job.load
        more = replace(load, step=load.step.scaled(Fraction(factor), load.rows.longest))
        share = forecast_share(replace(job, load=more), chosen.stages, chosen.replicas)
        if not share.fits:
            return None
        if not share.waits_for_network:
            return factor
        factor *= 2
    return None
