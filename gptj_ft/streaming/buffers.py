"""Buffers on the device: tensors of streamed layers pass through them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gptj_ft.models.layout import TIED_SOURCE_LAYER, Kind, Layout
from gptj_ft.streaming.moments import items_of, num_items
from gptj_ft.streaming.stores.base import CHUNK_NUMEL, LayerStore
from gptj_ft.system.accelerator import Transfer, fresh, record_event

PASS_TOKENS = 32768  # maximum tokens whose hidden states exist at once in a pass that computes only losses


@dataclass(frozen=True)
class BufferBudget:
    """Limits on the parts of a model that are on the device at once."""

    read_ahead: int = 1  # layers whose weights are prefetched
    num_gradients: int = 2  # gradient buffers; with two, one is written while the next gradient is summed
    num_chunks: int = 24  # chunk buffers of each kind that only an update needs
    chunk_numel: int = CHUNK_NUMEL
    chunks_at_once: int = 1
    """Chunks in a buffer, moved and updated together. On an accelerator a few large ones keep the link busy: the
    program takes about two milliseconds for each, in which PCIe 5.0 x16 moves 100 MB."""
    num_kept_layers: int = 0  # top blocks that keep their activations for backward
    pass_tokens: int = PASS_TOKENS
    forward_bytes: int | None = None
    """CPU: resident bytes above which a forward pass that keeps activations returns free heap; None: no limit."""

    @property
    def update_numel(self) -> int:
        """Elements that are moved and updated at once."""
        return self.chunk_numel * self.chunks_at_once


DEFAULT_BUDGET = BufferBudget()


class PoolShape(NamedTuple):
    """Shape of a buffer pool."""

    num_buffers: int
    numel: int  # of the first buffer
    dtype: torch.dtype
    others: int | None = None  # elements of each other buffer; None: as many

    @property
    def sizes(self) -> list[int]:
        """Elements of each buffer."""
        others = self.numel if self.others is None else self.others
        return [others if number else self.numel for number in range(self.num_buffers)]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes) * self.dtype.itemsize


def pool_shapes(
    budget: BufferBudget,
    layouts: Sequence[Layout],
    frozen: Sequence[Layout],
    dtypes: Mapping[Kind, torch.dtype],
    stores_gradients: bool = True,
) -> dict[str, PoolShape]:
    """Return the shape of every pool that a model may need; a forecast selects those that a run will use.

    Args:
        layouts: layouts of the trained parameters of each layer.
        frozen: layouts of the frozen ones.
        stores_gradients: whether gradients have a store, so that those of a vocabulary leave in tiles.

    Returns:
        ``weights`` and ``frozen``: slots for whole layers, with room for the source of tied parameters. Only one has
        room for an untied vocabulary: embedding and head are never neighbours.
        ``gradients``: buffers for any layer except the tied source, which has ``tied gradient``.
        Each kind: its chunks, at most as many as all layers have.
    """
    source, has_ties = layouts[TIED_SOURCE_LAYER].numel, any(layout.tied for layout in layouts)
    whole = max(layout.numel + (source if layout.tied else 0) for layout in layouts)
    sizes = [layout.most_summed if stores_gradients else layout.numel for layout in layouts]
    summed = max(size for i, size in enumerate(sizes) if not (has_ties and i == TIED_SOURCE_LAYER))
    chunk = min(budget.update_numel, max(layout.numel for layout in layouts))
    num_chunks = min(budget.num_chunks, sum(-(-layout.numel // max(1, chunk)) for layout in layouts))
    slots, fp32 = budget.read_ahead + 1, torch.float32
    return {
        "weights": PoolShape(slots, whole, dtypes["weight"], None if has_ties else _without_vocabularies(layouts)),
        "frozen": PoolShape(
            slots, max((layout.numel for layout in frozen), default=0), dtypes["weight"], _without_vocabularies(frozen)
        ),
        "gradients": PoolShape(budget.num_gradients, summed, fp32),
        "tied gradient": PoolShape(int(has_ties), source, fp32),
        **{kind: PoolShape(num_chunks, num_items(chunk, dtype), dtype) for kind, dtype in dtypes.items()},
    }


def _without_vocabularies(layouts: Sequence[Layout]) -> int | None:
    """Return the elements of the largest layer without a vocabulary; ``None``: no layer has one."""
    if not any(layout.has_vocabulary for layout in layouts):
        return None
    return max(layout.numel for layout in layouts if not layout.has_vocabulary)


@dataclass(eq=False)
class Buffer:
    """Device memory and the transfers that use it."""

    tensor: Tensor  # flat
    numel: int  # of the tensor; a forecast asks millions of times
    key: Hashable = None  # name of the content, now or after the transfers; None: no valid content
    transfers: list[Transfer] = field(default_factory=list)
    refcount: int = 0  # users; at 0 the buffer may be reused

    def release(self) -> None:
        """End a use. The next user waits for the event: the device may lag behind the program."""
        self.refcount -= 1
        self.transfers += record_event(self.tensor.device)


class BufferPool:
    """Buffers, least recently used first. A buffer's content is cached until the buffer is reused.

    Passes alternate between up and down, so the most recently used content is needed first.
    """

    def __init__(self, shape: PoolShape, device: torch.device) -> None:
        made = (fresh(numel, shape.dtype, device) for numel in shape.sizes)
        self._buffers = [Buffer(tensor, tensor.numel(), None, [*zeroed]) for tensor, zeroed in made]

    def has_free(self, key: Hashable, numel: int = 0) -> bool:
        """Tell whether `acquire` would return a buffer."""
        # A loop: `any` of a generator takes twice as long, and a forecast asks millions of times.
        for buffer in self._buffers:
            if key is not None and buffer.key == key:
                return True
            if not buffer.refcount and buffer.numel >= numel:
                return True
        return False

    def holds(self, key: Hashable) -> bool:
        """Tell whether a buffer has this content."""
        return any(buffer.key == key for buffer in self._buffers)

    def acquire(self, key: Hashable, numel: int = 0) -> tuple[Buffer, bool]:
        """Return a buffer for a content, and whether the content is cached; adds a user until `Buffer.release`."""
        # First choice: the content itself. Then the smallest buffers: one without content, or the least recently used.
        choice, is_cached = None, False
        for buffer in self._buffers:
            if key is not None and buffer.key == key:
                choice, is_cached = buffer, True
                break
            if buffer.refcount or buffer.numel < numel:
                continue
            if choice is None or (buffer.numel, buffer.key is not None) < (choice.numel, choice.key is not None):
                choice = buffer
        assert choice is not None, "internal error: every buffer is in use"
        buffer = choice
        buffer.key = key
        buffer.refcount += 1
        # The list is in the order of last use; buffers are equal only to themselves (`eq=False`).
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        # Failed transfers stay in the list: the next user waits for them, and the error surfaces there.
        buffer.transfers = [transfer for transfer in buffer.transfers if not transfer.done() or transfer.exception()]
        return buffer, is_cached

    def cancel(self) -> None:
        """Release every buffer whose users were cancelled."""
        for buffer in self._buffers:
            if buffer.refcount:
                # Their users are gone, but kernels may still run: `release` records an event for the next user.
                buffer.refcount = 1
                buffer.release()


@dataclass(eq=False)
class Lease:
    """Use of some elements on the device, in a store's own memory or in a buffer."""

    tensor: Tensor  # flat
    buffer: Buffer | None = None  # None: the store's own memory; nothing has to be moved
    is_cached: bool = True  # no read is necessary

    @classmethod
    def of(cls, pool: BufferPool, key: Hashable, numel: int) -> Lease:
        """Acquire a buffer for a content."""
        buffer, is_cached = pool.acquire(key, numel)
        return cls(buffer.tensor[:numel], buffer, is_cached)

    @property
    def transfers(self) -> list[Transfer]:
        """Transfers that still use the memory; callers append theirs."""
        return [] if self.buffer is None else self.buffer.transfers

    def label(self, key: Hashable) -> None:
        """Name the buffer's content, now or after its transfers; None: no valid content."""
        if self.buffer is not None:
            self.buffer.key = key

    def release(self) -> None:
        if self.buffer is not None:
            self.buffer.release()


