"""Prefetch the layers of a schedule while earlier layers compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.schedule import LayerTask
from gptj_ft.streaming.update_pump import Updater


class Prefetcher:
    """Iterate over the layers of a schedule. Each layer is on the device and updated; the next ones are loading.

    A layer's tensors are valid until the iterator advances. A model has one active prefetcher: a new one cancels the
    previous one.

    Args:
        updater: optimizer that applies pending updates; only for tasks with updates.
    """

    def __init__(self, model: OffloadedModel, tasks: Iterable[LayerTask], updater: Updater | None = None) -> None:
        self.model, self._updater = model, updater
        self._tasks = iter(tasks)
        self._next: LayerTask | None = None  # first task without a request
        # Every layer on the device is in one of these, from first to last release.
        self._updating = deque[LoadedLayer]()  # visited; an update with the gradient of the visit is in progress
        self._visited = deque[LoadedLayer](maxlen=1)
        self._loading = deque[LoadedLayer]()
        self._reusable: dict[int, LoadedLayer] = {}
        self._visits = self._visit_all()

    def __iter__(self) -> Iterator[LoadedLayer]:
        return self

    def __next__(self) -> LoadedLayer:
        return next(self._visits)

    @property
    def is_active(self) -> bool:
        """Whether it still owns the buffers: no other prefetcher has started on the model."""
        return self.model.active is self

    def poll(self) -> None:
        """Update the chunks that have arrived for this layer and the next ones, and request more, without waiting.

        Layers call it between their operations, so that few chunk buffers are enough. It draws no random numbers and
        records no autograd graph, whatever the caller is doing.
        """
        for layer in self._in_order():
            if not layer.advance():
                break  # a later layer must not take the chunk buffers that this one needs
        self._end_updates()

    def complete_updates(self) -> bool:
        """Complete the updates that have begun, after an error between layers; those of other layers stay pending.

        Returns:
            False if the error came in the middle of an update: the layer's state is unknown.
        """
        begun = [layer.update for layer in self._in_order() if layer.update is not None and layer.update.has_begun]
        if any(update.is_broken for update in begun):
            return False
        for update in begun:
            update.finish()
        return True

    def _in_order(self) -> list[LoadedLayer]:
        """Return the layers on the device and on their way there, in the order of their release."""
        return [*self._updating, *self._visited, *self._loading]

    def _visit_all(self) -> Iterator[LoadedLayer]:
        # An earlier prefetcher may have been dropped in the middle of its pass, with buffers still in use.
        self.model.cancel()
        self.model.active = self
        self._next = next(self._tasks, None)
        while True:
            self._request_layers()
            if not self._loading:
                # The next layer waits for a slot of a layer that is still updating; or this was the last one.
                if not self._updating:
                    return
                self._end_updates(wait=True)
                continue
            self.poll()  # earlier layers get the chunk buffers before this one waits for its own
            layer = self._loading.popleft()
            self._visited.append(layer)
            layer.finish()
            if self._updating and not self.model.pools.gradients(layer.index).has_free(None):
                self._end_updates(wait=True)  # frees the buffer for this layer's gradient
            if layer.is_reusable:
                self._reusable[layer.index] = layer
            yield layer
            # Asking for the next layer means that the caller no longer uses this one.
            self._visited.clear()
            if layer.is_updating:
                self._updating.append(layer)
            else:
                layer.release()

    def _request_layers(self) -> None:
        """Request the next layers while slots are free."""
        while self._next is not None:
            layers = self._in_order()
            # There are `read_ahead` + 1 slots: one is for the visited layer.
            if sum(layer.takes_slot for layer in layers) > self.model.budget.read_ahead:
                return
            # A visit may change the layer's weights. So neither the layer itself nor a layer that is tied to it is
            # requested before that visit ends.
            if self.model.weight_sources(self._next.layer) & {layer.index for layer in layers}:
                return
            layer, version = self._next.layer, self._next.version
            if layer in self._reusable:
                self._loading.append(self._reusable[layer])
            else:
                key = None if version is None else (layer, version)
                if not self.model.row_tables(layer) and not self.model.pools.has_free_slots(layer, key):
                    return  # only one slot has room for a vocabulary
                self._loading.append(LoadedLayer(self.model, self._next, self._updater))
                self._loading[-1].request()
            self._next = next(self._tasks, None)

    def _end_updates(self, wait: bool = False) -> None:
        """Release the layers whose updates are issued, or with ``wait`` all, and request the next layers."""
        while self._updating:
            update = self._updating[0].update
            assert update is not None
            if not (wait or update.is_done):
                return
            update.finish()
            self._updating.popleft().release()
            self._request_layers()
