"""Schedule the layers of a pass: which come when, and what of each is read, updated and written.

The list of a training step is the whole of its traffic: the `Prefetcher` follows it, and so does the forecast, which
runs it against stores that count (`stores.fake`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gptj_ft.streaming.offloaded_model import OffloadedModel


@dataclass(frozen=True)
class LayerTask:
    """One task of the schedule: what is read, updated and written of a layer while it is on the device.

    Attributes:
        layer: number of the layer.
        runs: whether it is run, so that its frozen weights come, too.
        updates: whether its pending update is applied while it is loaded: moments, master weights and the stored
            gradient are read for that.
        writes: whether the stores get the result; otherwise a later task repeats the update, to the same bits.
        gradient: use of the gradient that is summed while the layer is here: ``write`` stores it for a later
            update, ``apply`` updates the layer with it at once. ``None``: there is none.
        version: optimizer step of the state in the stores; what a buffer still holds of that step is not read again.
            ``None``: everything is read.
        descends: whether chunks are taken from the end: what the way up used last is found first, and the reverse.
    """

    layer: int
    runs: bool = True
    updates: bool = False
    writes: bool = True
    gradient: Literal["write", "apply"] | None = None
    version: int | None = None
    descends: bool = False


@dataclass
class PendingUpdates:
    """Which layers lack the update of the last step, and the policy by which they get it.

    Attributes:
        step: optimizer steps done.
        layers: layers that lack the update of that step.
        waits: whether an update waits for the whole step's gradient norm, so that gradients are stored and the next
            forward pass applies it; otherwise backward applies it as soon as the layer's gradient is there.
        deferred: blocks whose update forward applies to compute with, and backward once more to write. Forward has a
            third of the arithmetic and would have most of the traffic; so it writes nothing of them.
    """

    step: int = 0
    layers: set[int] = field(default_factory=set)
    waits: bool = True
    deferred: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: OffloadedModel, step: int = 0, num_deferred: int = 0) -> PendingUpdates:
        """Start with no update pending.

        Args:
            model: the offloaded model; gradients with a store wait there for the norm, and for a crash after which
                they are applied again.
            step: optimizer steps done.
            num_deferred: leading blocks, of those that this process has, whose updates are deferred; not the last
                block of all, with whose weights backward begins, and none where the state is on the device, changed in
                place.
        """
        blocks = tuple(layer for layer in model.local_layers if 1 <= layer < len(model.layers) - 2)
        return cls(step, set(), "grad" in model.stores, () if model.updates_in_place else blocks[:num_deferred])


def training_tasks(model: OffloadedModel, pending: PendingUpdates) -> list[LayerTask]:
    """Schedule a training step: all layers upwards, then down from the block below the head to the lowest trained.

    Of a model whose layers are shared between processes, those of this one.
    """
    own, top = model.local_layers, len(model.layers) - 1
    return [
        *(_forward_task(model, pending, layer) for layer in own),
        *(_backward_task(model, pending, layer) for layer in reversed(own) if model.lowest_trained <= layer < top),
    ]


def _forward_task(model: OffloadedModel, pending: PendingUpdates, layer: int) -> LayerTask:
    """Schedule a layer on the way up; the head, which is the turn, comes only then and has its gradient at once."""
    gradient = _gradient_use(model, pending, layer) if layer == len(model.layers) - 1 else None
    if layer in pending.layers:
        writes = layer not in pending.deferred
        return LayerTask(layer, updates=True, writes=writes, gradient=gradient, version=pending.step - 1)
    return LayerTask(layer, gradient=gradient, version=pending.step)


def _backward_task(model: OffloadedModel, pending: PendingUpdates, layer: int) -> LayerTask:
    gradient = _gradient_use(model, pending, layer)
    if layer in pending.layers and layer in pending.deferred:
        return LayerTask(layer, updates=True, gradient=gradient, version=pending.step - 1, descends=True)
    return LayerTask(layer, gradient=gradient, version=pending.step, descends=True)


def _gradient_use(model: OffloadedModel, pending: PendingUpdates, layer: int) -> Literal["write", "apply"] | None:
    if not model.layouts[layer].numel:
        return None
    return "write" if pending.waits else "apply"


def inference_tasks(layers: Iterable[int]) -> Iterable[LayerTask]:
    """Schedule layers that are run and nothing else."""
    return map(LayerTask, layers)


def flush_tasks(pending: PendingUpdates) -> list[LayerTask]:
    """Schedule the pending update of every layer that lacks it; no layer is run."""
    return [LayerTask(layer, runs=False, updates=True, version=pending.step - 1) for layer in sorted(pending.layers)]
