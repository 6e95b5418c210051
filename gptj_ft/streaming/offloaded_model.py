"""A model whose layers are in stores, with the buffers that they pass through on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gptj_ft.models.embedding import Embedding, EmbeddingRows
from gptj_ft.models.functional import FunctionalLayer
from gptj_ft.models.layer_sampling import EVERY_LAYER, EveryLayer
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Kind, Layout
from gptj_ft.streaming.activations import Activations, DeviceActivations
from gptj_ft.streaming.buffers import DEFAULT_BUDGET, BufferBudget, BufferPools
from gptj_ft.streaming.exchange import LOCAL, Exchange
from gptj_ft.streaming.moments import items_of
from gptj_ft.streaming.split_master import LOW_BITS, join
from gptj_ft.streaming.stores.base import LayerStore, chunks
from gptj_ft.streaming.transfers import Transfers
from gptj_ft.system.accelerator import current_stream, fresh, new_stream, wait_for


@dataclass
class OffloadedModel:
    """A model whose layers are in stores."""

    layers: Sequence[nn.Module]  # on the meta device: embedding, blocks, head
    dtypes: Mapping[Kind, torch.dtype]  # type of each kind; that of "weight" is the type of the computation
    stores: dict[Kind, LayerStore]  # a kind without a store exists in buffers only
    device: torch.device
    budget: BufferBudget = DEFAULT_BUDGET
    layouts: Sequence[Layout] = ()  # trained parameters of each layer; default: all; empty: layer is not local
    frozen: Sequence[Layout] = ()  # frozen parameters of each layer
    exchange: Exchange = LOCAL
    lowest_trained: int = -1  # lowest layer with trained parameters, local or not; len(layers): none
    choice: EveryLayer = EVERY_LAYER  # layers that each step trains, of those with trained parameters
    is_deterministic: bool = True  # a step uses deterministic kernels where the device has them

    def __post_init__(self) -> None:
        self.stores = dict(self.stores)
        self.layouts = self.layouts or [Layout.of(layer) for layer in self.layers]
        self.frozen = self.frozen or [Layout.of(layer, ()) for layer in self.layers]
        if self.lowest_trained < 0:
            self.lowest_trained = min(self.trained, default=len(self.layers))
        self.pools = BufferPools(self.budget, self.layouts, self.frozen, self.dtypes, self.stores, self.device)
        self.transfers = Transfers(self.stores, self.device, self.budget.update_numel)
        self.meter = self.transfers.meter
        self.boundaries: Activations = DeviceActivations()  # layer inputs between forward and backward
        self.active: object = None  # prefetcher that owns the buffers; a new one takes them over
        self.compute_stream = current_stream(self.device)
        # High priority: an update is many short kernels, and the next layer waits for them. Behind the long products
        # of the current layer they would finish too late.
        self.update_stream = new_stream(self.device, priority=-1)
        self.functional_layers = [FunctionalLayer(layer) for layer in self.layers]
        self._frozen_views: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        self._tables = [_tables_of(layer) for layer in self.layers]
        for layer in self.layers:
            layer.eval()  # dropout is an explicit argument of the layers

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Local layers with trained parameters."""
        return tuple(index for index, layout in enumerate(self.layouts) if layout.numel)

    @property
    def local_layers(self) -> list[int]:
        """Layers that this process computes."""
        return [layer for layer in range(len(self.layers)) if self.exchange.has(layer)]

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.dtypes["weight"]

    @property
    def parameter(self) -> Kind:
        """Kind of the fp32 parameters: ``master``, or ``weight`` if the computation is in fp32.

        `read_chunks` yields ``master`` in both layouts, stored or split.
        """
        return "master" if self.has_split_master or "master" in self.dtypes else "weight"

    @property
    def has_split_master(self) -> bool:
        """Whether ``weight`` and ``low_bits`` together are the fp32 parameters, see `split_master`."""
        return LOW_BITS in self.dtypes

    @property
    def updated_kinds(self) -> tuple[Kind, ...]:
        """Kinds that an update changes."""
        return tuple(kind for kind in self.dtypes if kind != "grad")

    @property
    def updates_read_weights(self) -> bool:
        """Whether an update reads the weights that it changes; those next to a stored ``master`` are only written."""
        return "master" not in self.dtypes

    def can_defer(self, layer: int) -> bool:
        """Tell whether a layer's update can be applied twice: it changes nothing that it reads before it writes."""
        read = (kind for kind in self.updated_kinds if kind != "weight" or self.updates_read_weights)
        return all(self.stores[kind].own(kind, layer) is None for kind in read)

    def is_split_off(self, layer: int) -> bool:
        """Tell whether a layer stays in memory while others of a kind are on disk."""
        return any(store.keeps(layer) for store in self.stores.values())

    def is_tied_source(self, layer: int) -> bool:
        """Tell whether another layer computes with trained parameters of this one."""
        return self.pools.is_tied_source(layer)

    def tiles(self, layer: int) -> tuple[slice, ...]:
        """Return the tiles in which a layer's gradient is summed; empty: as a whole."""
        # The gradient of a tied source begins with the head and waits for the embedding.
        return () if self.is_tied_source(layer) else self.layouts[layer].tiles

    def weight_sources(self, layer: int) -> set[int]:
        """Return the layers whose trained weights a layer computes with: itself and its tied source."""
        return {layer, TIED_SOURCE_LAYER} if self.layouts[layer].tied else {layer}

    def frozen_views(self, layer: int, flat: Tensor) -> Mapping[str, Tensor]:
        """Return a layer's frozen parameters as views of a slot; cached, because each layer returns to few slots."""
        key = layer, flat.data_ptr()
        if key not in self._frozen_views:
            self._frozen_views[key] = self.frozen[layer].views(flat)
        return self._frozen_views[key]

    def row_tables(self, layer: int) -> Mapping[str, str]:
        """Return the embedding tables of a layer that are read by rows, each with the batch field of its row indices.

        Empty for layers that are loaded whole.
        """
        # A trained table changes as a whole: only frozen ones are read by rows, and only if they are off the device.
        is_streamed = "frozen" in self.stores and self.stores["frozen"].own("frozen", layer) is None
        return self._tables[layer] if is_streamed and not self.layouts[layer].shapes else {}

    def gather_rows(self, layer: int, name: str, indices: Tensor) -> EmbeddingRows:
        """Read rows of a frozen embedding table; the indices are on the CPU.

        Raises:
            IndexError: an index outside the table.
        """
        rows, (num_rows, width) = indices.unique(), self.frozen[layer].shapes[name]  # type: ignore[no-untyped-call]
        numbers: list[int] = rows.tolist()
        if numbers and not 0 <= numbers[0] <= numbers[-1] < num_rows:
            raise IndexError(f"{name} has rows 0 to {num_rows - 1}; requested were {numbers[0]} to {numbers[-1]}")
        flat, zeroed = fresh(len(rows) * width, self.compute_dtype, self.device)
        values = flat.view(len(rows), width)
        self.transfers.read_rows(layer, name, numbers, values, zeroed)
        return EmbeddingRows(rows.to(self.device), values)

    def in_host(self, kind: Kind, layer: int) -> Tensor | None:
        """Return a layer's flat tensor in host memory; None: it is elsewhere, or is a split master."""
        return self.stores[kind].in_host(kind, layer) if kind in self.stores else None

    def read_chunks(self, kind: Kind, layer: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, chunk) of a layer's tensor; a chunk is valid until the next one.

        Chunks are on the device, or in host memory if the store is there: they need not cross the link then. A split
        master is restored.
        """
        if kind == "master" and self.has_split_master:
            for (start, weight), (_, low) in zip(
                self.read_chunks("weight", layer), self.read_chunks(LOW_BITS, layer), strict=True
            ):
                yield start, join(weight, low.to(weight.device))
            return
        in_host = self.in_host(kind, layer)
        for span in chunks(self.layouts[layer].numel, self.budget.chunk_numel):
            if in_host is not None:
                yield span.start, in_host[items_of(span, in_host.dtype)]
                continue
            lease = self.pools.lease_chunk(kind, layer, span)
            self.transfers.fill(lease, kind, layer, span.start)
            wait_for(lease.transfers, self.compute_stream)
            yield span.start, lease.tensor
            lease.release()

    def write_chunks(self, kind: Kind, layer: int, fill: Callable[[int, Tensor], object]) -> None:
        """Replace a layer's tensor: ``fill(start, chunk)`` puts new values into each chunk of `read_chunks`."""
        in_host = self.stores[kind].in_host(kind, layer)
        for span in chunks(self.layouts[layer].numel, self.budget.chunk_numel):
            if in_host is not None:
                fill(span.start, in_host[items_of(span, in_host.dtype)])
                continue
            lease = self.pools.lease_chunk(kind, layer, span)
            # The buffer's previous chunk may still be on its way to the store.
            wait_for(lease.transfers, self.compute_stream)
            fill(span.start, lease.tensor)
            if lease.buffer is not None:
                lease.transfers.append(self.transfers.write(kind, layer, span.start, lease.tensor))
            lease.release()

    def drain(self) -> None:
        """Wait until every store has completed its writes."""
        self.transfers.drain()

    def free_filling_pools(self) -> None:
        """Free the pools that filled the stores and that a step may not need. No transfer may be pending."""
        # A step sums gradients in the buffers for whole layers, unless the store of gradients owns fp32 memory.
        has_gradients = "grad" in self.stores and self.dtypes["grad"] == torch.float32
        needs_sums = not has_gradients or any(self.stores["grad"].own("grad", i) is None for i in self.trained)
        self.pools.free((*self.dtypes, *(() if needs_sums else ("gradients", "tied gradient"))))

    def free_pools(self) -> None:
        """Free all buffers; a later use allocates new ones. No transfer may be pending."""
        self.active = None
        self.pools.free(self.pools.allocated)
        self._frozen_views.clear()

    def cancel(self) -> None:
        """Cancel the active prefetcher and release its buffers."""
        self.active = None
        self.pools.cancel()

    def close(self) -> None:
        """Close the stores and free the buffers."""
        self.transfers.close()
        self.boundaries.close()
        self.free_pools()


def _tables_of(layer: nn.Module) -> dict[str, str]:
    """Return the source of the row indices of each parameter if the layer consists of embeddings, else nothing."""
    tables: dict[str, str] = {
        f"{path}.weight": module.index for path, module in layer.named_modules() if isinstance(module, Embedding)
    }
    return tables if tables.keys() == dict(layer.named_parameters()).keys() else {}