class BufferPools:
    """The buffer pools of a model. A lease uses a buffer, or the store's own memory if the store is on the device.

    A pool is allocated at its first use.
    """

    def __init__(
        self,
        budget: BufferBudget,
        layouts: Sequence[Layout],
        frozen: Sequence[Layout],
        dtypes: Mapping[Kind, torch.dtype],
        stores: Mapping[Kind, LayerStore],
        device: torch.device,
    ) -> None:
        self._shapes = pool_shapes(budget, layouts, frozen, dtypes, "grad" in stores)
        self._layouts, self._frozen, self._dtypes, self._stores = layouts, frozen, dtypes, stores
        self._device = device
        self._has_ties = any(layout.tied for layout in layouts)
        self.allocated: dict[str, BufferPool] = {}

    def __getitem__(self, name: str) -> BufferPool:
        """Return a pool, by its name in `pool_shapes`."""
        if name not in self.allocated:
            self.allocated[name] = BufferPool(self._shapes[name], self._device)
        return self.allocated[name]

    def gradients(self, layer: int) -> BufferPool:
        """Return the pool for a layer's fp32 gradient.

        The source of tied parameters has its own pool. Its gradient starts with the tied layer, the first in backward,
        and stays until backward reaches the source, the last.
        """
        return self["tied gradient" if self.is_tied_source(layer) else "gradients"]

    def is_tied_source(self, layer: int) -> bool:
        """Tell whether another layer computes with trained parameters of this one."""
        return self._has_ties and layer == TIED_SOURCE_LAYER

    def lease_weights(self, layer: int, key: Hashable) -> Lease:
        """Lease memory for a layer's trained weights; a buffer has room for the tied source's weights behind them."""
        own = self._stores["weight"].own("weight", layer)
        # Where layers are tied, all slots have room for the source.
        return Lease(own) if own is not None else Lease.of(self["weights"], key, self._layouts[layer].numel)

    def has_free_slots(self, layer: int, key: Hashable) -> bool:
        """Tell whether slots of a layer's trained and frozen weights are free."""
        parts: tuple[tuple[Kind, str, Hashable, int], ...] = (
            ("weight", "weights", key, self._layouts[layer].numel),
            ("frozen", "frozen", layer, self._frozen[layer].numel),
        )
        return all(
            not numel or self._stores[kind].own(kind, layer) is not None or self[pool].has_free(content, numel)
            for kind, pool, content, numel in parts
        )

    def lease_frozen(self, layer: int) -> Lease:
        """Lease memory for a layer's frozen weights."""
        own = self._stores["frozen"].own("frozen", layer)
        return Lease(own) if own is not None else Lease.of(self["frozen"], layer, self._frozen[layer].numel)

    def lease_gradient(self, layer: int) -> Lease:
        """Lease memory for a layer's fp32 gradient sum; for that of a tile if the pool has no larger buffers."""
        if "grad" in self._stores and self._dtypes["grad"] == torch.float32:
            own = self._stores["grad"].own("grad", layer)
            if own is not None:
                return Lease(own)
        pool = "tied gradient" if self.is_tied_source(layer) else "gradients"
        return Lease.of(self.gradients(layer), None, min(self._layouts[layer].numel, self._shapes[pool].numel))

    def lease_scratch(self, layer: int) -> Lease:
        """Lease fp32 memory for a whole layer, outside a step."""
        # New memory for a vocabulary, which is summed in tiles: it is free again when the caller drops it.
        numel = self._layouts[layer].numel
        if numel > self._shapes["tied gradient" if self.is_tied_source(layer) else "gradients"].numel:
            return Lease(torch.empty(numel, dtype=torch.float32, device=self._device))
        return Lease.of(self.gradients(layer), None, numel)

    def lease_stored_gradient(self, layer: int, key: Hashable) -> Lease | None:
        """Lease a layer's stored gradient if it is still in the buffer that it was summed in, in the store's type."""
        if self._stores["grad"].own("grad", layer) is not None or not self.gradients(layer).holds(key):
            return None
        buffer, _ = self.gradients(layer).acquire(key)
        # The fp32 buffer contains the rounded gradient in its first bytes: see `loaded_layer.round_in_place`.
        return Lease(buffer.tensor.view(self._dtypes["grad"])[: self._layouts[layer].numel], buffer)

    def lease_chunk(self, kind: Kind, layer: int, span: slice, key: Hashable = None) -> Lease:
        """Lease memory for a chunk of a kind that only an update needs."""
        own = self._stores[kind].own(kind, layer)
        items = items_of(span, self._dtypes[kind])
        return Lease(own[items]) if own is not None else Lease.of(self[kind], key, items.stop - items.start)

    def has_free_chunk(self, kind: Kind, layer: int, key: Hashable) -> bool:
        """Tell whether `lease_chunk` would find memory."""
        return self._stores[kind].own(kind, layer) is not None or self[kind].has_free(key)

    def allocate_slots(self) -> None:
        """Allocate the slots of streamed weights now instead of at their first use."""
        slots: tuple[tuple[Kind, str], ...] = (("weight", "weights"), ("frozen", "frozen"))
        for kind, name in slots:
            layers = range(len(self._layouts))
            if kind in self._stores and any(self._stores[kind].own(kind, layer) is None for layer in layers):
                _ = self[name]

    def free(self, names: Iterable[str]) -> None:
        """Free pools without pending transfers; a later use allocates them again."""
        for name in [*names]:
            self.allocated.pop(name, None)

    def cancel(self) -> None:
        """Release every buffer: all users were cancelled."""
        for pool in self.allocated.values():
            pool.cancel()
