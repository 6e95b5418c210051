"""Keep the autograd graphs of a layer from forward to backward instead of recomputing them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gptj_ft.models.batch import PackedBatch, Poll
from gptj_ft.streaming.exchange import Channel
from gptj_ft.streaming.loaded_layer import LoadedLayer


class SavedView(NamedTuple):
    """A view into one of a layer's flat weight tensors."""

    tensor: int  # index of the flat tensor
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class KeptActivations:
    """The autograd graphs of one layer, one per micro-batch.

    Between forward and backward the prefetcher may evict the layer's weights from their slot, and load them into
    another one later. So the graphs save each weight as a `SavedView` and look it up in the current slot.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._weights: tuple[Tensor, ...] = ()
        self._indices: dict[int, int] = {}  # index in _weights by storage address

    def run(
        self, layer: LoadedLayer, inputs: Iterable[Tensor], batches: Sequence[PackedBatch], poll: Poll, up: Channel
    ) -> list[Tensor]:
        """Run the layer on every micro-batch; return the detached outputs that stay local."""
        self.bind(layer)
        self.parameters = layer.leaf_parameters()
        local = []
        with layer.saving_views(self._pack, self._unpack):
            for values, batch in zip(inputs, batches, strict=True):
                x = values.detach().requires_grad_(layer.task.needs_input_gradient)
                self.inputs.append(x)
                poll()
                self.outputs.append(layer.run(self.parameters, x, batch, poll))
                if not up.send(layer.index, self.outputs[-1]):
                    local.append(self.outputs[-1].detach())
        return local

    def bind(self, layer: LoadedLayer) -> None:
        """Point the graphs at the slot that the layer's weights are in now."""
        self._weights = layer.weights.frozen, *((layer.weights.trained,) if layer.layout.numel else ())
        # Autograd saves views of the weights. They share the storage of the flat tensor: its address identifies them.
        addresses = [flat.untyped_storage().data_ptr() for flat in self._weights]
        self._indices = {address: i for i, address in enumerate(addresses) if self._weights[i].numel()}

    def take(self, b: int) -> tuple[Tensor, Tensor]:
        """Return input and output of a micro-batch; drop the references, so that backward frees its graph."""
        x, output = self.inputs[b], self.outputs[b]
        # Lists keep their length: the next micro-batches have the same indices.
        self.inputs[b] = self.outputs[b] = torch.empty(0)
        return x, output

    def _pack(self, saved: Tensor) -> Tensor | SavedView:
        index = self._indices.get(saved.untyped_storage().data_ptr())
        if index is None:  # an activation
            return saved
        offset = int(saved.storage_offset() - self._weights[index].storage_offset())
        return SavedView(index, offset, saved.shape, saved.stride())

    def _unpack(self, packed: Tensor | SavedView) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        flat = self._weights[packed.tensor]
        return flat.as_strided(packed.shape, packed.stride, flat.storage_offset() + packed.offset)
