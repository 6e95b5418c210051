"""Data parallelism with bits that do not depend on the number of ranks.

The rows of a step are divided into row shards (option ``lanes``), by their lengths alone. Each shard sums its gradients
over micro-batches in order, and a tree over the shards adds these sums. The bits of a step depend on the number of
shards, not on the number of ranks that compute them. Ranks exchange the sums of one layer in a thread while the next
layer computes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gptj_ft.system.group import Group

Node = tuple[int, int]  # of the tree: first shard, number of shards below


def shard_rows(lengths: Sequence[int], num_shards: int) -> list[list[int]]:
    """Return the rows of each shard: longest first, each to the shard with the fewest tokens (LPT scheduling).

    With fewer rows than shards, some shards are empty.
    """
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    tokens = [0] * num_shards
    # Equal rows by number: every rank must come to the same shards.
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        shard = min(range(num_shards), key=lambda shard: (tokens[shard], shard))
        shards[shard].append(row)
        tokens[shard] += lengths[row]
    return [sorted(shard) for shard in shards]


def local_shards(rank: int, size: int, num_shards: int) -> range:
    """Return the shards of a rank."""
    return range(rank * num_shards // size, (rank + 1) * num_shards // size)


def tree_nodes(shards: range) -> list[Node]:
    """Return the largest complete subtrees of neighbouring shards."""
    nodes: list[Node] = []
    for shard in shards:
        nodes.append((shard, 1))
        while len(nodes) > 1 and _are_siblings(nodes[-2], nodes[-1]):
            (start, count), _ = nodes[-2:]
            nodes[-2:] = [(start, 2 * count)]
    return nodes


def _are_siblings(left: Node, right: Node) -> bool:
    return left[1] == right[1] and left[0] % (2 * left[1]) == 0 and left[0] + left[1] == right[0]


def tree_sum(parts: dict[Node, Tensor], node: Node) -> Tensor:
    """Add the parts below a node, in place; it splits at the largest power of two below its number of shards."""
    if node in parts:
        return parts[node]
    start, count = node
    half = 1 << ((count - 1).bit_length() - 1)
    left, right = tree_sum(parts, (start, half)), tree_sum(parts, (start + half, count - half))
    return left.add_(right)


class PendingSum(threading.Thread):
    """The all-reduce of one layer's gradients. A daemon: it must not keep alive a process whose peer has died."""

    def __init__(self, sums: ShardSums, parts: Sequence[dict[Node, Tensor]]) -> None:
        super().__init__(daemon=True)
        self._sums, self._parts = sums, parts
        self._totals: list[Tensor] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._totals = [self._sums.all_reduce(parts) for parts in self._parts]
        except BaseException as error:
            self._error = error
        self._parts = []

    def result(self) -> list[Tensor]:
        """Wait; return one sum for each gradient, or raise the error of the thread."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._totals


@dataclass
class ShardSums:
    """The gradient sums of one step."""

    group: Group  # replicas; each has all of the summed layers
    num_shards: int  # at least one for each replica
    ends: Sequence[int]  # number of local micro-batches up to the end of each local shard
    weight: float  # divisor of the loss, over all shards
    num_targets: int  # over all shards

    def __post_init__(self) -> None:
        self._local = local_shards(self.group.rank, self.group.size, self.num_shards)
        assert len(self.ends) == len(self._local)
        self._num_closed = 0
        self._parts: list[dict[Node, Tensor]] = []
        self._last: PendingSum | None = None

    def begin(self, sums: Sequence[Tensor]) -> None:
        """Start a layer; backward sums its gradients into these tensors."""
        self._num_closed, self._parts = 0, [{} for _ in sums]

    def close(self, sums: Sequence[Tensor], num_done: int) -> None:
        """Set aside the sums of every shard that ends after ``num_done`` micro-batches, and zero the tensors."""
        # An empty shard ends where the one before ends: the loop may close several at once.
        while self._num_closed < len(self.ends) and self.ends[self._num_closed] == num_done:
            shard = self._local[self._num_closed]
            self._num_closed += 1
            for parts, flat in zip(self._parts, sums, strict=True):
                parts[shard, 1] = flat.clone()
                # Merge complete subtrees at once: memory grows with the logarithm of the number of shards.
                for node in tree_nodes(range(self._local[0], shard + 1)):
                    total = tree_sum(parts, node)
                    for part in [part for part in parts if node[0] <= part[0] < node[0] + node[1]]:
                        del parts[part]
                    parts[node] = total
                flat.zero_()

    def start(self) -> PendingSum:
        """Start the all-reduce of the layer, after that of the layer before."""
        if self._last is not None:
            self._last.result()  # one at a time: every rank sends layers in the same order
        self._last = PendingSum(self, [{node: part.to("cpu") for node, part in parts.items()} for parts in self._parts])
        self._parts = []
        self._last.start()
        return self._last

    def total(self, sums: Sequence[Tensor]) -> None:
        """Sum the layer over all shards of all ranks, into these tensors."""
        if self.group.size == 1:
            totals = [tree_sum(parts, (0, self.num_shards)) for parts in self._parts]
            self._parts = []
        else:
            totals = self.start().result()
        for total, flat in zip(totals, sums, strict=True):
            flat.copy_(total)

    # torch.distributed.all_reduce would add in an order of its own, so that bits depend on the number of ranks.
    def all_reduce(self, parts: dict[Node, Tensor]) -> Tensor:
        """Reduce-scatter in the order of the tree, then all-gather; return the sum over all shards.

        Args:
            parts: sums of the local shards, in host memory.
        """
        group, size = self.group, self.group.size
        numel = len(next(iter(parts.values())))
        cuts = [numel * rank // size for rank in range(size + 1)]
        spans = [slice(start, end) for start, end in pairwise(cuts)]
        others = [rank for rank in range(size) if rank != group.rank]
        own_span = spans[group.rank]
        # Transfers between two ranks match by their order, so both ends go through the nodes alike.
        sending = [group.send(rank, parts[node][spans[rank]]) for rank in others for node in tree_nodes(self._local)]
        receiving = []
        received = {node: part[own_span].clone() for node, part in parts.items()}
        for rank in others:
            for node in tree_nodes(local_shards(rank, size, self.num_shards)):
                received[node] = torch.empty(own_span.stop - own_span.start)
                receiving.append(group.recv(rank, received[node]))
        for transfer in receiving:
            transfer.wait()
        total = tree_sum(received, (0, self.num_shards))
        result = torch.empty(numel)
        receiving = [group.recv(rank, result[spans[rank]]) for rank in others]
        sending += [group.send(rank, total) for rank in others]
        result[own_span] = total
        for transfer in [*receiving, *sending]:
            transfer.wait()
        return result

    def gather_losses(self, series: Sequence[Sequence[float]]) -> list[list[float]]:
        """Extend series of loss terms, one value per micro-batch, to those of all ranks, in shard order."""
        messages = self.group.gather("losses of lanes", {"series": [*map(list, series)]})
        return [[value for each in messages for value in each["series"][number]] for number in range(len(series))]
