"""Open a model folder as an offloaded model, for training or inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from gptj_ft.checkpoints.adapter import Adapter, base_folder, open_adapter, tuned_architecture
from gptj_ft.checkpoints.metadata import check_base
from gptj_ft.checkpoints.model_folder import (
    Checkpoint,
    check_tensors,
    layer_tensor,
    open_checkpoint,
    tensor_source,
    with_stored_sizes,
)
from gptj_ft.checkpoints.quantized import QuantizedTensor
from gptj_ft.models.heads import initialise_head
from gptj_ft.models.layer_sampling import EVERY_LAYER, EveryLayer
from gptj_ft.models.layout import FROZEN, MOMENTS, NO_PARAMETERS, Kind, Layout
from gptj_ft.models.lora import GAIN, A, B, initialise, is_adapter_parameter, linear_layers
from gptj_ft.models.products import products_for, set_products
from gptj_ft.models.registry import Architecture
from gptj_ft.models.trainable import Selection, adapted, locate_parameters
from gptj_ft.streaming.activations import OffloadedActivations
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.exchange import LOCAL, Exchange
from gptj_ft.streaming.moments import form_of, num_elements
from gptj_ft.streaming.moments.form import Scratch
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.split_master import store
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.stores.device import DeviceStore
from gptj_ft.streaming.stores.folder import FolderStore
from gptj_ft.streaming.stores.host import HostStore
from gptj_ft.streaming.stores.placement import Place, Placement, memory_store, open_boundaries, open_stores
from gptj_ft.streaming.stores.quantized import PackedLayout, PackedStore
from gptj_ft.streaming.stores.split import SplitStore, split_layouts
from gptj_ft.system.digests import check_weights
from gptj_ft.system.machine import emulates_bf16, free_memory


def open_for_training(
    architecture: Architecture,
    placement: Placement,
    dtypes: Mapping[Kind, torch.dtype],
    device: torch.device,
    folder: Path,
    budget: BufferBudget = BufferBudget(),
    keep_gradients: bool = True,
    boundary: Layout | None = None,
    selection: Selection | None = None,
    exchange: Exchange = LOCAL,
    lowest_trained: int = -1,
    choice: EveryLayer = EVERY_LAYER,
) -> OffloadedModel:
    """Open a model for training with empty stores; `load_weights` or a checkpoint fills them.

    `open_frozen` opens the store of frozen weights.

    Args:
        keep_gradients: whether updates wait for the global norm, so that gradients need a store.
        boundary: layout of a layer's inputs; required if the placement puts them off the device.
        lowest_trained: lowest layer with trained parameters; required if it is not local.
        choice: layers that each step trains.
    """
    if selection is None:
        selection = Selection.of(architecture.layers, lambda *_: True)
    stored = {kind: dtype for kind, dtype in dtypes.items() if kind != "grad" or keep_gradients}
    stores = open_stores(placement, selection.trained, stored, device, folder, budget.chunk_numel)
    model = OffloadedModel(
        selection.build(), dtypes, stores, device, budget, selection.trained, selection.frozen, exchange,
        lowest_trained, choice,
    )  # fmt: skip
    if placement.boundaries != "device":
        assert boundary is not None
        compute, chunk_numel = model.compute_dtype, budget.chunk_numel
        layouts = [boundary if exchange.has(layer) else NO_PARAMETERS for layer in range(len(model.layers))]
        store = open_boundaries(placement, layouts, compute, device, folder, chunk_numel)
        model.boundaries = OffloadedActivations(store, boundary.numel, chunk_numel, compute, device, model.meter)
    return model


def open_frozen(
    model: OffloadedModel, architecture: Architecture, checkpoint: Checkpoint, placement: Placement
) -> None:
    """Open the store of the frozen weights, if the model has any.

    Args:
        placement: places of the weights; on disk, they are read from the checkpoint each time.
    """
    find, place = partial(tensor_source, architecture, checkpoint), placement.of(FROZEN)
    if not any(layout.numel for layout in model.frozen):
        return
    folder = FolderStore(model.frozen, find, model.device)
    matrices = _matrices(model, find)

    def in_memory(place: Place, layouts: Sequence[Layout]) -> LayerStore:
        if place == "host" and any(matrices):
            return _pack_frozen(model, folder, layouts, matrices)
        return _copy_frozen(model, folder, place, layouts)

    store: LayerStore = folder
    if place != "disk":
        store = in_memory(place, model.frozen)
        folder.close()
    elif placement.in_memory:
        layouts, _ = split_layouts(model.frozen, placement.in_memory)
        store = SplitStore(in_memory(placement.memory, layouts), folder, placement.in_memory)
    model.stores[FROZEN] = store


def _matrices(model: OffloadedModel, find: Callable[[int, str], object]) -> tuple[Mapping[str, QuantizedTensor], ...]:
    """Return the quantized matrices of each layer by name, of those that the model does not train."""
    sources = [{name: find(layer, name) for name in layout.shapes} for layer, layout in enumerate(model.frozen)]
    return tuple({name: each for name, each in own.items() if isinstance(each, QuantizedTensor)} for own in sources)


def _pack_frozen(
    model: OffloadedModel,
    folder: FolderStore,
    layouts: Sequence[Layout],
    matrices: Sequence[Mapping[str, QuantizedTensor]],
) -> PackedStore:
    """Copy frozen weights from the model folder to host memory; quantized matrices stay codes."""
    forms = [{name: matrix.form for name, matrix in own.items()} for own in matrices]
    packed = [PackedLayout.pack(*each, model.compute_dtype) for each in zip(layouts, forms, strict=True)]
    store = PackedStore(layouts, packed, forms, model.device)
    for layer, layout in enumerate(packed):
        if layout.numel:
            folder.read_stored(layer, store.stored(layer))
    return store


def _copy_frozen(
    model: OffloadedModel, source: FolderStore, place: Place, layouts: Sequence[Layout]
) -> DeviceStore | HostStore:
    """Copy frozen weights from the model folder to a new store on the device or in host memory."""
    store = memory_store(place, layouts, {FROZEN: model.compute_dtype}, model.device)
    for layer, layout in enumerate(layouts):
        if not layout.numel:
            continue
        own = store.own(FROZEN, layer)
        if isinstance(store, DeviceStore) and own is not None:  # read straight into the store's memory
            source.read(Span(FROZEN, layer, 0, store.zeroed), own).result()
            continue
        slot, _ = model.pools["frozen"].acquire(None, layout.numel)
        values = slot.tensor[: layout.numel]
        slot.transfers.append(source.read(Span(FROZEN, layer, 0, tuple(slot.transfers)), values))
        slot.transfers.append(store.write(Span(FROZEN, layer, 0, tuple(slot.transfers)), values))
        slot.release()
    store.drain()
    return store


def load_weights(
    model: OffloadedModel,
    architecture: Architecture,
    checkpoint: Checkpoint,
    seed: int = 0,
    moments: Mapping[Kind, Checkpoint] | None = None,
) -> None:
    """Fill the stores of a model for training.

    Args:
        seed: seed of the initial adapters, and of a head that the checkpoint lacks.
        moments: checkpoint with the initial values of each moment; default: zeros.
    """

    def load(layer: int, name: str, view: Tensor) -> None:
        if is_adapter_parameter(name):
            initialise(name, view, (seed, layer))
        elif architecture.family.name_of(layer, name, len(model.layers)) in architecture.new:
            initialise_head(architecture, name, view, (seed, layer))
        else:
            view.copy_(layer_tensor(architecture, checkpoint, layer, name))

    def load_moment(layer: int, kind: Kind, name: str, view: Tensor) -> None:
        assert moments is not None
        view.copy_(layer_tensor(architecture, moments[kind], layer, name))

    for layer in model.trained:
        fill_layer(model, layer, partial(load, layer), partial(load_moment, layer) if moments else None)
    model.drain()
    model.free_filling_pools()


def fill_layer(
    model: OffloadedModel,
    layer: int,
    fill: Callable[[str, Tensor], object],
    fill_moment: Callable[[Kind, str, Tensor], object] | None = None,
) -> None:
    """Initialize the state of a layer.

    Args:
        fill: writes a parameter into an fp32 view, given its name and the view.
        fill_moment: the same for each moment; None: zeros.
    """
    layout, kinds = model.layouts[layer], model.updated_kinds
    slot = model.pools.lease_scratch(layer)
    # Zeros for the padding between parameters, too, which goes to the stores along with them.
    flat = slot.tensor[: layout.numel].zero_()
    for name, view in layout.views(flat).items():
        fill(name, view)
    for kind in kinds:
        if kind not in MOMENTS:
            model.write_chunks(kind, layer, partial(_store, flat, kind))
        elif fill_moment is None:
            model.write_chunks(kind, layer, lambda start, part: part.zero_())
        else:
            flat.zero_()
            for name, view in layout.views(flat).items():
                fill_moment(kind, name, view)
            model.write_chunks(kind, layer, partial(_store_moment, flat, kind))
    slot.release()
    model.transfers.commit(kinds, layer, 0)


def _store(parameters: Tensor, kind: Kind, start: int, part: Tensor) -> None:
    store(parameters[start : start + len(part)], kind, part)


def _store_moment(moments: Tensor, kind: Kind, start: int, part: Tensor) -> None:
    form_of(part.dtype).store(
        kind, moments[start : start + num_elements(part)], part, None, _new_memory(moments.device)
    )


def _new_memory(device: torch.device) -> Scratch:
    return lambda _, numel: torch.empty(numel, device=device)


def trained_parameters(model: OffloadedModel) -> Iterator[dict[str, Tensor]]:
    """Yield the trained parameters of each layer, fp32 on the CPU; valid until the next layer."""
    for layer in range(len(model.layers)):
        views = flat_views(model, model.parameter, layer) if layer in model.trained else {}
        yield {name: view.cpu() for name, view in views.items()}


def whole_layers(
    architecture: Architecture, folder: Path, selection: Selection, trained: Iterator[dict[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """Yield each layer's tensors: the trained ones, and the others from the base model's folder."""
    with open_checkpoint(folder) as checkpoint:
        for layer, frozen in enumerate(selection.frozen):
            # Not zip(), which keeps the previous layer in memory while the next one is read.
            yield {
                **{
                    name: layer_tensor(architecture, checkpoint, layer, name)
                    for name in frozen.shapes.keys() - frozen.copied
                },
                **next(trained),
            }


def flat_views(model: OffloadedModel, kind: Kind, layer: int) -> dict[str, Tensor]:
    """Return a layer's tensors of one kind in fp32, by parameter; valid until the next call.

    They are in host memory if the store is there, else on the device.
    """
    in_host = model.in_host(kind, layer)
    if in_host is not None:
        return model.layouts[layer].views(in_host.float())
    slot = model.pools.lease_scratch(layer)
    flat = slot.tensor[: model.layouts[layer].numel]
    for start, part in model.read_chunks(kind, layer):
        flat[start : start + len(part)] = part
    slot.release()
    return model.layouts[layer].views(flat)


def load_adapter(model: OffloadedModel, architecture: Architecture, adapter: Adapter, base: Checkpoint) -> None:
    """Load adapters, and the head saved with them, onto the device; for inference.

    Args:
        base: weights of the base model; read for DoRA only.
    """
    store = DeviceStore(model.layouts, {"weight": model.compute_dtype}, model.device)

    def views_of(layer: int) -> dict[str, Tensor]:
        own = store.own("weight", layer)
        assert own is not None
        return model.layouts[layer].views(own)

    for module, (layer, local) in linear_layers(architecture).items():
        if module not in adapter.ranks:
            continue
        views = views_of(layer)
        for matrix in (A, B):
            views[f"{local}.{matrix}"].copy_(adapter.read(module, matrix))
        if adapter.ranks[module].magnitude:
            views[f"{local}.{GAIN}"].copy_(adapter.scale(module, base, adapter.change(module)) - 1)
    places = locate_parameters(architecture)
    for name in adapter.whole:
        layer, local = places[name]
        views_of(layer)[local].copy_(adapter.read_whole(name))
    model.stores["weight"] = store


@contextmanager
def open_for_inference(
    folder: Path,
    device: torch.device,
    compute: torch.dtype,
    weights: str = "auto",
    read_ahead: int = 1,
    memory_cap: int | None = None,
) -> Iterator[tuple[Architecture, OffloadedModel]]:
    """Open a model folder, or an adapter's folder together with its base model, for inference.

    Args:
        folder: a model folder in any format of `checkpoints.model_folder`, or a PEFT adapter.
        weights: ``device``: resident; ``host``: streamed from host memory; ``disk``: streamed from the folder;
            ``auto``: the first of these that fits.
        memory_cap: limit of device memory for ``auto``, in bytes; None: the free memory.

    Raises:
        UsageError: the folder is not usable as a model.
        DataError: the weights are damaged or do not match the configuration.
    """
    base, architecture = base_folder(folder), tuned_architecture(folder)
    with open_checkpoint(base) as checkpoint:
        check_tensors(architecture, checkpoint)
        for used in {base, folder}:
            check_weights(used)
        adapter = open_adapter(folder, architecture) if base != folder else None
        if adapter:
            check_base(folder, architecture, checkpoint)
        selection = adapted(architecture, adapter.ranks, adapter.whole) if adapter else adapted(architecture, {})
        dtypes: dict[Kind, torch.dtype] = {"weight": compute}
        if weights == "auto":
            layouts = with_stored_sizes(architecture, checkpoint, selection.frozen)
            size, in_host = (sum(layout.bytes_in(place, compute) for layout in layouts) for place in ("device", "host"))
            free = free_memory(device)
            # The other 30 % are for buffers, activations and caches of keys and values.
            fits_host = (device.type != "cpu" or in_host < size) and in_host < 0.7 * free_memory(torch.device("cpu"))
            weights = "device" if size < 0.7 * min(free, memory_cap or free) else "host" if fits_host else "disk"
        budget = BufferBudget(read_ahead)
        model = OffloadedModel(selection.build(), dtypes, {}, device, budget, selection.trained, selection.frozen)
        try:
            set_products(model.layers, products_for(compute, device, emulates_bf16()))
            place = cast("Place", weights)
            open_frozen(model, architecture, checkpoint, Placement(place, place))
            if adapter:
                load_adapter(model, architecture, adapter, checkpoint)
            yield architecture, model
        finally:
            model.close()
