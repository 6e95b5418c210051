"""Keep the inputs of layers from forward, which computes them, to backward, which recomputes from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from gptj_ft.models.layout import FLAT_ALIGNMENT, PARAMETER_ALIGNMENT, Kind, Layout
from gptj_ft.streaming.buffers import Buffer, BufferPool
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.transfers import TransferMeter
from gptj_ft.system.accelerator import current_stream, record_event, wait_for
from gptj_ft.system.memory import allocate

BOUNDARY: Kind = "boundary"
NUM_BUFFERS = 3  # on the device: one in use, one on its way here, one on its way out


class Activations(Protocol):
    """Keeps the inputs of the layers of one step."""

    def begin(self) -> None:
        """Drop what an interrupted step may have left."""

    def put(self, layer: int, inputs: list[Tensor]) -> None:
        """Keep a layer's inputs, one per micro-batch."""

    def take(self, layer: int) -> list[Tensor]:
        """Return a layer's inputs, and forget them; they are valid until the next are taken."""

    def close(self) -> None:
        """Give the memory back."""


class DeviceActivations:
    """Keeps them on the device.

    In memory of their own on a CPU: tensors that outlive a whole pass, strewn between those that live for a moment,
    leave holes in the heap that nothing else fits into (measured: 0.6 of 6.6 GB with GPT-J 6B).
    """

    def __init__(self) -> None:
        self._inputs: dict[int, list[Tensor]] = {}

    def begin(self) -> None:
        self._inputs.clear()

    def put(self, layer: int, inputs: list[Tensor]) -> None:
        self._inputs[layer] = [_apart(x) if x.is_floating_point() else x for x in inputs]

    def take(self, layer: int) -> list[Tensor]:
        return self._inputs.pop(layer)

    def close(self) -> None:
        self._inputs.clear()


def boundary_layout(tokens: int, width: int, num_micro_batches: int) -> Layout:
    """Return the layout of a layer's inputs in a store, [tokens, width] in all."""
    numel = tokens * width + num_micro_batches * PARAMETER_ALIGNMENT
    return Layout({}, {}, 0, -(-numel // FLAT_ALIGNMENT) * FLAT_ALIGNMENT)


@dataclass(frozen=True)
class SavedInputs:
    """A layer's inputs in the store: their shapes, how many elements were written, what they are called in a buffer."""

    shapes: list[torch.Size]
    numel: int
    content: tuple[int, int]


class OffloadedActivations:
    """Keep layer inputs in a store; on the device are those of `NUM_BUFFERS` layers, and the token ids.

    Args:
        store: store with the kind ``boundary`` of each layer.
        numel: elements that the store has for a layer.
        chunk_numel: elements that are moved at once, or a multiple of it.
        dtype: data type of the computation.
        device: device of the computation.
        meter: counter of the transfers.
    """

    def __init__(
        self,
        store: LayerStore,
        numel: int,
        chunk_numel: int,
        dtype: torch.dtype,
        device: torch.device,
        meter: TransferMeter,
    ) -> None:
        self._store, self._numel, self._chunk_numel, self._meter = store, numel, chunk_numel, meter
        self._device = device
        self._buffers = BufferPool(NUM_BUFFERS, numel, dtype, device)
        self._tokens: dict[int, list[Tensor]] = {}
        self._entries: dict[int, SavedInputs] = {}
        self._coming: dict[int, Buffer] = {}
        self._used: Buffer | None = None
        self._count = 0  # of boundaries put away, so that no two are called the same

    def begin(self) -> None:
        self._buffers.cancel()
        self._tokens.clear()
        self._entries.clear()
        self._coming.clear()
        self._used = None

    def put(self, layer: int, inputs: list[Tensor]) -> None:
        if not inputs[0].is_floating_point():
            self._tokens[layer] = inputs
            return
        self._count += 1
        part, used = self._chunk_numel, sum(_room(x.shape) for x in inputs)
        entry = SavedInputs([x.shape for x in inputs], min(-(-used // part) * part, self._numel), (layer, self._count))
        buffer, _ = self._buffers.acquire(entry.content)
        self._wait(buffer)
        for view, x in zip(_views(buffer.tensor, entry.shapes), inputs, strict=True):
            view.copy_(x)
        values = buffer.tensor[: entry.numel]
        buffer.transfers.append(self._store.write(Span(BOUNDARY, layer, 0, record_event(self._device)), values))
        self._store.commit(layer, self._count)
        self._meter.bytes_written += values.nbytes
        buffer.release()
        self._entries[layer] = entry

    def take(self, layer: int) -> list[Tensor]:
        if layer in self._tokens:
            return self._tokens.pop(layer)
        if self._used is not None:
            self._used.release()
        entry = self._entries.pop(layer)
        self._used = buffer = self._coming.pop(layer, None) or self._fetch(layer, entry)
        if self._entries:
            below = max(self._entries)
            self._coming[below] = self._fetch(below, self._entries[below])
        self._wait(buffer)
        return _views(buffer.tensor, entry.shapes)

    def close(self) -> None:
        self.begin()
        self._store.close()

    def _fetch(self, layer: int, entry: SavedInputs) -> Buffer:
        buffer, is_here = self._buffers.acquire(entry.content)
        if not is_here:
            values = buffer.tensor[: entry.numel]
            buffer.transfers.append(self._store.read(Span(BOUNDARY, layer, 0, tuple(buffer.transfers)), values))
            self._meter.bytes_read += values.nbytes
        return buffer

    def _wait(self, buffer: Buffer) -> None:
        with self._meter.waiting():
            wait_for(buffer.transfers, current_stream(self._device))


def _apart(x: Tensor) -> Tensor:
    """Return a tensor in memory of its own, which goes back to the system when it is not needed any more."""
    return allocate(x.numel(), x.dtype, x.device).view(x.shape).copy_(x) if x.device.type == "cpu" else x


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return tensors that lie in a flat one, one after the other, aligned as tensors of their own are."""
    starts = [0, *accumulate(map(_room, shapes))]
    return [flat[start : start + shape.numel()].view(shape) for start, shape in zip(starts, shapes, strict=False)]


def _room(shape: torch.Size) -> int:
    return -(-shape.numel() // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
