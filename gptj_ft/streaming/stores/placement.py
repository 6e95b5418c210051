"""Assign kinds of tensors to stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from gptj_ft.models.layout import Kind, Layout
from gptj_ft.streaming.stores.base import CHUNK_NUMEL, LayerStore
from gptj_ft.streaming.stores.device import DeviceStore
from gptj_ft.streaming.stores.disk import DiskStore, replaced_files
from gptj_ft.streaming.stores.host import HostStore
from gptj_ft.streaming.stores.queue import TransferQueue
from gptj_ft.system.direct_io import TRANSFERS
from gptj_ft.system.files import keep_folder

Place = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class Placement:
    """Places of a run's tensors."""

    weights: Place  # trained weights
    optimizer_state: Place  # gradients, moments and master weights
    boundaries: Place = "device"  # layer inputs for backward
    frozen: Place | None = None  # frozen weights; "disk": in the base model's folder; None: as `weights`

    def of(self, kind: Kind) -> Place:
        if kind == "boundary":
            return self.boundaries
        if kind == "frozen":
            return self.frozen or self.weights
        return self.weights if kind == "weight" else self.optimizer_state

    @property
    def is_durable(self) -> bool:
        """Whether the whole state is on disk, so that the stores are a checkpoint themselves."""
        return self.weights == self.optimizer_state == "disk"

    def __str__(self) -> str:
        away = f", layer inputs on {self.boundaries}" if self.boundaries != "device" else ""
        if self.frozen is not None:
            return f"model on {self.frozen}, adapters and their state on {self.optimizer_state}{away}"
        return f"weights on {self.weights}, optimizer state on {self.optimizer_state}{away}"


def training_dtypes(
    compute: torch.dtype, moments: torch.dtype = torch.float32, gradients: torch.dtype = torch.float32
) -> dict[Kind, torch.dtype]:
    """Return the kinds of a training run; with a compute type other than fp32, including an fp32 master copy."""
    master: dict[Kind, torch.dtype] = {} if compute == torch.float32 else {"master": torch.float32}
    return {"weight": compute, **master, "exp_avg": moments, "exp_avg_sq": moments, "grad": gradients}


def open_stores(
    placement: Placement,
    layouts: Sequence[Layout],
    dtypes: Mapping[Kind, torch.dtype],
    device: torch.device,
    folder: Path,
    chunk_numel: int = CHUNK_NUMEL,
) -> dict[Kind, LayerStore]:
    """Open a store for every kind. Kinds in one place share a store, except gradients: they commit at other times.

    Args:
        chunk_numel: elements of a transfer.
    """
    stores: dict[Kind, LayerStore] = {}
    # One queue for the disk: a gradient may replace the previous one only after the previous update is stored.
    queue = TransferQueue("disk", TRANSFERS, device)
    groups: dict[tuple[Place, bool], dict[Kind, torch.dtype]] = {}
    for kind, dtype in dtypes.items():
        groups.setdefault((placement.of(kind), kind == "grad"), {})[kind] = dtype  # gradients apart
    if any(place == "disk" for place, _ in groups):
        keep_folder(folder)
    for (place, is_gradient), kinds in groups.items():
        store: LayerStore
        if place == "device":
            store = DeviceStore(layouts, kinds, device)
        elif place == "host":
            store = HostStore(layouts, kinds, device)
        else:
            prefix = folder / ("gradient" if is_gradient else "layer")
            replaced = replaced_files(prefix, layouts)
            store = DiskStore(prefix, layouts, kinds, queue, placement.is_durable, chunk_numel, replaced)
        stores.update(dict.fromkeys(kinds, store))
    return stores


def open_boundaries(
    placement: Placement,
    layouts: Sequence[Layout],
    dtype: torch.dtype,
    device: torch.device,
    folder: Path,
    chunk_numel: int = CHUNK_NUMEL,
) -> LayerStore:
    """Open a store for layer inputs off the device. It need not survive a crash: the inputs are of one step.

    Args:
        layouts: layout of each layer's inputs, see `boundary_layout`.
        chunk_numel: elements of a transfer.
    """
    kinds: dict[Kind, torch.dtype] = {"boundary": dtype}
    if placement.boundaries == "host":
        return HostStore(layouts, kinds, device)
    queue = TransferQueue("boundary", TRANSFERS, device)
    keep_folder(folder)
    prefix = folder / "boundary"
    return DiskStore(prefix, layouts, kinds, queue, False, chunk_numel, replaced_files(prefix, layouts))
