"""Pipeline parallelism: assign the layers of a model to ranks, and move activations between them.

A micro-batch passes from the rank of one layer to the rank of the next, upwards in forward and downwards in backward.
Weights and their gradients never leave their rank. Each gradient sums the same micro-batches in the same order as in a
single process, so every bit equals that of a single process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gptj_ft.models.layout import NO_PARAMETERS, Layout
from gptj_ft.streaming.exchange import Channel
from gptj_ft.system.group import ALONE, Group, Link, PendingTransfer


@dataclass(frozen=True)
class Partition:
    """The owner rank of each layer."""

    group: Group = ALONE  # the ranks that share the layers
    owners: tuple[int, ...] = ()  # rank by layer; empty: all layers are local
    width: int = 0  # of the hidden states

    def has(self, layer: int) -> bool:
        """Tell whether a layer is local."""
        return not self.owners or self.owners[layer] == self.group.rank

    def owner(self, layer: int) -> int:
        return self.owners[layer] if self.owners else 0

    def local_layouts(self, layouts: Sequence[Layout]) -> list[Layout]:
        """Return the layouts of all layers, those of remote layers empty."""
        return [layout if self.has(layer) else NO_PARAMETERS for layer, layout in enumerate(layouts)]

    @property
    def layers_by_rank(self) -> dict[str, list[int]]:
        """The layers of each rank, by its name; empty for a single rank."""
        layers = {name: list[int]() for name in self.group.names} if self.group.size > 1 else {}
        for layer, owner in enumerate(self.owners if layers else ()):
            layers[self.group.names[owner]].append(layer)
        return layers

    @property
    def links(self) -> list[Link]:
        """Every pair of ranks that exchanges activations."""
        ways = (self.owners, 0), (self.owners[::-1], 1)
        return sorted({(a, b, down) for owners, down in ways for a, b in pairwise(owners) if a != b})


def assign_layers(layouts: Sequence[Layout], size: int) -> list[int]:
    """Return the owner rank of each layer.

    Blocks alternate between the ranks, so that all compute at once. Embedding and head go to the ranks with the fewest
    blocks; a head with tied parameters stays with the embedding.
    """
    top = len(layouts) - 1
    blocks = [block % size for block in range(top - 1)]
    counts = [blocks.count(rank) for rank in range(size)]
    if layouts[top].tied:
        both = counts.index(min(counts))
        return [both, *blocks, both]
    # Last block and head on different ranks: on one, nobody else would compute between forward and backward.
    head = min(range(size), key=lambda rank: (counts[rank], rank == blocks[-1]))
    embedding = min(range(size), key=lambda rank: (counts[rank], -rank))
    return [embedding, *blocks, head]


class PipelineChannel(Channel):
    """Send activations of one pass to the rank of the next layer, and receive those of the layer before.

    Receives are posted one local layer ahead, so that transfers overlap with computation. A sent tensor is kept until
    as many later ones were sent as the pass has micro-batches. By then the other rank has received it: the same
    micro-batch must have come round to the next local layer.

    Args:
        layers: layers of the pass, in order.
        num_tokens: tokens of each micro-batch.
        dtype: type of the activations.
        device: computing device.
    """

    def __init__(
        self,
        partition: Partition,
        layers: Sequence[int],
        num_tokens: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._partition, self._group = partition, partition.group
        self._num_tokens, self._dtype, self._device = num_tokens, dtype, device
        self._wire = self._group.wire(device)
        self._source = dict(zip(layers[1:], layers, strict=False))  # the layer before each
        self._target = dict(pairwise(layers))
        local = [layer for layer in layers if partition.has(layer)]
        self._next_local = dict(pairwise(local))
        self._posted = set[int]()  # layers whose receives were started
        self._receiving: dict[int, list[tuple[Tensor, PendingTransfer]]] = {}
        self._sending = deque[PendingTransfer]()
        if local:
            self._post(local[0])
        if local and local[0] == layers[0]:  # the first layer of the pass receives nothing
            self._post_next(local[0])

    def inputs(self, layer: int, local: list[Tensor]) -> Iterator[Tensor]:
        self._post_next(layer)
        if layer not in self._receiving:
            yield from super().inputs(layer, local)
            return
        receiving = self._receiving.pop(layer)
        receiving.reverse()  # pop() frees each tensor after its last use
        while receiving:
            values, transfer = receiving.pop()
            transfer.wait()
            yield values.to(self._device)

    def send(self, layer: int, output: Tensor) -> bool:
        target = self._target.get(layer)
        if target is None or self._partition.has(target):
            return False
        if len(self._sending) == len(self._num_tokens):
            # gloo reports the end of a transfer only to wait(). On a device, the memory may be reused only after it.
            self._sending.popleft().wait()
        values = output.detach().to(self._wire).contiguous()
        self._sending.append(self._group.send(self._partition.owners[target], values, self._tag(target)))
        return True

    def close(self) -> None:
        for transfer in self._sending:
            transfer.wait()
        self._sending.clear()

    def _tag(self, layer: int) -> int:
        # Backward posts receives while forward still sends: the lowest bit keeps the directions apart.
        return 2 * layer + (self._source[layer] > layer)

    def _post_next(self, layer: int) -> None:
        if layer in self._next_local:
            self._post(self._next_local[layer])

    def _post(self, layer: int) -> None:
        """Start the receives of a layer's inputs if the layer before is remote."""
        source = self._source.get(layer)
        if source is None or self._partition.has(source) or layer in self._posted:
            return
        self._posted.add(layer)
        self._receiving[layer] = receiving = []
        for tokens in self._num_tokens:
            values = torch.empty(tokens, self._partition.width, dtype=self._dtype, device=self._wire)
            transfer = self._group.recv(self._partition.owners[source], values, self._tag(layer))
            receiving.append((values, transfer))
