"""Assign kinds of tensors to stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gptj_ft.models.layout import Kind, Layout
from gptj_ft.streaming.moments import num_bytes
from gptj_ft.streaming.split_master import LOW_BITS
from gptj_ft.streaming.stores.base import CHUNK_NUMEL, LayerStore
from gptj_ft.streaming.stores.device import DeviceStore
from gptj_ft.streaming.stores.disk import DiskStore, replaced_files
from gptj_ft.streaming.stores.host import HostStore
from gptj_ft.streaming.stores.queue import TransferQueue
from gptj_ft.streaming.stores.split import SplitStore, split_layouts
from gptj_ft.system.direct_io import TRANSFERS
from gptj_ft.system.files import keep_folder

Place = Literal["device", "host", "disk"]
Master = Literal["split", "fp32"]  # layout of the fp32 master weights


@dataclass(frozen=True)
class Placement:
    """Places of a run's tensors."""

    weights: Place  # trained weights
    optimizer_state: Place  # gradients, moments and master weights
    boundaries: Place = "device"  # layer inputs for backward
    frozen: Place | None = None  # frozen weights; "disk": in the base model's folder; None: as `weights`
    in_memory: tuple[int, ...] = ()
    """Layers whose tensors are in `memory` although their kind is on disk. The state of a durable run stays on disk."""
    memory: Place = "host"

    def of(self, kind: Kind, layer: int = -1) -> Place:
        """Return the place of a kind in a layer; default: in layers that are not `in_memory`."""
        if kind == "boundary":
            return self.boundaries
        if kind == "frozen":
            place = self.frozen or self.weights
        else:
            place = self.weights if kind == "weight" else self.optimizer_state
        return self.memory if layer in self.in_memory and self.splits(kind) else place

    def splits(self, kind: Kind) -> bool:
        """Tell whether a kind can be on disk in some layers and in memory in others."""
        # Boundaries have no layers that stay: each is read once a step.
        is_state = kind not in ("frozen", "boundary")
        return self.of(kind) == "disk" and kind != "boundary" and not (is_state and self.is_durable)

    def bytes_by_place(self, kinds: Mapping[Kind, torch.dtype], numels: Sequence[int]) -> Counter[Place]:
        """Return the bytes of some kinds by place.

        Args:
            numels: elements of each layer.
        """
        sums = Counter[Place]()
        for kind, dtype in kinds.items():
            for layer, numel in enumerate(numels):
                sums[self.of(kind, layer)] += num_bytes(numel, dtype)
        return sums

    @property
    def is_durable(self) -> bool:
        """Whether the whole state is on disk, so that the stores are a checkpoint themselves."""
        return self.weights == self.optimizer_state == "disk"

    def to_dict(self) -> dict[str, Any]:
        """Return the places under their names in `--json`; without layers in memory if there are none."""
        places = asdict(self)
        if not self.in_memory:
            del places["in_memory"], places["memory"]
        return places

    def __str__(self) -> str:
        away = f", layer inputs on {self.boundaries}" if self.boundaries != "device" else ""
        if self.in_memory:
            memory = "memory" if self.memory == "device" else "host memory"
            away = f" ({len(self.in_memory)} layers in {memory} instead of on disk){away}"
        if self.frozen is not None:
            return f"model on {self.frozen}, adapters and their state on {self.optimizer_state}{away}"
        return f"weights on {self.weights}, optimizer state on {self.optimizer_state}{away}"


def training_dtypes(
    compute: torch.dtype,
    moments: torch.dtype = torch.float32,
    gradients: torch.dtype = torch.float32,
    master: Master = "split",
) -> dict[Kind, torch.dtype]:
    """Return the kinds of a training run and their types.

    Args:
        master: layout of the fp32 master weights, if the compute type is bf16; see `split_master`.
    """
    kinds: dict[Kind, torch.dtype] = {"weight": compute}
    if compute == torch.bfloat16 and master == "split":
        kinds[LOW_BITS] = torch.int16
    elif compute != torch.float32:  # 16 bits do not restore an fp32 number from an fp16 one
        kinds["master"] = torch.float32
    return {**kinds, "exp_avg": moments, "exp_avg_sq": moments, "grad": gradients}


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
        if place == "disk":
            is_split = bool(placement.in_memory) and all(map(placement.splits, kinds))
            memory, rest = split_layouts(layouts, placement.in_memory if is_split else ())
            prefix = folder / ("gradient" if is_gradient else "layer")
            replaced = replaced_files(prefix, rest)
            store = DiskStore(prefix, rest, kinds, queue, placement.is_durable, chunk_numel, replaced)
            if is_split:
                in_memory = memory_store(placement.memory, memory, kinds, device)
                store = SplitStore(in_memory, store, placement.in_memory)
        else:
            store = memory_store(place, layouts, kinds, device)
        stores.update(dict.fromkeys(kinds, store))
    return stores


def memory_store(
    place: Place, layouts: Sequence[Layout], kinds: Mapping[Kind, torch.dtype], device: torch.device
) -> DeviceStore | HostStore:
    """Open a store on the device or in host memory."""
    return (DeviceStore if place == "device" else HostStore)(layouts, kinds, device)


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
