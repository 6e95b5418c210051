"""Simulate steps of runs on 2 to 1,024 machines that share layers, rows, or both.

    python benchmarks/scaling.py                                             # efficiency by number of machines
    python benchmarks/scaling.py --tflops 100 --network 10Gbit --jitter 0.05
    python benchmarks/scaling.py --measured FILE.json                        # beside steps that were measured

Discrete events: each machine computes its layers in the order of `schedule.training_tasks`, micro-batch by micro-batch;
each link carries one message after the other each way, and gradients that are summed up take the time that hidden
states leave. The model is GPT-J 6B; all blocks are computed again in backward; the state moves behind the computation.
Efficiency is that of one machine that does nothing but compute: its seconds / (machines x seconds).

FILE.json has an object, or several in a list, with ``blocks``, ``micro_batches``, ``ranks``; seconds of a micro-batch
in a layer: ``seconds_forward_block``, ``seconds_backward_block``, ``seconds_head``; ``bytes_hop`` of a micro-batch,
``link_bytes_per_s`` and ``seconds_step_measured``. If need be: ``latency``; ``replicas``, with ``bytes_gradient`` of a
block and ``bytes_table`` of embedding or head; ``seconds_beside`` in a step, of what is not in the seconds of layers.
With replicas, ``ranks`` are those of one, and ``micro_batches`` too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptj_ft.distributed.network import LATENCY, Network
from gptj_ft.distributed.pipeline import assign_layers
from gptj_ft.distributed.scale_out import waiting_seconds
from gptj_ft.models.layout import NO_PARAMETERS

BLOCKS, WIDTH, BLOCK_PARAMETERS, HEAD_PARAMETERS = 28, 4096, 201_379_840, 206_488_800  # of GPT-J 6B
MICRO_BATCH = 2048  # tokens
TOKENS = (8192, 32768)  # a machine and step
MACHINES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Cluster:
    """Machines that share a run, and their seconds per micro-batch.

    Attributes:
        stages, replicas: machines that share the layers, and groups of them that share the rows.
        blocks: blocks of the model.
        micro_batches: micro-batches of a replica in a step.
        forward, backward, head: seconds of a micro-batch in a block, up and down, and in the head.
        hop: bytes of its hidden states.
        gradient, table: bytes of the gradient of a block, and of embedding or head.
        rate: bytes/s of a link, each way.
        latency: seconds of a message beside its bytes.
        jitter: standard deviation of those seconds, as a share of them.
    """

    stages: int
    replicas: int
    blocks: int
    micro_batches: int
    forward: float
    backward: float
    head: float
    hop: float
    gradient: float
    table: float
    rate: float
    latency: float = LATENCY
    jitter: float = 0.0

    @property
    def alone(self) -> float:
        """Seconds of the whole step on one machine that only computes."""
        block = self.forward + self.backward
        return self.replicas * self.micro_batches * (self.blocks * block + self.head)

    @property
    def owners(self) -> list[int]:
        """Rank of each layer: embedding, blocks, head."""
        return assign_layers([NO_PARAMETERS] * (self.blocks + 2), self.stages)

    @property
    def forecast(self) -> float:
        """Seconds of a step as `gptj-ft plan --nodes` computes them."""
        own = [self.owners[1:-1].count(rank) for rank in range(self.stages)]
        hop = self.hop / self.rate + self.latency
        total = 0.0
        for descends, seconds in enumerate((self.forward, self.backward)):
            passes = []
            for rank, blocks in enumerate(own):
                tables = (rank == self.owners[0]) + (rank == self.owners[-1])
                head = self.head if descends and rank == self.owners[-1] else 0.0
                compute = self.micro_batches * (blocks * seconds + head)
                waiting = waiting_seconds(self.stages, blocks, self.micro_batches, compute, hop)
                network = blocks * self.micro_batches * self.hop * (self.stages > 1) / self.rate
                if descends:
                    network += self.summing(blocks * self.gradient + tables * self.table)
                    waiting += self.summing(self.table if rank == self.owners[0] else self.gradient)
                passes.append(max(compute + waiting, network))
            total += max(passes)
        return total

    def summing(self, num_bytes: float) -> float:
        """Return the link seconds, each way, to sum gradients of a size over replicas."""
        return 2 * num_bytes * (self.replicas - 1) / self.replicas / self.rate


class Simulation:
    """One step of a cluster, event by event.

    Args:
        cluster: machines.
        seed: seed of the jitter.
    """

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        self.cluster, self._random = cluster, random.Random(seed)
        chains = cluster.replicas if cluster.jitter else 1  # without it they are all alike
        self._free = [[0.0] * cluster.stages for _ in range(chains)]
        self._out = [[0.0] * cluster.stages for _ in range(chains)]
        self._in = [[0.0] * cluster.stages for _ in range(chains)]
        self._ready = [[0.0] * cluster.micro_batches for _ in range(chains)]
        self._hops: list[list[tuple[float, float]]] = [
            [] for _ in range(cluster.stages)
        ]  # on a link of the first chain
        self._sums: list[list[tuple[float, float]]] = [
            [] for _ in range(cluster.stages)
        ]  # from when, seconds of a link

    def run(self) -> float:
        """Return the seconds of the step."""
        cluster, owners = self.cluster, self.cluster.owners
        top = len(owners) - 1
        for layer in range(top):
            self._layer(owners[layer], owners[layer + 1], cluster.forward if layer else 0.0)
        self._layer(owners[top], owners[top - 1], cluster.head)
        self._sum_gradients(owners[top], cluster.table)
        for layer in range(top - 1, 0, -1):
            self._layer(owners[layer], owners[layer - 1], cluster.backward)
            self._sum_gradients(owners[layer], cluster.gradient)
        self._sum_gradients(owners[0], cluster.table)
        ends = [_end_of(sums, sorted(hops)) for sums, hops in zip(self._sums, self._hops, strict=True)]
        return max(*ends, *(max(ready) for ready in self._ready), *(max(free) for free in self._free))

    def _layer(self, rank: int, following: int, seconds: float) -> None:
        """Compute all micro-batches with a layer, and send them to the next."""
        cluster = self.cluster
        for chain, ready in enumerate(self._ready):
            free, out, arriving = self._free[chain], self._out[chain], self._in[chain]
            for b in range(cluster.micro_batches):
                noise = max(0.5, self._random.gauss(1.0, cluster.jitter)) if cluster.jitter else 1.0
                free[rank] = max(free[rank], ready[b]) + seconds * noise
                ready[b] = free[rank]
                if following != rank:
                    start = max(ready[b], out[rank], arriving[following])
                    end = out[rank] = arriving[following] = start + cluster.hop / cluster.rate
                    ready[b] = end + cluster.latency
                    if chain == 0:
                        self._hops[rank].append((start, end))

    def _sum_gradients(self, rank: int, num_bytes: float) -> None:
        """Sum a layer's gradient over the replicas as soon as the last one has it."""
        self._sums[rank].append((max(free[rank] for free in self._free), self.cluster.summing(num_bytes)))


