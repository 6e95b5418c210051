"""A model whose layers live in stores, and the buffers on the device that they pass through."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gptj_ft.models.embedding import Embedding, EmbeddingRows
from gptj_ft.models.functional import FunctionalLayer
from gptj_ft.models.layout import MOMENTS, TIED_SOURCE_LAYER, Kind, Layout
from gptj_ft.streaming.activations import Activations, DeviceActivations
from gptj_ft.streaming.buffers import BufferPool, Lease
from gptj_ft.streaming.exchange import LOCAL, Exchange
from gptj_ft.streaming.stores.base import CHUNK_NUMEL, LayerStore, chunks
from gptj_ft.system.accelerator import (
    StallTimer,
    Transfer,
    current_stream,
    fresh,
    has_streams,
    new_stream,
    on_stream,
    record_event,
    wait_for,
)

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
        forward_bytes: resident memory of the process, on a CPU, above which a forward pass that keeps activations
            returns what the heap holds free; ``None``: any.
    """

    read_ahead: int = 1
    num_gradients: int = 2
    num_chunks: int = 24
    chunk_numel: int = CHUNK_NUMEL
    num_kept_layers: int = 0
    pass_tokens: int = PASS_TOKENS
    forward_bytes: int | None = None


@dataclass
class OffloadedModel:
    """A model whose layers live in stores.

    Attributes:
        layers: the layers on the ``meta`` device: ``Embed``, the blocks, ``Head``.
        dtypes: the kinds that exist and their types; ``weight`` is of the type of the computation.
        stores: store of each kind; a kind without a store exists in buffers only.
        device: device that computes.
        budget: buffer budget.
        layouts: layout of the trained parameters of each layer, which have state; default: all of them.
        frozen: layout of the frozen parameters of each layer.
        exchange: connection to other ranks; default: none. Layouts of layers that are not local are empty.
        lowest_trained: layer at which backward ends, whoever has it; one above the head if nothing is trained.
        bytes_read, bytes_written: bytes moved between the stores and the device, so far.
    """

    layers: Sequence[nn.Module]
    dtypes: Mapping[Kind, torch.dtype]
    stores: Mapping[Kind, LayerStore]
    device: torch.device
    budget: BufferBudget = BufferBudget()
    layouts: Sequence[Layout] = ()
    frozen: Sequence[Layout] = ()
    exchange: Exchange = LOCAL
    lowest_trained: int = -1
    bytes_read: int = field(default=0, init=False)
    bytes_written: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.layouts = self.layouts or [Layout.of(layer) for layer in self.layers]
        self.frozen = self.frozen or [Layout.of(layer, ()) for layer in self.layers]
        if self.lowest_trained < 0:
            self.lowest_trained = min(self.trained, default=len(self.layers))
        self._waited_seconds = 0.0
        self._stall_timer = StallTimer(self.device) if has_streams(self.device) else None
        self.compute_stream = current_stream(self.device)
        # Many short kernels, which the next layer waits for: behind its long products they would come too late.
        self.update_stream = new_stream(self.device, priority=-1)
        self.boundaries: Activations = DeviceActivations()
        """The inputs of the layers, between forward and backward."""
        self.active: object = None
        """The prefetcher that has the buffers: a new one takes them over."""
        self._pools: dict[str, BufferPool] = {}  # by the names of `pool_shapes`
        self._views: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        self.functional_layers = [FunctionalLayer(layer) for layer in self.layers]
        self._tables = [_tables_of(layer) for layer in self.layers]
        for layer in self.layers:
            layer.eval()  # dropout is for those who ask for it

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The layers that have something to train, of those that this process has."""
        return tuple(index for index, layout in enumerate(self.layouts) if layout.numel)

    @property
    def local_layers(self) -> list[int]:
        """The layers in this process."""
        return [layer for layer in range(len(self.layers)) if self.exchange.has(layer)]

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.dtypes["weight"]

    @property
    def parameter(self) -> Kind:
        """The kind that holds the parameters in fp32: ``master``, or the weights themselves where there is none."""
        return "master" if "master" in self.dtypes else "weight"

    @property
    def updated_kinds(self) -> tuple[Kind, ...]:
        """The kinds that an update changes."""
        return tuple(dict.fromkeys(("weight", self.parameter, *MOMENTS)))

    @property
    def updates_in_place(self) -> bool:
        """Whether an update changes a store's own memory."""
        return any(self.own(kind, layer) is not None for kind in self.updated_kinds for layer in self.trained[:1])

    @property
    def waited_seconds(self) -> float:
        """Time that the computation has stood still for the stores, so far."""
        return self._stall_timer.seconds if self._stall_timer else self._waited_seconds

    @property
    def slots(self) -> BufferPool:
        """The buffers for the weights of whole layers: one more than are read ahead, each as large as the largest."""
        return self._pool("weights")

    @property
    def frozen_slots(self) -> BufferPool:
        """Likewise for the weights that are not trained."""
        return self._pool("frozen")

    def take_slots(self) -> None:
        """Take the memory of the slots that will be needed now, not at their first use."""
        streamed = {kind for kind in self.stores if self.own(kind, TIED_SOURCE_LAYER) is None}
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
        is_read = "frozen" in self.stores and self.own("frozen", layer) is None
        return self._tables[layer] if is_read and not self.layouts[layer].shapes else {}

    def gather_rows(self, layer: int, name: str, indices: Tensor) -> EmbeddingRows:
        """Gather rows of an embedding table by their numbers, given on the CPU.

        Raises:
            IndexError: a number outside the table.
        """
        rows, (num_rows, width) = indices.unique(), self.frozen[layer].shapes[name]  # type: ignore[no-untyped-call]
        numbers: list[int] = rows.tolist()
        if numbers and not 0 <= numbers[0] <= numbers[-1] < num_rows:
            raise IndexError(f"{name} has rows 0 to {num_rows - 1}, asked for were {numbers[0]} to {numbers[-1]}")
        flat, zeroed = fresh(len(rows) * width, self.compute_dtype, self.device)
        values = flat.view(len(rows), width)
        self.bytes_read += values.nbytes
        self.stores["frozen"].read_rows("frozen", layer, name, numbers, values, zeroed)
        return EmbeddingRows(rows.to(self.device), values)

    def is_tied_source(self, layer: int) -> bool:
        """Tell whether another layer computes with parameters of this one that are trained."""
        return layer == TIED_SOURCE_LAYER and any(layout.tied for layout in self.layouts)

    def sources(self, layer: int) -> set[int]:
        """Return the layers whose trained weights a layer computes with: itself, and the source of tied parameters."""
        return {layer, TIED_SOURCE_LAYER} if self.layouts[layer].tied else {layer}

    def gradients(self, layer: int) -> BufferPool:
        """Return the buffers that a layer's gradient is summed in, fp32: one leaves while the other is filled.

        The source of tied parameters has one to itself: the layer that is tied to it begins its gradient, long before
        backward gets there.
        """
        return self._pool("tied gradient" if self.is_tied_source(layer) else "gradients")

    def pool(self, kind: Kind) -> BufferPool:
        """Return the buffers for chunks of a kind."""
        return self._pool(kind)

    def _pool(self, name: str) -> BufferPool:
        """Return a pool of buffers, taken at its first use."""
        if name not in self._pools:
            shape = pool_shapes(self.budget, self.layouts, self.frozen, self.dtypes)[name]
            self._pools[name] = BufferPool(*shape, self.device)
        return self._pools[name]

    def own(self, kind: Kind, layer: int) -> Tensor | None:
        """Return the memory of a store that keeps a kind on the device; ``None``: it has to be read and written."""
        return self.stores[kind].own(kind, layer)

    def lease_weights(self, layer: int, key: Hashable) -> Lease:
        """Lease memory for a layer's trained weights, with those of the source of its tied parameters behind them."""
        own = self.own("weight", layer)
        return Lease(own) if own is not None else Lease.of(self.slots, key, self.layouts[layer].numel)

    def lease_frozen(self, layer: int) -> Lease:
        """Lease memory for the weights of a layer that are not trained."""
        own = self.own("frozen", layer)
        return Lease(own) if own is not None else Lease.of(self.frozen_slots, layer, self.frozen[layer].numel)

    def lease_gradient(self, layer: int) -> Lease:
        """Lease memory in which a layer's gradient is summed, fp32."""
        if "grad" in self.stores and self.dtypes["grad"] == torch.float32:
            own = self.own("grad", layer)
            if own is not None:
                return Lease(own)
        return Lease.of(self.gradients(layer), None, self.layouts[layer].numel)

    def lease_chunk(self, kind: Kind, layer: int, span: slice, key: Hashable = None) -> Lease:
        """Lease memory for some elements of a kind that only an update needs."""
        own = self.own(kind, layer)
        return Lease(own[span]) if own is not None else Lease.of(self.pool(kind), key, span.stop - span.start)

    def has_free_chunk(self, kind: Kind, layer: int, key: Hashable) -> bool:
        """Tell whether `lease_chunk` has memory."""
        return self.own(kind, layer) is not None or self.pool(kind).has_free(key)

    def cached_gradient(self, layer: int, key: Hashable) -> Lease | None:
        """Lease a layer's gradient, of the store's type, where it is still in the buffer that it was summed in."""
        if self.own("grad", layer) is not None or not self.gradients(layer).holds(key):
            return None
        buffer, _ = self.gradients(layer).acquire(key)
        return Lease(buffer.tensor.view(self.dtypes["grad"])[: self.layouts[layer].numel], buffer)

    def fetch(self, kind: Kind, layer: int, out: Tensor, start: int, after: Sequence[Transfer] = ()) -> Future[Tensor]:
        """Ask a kind's store for elements."""
        self.bytes_read += out.nbytes
        return self.stores[kind].read(kind, layer, out, start, tuple(after))

    def fill(self, lease: Lease, kind: Kind, layer: int, start: int = 0) -> None:
        """Ask a kind's store for the elements of a lease, unless they are there."""
        if not lease.is_cached:
            lease.transfers.append(self.fetch(kind, layer, lease.tensor, start, lease.transfers))

    def digests_by_chunk(self, kind: Kind) -> bool:
        """Tell whether a kind's store takes the digest of each chunk from who has it in a processor's cache."""
        return self.device.type == "cpu" and self.stores[kind].digest_numel == self.budget.chunk_numel

    def send(self, kind: Kind, layer: int, values: Tensor, start: int, digests: Sequence[str] = ()) -> Future[None]:
        """Give elements to a kind's store, as the current stream leaves them."""
        self.bytes_written += values.nbytes
        return self.stores[kind].write(kind, layer, values, start, record_event(self.device), digests)

    def keep(
        self, lease: Lease, kind: Kind, layer: int, start: int = 0, values: Tensor | None = None,
        digests: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Give the elements of a lease, or values in its memory, to a kind's store, unless they are its own."""
        if lease.buffer is not None:
            lease.transfers.append(self.send(kind, layer, lease.tensor if values is None else values, start, digests))

    def read_chunks(self, kind: Kind, layer: int) -> Iterator[tuple[int, Tensor]]:
        """Yield a layer's tensor in chunks, with the first element's number; valid until the next is asked for.

        They are on the device, or in a store's own host memory: what is not computed with need not cross the link.
        """
        held = self.stores[kind].in_host(kind, layer)
        for span in chunks(self.layouts[layer].numel, self.budget.chunk_numel):
            if held is not None:
                yield span.start, held[span]
                continue
            lease = self.lease_chunk(kind, layer, span)
            self.fill(lease, kind, layer, span.start)
            wait_for(lease.transfers, self.compute_stream)
            yield span.start, lease.tensor
            lease.release()

    def write_chunks(self, kind: Kind, layer: int, fill: Callable[[int, Tensor], object]) -> None:
        """Replace a layer's tensor in chunks, where `read_chunks` has them: ``fill(start, chunk)`` puts in values."""
        held = self.stores[kind].in_host(kind, layer)
        for span in chunks(self.layouts[layer].numel, self.budget.chunk_numel):
            if held is not None:
                fill(span.start, held[span])
                continue
            lease = self.lease_chunk(kind, layer, span)
            wait_for(lease.transfers, self.compute_stream)
            fill(span.start, lease.tensor)
            self.keep(lease, kind, layer, span.start)
            lease.release()

    def release_filling_pools(self) -> None:
        """Give back the buffers by which the stores were filled, and that no step may need. Nothing may be on its way.

        Of whole layers those are the gradients', where the store of these has memory of its own on the device.
        """
        has_gradients = "grad" in self.stores and self.dtypes["grad"] == torch.float32
        sums = any(self.own("grad", layer) is None for layer in self.trained) if has_gradients else True
        for name in (*self.dtypes, *(() if sums else ("gradients", "tied gradient"))):
            self._pools.pop(name, None)

    def release_pools(self) -> None:
        """Give back all buffers, once no step is to follow: those of a next use are new. Nothing may be on its way."""
        self.active = None
        self._pools.clear()
        self._views.clear()

    def commit(self, kinds: Sequence[Kind], layer: int, step: int) -> None:
        """Commit kinds of a layer: all of it is written, and is the layer's state after ``step``."""
        for store in {id(self.stores[kind]): self.stores[kind] for kind in kinds}.values():
            store.commit(layer, step)

    def unique_stores(self) -> list[LayerStore]:
        """Return each store once."""
        return list({id(store): store for store in self.stores.values()}.values())

    def drain(self) -> None:
        """Wait until every store has completed its writes."""
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
        with on_stream(self.update_stream):
            yield

    def cancel(self) -> None:
        """Forget the layers on their way: nobody waits for them any more."""
        self.active = None
        for pool in self._pools.values():
            pool.cancel()

    def close(self) -> None:
        """Stop the stores and give their memory and the buffers back."""
        for store in self.unique_stores():
            store.close()
        self.boundaries.close()
        self.release_pools()


def _tables_of(layer: nn.Module) -> dict[str, str]:
    """Map each parameter of a layer that has only embeddings to the source of its row indices; else empty."""
    tables: dict[str, str] = {
        f"{path}.weight": module.index for path, module in layer.named_modules() if isinstance(module, Embedding)
    }
    return tables if tables.keys() == dict(layer.named_parameters()).keys() else {}


class PoolShape(NamedTuple):
    """Shape of a buffer pool: number of buffers, elements of each, data type."""

    num_buffers: int
    numel: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.num_buffers * self.numel * self.dtype.itemsize


def pool_shapes(
    budget: BufferBudget, layouts: Sequence[Layout], frozen: Sequence[Layout], dtypes: Mapping[Kind, torch.dtype]
) -> dict[str, PoolShape]:
    """Return the shape of every pool that a model may need; a forecast counts those that it will need.

    Args:
        budget: limits of the buffers.
        layouts: layouts of what is trained in each layer.
        frozen: layouts of the rest.
        dtypes: types of the kinds.

    Returns:
        ``weights`` and ``frozen``, for whole layers, with the source of tied parameters where a layer has some;
        ``gradients``, for any layer but that source, and ``tied gradient`` for it; each kind, for its chunks, no more
        than all layers have.
    """
    source, has_ties = layouts[TIED_SOURCE_LAYER].numel, any(layout.tied for layout in layouts)
    whole = max(layout.numel + (source if layout.tied else 0) for layout in layouts)
    summed = max(layout.numel for i, layout in enumerate(layouts) if not (has_ties and i == TIED_SOURCE_LAYER))
    chunk = min(budget.chunk_numel, max(layout.numel for layout in layouts))
    num_chunks = min(budget.num_chunks, sum(-(-layout.numel // max(1, chunk)) for layout in layouts))
    slots, fp32 = budget.read_ahead + 1, torch.float32
    return {
        "weights": PoolShape(slots, whole, dtypes["weight"]),
        "frozen": PoolShape(slots, max((layout.numel for layout in frozen), default=0), dtypes["weight"]),
        "gradients": PoolShape(budget.num_gradients, summed, fp32),
        "tied gradient": PoolShape(int(has_ties), source, fp32),
        **{kind: PoolShape(num_chunks, chunk, dtype) for kind, dtype in dtypes.items()},
    }
