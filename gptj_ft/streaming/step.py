"""Train a model one layer at a time. Start reading here: this page is the training step.

    forward   for each layer, bottom up:  run every micro-batch; save the layer's inputs (the "boundaries")
    loss      head:                       run forward and backward on the target positions, in chunks of logits
    backward  for each layer, top down:   recompute every micro-batch from its boundary; sum the layer's gradient

The outer loop runs over layers and the inner loop over micro-batches. So each block's weights are loaded twice per
optimizer step, however many micro-batches the step has. `schedule` lists what the step reads, updates and writes for
each layer.

While a layer computes, `Prefetcher` loads and updates the next layers and writes the previous one. It works through
these transfers in `Prefetcher.poll`, which the layers call between their operations. If memory allows, the top layers
keep their autograd graphs instead of recomputing them (`KeptActivations`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import add
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.errors import NotFinite
from gptj_ft.models.batch import HeadRows, PackedBatch, rounded_up
from gptj_ft.streaming.activations import Activations
from gptj_ft.streaming.exchange import Channel, GradientReducer
from gptj_ft.streaming.kept_activations import KeptActivations
from gptj_ft.streaming.loaded_layer import LoadedLayer, sum_into
from gptj_ft.streaming.loss_scale import LossScale
from gptj_ft.streaming.objective import CrossEntropy, Objective, StepLoss
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import PendingUpdates, lowest_trained, training_tasks
from gptj_ft.streaming.update_pump import Updater
from gptj_ft.streaming.vocabulary import (
    RowGradients,
    VocabularyRows,
    add_rows,
    row_gradients,
    sum_losses,
    vocabulary_gradients,
)
from gptj_ft.system.accelerator import deterministic_kernels
from gptj_ft.system.memory import return_free_heap

HEAD_CHUNK_BYTES = 128 * 2**20  # of fp32 logits


class Optimizer(Updater, Protocol):
    """Interface between an optimizer and the training step."""

    updates: PendingUpdates
    loss_scale: LossScale | None

    def add_gradient(self, layer: LoadedLayer) -> None:
        """Store the layer's complete gradient, or update the layer with it, as the layer's task says."""


@dataclass(frozen=True)
class Step:
    """Data, objective and channels of one training step."""

    batches: Sequence[PackedBatch]
    objective: Objective
    loss_scale: LossScale | None  # fp16 only
    up: Channel  # activations
    down: Channel  # gradients of activations
    reducer: GradientReducer  # gradients of weights


def train_step(
    model: OffloadedModel,
    optimizer: Optimizer,
    batches: Sequence[PackedBatch],
    objective: Objective = CrossEntropy(),
) -> StepLoss:
    """Run forward, loss and backward for the micro-batches of one optimizer step.

    The loss is the sum over all targets divided by the number of targets, so it does not depend on how rows are packed
    into micro-batches.
    """
    with deterministic_kernels(model.device) if model.is_deterministic else nullcontext():
        return _train_step(model, optimizer, pad_batches(model, batches), objective)


def _train_step(
    model: OffloadedModel, optimizer: Optimizer, batches: Sequence[PackedBatch], objective: Objective
) -> StepLoss:
    top, lowest = len(model.layers) - 1, lowest_trained(model, optimizer.updates)
    up = open_channel(model, range(top + 1), batches)
    down = open_channel(model, range(top, lowest - 1, -1), batches)
    reducer = model.exchange.open_reducer(optimizer.add_gradient)
    step = Step(batches, objective, optimizer.loss_scale, up, down, reducer)

    # One iterator for the whole step: `forward` takes the layers below the head, the next is the head, and `backward`
    # takes the same layers again, top down. So backward's first layers load while the head still computes.
    layers = Prefetcher(model, training_tasks(model, optimizer.updates), optimizer)
    kept = kept_layers(model, lowest)
    model.boundaries.begin()

    hidden = forward(layers, batches, up, kept, model.boundaries)
    loss, gradients = None, list[Tensor]()
    if model.exchange.has(top):  # always, unless layers are shared out: see `exchange`
        head = next(layers)
        loss, gradients = head_gradients(step, head, up.inputs(top, hidden))
    up.close()
    backward(step, layers, gradients, kept)
    down.close()
    # With layers shared out, only the owner of the head has computed the loss.
    return model.exchange.broadcast_losses([loss] if loss else None)[0]


def kept_layers(model: OffloadedModel, lowest: int) -> dict[int, KeptActivations]:
    """Return the layers that keep their autograd graphs in a step: the top blocks, as many as the budget allows.

    Args:
        lowest: layer at which backward ends.
    """
    # Backward frees the graphs of the top blocks first. The head and the layers below `lowest` need none, and the
    # embedding's backward needs only the token ids.
    top = len(model.layers) - 1
    first = max(1, lowest, top - model.budget.num_kept_layers)
    return {layer: KeptActivations() for layer in range(first, top) if model.exchange.has(layer)}


def pad_batches(model: OffloadedModel, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Pad token counts to a few sizes where kernels are compiled per shape."""
    is_padded = compiles_per_shape(model.device)
    return [batch.padded() if is_padded and not batch.cache else batch for batch in batches]


