"""Share the rows of a step between processes: each has a whole model, and sums the gradients of its rows.

A *lane* is a share of the rows, fixed by their lengths and the number of lanes; inside it, gradients are summed over
micro-batches as ever. The sums of the lanes are added by a tree that their number alone decides. So the bits of a step
depend on how many lanes there are, and not on how many processes compute them. While processes exchange the sums of a
layer, in a thread of their own, the next layer computes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gptj_ft.system.group import Group

Node = tuple[int, int]  # of the tree: its first lane, and how many there are below it


def lanes_of(lengths: Sequence[int], num_lanes: int) -> list[list[int]]:
    """Deal rows out to lanes: the longest first, each to the lane with the fewest tokens (LPT).

    Args:
        lengths: tokens of each row of the step.
        num_lanes: number of lanes; with fewer rows, some have none.

    Returns: the rows of each lane, in their order.
    """
    lanes: list[list[int]] = [[] for _ in range(num_lanes)]
    tokens = [0] * num_lanes
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        lane = min(range(num_lanes), key=lambda lane: (tokens[lane], lane))
        lanes[lane].append(row)
        tokens[lane] += lengths[row]
    return [sorted(lane) for lane in lanes]


def lanes_of_rank(rank: int, size: int, num_lanes: int) -> range:
    """Return the lanes that a process computes."""
    return range(rank * num_lanes // size, (rank + 1) * num_lanes // size)


def nodes_of(lanes: range) -> list[Node]:
    """Return the largest parts of the tree that lie in neighbouring lanes."""
    nodes: list[Node] = []
    for lane in lanes:
        nodes.append((lane, 1))
        while len(nodes) > 1 and _are_halves(nodes[-2], nodes[-1]):
            (start, count), _ = nodes[-2:]
            nodes[-2:] = [(start, 2 * count)]
    return nodes


def _are_halves(left: Node, right: Node) -> bool:
    return left[1] == right[1] and left[0] % (2 * left[1]) == 0 and left[0] + left[1] == right[0]


def add_up(parts: dict[Node, Tensor], node: Node) -> Tensor:
    """Add the parts of a node of the tree, in place: split at the largest power of two below its number of lanes."""
    if node in parts:
        return parts[node]
    start, count = node
    half = 1 << ((count - 1).bit_length() - 1)
    left, right = add_up(parts, (start, half)), add_up(parts, (start + half, count - half))
    return left.add_(right)


class Summing(threading.Thread):
    """The sums over all lanes of a layer's gradients, on their way between processes.

    It does not keep a process from ending that waits for one that is gone.

    Args:
        lanes: lanes of the step.
        parts: sums of the lanes of this process, in host memory, for each of the layer's flat gradients.
    """

    def __init__(self, lanes: LaneSums, parts: Sequence[dict[Node, Tensor]]) -> None:
        super().__init__(daemon=True)
        self._lanes, self._parts = lanes, parts
        self._totals: list[Tensor] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._totals = [self._lanes.exchange(parts) for parts in self._parts]
        except BaseException as error:
            self._error = error
        self._parts = []

    def end(self) -> list[Tensor]:
        """Return the sums, one for each of the gradients.

        Raises:
            PeerFailed: another process is gone.
        """
        self.join()
        if self._error is not None:
            raise self._error
        return self._totals


@dataclass
class LaneSums:
    """Sums the gradients of one step over lanes, and over the processes that have them.

    Attributes:
        group: processes; each has all layers.
        num_lanes: lanes of the step, at least one for each process.
        ends: micro-batches up to the end of each lane of this process.
        weight: divisor of the sum of the losses of all lanes.
        num_targets: targets of all lanes.
    """

    group: Group
    num_lanes: int
    ends: Sequence[int]
    weight: float
    num_targets: int

    def __post_init__(self) -> None:
        self._own = lanes_of_rank(self.group.rank, self.group.size, self.num_lanes)
        assert len(self.ends) == len(self._own)
        self._closed = 0
        self._parts: list[dict[Node, Tensor]] = []
        self._last: Summing | None = None

    def begin(self, sums: Sequence[Tensor]) -> None:
        """Begin a layer, whose gradients are summed in these tensors."""
        self._closed, self._parts = 0, [{} for _ in sums]

    def close(self, sums: Sequence[Tensor], done: int) -> None:
        """Put away the sums of the lanes that end when so many micro-batches are done."""
        while self._closed < len(self.ends) and self.ends[self._closed] == done:
            lane = self._own[self._closed]
            self._closed += 1
            for parts, flat in zip(self._parts, sums, strict=True):
                parts[lane, 1] = flat.clone()
                for node in nodes_of(range(self._own[0], lane + 1)):
                    total = add_up(parts, node)
                    for part in [part for part in parts if node[0] <= part[0] < node[0] + node[1]]:
                        del parts[part]
                    parts[node] = total
                flat.zero_()

    def start(self) -> Summing:
        """Begin to sum up a layer over all lanes of all processes, when the layer before has been."""
        if self._last is not None:
            self._last.end()  # everywhere in the same order
        self._last = Summing(self, [{node: part.to("cpu") for node, part in parts.items()} for parts in self._parts])
        self._parts = []
        self._last.start()
        return self._last

    def total(self, sums: Sequence[Tensor]) -> None:
        """Put the sums over all lanes of all processes into these tensors."""
        if self.group.size == 1:
            totals = [add_up(parts, (0, self.num_lanes)) for parts in self._parts]
            self._parts = []
        else:
            totals = self.start().end()
        for total, flat in zip(totals, sums, strict=True):
            flat.copy_(total)

    def exchange(self, parts: dict[Node, Tensor]) -> Tensor:
        """Add a span of the elements here, the others elsewhere, and hand the totals round; return all of them.

        Args:
            parts: sums of the lanes of this process, in host memory.
        """
        group, size = self.group, self.group.size
        numel = len(next(iter(parts.values())))
        cuts = [numel * rank // size for rank in range(size + 1)]
        spans = [slice(start, end) for start, end in pairwise(cuts)]
        others = [rank for rank in range(size) if rank != group.rank]
        mine = spans[group.rank]
        leaving = [group.send(rank, parts[node][spans[rank]]) for rank in others for node in nodes_of(self._own)]
        coming = []
        arrived = {node: part[mine].clone() for node, part in parts.items()}
        for rank in others:
            for node in nodes_of(lanes_of_rank(rank, size, self.num_lanes)):
                arrived[node] = torch.empty(mine.stop - mine.start)
                coming.append(group.receive(rank, arrived[node]))
        for each in coming:
            each.wait()
        total = add_up(arrived, (0, self.num_lanes))
        result = torch.empty(numel)
        coming = [group.receive(rank, result[spans[rank]]) for rank in others]
        leaving += [group.send(rank, total) for rank in others]
        result[mine] = total
        for each in [*coming, *leaving]:
            each.wait()
        return result

    def losses(self, values: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return series of numbers, one for each piece of each lane, with those of the other processes, by lane."""
        found = [each["series"] for each in self.group.gather("losses of lanes", {"series": [*map(list, values)]})]
        return [[value for each in found for value in each[number]] for number in range(len(values))]
