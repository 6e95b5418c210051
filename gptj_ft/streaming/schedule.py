"""Schedule the layers of a pass: their order, and the reads, updates and writes of each.

The schedule of a training step determines all of its traffic. `Prefetcher` executes it. The planner runs the same
schedule against stores that count bytes (`stores.fake`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gptj_ft.streaming.offloaded_model import OffloadedModel


@dataclass(frozen=True)
class LayerTask:
    """One visit of a layer."""

    layer: int
    runs: bool = True  # run the layer, so that its frozen weights are loaded, too
    updates: bool = False  # apply the pending update: read moments, master weights and the stored gradient
    writes: bool = True  # write the updated state; False: a later task repeats the update, with the same bits
    gradient: Literal["write", "apply"] | None = None
    """Use of the gradient that this visit sums: store it for a later update, or update the layer with it at once."""
    version: int | None = None
    """Optimizer step of the state in the stores. Buffers with content of this step are not read again. None: read
    everything."""
    descends: bool = False
    """Process chunks from the last to the first. Forward ends with the last chunks in the buffers, and backward finds
    them there if it starts with them."""


@dataclass
class PendingUpdates:
    """Layers that lack the last step's update, and the policy for applying it."""

    step: int = 0  # optimizer steps done
    layers: set[int] = field(default_factory=set)  # layers without the update of `step`
    waits: bool = True
    """True: an update waits for the gradient norm of the whole step. Gradients are stored, and the next forward pass
    applies them. False: backward applies a layer's gradient at once."""
    deferred: tuple[int, ...] = ()
    """Blocks that forward updates without writing, and backward updates again and writes. Forward has a third of a
    step's arithmetic; without deferral it would have most of the traffic."""

    @classmethod
    def of(cls, model: OffloadedModel, step: int = 0, num_deferred: int = 0) -> PendingUpdates:
        """Start without a pending update.

        Args:
            model: the offloaded model. If gradients have a store, updates wait for the norm; after a crash, they are
                applied again from there.
            num_deferred: number of local blocks to defer: the leading ones on disk, then the leading others.
        """
        # Never the last block: backward starts with its weights. Those on disk first: they gain most.
        blocks = (layer for layer in model.local_layers if 1 <= layer < len(model.layers) - 2)
        deferrable = sorted(filter(model.can_defer, blocks), key=model.is_split_off)
        return cls(step, set(), "grad" in model.stores, tuple(sorted(deferrable[:num_deferred])))


def training_tasks(model: OffloadedModel, pending: PendingUpdates) -> list[LayerTask]:
    """Schedule a training step: local layers up to the head, then from the last block down to the lowest trained."""
    local, top = model.local_layers, len(model.layers) - 1
    return [
        *(_forward_task(model, pending, layer) for layer in local),
        *(_backward_task(model, pending, layer) for layer in reversed(local) if model.lowest_trained <= layer < top),
    ]


def _forward_task(model: OffloadedModel, pending: PendingUpdates, layer: int) -> LayerTask:
    """Schedule a layer's forward visit. The head has only this one: it computes its gradient at once."""
    gradient = _gradient_use(model, pending, layer) if layer == len(model.layers) - 1 else None
    if layer in pending.layers:
        # Until an update is written, the stores have the state of the step before.
        writes = layer not in pending.deferred
        return LayerTask(layer, updates=True, writes=writes, gradient=gradient, version=pending.step - 1)
    return LayerTask(layer, gradient=gradient, version=pending.step)


def _backward_task(model: OffloadedModel, pending: PendingUpdates, layer: int) -> LayerTask:
    gradient = _gradient_use(model, pending, layer)
    # Forward has updated the layer without writing, so it is read in its old state again.
    if layer in pending.layers and layer in pending.deferred:
        return LayerTask(layer, updates=True, gradient=gradient, version=pending.step - 1, descends=True)
    return LayerTask(layer, gradient=gradient, version=pending.step, descends=True)


def _gradient_use(model: OffloadedModel, pending: PendingUpdates, layer: int) -> Literal["write", "apply"] | None:
    if not model.layouts[layer].numel:
        return None
    return "write" if pending.waits else "apply"


def inference_tasks(layers: Iterable[int]) -> Iterable[LayerTask]:
    """Schedule layers that run without updates."""
    return map(LayerTask, layers)


def flush_tasks(pending: PendingUpdates) -> list[LayerTask]:
    """Schedule the pending updates, without running layers."""
    return [LayerTask(layer, runs=False, updates=True, version=pending.step - 1) for layer in sorted(pending.layers)]