def compiles_per_shape(device: torch.device) -> bool:
    """Tell whether each shape has a kernel of its own, as in oneDNN on CPUs."""
    return device.type == "cpu"


def open_channel(model: OffloadedModel, layers: Sequence[int], batches: Sequence[PackedBatch]) -> Channel:
    """Open the channel of a pass over these layers."""
    num_tokens = [len(batch.tokens_T) for batch in batches]
    return model.exchange.open_channel(layers, num_tokens, model.compute_dtype, model.device)


def forward(
    layers: Prefetcher,
    batches: Sequence[PackedBatch],
    up: Channel = Channel(),
    kept: Mapping[int, KeptActivations] | None = None,
    boundaries: Activations | None = None,
) -> list[Tensor]:
    """Run the layers below the head on every micro-batch.

    Args:
        layers: iterator over the layers; the head is left for the caller.
        up: channel of the outputs.
        kept: layers that keep their autograd graphs; training only.
        boundaries: store for the inputs of all other layers; training only.

    Returns:
        The inputs of the head, [T, D] per micro-batch; empty if `up` has sent them.
    """
    model = layers.model
    # All layers are local unless the exchange shares them out.
    num_layers = sum(layer < len(model.layers) - 1 for layer in model.local_layers)
    hidden: list[Tensor] = [batch.tokens_T for batch in batches]
    # Decoding never trains on its tensors. inference_mode skips more of autograd's bookkeeping than no_grad.
    is_decoding = bool(batches) and batches[0].kernel == "decoding"
    for layer in islice(layers, num_layers):
        inputs = up.inputs(layer.index, hidden)
        if kept and layer.index in kept:
            hidden = kept[layer.index].run(layer, inputs, batches, layers.poll, up)
            if model.budget.forward_bytes is not None:
                # A layer's freed heap lies in holes between its kept tensors, often too small for the next layer.
                return_free_heap(above=model.budget.forward_bytes)
            continue
        saves_inputs = boundaries is not None and layer.task.is_in_backward
        parameters = layer.parameters_for(batches) if batches else {}
        saved, outputs = list[Tensor](), list[Tensor]()
        with torch.inference_mode() if is_decoding else torch.no_grad():
            for x, batch in zip(inputs, batches, strict=True):
                layers.poll()
                output = layer.run(parameters, x, batch, layers.poll)
                if not up.send(layer.index, output):
                    outputs.append(output)
                if saves_inputs:
                    saved.append(x)
        if boundaries is not None and saved:
            boundaries.put(layer.index, saved)
        hidden = outputs
    return hidden


def head_gradients(step: Step, head: LoadedLayer, hidden: Iterable[Tensor]) -> tuple[StepLoss, list[Tensor]]:
    """Compute the loss and the gradients of the head's inputs; reduce the head's gradient.

    Args:
        hidden: input of the head for each micro-batch, [T, D].

    Returns:
        The loss, and d(loss)/d(hidden) for each micro-batch, [T, D]; an empty list if `Step.down` has sent them.

    Raises:
        NotFinite: the loss is not finite. No weight has changed in this step. With a loss scale, the optimizer decides
            by the gradient norm instead.
    """
    scale = step.loss_scale.scale if step.loss_scale else 1.0
    divisor, num_targets = step.reducer.totals(step.batches, step.objective)
    parameters = head.leaf_parameters()
    if head.tiles:
        assert isinstance(step.objective, CrossEntropy), "internal error: labels in tiles"
        padding = [num_padding_rows(head, batch.target_positions_T, step.objective) for batch in step.batches]
        targets = [
            VocabularyRows.of(head, parameters, *each) for each in zip(hidden, step.batches, padding, strict=True)
        ]
        series = sum_losses(head, parameters, targets, step.objective.z_loss)
        result = total_loss(step, series, divisor, num_targets)
        return result, vocabulary_gradients(step, head, parameters, targets, scale / divisor)
    if head.task.trains:
        attach_gradients(head, parameters)
        step.reducer.begin(head)
    gradients: list[Tensor] = []
    losses, z_losses = [torch.zeros((), device=head.device)], [torch.zeros((), device=head.device)]
    for b, (batch, x_TD) in enumerate(zip(step.batches, hidden, strict=True)):
        gradient_TD = torch.zeros_like(x_TD)
        for positions_S, rows in head_chunks(head, batch, step.objective):
            count = num_padding_rows(head, positions_S, step.objective)
            # Padding rows repeat position 0. The objective ignores them, so their gradient is zero.
            x_SD = x_TD[F.pad(positions_S, (0, count))].requires_grad_(head.task.needs_input_gradient)
            loss, z_loss = step.objective.loss(head.run(parameters, x_SD, rows.padded(count)), batch, positions_S)
            losses.append(loss.detach())
            if z_loss is not None:
                z_losses.append(z_loss.detach())
                loss = loss + z_loss
            (loss / divisor * scale).backward()  # type: ignore[no-untyped-call]
            if x_SD.grad is not None:
                gradient_TD[positions_S] = x_SD.grad[: len(positions_S)]
        if not step.down.send(head.index, gradient_TD):
            gradients.append(gradient_TD)
        if head.task.trains:
            step.reducer.end_micro_batch(head, b + 1)
    result = total_loss(step, (losses, z_losses), divisor, num_targets)
    step.reducer.end(head)
    return result, gradients


