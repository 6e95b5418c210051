"""Save the inputs of layers in forward, for the recomputation in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from gptj_ft.models.layout import FLAT_ALIGNMENT, PARAMETER_ALIGNMENT, Kind, Layout
from gptj_ft.streaming.buffers import Buffer, BufferPool, PoolShape
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.transfers import TransferMeter
from gptj_ft.system.accelerator import current_stream, record_event, wait_for
from gptj_ft.system.memory import allocate

BOUNDARY: Kind = "boundary"
NUM_BUFFERS = 3  # on the device: one in use, one being read, one being written


class Activations(Protocol):
    """Interface of a store for the layer inputs of one step."""

    def begin(self) -> None:
        """Discard the inputs of an interrupted step."""

    def put(self, layer: int, inputs: list[Tensor]) -> None:
        """Save a layer's inputs, one per micro-batch."""

    def take(self, layer: int) -> list[Tensor]:
        """Return a layer's inputs and discard them; they are valid until the next call."""

    def close(self) -> None:
        """Free the memory."""


class DeviceActivations:
    """Layer inputs that stay on the device."""

    def __init__(self) -> None:
        self._inputs: dict[int, list[Tensor]] = {}

    def begin(self) -> None:
        self._inputs.clear()

    def put(self, layer: int, inputs: list[Tensor]) -> None:
        self._inputs[layer] = [_outside_heap(x) if x.is_floating_point() else x for x in inputs]

    def take(self, layer: int) -> list[Tensor]:
        return self._inputs.pop(layer)

    def close(self) -> None:
        self._inputs.clear()


def boundary_layout(tokens: int, width: int, num_micro_batches: int) -> Layout:
    """Return the layout of a layer's inputs in a store: [tokens, width] over all micro-batches."""
    numel = tokens * width + num_micro_batches * PARAMETER_ALIGNMENT
    return Layout({}, {}, 0, -(-numel // FLAT_ALIGNMENT) * FLAT_ALIGNMENT)


@dataclass(frozen=True)
class SavedInputs:
    """A layer's inputs in the store."""

    shapes: list[torch.Size]
    numel: int  # elements written
    key: tuple[int, int]  # name of the content in a buffer


class OffloadedActivations:
    """Layer inputs in a store off the device, with buffers for `NUM_BUFFERS` layers on it.

    Args:
        store: store of the kind ``boundary``.
        numel: elements of a layer's inputs in the store.
        chunk_numel: elements of a transfer; larger transfers are a multiple of it.
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
        self._buffers = BufferPool(PoolShape(NUM_BUFFERS, numel, dtype), device)
        self._tokens: dict[int, list[Tensor]] = {}
        self._entries: dict[int, SavedInputs] = {}
        self._prefetched: dict[int, Buffer] = {}
        self._used: Buffer | None = None  # buffer of the last `take`
        self._count = 0  # of `put`, for unique keys

    def begin(self) -> None:
        self._buffers.cancel()
        self._tokens.clear()
        self._entries.clear()
        self._prefetched.clear()
        self._used = None

    def put(self, layer: int, inputs: list[Tensor]) -> None:
        if not inputs[0].is_floating_point():
            # Token ids, the embedding's input, are small: they stay where they are.
            self._tokens[layer] = inputs
            return
        self._count += 1
        part, used = self._chunk_numel, sum(_room(x.shape) for x in inputs)
        # Whole chunks: direct I/O and digests work on chunks. The rest of the last one is written along.
        # The count tells apart the same layer's inputs of successive steps, which a buffer may still contain.
        entry = SavedInputs([x.shape for x in inputs], min(-(-used // part) * part, self._numel), (layer, self._count))
        buffer, _ = self._buffers.acquire(entry.key)
        # The buffer's previous content may still be on its way to the store.
        self._wait(buffer)
        for view, x in zip(_views(buffer.tensor, entry.shapes), inputs, strict=True):
            view.copy_(x)
        values = buffer.tensor[: entry.numel]
        buffer.transfers.append(self._store.write(Span(BOUNDARY, layer, 0, record_event(self._device)), values))
        # Reads see committed content only; this store's step number has no meaning.
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
        self._used = buffer = self._prefetched.pop(layer, None) or self._fetch(layer, entry)
        if self._entries:  # prefetch the next layer of backward
            below = max(self._entries)
            self._prefetched[below] = self._fetch(below, self._entries[below])
        self._wait(buffer)
        return _views(buffer.tensor, entry.shapes)

    def close(self) -> None:
        self.begin()
        self._store.close()

    def _fetch(self, layer: int, entry: SavedInputs) -> Buffer:
        buffer, is_cached = self._buffers.acquire(entry.key)
        if not is_cached:
            values = buffer.tensor[: entry.numel]
            buffer.transfers.append(self._store.read(Span(BOUNDARY, layer, 0, tuple(buffer.transfers)), values))
            self._meter.bytes_read += values.nbytes
        return buffer

    def _wait(self, buffer: Buffer) -> None:
        with self._meter.waiting():
            wait_for(buffer.transfers, current_stream(self._device))


def _outside_heap(x: Tensor) -> Tensor:
    """On a CPU, copy a tensor out of the heap, into memory that returns to the system when the tensor is freed."""
    # Boundaries outlive the whole pass. Between short-lived tensors they would leave holes in the heap that fit nothing
    # else (measured: 0.6 of 6.6 GB with GPT-J 6B).
    return allocate(x.numel(), x.dtype, x.device).view(x.shape).copy_(x) if x.device.type == "cpu" else x


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return consecutive tensors in a flat one, aligned as separate tensors are."""
    starts = [0, *accumulate(map(_room, shapes))]
    return [flat[start : start + shape.numel()].view(shape) for start, shape in zip(starts, shapes, strict=False)]


def _room(shape: torch.Size) -> int:
    return -(-shape.numel() // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
