"""A model whose layers live in stores, and what of it is on the device: slots and the layers passing through them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gptj_ft.stores import Kind, LayerStore, Layout, allocate


@dataclass(frozen=True)
class Visit:
    """One pass of a layer through the device: which of its tensors are read, and which come as empty slots."""

    layer: int
    reads: tuple[Kind, ...] = ("weight",)
    blanks: tuple[Kind, ...] = ()


@dataclass
class Slot:
    """A buffer on the device that one layer's tensor of one kind passes through."""

    buffer: Tensor
    writes: list[Future[None]] = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """A layer that is on the device now."""

    index: int
    module: nn.Module
    layout: Layout
    tensors: Mapping[Kind, Tensor]
    _slots: Mapping[Kind, Slot]
    _stores: Mapping[Kind, LayerStore]

    def write(self, kinds: Sequence[Kind]) -> None:
        """Send tensors back to their stores; their slots are not reused before that has ended."""
        for kind in kinds:
            transfer = self._stores[kind].write(kind, self.index, self.tensors[kind])
            if kind in self._slots:
                self._slots[kind].writes.append(transfer)

    def commit(self, kinds: Sequence[Kind], step: int) -> None:
        """Everything of these kinds has been written: it is the layer's state after ``step``."""
        for store in {id(self._stores[kind]): self._stores[kind] for kind in kinds}.values():
            store.commit(self.index, step)


@dataclass
class LayerStack:
    """A model whose layers live in stores.

    Attributes:
        layers: the layers on the ``meta`` device: ``Embed``, the blocks, ``Head``.
        dtypes: the kinds that exist and their types; ``weight`` is of the type of the computation.
        stores: where each kind lives; a kind without a store exists in slots only.
        device: where the computation runs.
        read_ahead: layers read before they are needed.
    """

    layers: Sequence[nn.Module]
    dtypes: Mapping[Kind, torch.dtype]
    stores: Mapping[Kind, LayerStore]
    device: torch.device
    read_ahead: int = 1

    def __post_init__(self) -> None:
        self.layouts = [Layout.of(layer) for layer in self.layers]
        self._slots: dict[Kind, list[Slot]] = {}
        self.waited_seconds = 0.0
        """Time that the computation has stood still for the stores."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.dtypes["weight"]

    @property
    def parameter(self) -> Kind:
        """The kind that holds the parameters in fp32: ``master``, or the weights themselves where there is none."""
        return "master" if "master" in self.dtypes else "weight"

    def slots(self, kind: Kind) -> list[Slot]:
        """Return the slots of a kind: one more than are read ahead, each as large as the largest layer."""
        if kind not in self._slots:
            largest = max(layout.numel for layout in self.layouts)
            self._slots[kind] = [
                Slot(allocate(largest, self.dtypes[kind], self.device)) for _ in range(self.read_ahead + 1)
            ]
        return self._slots[kind]

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
            yield
        finally:
            self.waited_seconds += time.perf_counter() - start

    def close(self) -> None:
        """Stop the stores and give their memory and the slots back."""
        for store in self.unique_stores():
            store.close()
        self._slots.clear()
