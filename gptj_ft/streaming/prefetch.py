"""Load the layers of a schedule ahead of the computation: weights whole, what only an update needs in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.embedding import EmbeddingRows
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Kind
from gptj_ft.streaming.buffers import Lease
from gptj_ft.streaming.model import OffloadedModel
from gptj_ft.streaming.schedule import LayerTask
from gptj_ft.streaming.stores.base import chunks
from gptj_ft.streaming.stores.state_file import PartDigest
from gptj_ft.system.accelerator import Stream, StreamEvent, Transfer, record_event, wait_for

Updated = Callable[[Kind, Tensor], None]
"""Take the new values of some elements of a kind, in order."""


class Updater(Protocol):
    """Applies updates to chunks of layers while they are loaded."""

    def apply(self, task: LayerTask, span: slice, tensors: Mapping[Kind, Tensor], updated: Updated) -> None:
        """Update the elements of a span in place, block by block.

        Args:
            task: task of the layer.
            span: elements of the layer to update.
            tensors: those of every kind, and of the gradient.
            updated: called with the new values of each kind, block by block, while they are in a processor's cache.
        """

    def applied(self, task: LayerTask) -> None:
        """Note that every element of the layer has been updated, and sent to the stores if the task writes."""


class Prefetcher:
    """Iterate over the layers of a schedule, each on the device and updated, the next ones already on their way.

    A layer's tensors are valid until the next one is asked for. One at a time: a new one ends the last.

    Args:
        model: the offloaded model.
        tasks: the schedule.
        updater: the optimizer whose pending updates are applied; only for tasks with updates.
    """

    def __init__(self, model: OffloadedModel, tasks: Iterable[LayerTask], updater: Updater | None = None) -> None:
        self.model, self._updater = model, updater
        self._tasks = iter(tasks)
        self._next: LayerTask | None = None  # of the tasks, the first that is not asked for
        self._updating = deque[LayerLoad]()  # visited, and still to be updated with the gradient that came of it
        self._visited = deque[LayerLoad](maxlen=1)
        self._loading = deque[LayerLoad]()
        self._reusable: dict[int, LayerLoad] = {}
        self._visits = self._visit_all()

    def __iter__(self) -> Iterator[LayerLoad]:
        return self

    def __next__(self) -> LayerLoad:
        return next(self._visits)

    @property
    def is_active(self) -> bool:
        """Whether it still owns the buffers: no later prefetcher has been started on the model."""
        return self.model.active is self

    def poll(self) -> None:
        """Update the chunks that have arrived, of this layer and the next ones, and request more, without waiting.

        Called between the operations of the layer that computes, so that memory for a few chunks is enough. It draws
        no random numbers and records no graph, whatever the layer is in the middle of.
        """
        for load in self._in_order():
            if not load.advance():
                break  # a later layer must not take the chunk buffers that this one needs
        self._end_updates()

    def _in_order(self) -> list[LayerLoad]:
        """Return the layers on the device and on their way there, in the order in which they are done with."""
        return [*self._updating, *self._visited, *self._loading]

    def _visit_all(self) -> Iterator[LayerLoad]:
        self.model.cancel()
        self.model.active = self
        self._next = next(self._tasks, None)
        while True:
            self._start_loads()
            if not self._loading:
                if not self._updating:
                    return
                self._end_updates(wait=True)
                continue
            self.poll()
            load = self._loading.popleft()
            self._visited.append(load)
            load.finish()
            if self._updating and not self.model.gradients(load.index).has_free(None):
                self._end_updates(wait=True)  # one of them has the buffer that this layer's gradient is to be summed in
            if load.is_reusable:
                self._reusable[load.index] = load
            yield load
            self._visited.clear()
            if load.is_updating:
                self._updating.append(load)
            else:
                load.release()

    def _start_loads(self) -> None:
        """Ask for the next layers, as far as there are slots for them."""
        while self._next is not None:
            here = self._in_order()
            if sum(load.takes_slot for load in here) > self.model.budget.read_ahead:
                return
            # A layer that is still to be visited may change on that visit: it is not asked for a second time before,
            # nor is a layer that computes with its parameters.
            if self.model.sources(self._next.layer) & {load.index for load in here}:
                return
            if self._next.layer in self._reusable:
                self._loading.append(self._reusable[self._next.layer])
            else:
                self._loading.append(LayerLoad(self.model, self._next, self._updater))
                self._loading[-1].start()
            self._next = next(self._tasks, None)

    def _end_updates(self, wait: bool = False) -> None:
        """End the updates, by gradients of this pass, that are through, or with ``wait`` all; the next layers come."""
        while self._updating and (wait or self._updating[0].is_updated):
            self._updating[0].end_update()
            self._updating.popleft()
            self._start_loads()


@dataclass
class Chunk:
    """Some elements of a layer on their way to being updated."""

    span: slice
    leases: dict[Kind, Lease]
    transfers: list[Transfer]


class LayerLoad:
    """Load one layer onto the device, for one task of the schedule.

    Weights come whole, into a slot. Moments, master weights and stored gradients come in chunks, as fast as the pools
    have buffers for them, are used by the update as soon as they are there, and leave at once.

    Attributes:
        task: task of the schedule.
        layout: layout of its trained parameters.
        tensors: tensors of these on the device, whole, by kind.
        frozen: frozen weights, flat; empty if there are none.
    """

    def __init__(self, model: OffloadedModel, task: LayerTask, updater: Updater | None) -> None:
        self.task, self.layout = task, model.layouts[task.layer]
        self.tensors: dict[Kind, Tensor] = {}
        self.frozen = torch.empty(0)
        self._model, self._updater = model, updater
        self._leases: dict[Kind, Lease] = {}
        self._tied_source = torch.empty(0)  # weights of the layer that this one has tied parameters of
        self._tied_gradients: list[Lease] = []
        self._earlier: list[Transfer] = []  # transfers that used the weights' slot before
        self._transfers: list[Transfer] = []
        self._weights_in_chunks = False
        # What an update comes after, beside what it reads; ``None``: there is no gradient to update with.
        self._ready: list[Transfer] | None = [] if task.updates else None
        self._updated: list[StreamEvent] = []  # when the device has done the last chunk
        self._chunked: list[Kind] = []
        self._spans: deque[slice] = deque()
        self._chunks: deque[Chunk] = deque()
        self._tables = model.tables(task.layer)

    @property
    def index(self) -> int:
        """Number of the layer."""
        return self.task.layer

    @property
    def device(self) -> torch.device:
        """Device that computes."""
        return self._model.device

    @property
    def module(self) -> nn.Module:
        """The layer, on the ``meta`` device."""
        return self._model.layers[self.index]

    @property
    def is_trained(self) -> bool:
        """Whether parameters that the layer computes with are trained, its own or tied ones."""
        return bool(self.layout.shapes or self.layout.tied)

    @property
    def is_reusable(self) -> bool:
        """Whether the load can be reused: resident weights that never change, as in inference."""
        return set(self._model.dtypes) == {"weight"} and self._stays and not self._tables

    def saving_places(
        self, pack: Callable[[Tensor], object], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]:
        """Have graphs save weights by `pack`, where they do not stay in memory from forward to backward."""
        return nullcontext() if self._stays else torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @property
    def _stays(self) -> bool:
        """Whether the layer is in memory of its stores', where it stays."""
        return all(lease.buffer is None for lease in self._leases.values())

    @property
    def takes_slot(self) -> bool:
        """Whether the layer takes a slot; of frozen embedding tables, single rows are gathered instead."""
        return not self._tables

    @property
    def is_above_trained(self) -> bool:
        """Whether a layer below it is trained, so that the gradient of its inputs is needed."""
        return self.index > self._model.lowest_trained

    @property
    def is_in_backward(self) -> bool:
        """Whether the backward pass visits it."""
        return self.index >= self._model.lowest_trained

    def trained_parameters(self) -> dict[str, Tensor]:
        """Return those of the `parameters` that are trained."""
        own = self.layout.views(self.tensors["weight"]) if self.layout.numel else {}
        return {**own, **self._tied_views(self._tied_source)}

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters that the layer computes with, as views of its weights and of its ties' source."""
        frozen = self._model.frozen_views(self.index, self.frozen) if self.frozen.numel() else {}
        return {**frozen, **self.trained_parameters()}

    def leaf_parameters(self) -> dict[str, Tensor]:
        """Return the `parameters`; the trained ones are leaves of a new graph."""
        trained = {name: view.detach().requires_grad_() for name, view in self.trained_parameters().items()}
        return {**self.parameters(), **trained}

    def parameters_for(self, batches: Sequence[PackedBatch]) -> Mapping[str, Tensor | EmbeddingRows]:
        """Return the `parameters`, or of tables just the rows that these batches use: asked for here, waited for."""
        if not self._tables:
            return self.parameters()
        with self._model.waiting():
            return {
                name: self._model.gather_rows(self.index, name, torch.cat([batch.on_host(by) for batch in batches]))
                for name, by in self._tables.items()
            }

    def run(self, parameters: Mapping[str, Tensor | EmbeddingRows], *inputs: Any) -> Tensor:
        """Run the layer with these in the place of its parameters, by name."""
        return self._model.functional_layers[self.index].run(parameters, *inputs)

    def start(self) -> None:
        """Ask the stores for the layer; nothing is waited for."""
        if self.is_trained:
            self._start_weights()
        if self.task.runs and self._model.frozen[self.index].numel and not self._tables:
            self._start_frozen()
        if self.task.updates:
            self._find_gradient()
        if self.task.updates or self.task.gradient == "apply":
            self._start_update()

    def advance(self, wait: bool = False) -> bool:
        """Update the chunks that have arrived, or with ``wait`` all; return whether no request is left to make."""
        if wait:
            self._wait(self._transfers, self._model.compute_stream)
        while True:
            while self._spans and self._has_free(self._spans[0]):
                self._chunks.append(self._start_chunk(self._spans.popleft()))
            if self._ready is None or not self._chunks:
                return not self._spans
            if not (wait or all(transfer.done() for transfer in self._chunks[0].transfers)):
                return not self._spans
            with self._model.updating(), torch.no_grad():
                self._update(self._chunks.popleft())

    def finish(self) -> None:
        """Have the layer on the device, with its pending update."""
        if self.task.updates:
            self._finish_update()
            return
        self._wait(self._transfers, self._model.compute_stream)
        self._label_weights(self.task.version)

    @property
    def is_updating(self) -> bool:
        """Whether it is being updated with the gradient that was summed while it was here."""
        return self.task.gradient == "apply" and self._ready is not None

    @property
    def is_updated(self) -> bool:
        """Whether the device has been given every chunk of an update."""
        return not self._spans and not self._chunks

    def end_update(self) -> None:
        """Have the layer updated with its gradient, and end its use."""
        self._finish_update()
        self.release()

    def _finish_update(self) -> None:
        self.advance(wait=True)
        assert not self._spans, "a later layer has taken the chunk buffers"
        assert self._updater is not None
        self._wait(self._updated, self._model.compute_stream)
        self._updater.applied(self.task)
        self._label_weights(None if self.task.version is None else self.task.version + 1)

    def _label_weights(self, version: int | None) -> None:
        if "weight" in self._leases:
            self._leases["weight"].label(None if version is None else (self.index, version))

    def gradients(self) -> dict[str, Tensor]:
        """Return the sums of the gradients of `trained_parameters`, fp32; waits until the gradient before has left.

        They are zeros, but for those of the source of tied parameters. The layer that is tied to it, which backward
        comes to first, has begun them: the gradient of a parameter that two layers use is one sum, clipped and applied
        once.
        """
        own: dict[str, Tensor] = {}
        if self.layout.numel:
            # That of the step before, if the layer was updated with it just now, is not needed any more.
            self._leases["grad"] = lease = self._sum_into(self._leases.get("grad"), self.index)
            self.tensors["grad"] = lease.tensor
            if not self._model.is_tied_source(self.index):
                lease.tensor.zero_()
            own = self.layout.views(lease.tensor)
        if not self.layout.tied:
            return own
        begun = self._sum_into(None, TIED_SOURCE_LAYER)
        self._tied_gradients = [begun]
        return {**own, **self._tied_views(begun.tensor.zero_())}

    @property
    def is_tied_source(self) -> bool:
        """Whether another layer computes with trained parameters of this one, and has begun its gradient."""
        return self._model.is_tied_source(self.index)

    def gradient_sums(self) -> list[Tensor]:
        """Return the flat tensors that `gradients` are parts of."""
        own = [self.tensors["grad"]] if self.layout.numel else []
        return [*own, *(lease.tensor for lease in self._tied_gradients)]

    def release_gradient(self) -> None:
        """End the use of the gradient's memory, before that of the layer or after it."""
        self._leases.pop("grad").release()

    def lease_gradient(self) -> Tensor:
        """Return memory for the gradient again, to be filled; all else of the layer may have been released."""
        self._leases["grad"] = lease = self._sum_into(None, self.index)
        self.tensors["grad"] = lease.tensor
        return lease.tensor

    def use_gradient(self, step: int) -> None:
        """Store the gradient, or update the layer with it, as the task says."""
        if self.task.gradient == "write":
            self._send_gradient(step)
        else:
            self._apply_gradient()

    def _send_gradient(self, step: int) -> None:
        """Give the gradient of a step to its store, rounded to the store's type."""
        model, gradient, lease = self._model, self.tensors["grad"], self._leases["grad"]
        own, dtype = model.own("grad", self.index), model.dtypes["grad"]
        if own is not None:
            if own.dtype != gradient.dtype:
                own.copy_(gradient)
            return
        model.keep(lease, "grad", self.index, values=round_in_place(gradient, dtype, model.budget.chunk_numel))
        lease.label((self.index, step))
        model.commit(("grad",), self.index, step)

    def _apply_gradient(self) -> None:
        """Begin to update the layer with the gradient that is on the device; the prefetcher sees to the rest."""
        used = self._leases["weight"].transfers if "weight" in self._leases else []
        self._ready = [*used, *record_event(self._model.device)]
        self._label_weights(None)  # until all of it has been updated
        self.advance()

    def release(self) -> None:
        """End the use of the layer: its memory may be given to others."""
        for lease in (*self._leases.values(), *self._tied_gradients):
            lease.release()

    def _start_weights(self) -> None:
        model, task = self._model, self.task
        key = None if task.version is None else (self.index, task.version)
        self._leases["weight"] = lease = model.lease_weights(self.index, key)
        self.tensors["weight"] = lease.tensor
        if lease.buffer is None:
            if self.layout.tied:
                source = model.own("weight", TIED_SOURCE_LAYER)
                assert source is not None
                self._tied_source = source
            return
        self._earlier = list(lease.transfers)
        if task.updates or not lease.is_cached:
            lease.label(None)  # until all of it has come, or been updated
        if task.updates:
            self._weights_in_chunks = not lease.is_cached and model.parameter == "weight"
        elif self.layout.numel and not lease.is_cached:
            model.fill(lease, "weight", self.index)
            self._transfers.append(lease.transfers[-1])
        if self.layout.tied and task.runs:
            # Behind the layer's own, where they begin on a page as well. They have changed since they were last here.
            numel = model.layouts[TIED_SOURCE_LAYER].numel
            self._tied_source = lease.buffer.tensor[self.layout.numel :][:numel]
            self._transfers.append(model.fetch("weight", TIED_SOURCE_LAYER, self._tied_source, 0, self._earlier))
            lease.transfers.append(self._transfers[-1])

    def _start_frozen(self) -> None:
        self._leases["frozen"] = lease = self._model.lease_frozen(self.index)
        self.frozen = lease.tensor
        self._model.fill(lease, "frozen", self.index)
        self._transfers += lease.transfers

    def _find_gradient(self) -> None:
        """Use the gradient where it is still in the buffer that it was summed in; not on the way down, for the next."""
        if self.task.version is not None and not self.task.descends:
            lease = self._model.cached_gradient(self.index, (self.index, self.task.version + 1))
            if lease is not None:
                self._leases["grad"], self.tensors["grad"] = lease, lease.tensor

    def _start_update(self) -> None:
        kinds = (*self._model.updated_kinds, "grad") if self.task.updates else self._model.updated_kinds
        self._chunked = [kind for kind in kinds if kind not in self.tensors]
        spans = chunks(self.layout.numel, self._model.budget.chunk_numel)
        self._spans.extend(reversed(spans) if self.task.descends else spans)

    def _key(self, kind: Kind, span: slice) -> Hashable:
        version = self.task.version
        return None if version is None else (self.index, span.start, version + (kind == "grad"))

    def _has_free(self, span: slice) -> bool:
        return all(self._model.has_free_chunk(kind, self.index, self._key(kind, span)) for kind in self._chunked)

    def _start_chunk(self, span: slice) -> Chunk:
        model = self._model
        # What was in the slot before must have left before the update changes it.
        chunk = Chunk(span, {}, list(self._earlier))
        if self._weights_in_chunks:
            values = self.tensors["weight"][span]
            chunk.transfers.append(model.fetch("weight", self.index, values, span.start, self._earlier))
        for kind in self._chunked:
            chunk.leases[kind] = lease = model.lease_chunk(kind, self.index, span, self._key(kind, span))
            model.fill(lease, kind, self.index, span.start)
            chunk.transfers += lease.transfers
        return chunk

    def _update(self, chunk: Chunk) -> None:
        model, task, updater = self._model, self.task, self._updater
        assert updater is not None
        assert self._ready is not None
        self._wait([*self._ready, *chunk.transfers], model.update_stream)
        tensors = {kind: tensor[chunk.span] for kind, tensor in self.tensors.items()}
        tensors |= {kind: lease.tensor for kind, lease in chunk.leases.items()}
        digests = {kind: PartDigest() for kind in model.updated_kinds if task.writes and model.digests_by_chunk(kind)}

        def add(kind: Kind, block: Tensor) -> None:
            if kind in digests:
                digests[kind].add(block)

        updater.apply(task, chunk.span, tensors, add)
        version = None if task.version is None else task.version + 1
        for kind in model.updated_kinds:
            if task.writes:
                lease = chunk.leases.get(kind) or self._leases[kind]
                known = [digests[kind].of(tensors[kind])] if kind in digests else []
                model.keep(lease, kind, self.index, chunk.span.start, tensors[kind], known)
            if kind in chunk.leases:
                chunk.leases[kind].label(None if version is None else (self.index, chunk.span.start, version))
        for lease in chunk.leases.values():
            lease.release()
        self._updated = record_event(model.device)

    def _sum_into(self, found: Lease | None, layer: int) -> Lease:
        """Return a buffer to sum a layer's gradient in, once its former content has been written."""
        model = self._model
        if found is not None and found.buffer is not None:
            lease = Lease(found.buffer.tensor[: model.layouts[layer].numel], found.buffer)
        else:
            lease = model.lease_gradient(layer)
        self._wait(lease.transfers, model.compute_stream)
        lease.label(None)
        return lease

    def _tied_views(self, source: Tensor) -> dict[str, Tensor]:
        """Return views of the layer's tied parameters, by its names, in a flat tensor of the layer they are of."""
        if not self.layout.tied:
            return {}
        views = self._model.layouts[TIED_SOURCE_LAYER].views(source)
        return {name: views[tied.source] for name, tied in self.layout.tied.items()}

    def _wait(self, transfers: Sequence[Transfer], stream: Stream) -> None:
        if transfers:
            with self._model.waiting():
                wait_for(transfers, stream)


def round_in_place(gradient: Tensor, dtype: torch.dtype, chunk_numel: int) -> Tensor:
    """Round a gradient to a type no wider than its own, in its own memory; return it as that type."""
    if dtype == gradient.dtype:
        return gradient
    packed = gradient.view(dtype)[: len(gradient)]
    for span in chunks(len(gradient), chunk_numel):
        source = gradient[span]
        # The first chunk overlaps its own rounded form; that of any other ends before it begins.
        packed[span].copy_(source if span.start else source.to(dtype))
    return packed
