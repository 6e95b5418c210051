"""A layer on the device: the slot of its weights, its gradient, and its update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.embedding import EmbeddingRows
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Layout
from gptj_ft.models.linear import sum_products_into
from gptj_ft.streaming.buffers import Lease
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.schedule import LayerTask
from gptj_ft.streaming.stores.base import Span, chunks
from gptj_ft.streaming.update_pump import UpdatePump, Updater
from gptj_ft.system.accelerator import Transfer, record_event


class WeightSlot:
    """The memory of a layer's weights, from the first read request to the release."""

    def __init__(self, model: OffloadedModel, task: LayerTask) -> None:
        self._model, self._task, self._layout = model, task, model.layouts[task.layer]
        self.trained = torch.empty(0)  # flat
        self.frozen = torch.empty(0)  # flat
        self.lease: Lease | None = None  # memory of the trained weights
        self.reads: list[Transfer] = []  # must end before the layer runs
        self.earlier: list[Transfer] = []  # transfers of the slot's previous content
        self.reads_in_chunks = False  # the update reads the trained weights, chunk by chunk
        self._frozen_lease: Lease | None = None
        self._tied_source = torch.empty(0)  # trained weights of the layer that owns the tied parameters, flat

    def request(self) -> None:
        """Lease memory and request the reads, without waiting."""
        task, model = self._task, self._model
        if self._layout.shapes or self._layout.tied:
            self._request_trained()
        if task.runs and model.frozen[task.layer].numel and not model.row_tables(task.layer):
            self._frozen_lease = lease = model.pools.lease_frozen(task.layer)
            self.frozen = lease.tensor
            model.transfers.fill(lease, "frozen", task.layer)
            self.reads += lease.transfers

    def _request_trained(self) -> None:
        model, task, layout = self._model, self._task, self._layout
        # The key names the content: a slot that still has this version of the layer is not read again.
        key = None if task.version is None else (task.layer, task.version)
        self.lease = lease = model.pools.lease_weights(task.layer, key)
        self.trained = lease.tensor
        if lease.buffer is None:  # the store's own memory
            if layout.tied:
                source = model.stores["weight"].own("weight", TIED_SOURCE_LAYER)
                assert source is not None
                self._tied_source = source
            return
        self.earlier = list(lease.transfers)
        if task.updates or not lease.is_cached:
            # No valid content until the reads or the update end. If the pass is cancelled before, a later pass must
            # not take the slot for complete.
            lease.label(None)
        if task.updates:
            # An update overwrites the weights. If it reads the old ones, they come in chunks along with the moments.
            self.reads_in_chunks = not lease.is_cached and model.updates_read_weights
        elif layout.numel and not lease.is_cached:
            model.transfers.fill(lease, "weight", task.layer)
            self.reads.append(lease.transfers[-1])
        if layout.tied and task.runs:
            # The tied source's weights go behind the layer's own, where they start on a page, too. They are read again
            # each time: another layer updates them, so the slot's key says nothing about them.
            numel = model.layouts[TIED_SOURCE_LAYER].numel
            self._tied_source = lease.buffer.tensor[layout.numel :][:numel]
            span = Span("weight", TIED_SOURCE_LAYER, 0, self.earlier)
            self.reads.append(model.transfers.read(span, self._tied_source))
            lease.transfers.append(self.reads[-1])  # a cancelled pass leaves the slot in use until this read ends

    @property
    def is_resident(self) -> bool:
        """Whether all weights are in memory of their stores."""
        return all(lease.buffer is None for lease in (self.lease, self._frozen_lease) if lease)

    def label(self, version: int | None) -> None:
        """Name the version of the trained weights in the slot; None: no valid content."""
        if self.lease:
            self.lease.label(None if version is None else (self._task.layer, version))

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return views of the trained parameters that the layer computes with, by name."""
        own = self._layout.views(self.trained) if self._layout.numel else {}
        return {**own, **tied_views(self._model, self._layout, self._tied_source)}

    def parameters(self) -> dict[str, Tensor]:
        """Return views of all parameters that the layer computes with, by name."""
        frozen = self._model.frozen_views(self._task.layer, self.frozen) if self.frozen.numel() else {}
        return {**frozen, **self.trained_parameters()}

    def release(self) -> None:
        """Give the memory back."""
        for lease in (self.lease, self._frozen_lease):
            if lease:
                lease.release()


class LayerGradient:
    """The sum of a layer's gradient over the micro-batches, flat and fp32."""

    def __init__(self, model: OffloadedModel, layer: int) -> None:
        self._model, self._layer, self._layout = model, layer, model.layouts[layer]
        self.flat = torch.empty(0)
        self.tile: slice | None = None  # elements of the layer in ``flat``; None: all
        self.lease: Lease | None = None
        self._tied_lease: Lease | None = None  # gradient of the layer that owns this one's tied parameters

    @property
    def is_tied_source(self) -> bool:
        """Whether a tied layer has started this sum: another layer computes with trained parameters of this one."""
        return self._model.is_tied_source(self._layer)

    def find_stored(self, version: int) -> None:
        """Reuse the stored gradient of a step if it is still in the buffer that it was summed in."""
        self.lease = self._model.pools.lease_stored_gradient(self._layer, (self._layer, version))
        if self.lease:
            self.flat = self.lease.tensor

    def begin(self) -> dict[str, Tensor]:
        """Return views of the sums of the trained parameters' gradients, by name; zeros, except for the tied source.

        A tied parameter has one gradient, clipped and applied once. The tied layer starts the sum in the source's
        buffer, and the source adds to it at the end of backward.
        """
        own: dict[str, Tensor] = {}
        if self._layout.numel:
            if self.lease and self.lease.buffer:
                # The buffer of the previous step's gradient: the update has just applied it. `find_stored` may have
                # leased it as the store's type; view all elements as fp32 again.
                buffer = self.lease.buffer
                self.lease = self._cleared(Lease(buffer.tensor[: self._layout.numel], buffer))
            else:
                self.lease = self._cleared(self._model.pools.lease_gradient(self._layer))
            self.flat = self.lease.tensor
            if not self.is_tied_source:
                self.flat.zero_()
            own = self._layout.views(self.flat)
        if not self._layout.tied:
            return own
        self._tied_lease = lease = self._cleared(self._model.pools.lease_gradient(TIED_SOURCE_LAYER))
        return {**own, **tied_views(self._model, self._layout, lease.tensor.zero_())}

    def lease_again(self) -> Tensor:
        """Lease memory again after `release`, without the rest of the layer; the caller fills it."""
        self.lease = self._cleared(self._model.pools.lease_gradient(self._layer))
        self.flat = self.lease.tensor
        return self.flat

    def begin_tile(self, tile: slice) -> dict[str, Tensor]:
        """Return views of the sums of a tile, by name, zeroed; see `Layout.tile_views`."""
        layout = self._layout
        if self.lease is not None and len(self.lease.tensor) < layout.numel:
            self.release()  # the tile before is on its way to the store
        if self.lease is None:
            self.lease = self._cleared(self._model.pools.lease_gradient(self._layer))
        memory = self.lease.tensor
        self.flat = memory[tile] if len(memory) == layout.numel else memory[: tile.stop - tile.start]
        self.tile = tile
        return layout.tile_views(self.flat.zero_(), tile)

    @property
    def is_last_tile(self) -> bool:
        """Whether the sum in ``flat`` ends the layer."""
        return self.tile is None or self.tile.stop == self._layout.numel

    def _cleared(self, lease: Lease) -> Lease:
        """Wait until the buffer's previous gradient has been written; return the lease, without valid content."""
        self._model.meter.wait(lease.transfers, self._model.compute_stream)
        lease.label(None)
        return lease

    def sums(self) -> list[Tensor]:
        """Return the flat tensors that `begin` returned views of."""
        own = [self.flat] if self._layout.numel else []
        return [*own, *([self._tied_lease.tensor] if self._tied_lease else [])]

    def store(self, step: int) -> None:
        """Write the gradient of a step to its store, rounded to the store's type."""
        model, lease = self._model, self.lease
        assert lease is not None
        own, dtype = model.stores["grad"].own("grad", self._layer), model.dtypes["grad"]
        if own is not None:
            # With equal types, the gradient was summed in the store's own memory.
            if own.dtype != self.flat.dtype:
                (own if self.tile is None else own[self.tile]).copy_(self.flat)
            return
        values = round_in_place(self.flat, dtype, model.budget.update_numel)
        start = 0 if self.tile is None else self.tile.start
        lease.transfers.append(model.transfers.write("grad", self._layer, start, values))
        lease.label((self._layer, step) if self.tile is None else None)
        if self.is_last_tile:
            model.transfers.commit(("grad",), self._layer, step)

    def release(self) -> None:
        """Give the layer's own sum back."""
        if self.lease:
            self.lease.release()
            self.lease = None

    def release_all(self) -> None:
        """Give all memory back."""
        self.release()
        if self._tied_lease:
            self._tied_lease.release()


