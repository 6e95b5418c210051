"""A model folder, opened as a stack of layers: to be trained, or to be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gptj_ft.families import Architecture, read_architecture
from gptj_ft.formats.huggingface import Checkpoint, check, layer_tensors, open_checkpoint
from gptj_ft.machine import free_memory
from gptj_ft.stack import LayerStack, Visit
from gptj_ft.stores import Kind, Layout
from gptj_ft.stores.device import DeviceStore
from gptj_ft.stores.folder import FolderStore
from gptj_ft.stores.placement import Placement, open_stores, training_dtypes
from gptj_ft.streaming import stream


def training_stack(
    architecture: Architecture,
    placement: Placement,
    compute: torch.dtype,
    device: torch.device,
    folder: Path,
    read_ahead: int,
    keep_gradients: bool,
) -> LayerStack:
    """Open empty stores for training a model; `load_weights` or a checkpoint fills them.

    Args:
        architecture: of the model.
        placement: where its tensors live.
        compute: type of the computation.
        device: where it runs.
        folder: for what lives on disk.
        read_ahead: layers read before they are needed.
        keep_gradients: whether updates wait for the global norm, so that gradients need a store.
    """
    layers = architecture.layers()
    dtypes = training_dtypes(compute)
    stored = {kind: dtype for kind, dtype in dtypes.items() if kind != "grad" or keep_gradients}
    stores = open_stores(placement, [Layout.of(layer) for layer in layers], stored, device, folder)
    return LayerStack(layers, dtypes, stores, device, read_ahead)


def load_weights(stack: LayerStack, architecture: Architecture, checkpoint: Checkpoint) -> None:
    """Fill a training stack from a checkpoint, layer by layer; the moments start at zero."""
    kinds: tuple[Kind, ...] = tuple(kind for kind in stack.dtypes if kind != "grad")
    for loaded in stream(stack, [Visit(layer, (), kinds) for layer in range(len(stack.layers))]):
        tensors = layer_tensors(architecture, checkpoint, loaded.index)
        for kind, flat in loaded.tensors.items():
            flat.zero_()
            if kind in ("weight", "master"):
                for name, view in loaded.layout.views(flat).items():
                    view.copy_(tensors[name])
        loaded.write(kinds)
        loaded.commit(kinds, 0)
    stack.drain()


@contextmanager
def reading_stack(
    folder: Path,
    device: torch.device,
    compute: torch.dtype,
    weights: str = "auto",
    read_ahead: int = 1,
    memory_cap: int | None = None,
) -> Iterator[tuple[Architecture, LayerStack]]:
    """Open a model folder to evaluate it or to write with it.

    Args:
        folder: a model folder of any form that `formats.huggingface` reads.
        device: where it runs.
        compute: type of the computation.
        weights: ``device`` keeps them there; ``disk`` or ``host`` streams them from the folder (which the operating
            system keeps in RAM while there is room); ``auto`` keeps them on the device if they fit.
        read_ahead: layers read before they are needed.
        memory_cap: most bytes of the device to use, for ``auto``; ``None``: what is free.

    Raises:
        UsageError, DataError: as `families.read_architecture` and `formats.huggingface.check`.
    """
    architecture = read_architecture(folder)
    with open_checkpoint(folder) as checkpoint:
        check(architecture, checkpoint)
        layers = architecture.layers()
        layouts = [Layout.of(layer) for layer in layers]
        dtypes: dict[Kind, torch.dtype] = {"weight": compute}
        if weights == "auto":
            size = sum(layout.numel for layout in layouts) * compute.itemsize
            free = free_memory(device)
            weights = "device" if size < 0.7 * min(free, memory_cap or free) else "disk"
        source = FolderStore(layouts, lambda layer: layer_tensors(architecture, checkpoint, layer))
        stack = LayerStack(layers, dtypes, {"weight": source}, device, read_ahead)
        try:
            if weights == "device":
                stack = _resident(stack, layouts)
            yield architecture, stack
        finally:
            stack.close()


def _resident(streamed: LayerStack, layouts: list[Layout]) -> LayerStack:
    """Copy a stack's weights to the device once; close where they came from."""
    store = DeviceStore(layouts, streamed.dtypes, streamed.device)
    for loaded in stream(streamed, [Visit(layer) for layer in range(len(layouts))]):
        store.read("weight", loaded.index, None).result().copy_(loaded.tensors["weight"])
    streamed.close()
    return LayerStack(streamed.layers, streamed.dtypes, {"weight": store}, streamed.device)
