"""Share the layers of a model between processes: each has some, with their state, and hands on what it computes.

Layer by layer, a micro-batch goes from the process of one layer to that of the next, upwards and down again. A process
computes with its layer while the next micro-batch is on its way to it. No weight, no gradient of a weight ever leaves
the process that it is of, and each is summed over the same micro-batches in the same order as in one process: so the
numbers are those of one process, to the last bit, however many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gptj_ft.models.layout import NO_PARAMETERS, Layout
from gptj_ft.streaming.exchange import Channel
from gptj_ft.system.group import ALONE, Group, Handover, Link


class Relay:
    """Which process has which layer, and what hands hidden states on between them.

    Args:
        group: processes of the run.
        owners: rank of the process that has each layer.
        width: width of the hidden states.
    """

    def __init__(self, group: Group, owners: Sequence[int], width: int) -> None:
        self.group, self.owners, self.width = group, tuple(owners), width

    @classmethod
    def alone(cls, num_layers: int) -> Relay:
        """Return the relay of one process, which has all layers."""
        return cls(ALONE, [0] * num_layers, 0)

    @property
    def by_name(self) -> dict[str, list[int]]:
        """Layers of each process by its name, if there are several."""
        layers = {name: list[int]() for name in self.group.names} if self.group.size > 1 else {}
        for layer, owner in enumerate(self.owners if layers else ()):
            layers[self.group.names[owner]].append(layer)
        return layers

    def has(self, layer: int) -> bool:
        """Tell whether this process has a layer."""
        return self.owners[layer] == self.group.rank

    @property
    def has_head(self) -> bool:
        """Whether this process has the head, and thus the loss."""
        return self.has(len(self.owners) - 1)

    @property
    def links(self) -> list[Link]:
        """Between which processes hidden states go up, and their gradients down."""
        ways = (self.owners, 0), (self.owners[::-1], 1)
        return sorted({(a, b, down) for owners, down in ways for a, b in pairwise(owners) if a != b})


class Route(Channel):
    """Hand on what comes of the layers of one pass; in a single process, nothing is done.

    Receives of a layer's inputs are asked for while the layer before it that is here computes, so that they arrive
    meanwhile. What has been sent is kept until it has left: for so long as the same micro-batch needs to come round to
    the next layer here, which it cannot before the other process has taken it.

    Args:
        relay: owner process of each layer.
        layers: layers of the pass, in order.
        tokens: tokens of each micro-batch.
        dtype: data type of what is handed on.
        device: device that computes.
    """

    def __init__(
        self, relay: Relay, layers: Sequence[int], tokens: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._relay, self._group = relay, relay.group
        self._tokens, self._dtype, self._device = tokens, dtype, device
        self._wire = self._group.wire(device)
        self._source = dict(zip(layers[1:], layers, strict=False))  # by layer, the one before
        self._target = dict(pairwise(layers))
        own = [layer for layer in layers if relay.has(layer)]
        self._next = dict(pairwise(own))  # by layer that is here, the next that is
        self._asked = set[int]()
        self._coming: dict[int, list[tuple[Tensor, Handover]]] = {}
        self._leaving = deque[Handover]()
        if own:
            self._ask(own[0])
        if own and own[0] == layers[0]:  # nothing arrives for the first of the pass
            self._ask_next(own[0])

    def inputs(self, layer: int, local: list[Tensor]) -> Iterator[Tensor]:
        self._ask_next(layer)
        if layer not in self._coming:
            yield from super().inputs(layer, local)
            return
        coming = self._coming.pop(layer)
        coming.reverse()
        while coming:
            values, handover = coming.pop()
            handover.wait()
            yield values.to(self._device)

    def send(self, layer: int, output: Tensor) -> bool:
        target = self._target.get(layer)
        if target is None or self._relay.has(target):
            return False
        if len(self._leaving) == len(self._tokens):
            self._leaving.popleft().wait()  # gloo tells of no transfer that it has ended, unless that is waited for;
            # and what lay on a device may be written again only now
        sent = output.detach().to(self._wire).contiguous()
        self._leaving.append(self._group.send(self._relay.owners[target], sent, self._tag(target)))
        return True

    def close(self) -> None:
        for each in self._leaving:
            each.wait()
        self._leaving.clear()

    def _tag(self, layer: int) -> int:
        """Return the tag of what is for a layer: receives for the way down are asked for while the way up goes on."""
        source = self._source[layer]
        return 2 * layer + (source > layer)

    def _ask_next(self, layer: int) -> None:
        if layer in self._next:
            self._ask(self._next[layer])

    def _ask(self, layer: int) -> None:
        source = self._source.get(layer)
        if source is None or self._relay.has(source) or layer in self._asked:
            return
        self._asked.add(layer)
        coming = []
        for tokens in self._tokens:
            values = torch.empty(tokens, self._relay.width, dtype=self._dtype, device=self._wire)
            coming.append((values, self._group.receive(self._relay.owners[source], values, self._tag(layer))))
        self._coming[layer] = coming


ONE_PROCESS = Relay.alone(0)  # for a model whose number of layers is still to be known


def assign(layouts: Sequence[Layout], size: int) -> list[int]:
    """Assign a process to each layer: blocks in turn, head and embedding to those that have the fewest blocks.

    Args:
        layouts: layout of each layer; a head that computes with the embedding's parameters is where that is.
        size: number of processes.
    """
    top = len(layouts) - 1
    blocks = [block % size for block in range(top - 1)]
    counts = [blocks.count(rank) for rank in range(size)]
    if layouts[top].tied:
        both = counts.index(min(counts))
        return [both, *blocks, both]
    # The last block and the head on different processes, else one computes alone at the turn; the embedding elsewhere.
    head = min(range(size), key=lambda rank: (counts[rank], rank == blocks[-1]))
    embedding = min(range(size), key=lambda rank: (counts[rank], -rank))
    return [embedding, *blocks, head]


def restricted(layouts: Sequence[Layout], owners: Sequence[int], rank: int) -> list[Layout]:
    """Return the layouts of the layers that a process has; those of the others are empty."""
    return [layout if owner == rank else NO_PARAMETERS for layout, owner in zip(layouts, owners, strict=True)]
