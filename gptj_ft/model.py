"""A model folder, opened as a stack of layers: to be trained, or to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.boundaries import Away
from gptj_ft.families import Architecture, read_architecture
from gptj_ft.formats.huggingface import Checkpoint, check, layer_tensors, open_checkpoint
from gptj_ft.machine import free_memory
from gptj_ft.passage import Visit
from gptj_ft.stack import LayerStack, Room
from gptj_ft.stores import Kind, Layout
from gptj_ft.stores.device import DeviceStore
from gptj_ft.stores.folder import FolderStore
from gptj_ft.stores.placement import Placement, open_boundaries, open_stores
from gptj_ft.streaming import stream


def training_stack(
    architecture: Architecture,
    placement: Placement,
    dtypes: Mapping[Kind, torch.dtype],
    device: torch.device,
    folder: Path,
    room: Room = Room(),
    keep_gradients: bool = True,
    boundary: Layout | None = None,
) -> LayerStack:
    """Open empty stores for training a model; `load_weights` or a checkpoint fills them.

    Args:
        architecture: of the model.
        placement: where its tensors live.
        dtypes: of each kind, see `stores.placement.training_dtypes`.
        device: where the computation runs.
        folder: for what lives on disk.
        room: how much may be on the device at once.
        keep_gradients: whether updates wait for the global norm, so that gradients need a store.
        boundary: layout of a layer's inputs; needed where the placement keeps them off the device.
    """
    layers = architecture.layers()
    stored = {kind: dtype for kind, dtype in dtypes.items() if kind != "grad" or keep_gradients}
    layouts = [Layout.of(layer) for layer in layers]
    stores = open_stores(placement, layouts, stored, device, folder, room.part_numel)
    stack = LayerStack(layers, dtypes, stores, device, room)
    if placement.boundaries != "device":
        assert boundary is not None
        compute, part_numel = stack.compute_dtype, room.part_numel
        store = open_boundaries(placement, boundary, len(layers), compute, device, folder, part_numel)
        stack.boundaries = Away(store, boundary.numel, part_numel, compute, device, stack)
    return stack


def load_weights(stack: LayerStack, architecture: Architecture, checkpoint: Checkpoint) -> None:
    """Fill a training stack from a checkpoint, layer by layer; the moments start at zero."""
    for layer in range(len(stack.layers)):
        tensors = layer_tensors(architecture, checkpoint, layer)
        fill_layer(stack, layer, partial(_copy, tensors))
    stack.drain()
    stack.forget_parts()


def _copy(tensors: Mapping[str, Tensor], name: str, view: Tensor) -> None:
    view.copy_(tensors[name])


def fill_layer(stack: LayerStack, layer: int, fill: Callable[[str, Tensor], object]) -> None:
    """Give a layer its first state.

    Args:
        stack: the model.
        layer: number of the layer.
        fill: called with each parameter's name and a view, fp32, to put its values into.
    """
    layout, kinds = stack.layouts[layer], tuple(kind for kind in stack.dtypes if kind != "grad")
    slot, _ = stack.gradients(layer).take(None)  # as large as the layer, and fp32
    flat = slot.tensor[: layout.numel].zero_()
    for name, view in layout.views(flat).items():
        fill(name, view)
    for kind in kinds:
        if kind in ("weight", "master"):
            stack.write_parts(kind, layer, lambda start, part: part.copy_(flat[start : start + len(part)]))
        else:
            stack.write_parts(kind, layer, lambda start, part: part.zero_())
    slot.release()
    stack.commit(kinds, layer, 0)


def parameters_of(stack: LayerStack, layer: int) -> dict[str, Tensor]:
    """Return a layer's parameters in fp32; valid until the next are asked for."""
    return flat_views(stack, stack.parameter, layer)


def flat_views(stack: LayerStack, kind: Kind, layer: int) -> dict[str, Tensor]:
    """Return a layer's tensors of one kind in fp32, by parameter; valid until the next are asked for."""
    slot, _ = stack.gradients(layer).take(None)
    flat = slot.tensor[: stack.layouts[layer].numel]
    for start, part in stack.read_parts(kind, layer):
        flat[start : start + len(part)] = part
    slot.release()
    return stack.layouts[layer].views(flat)


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
        source = FolderStore(layouts, lambda layer: layer_tensors(architecture, checkpoint, layer), device)
        stack = LayerStack(layers, dtypes, {"weight": source}, device, Room(read_ahead))
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
