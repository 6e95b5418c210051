"""Pump a layer's optimizer state through chunk buffers: read, update, write back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind
from gptj_ft.streaming.buffers import Lease
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.schedule import LayerTask
from gptj_ft.streaming.stores.base import Span, chunks
from gptj_ft.streaming.stores.state_file import ChunkDigest
from gptj_ft.system.accelerator import StreamEvent, Transfer, on_stream, record_event

if TYPE_CHECKING:
    from gptj_ft.streaming.loaded_layer import LayerGradient, WeightSlot

Updated = Callable[[Kind, Tensor], None]
"""Callback with the new values of some elements of a kind, in order."""


class Updater(Protocol):
    """Interface of an optimizer: update chunks of layers while they are on the device."""

    def apply(self, task: LayerTask, span: slice, tensors: Mapping[Kind, Tensor], updated: Updated) -> None:
        """Update the elements of a span in place, block by block.

        Args:
            tensors: these elements of every kind, and of the gradient.
            updated: called with each block's new values while they are in a processor's cache.
        """

    def applied(self, task: LayerTask) -> None:
        """Note that every element of the layer is updated, and written to the stores if the task writes."""


@dataclass
class Chunk:
    """Elements of a layer on their way through an update."""

    span: slice
    leases: dict[Kind, Lease]
    reads: list[Transfer]


class UpdatePump:
    """Update one layer.

    The trained weights are in the layer's slot as a whole. Moments, master weights and the stored gradient come in
    chunks, as fast as the pools have free buffers, and leave right after their update.
    """

    def __init__(
        self, model: OffloadedModel, task: LayerTask, weights: WeightSlot, gradient: LayerGradient, updater: Updater
    ) -> None:
        self._model, self._task, self._weights, self._gradient = model, task, weights, gradient
        self._updater = updater
        # Work that the update must follow, apart from its reads. None: the gradient is not complete yet.
        self._after: list[Transfer] | None = [] if task.updates else None
        self._chunked: list[Kind] = []  # kinds that come in chunks
        self._spans: deque[slice] = deque()  # not requested yet
        self._chunks: deque[Chunk] = deque()  # requested
        self._last_update: list[StreamEvent] = []
        self.has_begun = False  # at least one chunk has been updated, and the layer is not complete
        self.is_broken = False  # an error came in the middle of a chunk, whose values are unknown now

    @property
    def is_started(self) -> bool:
        """Whether the gradient is complete, so that chunks are updated as they arrive."""
        return self._after is not None

    @property
    def is_done(self) -> bool:
        """Whether every chunk's update has been issued to the device."""
        return not self._spans and not self._chunks

    def request(self) -> None:
        """List the chunks; `advance` requests them."""
        # A stored gradient comes in chunks, unless its buffer still has it. That of this visit is on the device.
        reads_gradient = self._task.updates and not self._gradient.lease
        self._chunked = [kind for kind in self._model.updated_kinds if kind != "weight"]
        self._chunked += ["grad"] if reads_gradient else []
        spans = chunks(self._model.layouts[self._task.layer].numel, self._model.budget.update_numel)
        self._spans.extend(reversed(spans) if self._task.descends else spans)

    def start(self, after: Sequence[Transfer]) -> None:
        """Start to update with the gradient of this visit, after the given work."""
        self._after = [*after]
        self.advance()

    def advance(self, wait: bool = False) -> bool:
        """Update the chunks that have arrived, or with ``wait`` all; return False if chunks wait for free buffers."""
        if wait:
            self._model.meter.wait(self._weights.reads, self._model.compute_stream)
        while True:
            while self._spans and self._has_free(self._spans[0]):
                self._chunks.append(self._request_chunk(self._spans.popleft()))
            if self._after is None or not self._chunks:
                return not self._spans
            if not (wait or all(read.done() for read in self._chunks[0].reads)):
                return not self._spans
            # On its own stream: memory bandwidth limits updates, and products limit the layers. They overlap well.
            with on_stream(self._model.update_stream), torch.no_grad():
                self._update(self._chunks.popleft())

    def finish(self) -> None:
        """Wait until the whole layer is updated."""
        self.advance(wait=True)
        assert not self._spans, "internal error: a later layer has taken the chunk buffers"
        self._model.meter.wait(self._last_update, self._model.compute_stream)
        self._updater.applied(self._task)
        self.has_begun = False
        self._weights.label(self._task.new_version)

    def _key(self, kind: Kind, span: slice) -> Hashable:
        """Name the content of a chunk buffer. A stored gradient belongs to the step that the update leads to."""
        version = self._task.new_version if kind == "grad" else self._task.version
        return None if version is None else (self._task.layer, span.start, version)

    def _has_free(self, span: slice) -> bool:
        pools, layer = self._model.pools, self._task.layer
        return all(pools.has_free_chunk(kind, layer, self._key(kind, span)) for kind in self._chunked)

    def _request_chunk(self, span: slice) -> Chunk:
        model, layer, weights = self._model, self._task.layer, self._weights
        # The update overwrites the slot: its previous content must have been written before.
        chunk = Chunk(span, {}, list(weights.earlier))
        if weights.reads_in_chunks:
            source = Span("weight", layer, span.start, weights.earlier)
            chunk.reads.append(model.transfers.read(source, weights.trained[span]))
            # After a cancelled pass, the slot is in use until this read ends.
            assert weights.lease is not None
            weights.lease.transfers.append(chunk.reads[-1])
        for kind in self._chunked:
            chunk.leases[kind] = lease = model.pools.lease_chunk(kind, layer, span, self._key(kind, span))
            model.transfers.fill(lease, kind, layer, span.start)
            chunk.reads += lease.transfers
        return chunk

    def _update(self, chunk: Chunk) -> None:
        model, task, weights = self._model, self._task, self._weights
        assert self._after is not None
        assert weights.lease is not None
        model.meter.wait([*self._after, *chunk.reads], model.update_stream)
        tensors: dict[Kind, Tensor] = {"weight": weights.trained[chunk.span]}
        if self._gradient.lease:
            tensors["grad"] = self._gradient.flat[chunk.span]
        tensors |= {kind: lease.tensor for kind, lease in chunk.leases.items()}
        self.has_begun = self.is_broken = True
        writes = model.updated_kinds if task.writes else ()
        digests = {kind: ChunkDigest() for kind in writes if model.transfers.digests_by_chunk(kind, task.layer)}

        def add(kind: Kind, block: Tensor) -> None:
            if kind in digests:
                digests[kind].add(block)

        self._updater.apply(task, chunk.span, tensors, add)
        for kind in writes:
            lease = chunk.leases.get(kind, weights.lease)
            if lease.buffer is not None:
                known = [digests[kind].of(tensors[kind])] if kind in digests else []
                lease.transfers.append(model.transfers.write(kind, task.layer, chunk.span.start, tensors[kind], known))
        version = task.new_version
        for kind, lease in chunk.leases.items():
            # An update leaves the stored gradient as it is, so the buffer keeps its name.
            if kind != "grad":
                lease.label(None if version is None else (task.layer, chunk.span.start, version))
            lease.release()
        # Updates run in order on one stream: the last event stands for all.
        self._last_update = record_event(model.device)
        self.is_broken = False
