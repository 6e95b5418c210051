"""A model whose layers live in stores, and the buffers on the device that they pass through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from gptj_ft.models.embedding import Embedding, EmbeddingRows
from gptj_ft.models.functional import FunctionalLayer
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Kind, Layout
from gptj_ft.streaming.activations import Activations, DeviceActivations
from gptj_ft.streaming.buffers import BufferPool
from gptj_ft.streaming.stores.base import CHUNK_NUMEL, LayerStore, chunks
from gptj_ft.system.cuda import StallTimer, Transfer, record_event

PASS_TOKENS = 32768  # of hidden states held at once when only a loss is wanted, at most


@dataclass(frozen=True)
class BufferBudget:
    """Limit how much of a model is on the device at once.

    Attributes:
        read_ahead: layers whose weights are prefetched.
        num_gradients: gradient buffers; with two, one is written out while the other is summed. The source of tied
            parameters has one of its own beside them.
        num_chunks: chunk buffers of each kind that only an update needs.
        chunk_numel: elements of a chunk.
        num_kept_layers: blocks, the last ones, whose activations are kept for backward instead of recomputed.
        pass_tokens: tokens whose hidden states share a pass over the weights when only a loss is computed.
    """

    read_ahead: int = 1
    num_gradients: int = 2
    num_chunks: int = 24
    chunk_numel: int = CHUNK_NUMEL
    num_kept_layers: int = 0
    pass_tokens: int = PASS_TOKENS


class Advances(Protocol):
    """A layer on its way to the device."""

    def advance(self) -> bool:
        """Take a step if that is possible without waiting; tell whether nothing is left to ask the stores for."""


@dataclass
class OffloadedModel:
    """A model whose layers live in stores.

    Attributes:
        layers: the layers on the ``meta`` device: ``Embed``, the blocks, ``Head``.
        dtypes: the kinds that exist and their types; ``weight`` is of the type of the computation.
        stores: where each kind lives; a kind without a store exists in buffers only.
        device: where the computation runs.
        room: how much of it may be there.
        layouts: what of each layer is trained, and has state; by default all of it.
        frozen: what of each layer is not.
        bytes_read, bytes_written: between the stores and the device, so far.
    """

    layers: Sequence[nn.Module]
    dtypes: Mapping[Kind, torch.dtype]
    stores: Mapping[Kind, LayerStore]
    device: torch.device
    budget: BufferBudget = BufferBudget()
    layouts: Sequence[Layout] = ()
    frozen: Sequence[Layout] = ()
    bytes_read: int = field(default=0, init=False)
    bytes_written: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.layouts = self.layouts or [Layout.of(layer) for layer in self.layers]
        self.frozen = self.frozen or [Layout.of(layer, ()) for layer in self.layers]
        self._waited_seconds = 0.0
        on_cuda = self.device.type == "cuda"
        self._stall_timer = StallTimer(self.device) if on_cuda else None
        self._update_stream = torch.cuda.Stream(self.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self.boundaries: Activations = DeviceActivations()
        """The inputs of the layers, between forward and backward."""
        self.loading: Iterable[Advances] = ()
        self._slots: BufferPool | None = None
        self._frozen_slots: BufferPool | None = None
        self._gradients: dict[bool, BufferPool] = {}  # by whether they are of the layer that lends
        self._pools: dict[Kind, BufferPool] = {}
        self._views: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        self.functional_layers = [FunctionalLayer(layer) for layer in self.layers]
        self._tables = [_tables_of(layer) for layer in self.layers]
        for layer in self.layers:
            layer.eval()  # dropout is for those who ask for it
            # What is only read comes whole: in between there is nothing to do for it.
            for module in layer.modules() if set(self.dtypes) > {"weight"} else ():
                module.register_forward_pre_hook(lambda *_: self.poll())

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The layers that have something to train."""
        return tuple(index for index, layout in enumerate(self.layouts) if layout.numel)

    @property
    def lowest_trained(self) -> int:
        """The layer at which backward ends; one above the head if nothing is trained."""
        return min(self.trained, default=len(self.layers))

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.dtypes["weight"]

    @property
    def parameter(self) -> Kind:
        """The kind that holds the parameters in fp32: ``master``, or the weights themselves where there is none."""
        return "master" if "master" in self.dtypes else "weight"

    @property
    def waited_seconds(self) -> float:
        """Time that the computation has stood still for the stores, so far."""
        return self._stall_timer.seconds if self._stall_timer else self._waited_seconds

    @property
    def slots(self) -> BufferPool:
        """The buffers for the weights of whole layers: one more than are read ahead, each as large as the largest."""
        if self._slots is None:
            self._slots = BufferPool(
                self.budget.read_ahead + 1, slot_numel(self.layouts), self.compute_dtype, self.device
            )
        return self._slots

    @property
    def frozen_slots(self) -> BufferPool:
        """Likewise for the weights that are not trained."""
        if self._frozen_slots is None:
            largest = max(layout.numel for layout in self.frozen)
            self._frozen_slots = BufferPool(self.budget.read_ahead + 1, largest, self.compute_dtype, self.device)
        return self._frozen_slots

    def take_slots(self) -> None:
        """Take the memory of the slots that will be needed now, not at their first use."""
        streamed = {kind for kind, store in self.stores.items() if not store.resident}
        _ = self.slots if "weight" in streamed else None
        _ = self.frozen_slots if "frozen" in streamed else None

    def frozen_views(self, layer: int, flat: Tensor) -> Mapping[str, Tensor]:
        """Return a layer's frozen parameters as views of where they are; kept, for they come back to the same place."""
        key = layer, flat.data_ptr()
        if key not in self._views:
            self._views[key] = self.frozen[layer].views(flat)
        return self._views[key]

    def tables(self, layer: int) -> Mapping[str, str]:
        """Return a layer's parameters, and what of a batch tells the rows of each, if rows are all that has to come."""
        store = self.stores.get("frozen")
        return {} if store is None or store.resident or self.layouts[layer].shapes else self._tables[layer]

    def gather_rows(self, layer: int, name: str, indices: Tensor) -> EmbeddingRows:
        """Return the rows of a table that some numbers tell.

        Raises:
            IndexError: it has none such.
        """
        rows, (num_rows, width) = indices.unique(), self.frozen[layer].shapes[name]  # type: ignore[no-untyped-call]
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < num_rows:
            raise IndexError(f"{name} has rows 0 to {num_rows - 1}, asked for were {int(rows[0])} to {int(rows[-1])}")
        values = torch.empty(len(rows), width, dtype=self.compute_dtype, device=self.device)
        self.bytes_read += values.nbytes
        self.stores["frozen"].read_rows("frozen", layer, name, rows.tolist(), values)
        return EmbeddingRows(rows, values)

    def is_tied_source(self, layer: int) -> bool:
        """Tell whether another layer computes with parameters of this one that are trained."""
        return layer == TIED_SOURCE_LAYER and any(layout.tied for layout in self.layouts)

    def sources(self, layer: int) -> set[int]:
        """Return the layers whose trained weights a layer computes with: itself, and what it borrows from."""
        return {layer, TIED_SOURCE_LAYER} if self.layouts[layer].tied else {layer}

    def gradients(self, layer: int) -> BufferPool:
        """Return the buffers that a layer's gradient is summed in, fp32: one leaves while the other is filled.

        A layer that lends has one to itself: who borrows from it begins its gradient, long before backward gets there.
        """
        is_tied_source = self.is_tied_source(layer)
        if is_tied_source not in self._gradients:
            count, numel = (
                (1, self.layouts[layer].numel)
                if is_tied_source
                else (self.budget.num_gradients, sum_numel(self.layouts))
            )
            self._gradients[is_tied_source] = BufferPool(count, numel, torch.float32, self.device)
        return self._gradients[is_tied_source]

    def pool(self, kind: Kind) -> BufferPool:
        """Return the buffers for parts of a kind."""
        if kind not in self._pools:
            numel = min(self.budget.chunk_numel, self._largest)
            self._pools[kind] = BufferPool(self.budget.num_chunks, numel, self.dtypes[kind], self.device)
        return self._pools[kind]

    def fetch(self, kind: Kind, layer: int, out: Tensor, start: int, after: Sequence[Transfer] = ()) -> Future[Tensor]:
        """Ask a kind's store for elements."""
        self.bytes_read += out.nbytes
        return self.stores[kind].read(kind, layer, out, start, tuple(after))

    def send(self, kind: Kind, layer: int, values: Tensor, start: int) -> Future[None]:
        """Give elements to a kind's store, as the current stream leaves them."""
        self.bytes_written += values.nbytes
        return self.stores[kind].write(kind, layer, values, start, record_event(self.device))

    def poll(self) -> None:
        """Let the layers that are on their way come nearer; called between the operations of a layer."""
        for load in self.loading:
            if not load.advance():
                break  # a later layer must not take the room that this one needs

    def read_chunks(self, kind: Kind, layer: int) -> Iterator[tuple[int, Tensor]]:
        """Yield a layer's tensor part by part, with the first element's number; valid until the next is asked for."""
        numel, store = self.layouts[layer].numel, self.stores[kind]
        whole = store.read(kind, layer, None).result() if store.resident else None
        for span in chunks(numel, self.budget.chunk_numel):
            if whole is not None:
                yield span.start, whole[span]
                continue
            buffer, _ = self.pool(kind).acquire(None)
            values = buffer.tensor[: span.stop - span.start]
            buffer.transfers.append(self.fetch(kind, layer, values, span.start, buffer.transfers))
            yield span.start, buffer.transfers[-1].result()
            buffer.release()

    def write_chunks(self, kind: Kind, layer: int, fill: Callable[[int, Tensor], object]) -> None:
        """Replace a layer's tensor part by part: ``fill(start, part)`` puts in the new values."""
        numel, store = self.layouts[layer].numel, self.stores[kind]
        whole = store.read(kind, layer, None).result() if store.resident else None
        for span in chunks(numel, self.budget.chunk_numel):
            if whole is not None:
                fill(span.start, whole[span])
                continue
            buffer, _ = self.pool(kind).acquire(None)
            for transfer in buffer.transfers:
                transfer.result()
            values = buffer.tensor[: span.stop - span.start]
            fill(span.start, values)
            buffer.transfers.append(self.send(kind, layer, values, span.start))
            buffer.release()

    def release_chunk_pools(self) -> None:
        """Give back the buffers for parts, of kinds, perhaps, that no update needs. Nothing may be on its way."""
        self._pools.clear()

    def commit(self, kinds: Sequence[Kind], layer: int, step: int) -> None:
        """Everything of these kinds has been written: it is the layer's state after ``step``."""
        for store in {id(self.stores[kind]): self.stores[kind] for kind in kinds}.values():
            store.commit(layer, step)

    def unique_stores(self) -> list[LayerStore]:
        """Return each store once."""
        return list({id(store): store for store in self.stores.values()}.values())

    def drain(self) -> None:
        """Wait until every store holds what was written to it."""
        with self.waiting():
            for store in self.unique_stores():
                store.drain()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent inside as waiting for the stores."""
        start = time.perf_counter()
        try:
            with self._stall_timer.waiting() if self._stall_timer else nullcontext():
                yield
        finally:
            self._waited_seconds += time.perf_counter() - start

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Run updates beside the computation, where the device can: memory bounds them, products bound the layers."""
        with torch.cuda.stream(self._update_stream) if self._update_stream else nullcontext():
            yield

    def cancel(self) -> None:
        """Forget the layers on their way: nobody waits for them any more."""
        self.loading = ()
        for buffers in (self._slots, self._frozen_slots, *self._gradients.values(), *self._pools.values()):
            if buffers is not None:
                buffers.cancel()

    def close(self) -> None:
        """Stop the stores and give their memory and the buffers back."""
        for store in self.unique_stores():
            store.close()
        self.boundaries.close()
        self.loading = ()
        self._slots = self._frozen_slots = None
        self._gradients.clear()
        self._pools.clear()
        self._views.clear()

    @property
    def _largest(self) -> int:
        return max(layout.numel for layout in self.layouts)


def _tables_of(layer: nn.Module) -> dict[str, str]:
    """Return what tells the rows of each parameter of a layer that has nothing but embeddings; else nothing."""
    tables: dict[str, str] = {
        f"{path}.weight": module.index for path, module in layer.named_modules() if isinstance(module, Embedding)
    }
    return tables if tables.keys() == dict(layer.named_parameters()).keys() else {}


def slot_numel(layouts: Sequence[Layout]) -> int:
    """Return the elements of a slot that any layer fits into, with the layer that it borrows from, if it does."""
    return max(layout.numel + (layouts[TIED_SOURCE_LAYER].numel if layout.tied else 0) for layout in layouts)


def sum_numel(layouts: Sequence[Layout]) -> int:
    """Return the elements of a buffer in which the gradient of any layer can be summed that does not lend."""
    is_tied_source = any(layout.tied for layout in layouts)
    return max(
        layout.numel for layer, layout in enumerate(layouts) if not (is_tied_source and layer == TIED_SOURCE_LAYER)
    )
