"""A layer's passage through the device: what the computation needs comes whole, what only its update needs in parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.embedding import EmbeddingRows
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Kind
from gptj_ft.streaming.buffers import Buffer
from gptj_ft.streaming.model import OffloadedModel
from gptj_ft.streaming.stores.base import chunks
from gptj_ft.system.cuda import StreamEvent, Transfer, record_event


@dataclass(frozen=True)
class LayerTask:
    """What is to be done with a layer on one passage.

    Attributes:
        layer: which.
        updates: whether its pending update is applied on the way in.
        keeps: whether the stores get what the update made; if not, it is done once more on a later visit.
        version: step that the stores' weights and moments are of; what is still on the device of that step is not read
            again. ``None``: everything is read.
        computes: whether the layer is run, so that what of it is not trained has to come, too.
        downwards: parts are taken from the end, to find what was used last on the way up, and the other way round.
    """

    layer: int
    updates: bool = False
    keeps: bool = True
    version: int | None = None
    downwards: bool = False
    computes: bool = True


class Updater(Protocol):
    """What a passage asks of an optimizer."""

    @property
    def kinds(self) -> Sequence[Kind]:
        """What an update changes: weights, master weights, moments."""

    def apply(self, visit: LayerTask, span: slice, tensors: Mapping[Kind, Tensor]) -> None:
        """Update the elements of a span in place, given those of every kind and of the gradient."""

    def applied(self, visit: LayerTask) -> None:
        """Every element of the layer has been updated, and sent to the stores if the visit keeps it."""


@dataclass
class Chunk:
    """Some elements of a layer on their way to being updated."""

    span: slice
    tensors: dict[Kind, Tensor]
    buffers: dict[Kind, Buffer]
    transfers: list[Transfer]


class LayerLoad:
    """One layer on its way to the device, and on it.

    Weights come whole, into a slot. Moments, master weights and stored gradients come in parts, as fast as the pool has
    room for them, are used by the update as soon as they are there, and leave at once. That goes on while the layer
    before computes (see `OffloadedModel.poll`), so that memory for a few parts is enough.

    Attributes:
        index: number of the layer.
        layout: of what is trained of it.
        tensors: what of that is on the device, whole.
        frozen: its other weights; empty if there are none.
    """

    def __init__(self, model: OffloadedModel, visit: LayerTask, updater: Updater | None) -> None:
        self.index, self.layout = visit.layer, model.layouts[visit.layer]
        self.tensors: dict[Kind, Tensor] = {}
        self.frozen = torch.empty(0)
        self._model, self._visit, self._updater = model, visit, updater
        self._slots: dict[Kind, Buffer] = {}
        self._tied_source = torch.empty(0)  # weights of the layer that this one borrows from
        self._tied_gradients: list[Buffer] = []
        self._earlier: list[Transfer] = []  # transfers that used the weights' slot before
        self._transfers: list[Transfer] = []
        self._comes_in_parts = False  # the weights
        self._updated: list[StreamEvent] = []  # when the device has done the last part
        self._spans: deque[slice] = deque()
        self._parts: deque[Chunk] = deque()
        if self.is_trained:
            self._bring_weights()
        self._tables = model.tables(self.index)
        if visit.computes and model.frozen[self.index].numel and not self._tables:
            self._bring_frozen()
        if visit.updates:
            self._find_gradient()
            self._prepare_update()
        # Of a model that is only read, what is on the device for good stays as it is.
        self.is_settled = set(model.dtypes) == {"weight"} and not (self._slots or self._tables)

    @property
    def module(self) -> nn.Module:
        """The layer, on the ``meta`` device."""
        return self._model.layers[self.index]

    @property
    def is_trained(self) -> bool:
        """Whether some of the parameters are that the layer computes with, its own or those it borrows."""
        return bool(self.layout.shapes or self.layout.tied)

    @property
    def takes_room(self) -> bool:
        """Whether it comes whole; of tables, rows are asked for when they are used."""
        return not self._tables

    @property
    def is_above_trained(self) -> bool:
        """Whether a layer below it is trained, so that the gradient of its inputs is needed."""
        return self.index > self._model.lowest_trained

    @property
    def is_in_backward(self) -> bool:
        return self.index >= self._model.lowest_trained

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return those of the `parameters` that are trained."""
        own = self.layout.views(self.tensors["weight"]) if self.layout.numel else {}
        return {**own, **self._tied_views(self._tied_source)}

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters that the layer computes with as views of its weights, and of those it borrows."""
        frozen = self._model.frozen_views(self.index, self.frozen) if self.frozen.numel() else {}
        return {**frozen, **self.trained_parameters()}

    def parameters_for(self, batches: Sequence[PackedBatch]) -> Mapping[str, Tensor | EmbeddingRows]:
        """Return the `parameters`, or of tables just the rows that these batches use: asked for here, waited for."""
        if not self._tables:
            return self.parameters()
        with self._model.waiting():
            return {
                name: self._model.gather_rows(self.index, name, torch.cat([getattr(batch, by) for batch in batches]))
                for name, by in self._tables.items()
            }

    def run(self, parameters: Mapping[str, Tensor | EmbeddingRows], *inputs: Any) -> Tensor:
        """Run the layer with these in the place of its parameters, by name."""
        return self._model.functional_layers[self.index].run(parameters, *inputs)

    def advance(self, wait: bool = False) -> bool:
        """Update what has come, or with ``wait`` everything; tell whether nothing is left to ask the stores for."""
        if wait:
            self._wait(self._transfers)
        while True:
            while self._spans and self._has_free(self._spans[0]):
                self._parts.append(self._ask(self._spans.popleft()))
            if not self._parts or not (wait or all(transfer.done() for transfer in self._parts[0].transfers)):
                return not self._spans
            with self._model.updating():
                self._update(self._parts.popleft())

    def finish(self) -> None:
        """Have the layer on the device, updated."""
        self.advance(wait=True)
        assert not self._spans, "a later layer has taken the room"
        self._wait(self._updated)
        version = self._visit.version
        if self._visit.updates:
            assert self._updater is not None
            self._updater.applied(self._visit)
            version = None if version is None else version + 1
        if "weight" in self._slots:
            self._slots["weight"].key = None if version is None else (self.index, version)

    def gradients(self) -> dict[str, Tensor]:
        """Return where to sum the gradients of `trained_parameters`, fp32; waits until the gradient before has left.

        They are zeros, but for those of a layer that lends. Its borrower, which backward comes to first, has begun
        them: the gradient of a parameter that two layers use is one sum, clipped and applied once.
        """
        own: dict[str, Tensor] = {}
        if self.layout.numel:
            self.tensors["grad"], slot = self._sum_of(self.index)
            if slot is not None:
                self._slots["grad"] = slot
            if not self._model.is_tied_source(self.index):
                self.tensors["grad"].zero_()
            own = self.layout.views(self.tensors["grad"])
        if not self.layout.tied:
            return own
        begun, slot = self._sum_of(TIED_SOURCE_LAYER)
        self._tied_gradients = [slot] if slot is not None else []
        return {**own, **self._tied_views(begun.zero_())}

    def _sum_of(self, layer: int) -> tuple[Tensor, Buffer | None]:
        """Return where a layer's gradient is summed, and the buffer that this is in, if it is not its store."""
        model = self._model
        store = model.stores.get("grad")
        if store is not None and store.resident and model.dtypes["grad"] == torch.float32:
            return store.read("grad", layer, None).result(), None
        # That of the step before, if the layer was updated with it just now, is not needed any more.
        own = self._slots.get("grad") if layer == self.index else None
        slot = own or model.gradients(layer).acquire(None)[0]
        self._wait(slot.transfers)
        slot.key = None
        return slot.tensor[: model.layouts[layer].numel], slot

    def _tied_views(self, lender: Tensor) -> dict[str, Tensor]:
        """Return views of what the layer borrows, by its names here, in a flat tensor of the layer it is of."""
        if not self.layout.tied:
            return {}
        views = self._model.layouts[TIED_SOURCE_LAYER].views(lender)
        return {name: views[loan.source] for name, loan in self.layout.tied.items()}

    def send_gradient(self, step: int) -> None:
        """Give the gradient of a step to its store, rounded to the store's type."""
        model, gradient = self._model, self.tensors["grad"]
        store, dtype = model.stores["grad"], model.dtypes["grad"]
        if store.resident:
            if dtype != gradient.dtype:
                store.read("grad", self.index, None).result().copy_(gradient)
            return
        slot = self._slots["grad"]
        slot.transfers.append(model.send("grad", self.index, pack(gradient, dtype, model.budget.chunk_numel), 0))
        slot.key = (self.index, step)
        store.commit(self.index, step)

    def update(self) -> None:
        """Update the layer now, with the gradient that is on the device."""
        assert not self._visit.updates
        self._visit = LayerTask(self.index, updates=True, version=self._visit.version)
        self._earlier = [
            *(self._slots["weight"].transfers if "weight" in self._slots else ()),
            *record_event(self._model.device),
        ]
        self._prepare_update()
        self.finish()

    def release(self) -> None:
        """The consumer has left the layer: its slots may be given to others."""
        for slot in (*self._slots.values(), *self._tied_gradients):
            slot.release()

    def _bring_weights(self) -> None:
        model, visit, store = self._model, self._visit, self._model.stores["weight"]
        if store.resident:
            if self.layout.numel:
                self.tensors["weight"] = store.read("weight", self.index, None).result()
            if self.layout.tied:
                self._tied_source = store.read("weight", TIED_SOURCE_LAYER, None).result()
            return
        content = None if visit.version is None else (self.index, visit.version)
        slot, is_here = model.slots.acquire(content)
        self._slots["weight"], self._earlier = slot, list(slot.transfers)
        self.tensors["weight"] = slot.tensor[: self.layout.numel]
        slot.key = None  # until all of it has come, or been updated
        if visit.updates:
            self._comes_in_parts = not is_here and model.parameter == "weight"
        elif is_here:
            slot.key = content
        elif self.layout.numel:
            self._transfers.append(model.fetch("weight", self.index, self.tensors["weight"], 0, self._earlier))
            slot.transfers.append(self._transfers[-1])
        if self.layout.tied:
            # Behind the layer's own, where they begin on a page as well. They have changed since they were last here.
            self._tied_source = slot.tensor[self.layout.numel :][: model.layouts[TIED_SOURCE_LAYER].numel]
            self._transfers.append(model.fetch("weight", TIED_SOURCE_LAYER, self._tied_source, 0, self._earlier))
            slot.transfers.append(self._transfers[-1])

    def _bring_frozen(self) -> None:
        model, store = self._model, self._model.stores["frozen"]
        if store.resident:
            self.frozen = store.read("frozen", self.index, None).result()
            return
        slot, is_here = model.frozen_slots.acquire(self.index)
        self._slots["frozen"] = slot
        self.frozen = slot.tensor[: model.frozen[self.index].numel]
        if not is_here:
            slot.transfers.append(model.fetch("frozen", self.index, self.frozen, 0, slot.transfers))
        self._transfers += slot.transfers

    def _find_gradient(self) -> None:
        """Use the gradient where it is still in the slot that it was summed in; not on the way down, which needs it."""
        model, version, dtype = self._model, self._visit.version, self._model.dtypes["grad"]
        if version is not None and not self._visit.downwards and not model.stores["grad"].resident:
            content = (self.index, version + 1)
            sums = model.gradients(self.index)
            if sums.key(content):
                self._slots["grad"], _ = sums.acquire(content)
                self.tensors["grad"] = self._slots["grad"].tensor.view(dtype)[: self.layout.numel]

    def _prepare_update(self) -> None:
        model, updater = self._model, self._updater
        assert updater is not None
        for kind in (*updater.kinds, "grad"):
            if kind not in self.tensors and model.stores[kind].resident:
                self.tensors[kind] = model.stores[kind].read(kind, self.index, None).result()
        self._pooled: list[Kind] = [kind for kind in (*updater.kinds, "grad") if kind not in self.tensors]
        spans = chunks(self.layout.numel, model.budget.chunk_numel)
        self._spans.extend(reversed(spans) if self._visit.downwards else spans)

    def _content(self, kind: Kind, span: slice) -> Hashable:
        version = self._visit.version
        return None if version is None else (self.index, span.start, version + (kind == "grad"))

    def _has_free(self, span: slice) -> bool:
        return all(self._model.pool(kind).has_free(self._content(kind, span)) for kind in self._pooled)

    def _ask(self, span: slice) -> Chunk:
        model = self._model
        # What was in a buffer before must have left before the update changes it.
        part = Chunk(span, {kind: tensor[span] for kind, tensor in self.tensors.items()}, {}, list(self._earlier))
        if self._comes_in_parts:
            values = part.tensors["weight"]
            part.transfers.append(model.fetch("weight", self.index, values, span.start, self._earlier))
        for kind in self._pooled:
            buffer, is_here = model.pool(kind).acquire(self._content(kind, span))
            part.buffers[kind] = buffer
            part.tensors[kind] = values = buffer.tensor[: span.stop - span.start]
            if not is_here:
                buffer.transfers.append(model.fetch(kind, self.index, values, span.start, buffer.transfers))
            part.transfers += buffer.transfers
        return part

    def _update(self, part: Chunk) -> None:
        model, visit, updater = self._model, self._visit, self._updater
        assert updater is not None
        self._wait(part.transfers)
        updater.apply(visit, part.span, part.tensors)
        version = None if visit.version is None else visit.version + 1
        for kind in updater.kinds:
            holder = part.buffers.get(kind) or self._slots.get(kind)
            if holder is None:
                continue  # resident, changed in place
            if visit.keeps:
                holder.transfers.append(model.send(kind, self.index, part.tensors[kind], part.span.start))
            if kind in part.buffers:
                holder.key = None if version is None else (self.index, part.span.start, version)
        for buffer in part.buffers.values():
            buffer.release()
        self._updated = record_event(model.device)

    def _wait(self, transfers: Sequence[Transfer]) -> None:
        if transfers:
            with self._model.waiting():
                for transfer in transfers:
                    transfer.result()


def pack(gradient: Tensor, dtype: torch.dtype, chunk_numel: int) -> Tensor:
    """Round a gradient to a type no wider than its own, in its own memory; return it as that type."""
    if dtype == gradient.dtype:
        return gradient
    packed = gradient.view(dtype)[: len(gradient)]
    for span in chunks(len(gradient), chunk_numel):
        packed[span] = gradient[span].to(dtype)  # a copy first: the first part overlaps its own rounded form
    return packed