def total_loss(
    step: Step, series: tuple[Sequence[Tensor], Sequence[Tensor]], divisor: float, num_targets: int
) -> StepLoss:
    """Add the losses and z-losses of a step.

    Raises:
        NotFinite: see `head_gradients`.
    """
    losses, z_losses = series
    # tolist() makes the program wait for the device: once for both series.
    values = torch.stack([*losses, *z_losses]).tolist()
    gathered = step.reducer.gather_losses([values[: len(losses)], values[len(losses) :]])
    total, z_total = (reduce(add, terms, 0.0) for terms in gathered)  # fp64, in this order
    if step.loss_scale is None and not math.isfinite(total + z_total):
        raise NotFinite("the loss is not finite")
    return StepLoss(total, divisor, z_total, num_targets)


def backward(step: Step, layers: Prefetcher, gradients: list[Tensor], kept: dict[int, KeptActivations]) -> None:
    """Run backward through the layers below the head, down to the lowest trained layer.

    Args:
        layers: iterator over the layers, top down.
        gradients: gradients of the head's inputs, per micro-batch.
        kept: layers with autograd graphs; all others are recomputed from their boundaries. Consumed, as the boundaries
            and gradients are: a layer's memory is free after its turn.
    """
    boundaries = layers.model.boundaries
    for layer in layers:
        output_gradients, input_gradients = step.down.inputs(layer.index, gradients), list[Tensor]()
        graphs = kept.pop(layer.index, None)
        inputs = boundaries.take(layer.index) if step.batches and graphs is None else []
        if graphs is not None:
            graphs.bind(layer)  # the weights may be in another buffer than in forward
        parameters = graphs.parameters if graphs is not None else layer.leaf_parameters()
        looked_up: list[RowGradients] = []
        for b, batch in enumerate(step.batches):
            layers.poll()
            if graphs is not None:
                x, output = graphs.take(b)
            else:
                x = inputs[b].detach().requires_grad_(layer.task.needs_input_gradient)
                output = layer.run(parameters, x, batch, layers.poll)
            if b == 0 and layer.task.trains and not layer.tiles:
                # Not earlier: the previous layer's gradient was still leaving the buffer while this layer recomputed.
                attach_gradients(layer, parameters)
                step.reducer.begin(layer)
            torch.autograd.backward(output, next(output_gradients))
            if layer.tiles:
                looked_up.append(row_gradients(parameters, layer, batch))
            elif layer.task.trains:
                step.reducer.end_micro_batch(layer, b + 1)
            if x.grad is not None and not step.down.send(layer.index, x.grad):
                input_gradients.append(x.grad)
        gradients = input_gradients
        if layer.tiles:
            add_rows(step.reducer, layer, looked_up)
        else:
            step.reducer.end(layer)
    step.reducer.close()


def attach_gradients(layer: LoadedLayer, parameters: Mapping[str, Tensor]) -> None:
    """Have autograd sum the parameters' gradients into the layer's flat fp32 gradient.

    The gradients of tied parameters go into the flat gradient of the layer that owns them.
    """
    for name, total in layer.gradient.begin().items():
        sum_into(parameters[name], total)


def head_chunks(head: LoadedLayer, batch: PackedBatch, objective: Objective) -> Iterator[tuple[Tensor, HeadRows]]:
    """Yield the target positions in chunks whose logits take at most `HEAD_CHUNK_BYTES`.

    An objective that reads whole documents gets a batch in one chunk.
    """
    if not batch.num_targets:
        return
    if objective.reads_documents:
        yield batch.target_positions_T, batch.head_rows(0, batch.num_targets, with_ends=True)
        return
    start = 0
    for positions_S in torch.split(batch.target_positions_T, head_chunk_size(head)):
        yield positions_S, batch.head_rows(start, start + len(positions_S))
        start += len(positions_S)


def head_chunk_size(head: LoadedLayer) -> int:
    """Return the number of positions whose logits take at most `HEAD_CHUNK_BYTES`."""
    vocabulary = max(len(parameter) for parameter in head.parameters().values() if parameter.ndim == 2)
    return max(1, HEAD_CHUNK_BYTES // (4 * vocabulary))


def num_padding_rows(head: LoadedLayer, positions_S: Tensor, objective: Objective) -> int:
    """Return the number of rows that pad a chunk to a common size, as in `pad_batches`."""
    is_padded = compiles_per_shape(head.device) and not objective.reads_documents
    return rounded_up(len(positions_S)) - len(positions_S) if is_padded else 0