class LoadedLayer:
    """One layer on the device, or on its way there, for one task of the schedule."""

    def __init__(self, model: OffloadedModel, task: LayerTask, updater: Updater | None) -> None:
        self._model, self.task = model, task
        self.index, self.layout = task.layer, model.layouts[task.layer]
        self.weights, self.gradient = WeightSlot(model, task), LayerGradient(model, task.layer)
        self.update: UpdatePump | None = None
        if task.updates or task.gradient == "apply":
            assert updater is not None
            self.update = UpdatePump(model, task, self.weights, self.gradient, updater)
        self._tables = model.row_tables(task.layer)

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def tiles(self) -> tuple[slice, ...]:
        """Tiles in which the gradient is summed; empty: as a whole, or not at all."""
        return self._model.tiles(self.index) if self.task.trains else ()

    @property
    def takes_slot(self) -> bool:
        """Whether the layer needs a slot; frozen embeddings read single rows instead."""
        return not self._tables

    @property
    def is_reusable(self) -> bool:
        """Whether later passes may use this object again: resident weights that never change, as in inference."""
        return set(self._model.dtypes) == {"weight"} and self.weights.is_resident and not self._tables

    def request(self) -> None:
        """Request the layer from the stores, without waiting."""
        self.weights.request()
        # Only in forward: in backward the gradient buffers are needed for new gradients.
        if self.task.updates and self.task.new_version is not None and not self.task.descends:
            self.gradient.find_stored(self.task.new_version)
        if self.update:
            self.update.request()

    def advance(self) -> bool:
        """Update the chunks that have arrived; return False if chunks wait for free buffers."""
        return self.update.advance() if self.update else True

    def finish(self) -> None:
        """Wait until the layer is on the device, with its pending update applied."""
        if self.update and self.task.updates:
            self.update.finish()
            return
        self._model.meter.wait(self.weights.reads, self._model.compute_stream)
        self.weights.label(self.task.version)

    def parameters(self) -> dict[str, Tensor]:
        """Return views of all parameters that the layer computes with, by name."""
        return self.weights.parameters()

    def leaf_parameters(self) -> dict[str, Tensor]:
        """Return the `parameters`; those that the step trains are leaves of a new autograd graph."""
        if not self.task.trains:
            return self.parameters()
        trained = {name: view.detach().requires_grad_() for name, view in self.weights.trained_parameters().items()}
        return {**self.parameters(), **trained}

    def parameters_for(self, batches: Sequence[PackedBatch]) -> Mapping[str, Tensor | EmbeddingRows]:
        """Return the `parameters`; a table that is read by rows contains only the rows that these batches use."""
        if not self._tables:
            return self.parameters()
        with self._model.meter.waiting():
            return {
                name: self._model.gather_rows(self.index, name, torch.cat([batch.on_host(by) for batch in batches]))
                for name, by in self._tables.items()
            }

    def run(self, parameters: Mapping[str, Tensor | EmbeddingRows], *inputs: Any, method: str = "forward") -> Tensor:
        """Run the layer, or one of its methods, with these parameters, by name."""
        return self._model.functional_layers[self.index].run(parameters, *inputs, method=method)

    def saving_views(
        self, pack: Callable[[Tensor], object], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]:
        """Have autograd save tensors by `pack`, if the weights may leave their slot before backward."""
        if self.weights.is_resident:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def use_gradient(self, step: int) -> None:
        """Store the complete gradient or tile, or start to update the layer with it, as the task says."""
        if self.task.gradient == "write":
            self.gradient.store(step)
        elif self.gradient.is_last_tile:
            assert self.update is not None
            if self.gradient.tile is not None:  # all tiles are in the same memory
                assert self.gradient.lease is not None
                self.gradient.flat = self.gradient.lease.tensor
            # The update overwrites the slot. It starts after reads of the slot and after backward's last kernel.
            used = self.weights.lease.transfers if self.weights.lease else []
            self.weights.label(None)  # no valid content until the update ends
            self.update.start([*used, *record_event(self._model.device)])

    @property
    def is_updating(self) -> bool:
        """Whether an update with the gradient of this visit is in progress."""
        return self.task.gradient == "apply" and self.update is not None and self.update.is_started

    def release(self) -> None:
        """Give the layer's memory back."""
        self.weights.release()
        self.gradient.release_all()