def _end_of(sums: Sequence[tuple[float, float]], hops: Sequence[tuple[float, float]]) -> float:
    """Return the end time of gradient sums that use a link between hops, one after the other."""
    now, following = 0.0, 0
    for there, left in sums:
        now = max(now, there)
        while left > 0:
            while following < len(hops) and hops[following][1] <= now:
                following += 1
            start, end = hops[following] if following < len(hops) else (math.inf, math.inf)
            done = min(left, max(0.0, start - now))
            now, left = now + done, left - done
            if left > 0:
                now = end
    return now


def cluster_of(split: tuple[int, int], tokens: int, tflops: float, network: Network) -> Cluster:
    """Return machines that train GPT-J 6B in bf16 on a number of tokens per machine and step."""
    stages, replicas = split
    block = 2.0 * BLOCK_PARAMETERS * MICRO_BATCH / (1e12 * tflops)
    head = 6.0 * HEAD_PARAMETERS * MICRO_BATCH / (1e12 * tflops)
    micro_batches = max(1, tokens * stages // MICRO_BATCH)
    sizes = (2.0 * WIDTH * MICRO_BATCH, 4.0 * BLOCK_PARAMETERS, 4.0 * HEAD_PARAMETERS)
    return Cluster(stages, replicas, BLOCKS, micro_batches, block, 3 * block, head, *sizes, network.rate)


def splits_of(machines: int) -> list[tuple[int, int]]:
    """Return pairs of stages and replicas: powers of 2, with at least two blocks per stage."""
    return [(s, machines // s) for s in (1, 2, 4, 8) if s <= machines]


def efficiency(cluster: Cluster, seconds: float) -> float:
    """Return the seconds of one machine divided by the total seconds of all machines."""
    return cluster.alone / (cluster.stages * cluster.replicas * seconds)


def show_efficiency(tflops: float, network: Network, jitter: float) -> None:
    """Print the efficiency of every split: simulated and, in brackets, forecast."""
    print(f"{tflops:g} TFLOP/s a machine, {network.bits / 1e9:g} Gbit/s, jitter {jitter:.0%}; simulated (forecast)")
    print(f"{'machines':>8} {'tokens':>7}" + "".join(f"{f'layers {s}':>16}" for s in (1, 2, 4, 8)))
    for machines in MACHINES:
        for tokens in TOKENS:
            cells = []
            for split in splits_of(machines):
                cluster = cluster_of(split, tokens, tflops, network)
                seconds = Simulation(replace(cluster, jitter=jitter)).run()
                cells.append(f"{efficiency(cluster, seconds):.2f} ({efficiency(cluster, cluster.forecast):.2f})")
            print(f"{machines:>8} {tokens:>7}" + "".join(f"{cell:>16}" for cell in cells))
    left_out = (
        "stragglers, failures, attention, the disk, the work of the network for a processor, switches that are full"
    )
    print(f"not in it: {'' if jitter else 'jitter of the seconds of a layer (--jitter), '}{left_out}")


def show_measured(points: Sequence[dict[str, Any]]) -> None:
    """Print measured, simulated and forecast steps."""
    print(f"{'ranks':>5} {'link MB/s':>9} {'measured':>9} {'simulated':>9} {'off':>6} {'forecast':>9} {'off':>6}")
    worst = 0.0
    for point in points:
        cluster = Cluster(
            point["ranks"], point.get("replicas", 1), point["blocks"], point["micro_batches"],
            point["seconds_forward_block"], point["seconds_backward_block"], point["seconds_head"], point["bytes_hop"],
            point.get("bytes_gradient", 0.0), point.get("bytes_table", 0.0), point["link_bytes_per_s"],
            point.get("latency", LATENCY),
        )  # fmt: skip
        beside, measured = point.get("seconds_beside", 0.0), point["seconds_step_measured"]
        simulated, forecast = Simulation(cluster).run() + beside, cluster.forecast + beside
        off, forecast_off = (abs(each / measured - 1) for each in (simulated, forecast))
        worst = max(worst, off)
        print(
            f"{cluster.stages * cluster.replicas:>5} {cluster.rate / 1e6:>9.1f} {measured:>9.3f} {simulated:>9.3f} "
            f"{off:>6.1%} {forecast:>9.3f} {forecast_off:>6.1%}"
        )
    print(f"simulation: at most {worst:.1%} off")


def main() -> None:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tflops", type=float, default=400.0, help="of a machine; default 400, an H100 in bf16")
    parser.add_argument("--network", type=Network.parse, default=Network(1e11), help="rate; default 100Gbit")
    parser.add_argument("--jitter", type=float, default=0.0, help="spread of the seconds of a layer, as a share")
    parser.add_argument("--measured", type=Path, metavar="FILE.json", help="measured steps to compare with")
    given = parser.parse_args()
    if given.measured is None:
        show_efficiency(given.tflops, given.network, given.jitter)
        return
    points = json.loads(given.measured.read_text(encoding="utf-8"))
    show_measured(points if isinstance(points, list) else [points])


if __name__ == "__main__":
    main()
