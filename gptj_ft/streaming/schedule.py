"""Schedule the layers of a pass: their order, and the reads, updates and writes of each.

The schedule of a training step determines all of its traffic. `Prefetcher` executes it. The planner runs the same
schedule against stores that count bytes (`stores.fake`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from gptj_ft.models.layer_sampling import EVERY_LAYER, EveryLayer
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
    trains: bool = False  # the step trains the layer: backward sums the gradients of its parameters
    needs_input_gradient: bool = False  # the step trains a lower layer
    version: int | None = None
    """Optimizer step of the state in the stores. Buffers with content of this step are not read again. None: read
    everything."""
    new_version: int | None = None  # optimizer step of the state after an update
    descends: bool = False
    """Process chunks from the last to the first. Forward ends with the last chunks in the buffers, and backward finds
    them there if it starts with them."""

    @property
    def is_in_backward(self) -> bool:
        """Whether the backward pass visits the layer."""
        return self.trains or self.needs_input_gradient


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
    choice: EveryLayer = EVERY_LAYER  # layers that each step trains

    @classmethod
    def of(cls, model: OffloadedModel, step: int = 0, num_deferred: int = 0) -> PendingUpdates:
        """Start without a pending update.

        Args:
            model: the offloaded model. If gradients have a store, updates wait for the norm; after a crash, they are
                applied again from there.
            num_deferred: number of local blocks to defer: the leading ones on disk, then the leading others.
        """
        if model.choice != EVERY_LAYER:
            # Backward may end above a layer with a pending update, which would never be written. And there is little
            # to gain: few layers are updated.
            num_deferred = 0
        # Never the last block: backward starts with its weights. Those on disk first: they gain most.
        blocks = (layer for layer in model.local_layers if 1 <= layer < len(model.layers) - 2)
        deferrable = sorted(filter(model.can_defer, blocks), key=model.is_split_off)
        deferred = tuple(sorted(deferrable[:num_deferred]))
        return cls(step, set(), "grad" in model.stores, deferred, model.choice)

    def trains(self, layer: int) -> bool:
        """Tell whether the next step trains a layer."""
        return self.choice.trains(layer, self.step)


def training_tasks(model: OffloadedModel, pending: PendingUpdates) -> list[LayerTask]:
    """Schedule a training step: local layers up to the head, then from the last block down to the lowest trained."""
    local, top, lowest = model.local_layers, len(model.layers) - 1, lowest_trained(model, pending)
    return [
        *(_forward_task(model, pending, layer, lowest) for layer in local),
        *(_backward_task(model, pending, layer, lowest) for layer in reversed(local) if lowest <= layer < top),
    ]


def lowest_trained(model: OffloadedModel, pending: PendingUpdates) -> int:
    """Return the layer at which the next step's backward ends, local or not; the number of layers if it trains none."""
    return next(filter(pending.trains, range(model.lowest_trained, len(model.layers))), len(model.layers))


def _forward_task(model: OffloadedModel, pending: PendingUpdates, layer: int, lowest: int) -> LayerTask:
    """Schedule a layer's forward visit. The head has only this one: it computes its gradient at once."""
    task = _task(model, pending, layer, lowest, updates=layer in pending.layers)
    if layer == len(model.layers) - 1:
        task = replace(task, gradient=_gradient_use(model, pending, layer))
    # Until an update is written, the stores have the state before it.
    return replace(task, writes=not (task.updates and layer in pending.deferred))


def _backward_task(model: OffloadedModel, pending: PendingUpdates, layer: int, lowest: int) -> LayerTask:
    # Forward has updated a deferred layer without writing, so it is read in its old state again.
    again = layer in pending.layers and layer in pending.deferred
    task = _task(model, pending, layer, lowest, updates=again)
    return replace(task, gradient=_gradient_use(model, pending, layer), descends=True)


def _task(model: OffloadedModel, pending: PendingUpdates, layer: int, lowest: int, updates: bool) -> LayerTask:
    layout, num_done = model.layouts[layer], pending.step - updates
    return LayerTask(
        layer,
        updates=updates,
        trains=bool(layout.shapes or layout.tied) and pending.trains(layer),
        needs_input_gradient=layer > lowest,
        version=pending.choice.last_step(layer, num_done),
        new_version=num_done + 1,
    )


def _gradient_use(model: OffloadedModel, pending: PendingUpdates, layer: int) -> Literal["write", "apply"] | None:
    if not model.layouts[layer].numel or not pending.trains(layer):
        return None
    return "write" if pending.waits else "apply"


def inference_tasks(layers: Iterable[int]) -> Iterable[LayerTask]:
    """Schedule layers that run without updates."""
    return map(LayerTask, layers)


def flush_tasks(pending: PendingUpdates) -> list[LayerTask]:
    """Schedule the pending updates, without running layers."""
    step, last_step = pending.step, pending.choice.last_step
    return [
        LayerTask(layer, runs=False, updates=True, version=last_step(layer, step - 1), new_version=step)
        for layer in sorted(pending.layers)
    ]