def tied_views(model: OffloadedModel, layout: Layout, source: Tensor) -> dict[str, Tensor]:
    """Return views of a layer's tied parameters, by the layer's names, in a flat tensor of their source layer."""
    if not layout.tied:
        return {}
    views = model.layouts[TIED_SOURCE_LAYER].views(source)
    return {name: views[tied.source] for name, tied in layout.tied.items()}


def sum_into(parameter: Tensor, total: Tensor) -> None:
    """Have autograd add the gradient of a leaf to an fp32 tensor."""
    if parameter.dtype == total.dtype:
        parameter.grad = total  # autograd adds to an existing .grad in place
    elif total.device.type == "cpu":  # `linear.project` adds to an fp32 .grad of a bf16 leaf itself
        parameter.grad_dtype = total.dtype
        parameter.grad = total
    else:  # autograd would sum in the parameter's type: add each micro-batch's gradient to the fp32 sum instead
        parameter.register_post_accumulate_grad_hook(_adder(total))  # type: ignore[no-untyped-call]
        sum_products_into(parameter, total)


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add_to_total(parameter: Tensor) -> None:
        if parameter.grad is not None:  # `linear.project` may have added all of it already
            total.add_(parameter.grad)
            parameter.grad = None

    return add_to_total


def round_in_place(gradient: Tensor, dtype: torch.dtype, chunk_numel: int) -> Tensor:
    """Round a gradient to a type no wider than its own, in its own memory; return it as that type."""
    if dtype == gradient.dtype:
        return gradient
    packed = gradient.view(dtype)[: len(gradient)]
    for span in chunks(len(gradient), chunk_numel):
        source = gradient[span]
        # The first chunk overlaps its rounded form: round into new memory first. A later chunk's rounded form ends
        # before the chunk begins.
        packed[span].copy_(source if span.start else source.to(dtype))
    return packed
