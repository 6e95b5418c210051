"""The weights pass through the device, one layer at a time. This is the page the rest of the program stands on.

    forward   for each layer, upwards:     apply its pending update; run every micro-batch; keep the boundaries
    loss      the head, on the positions that carry a target only, in chunks: forward and backward at once
    backward  for each layer, downwards:   run every micro-batch again from its boundary; sum the gradient; send it away

The layer is the outer loop and the micro-batch the inner one: weights cross the link twice per optimizer step however
many micro-batches there are. While a layer computes, the next one is being read and the last one written.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from gptj_ft.errors import NotFinite
from gptj_ft.layers import NO_TARGET, PackedBatch
from gptj_ft.stack import LayerStack, Loaded, Slot, Visit
from gptj_ft.stores import Kind, finished

HEAD_CHUNK_BYTES = 128 * 2**20  # of fp32 logits


class Updater(Protocol):
    """What `forward` and `backward` ask of an optimizer."""

    def visit_up(self, layer: int) -> Visit:
        """What the forward pass needs of a layer."""

    def visit_turn(self, layer: int) -> Visit:
        """What the head needs, where forward ends and backward begins."""

    def visit_down(self, layer: int) -> Visit:
        """What the backward pass needs of a layer."""

    def before_forward(self, loaded: Loaded) -> None:
        """Apply the layer's pending update, if there is one."""

    def after_backward(self, loaded: Loaded) -> None:
        """Take the layer's gradient, ``loaded.tensors["grad"]``."""


@dataclass(frozen=True)
class StepLoss:
    """Sum of the losses of the target tokens, how many there were, and the sum of their z-losses, kept apart."""

    total: float
    num_targets: int
    z_total: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.num_targets if self.num_targets else math.nan

    @property
    def z_mean(self) -> float:
        return self.z_total / self.num_targets if self.num_targets else math.nan


def stream(stack: LayerStack, visits: Sequence[Visit]) -> Iterator[Loaded]:
    """Yield each visit's layer with its tensors on the device, the next ones already on their way.

    A layer's tensors are valid until the next one is asked for.
    """
    turns: dict[Kind, int] = {}

    def fetch(visit: Visit) -> tuple[Visit, dict[Kind, Future[Tensor]], dict[Kind, Slot]]:
        transfers: dict[Kind, Future[Tensor]] = {}
        slots: dict[Kind, Slot] = {}
        for kind in (*visit.reads, *visit.blanks):
            store = stack.stores.get(kind)
            if store is not None and store.resident:
                transfers[kind] = store.read(kind, visit.layer, None)
                continue
            turns[kind] = turns.get(kind, -1) + 1
            slot = slots[kind] = stack.slots(kind)[turns[kind] % (stack.read_ahead + 1)]
            writes, slot.writes = slot.writes, []
            buffer = slot.buffer[: stack.layouts[visit.layer].numel]
            if kind in visit.reads:
                assert store is not None
                transfers[kind] = store.read(kind, visit.layer, buffer, writes)
            else:
                with stack.waiting():
                    for write in writes:
                        write.result()
                transfers[kind] = finished(buffer)
        return visit, transfers, slots

    upcoming = deque(visits)
    queue: deque[tuple[Visit, dict[Kind, Future[Tensor]], dict[Kind, Slot]]] = deque()
    while upcoming or queue:
        # The slots taken here were those of the layer that the consumer has just left. A layer that is still to be
        # visited may change on that visit: it is not fetched a second time before.
        while (
            upcoming
            and len(queue) <= stack.read_ahead
            and all(visit.layer != upcoming[0].layer for visit, _, _ in queue)
        ):
            queue.append(fetch(upcoming.popleft()))
        visit, transfers, slots = queue.popleft()
        with stack.waiting():
            tensors = {kind: transfer.result() for kind, transfer in transfers.items()}
        index = visit.layer
        yield Loaded(index, stack.layers[index], stack.layouts[index], tensors, slots, stack.stores)


def train_step(stack: LayerStack, updater: Updater, batches: Sequence[PackedBatch], z_loss: float = 0.0) -> StepLoss:
    """Run forward, loss and backward for the micro-batches of one optimizer step.

    The loss is the sum over target tokens divided by the target tokens of the whole step, whatever the micro-batches;
    ``z_loss`` is the weight of the z-loss, see `head_gradients`.
    """
    top = len(stack.layers) - 1
    up = [updater.visit_up(layer) for layer in range(top)]
    down = [updater.visit_down(layer) for layer in reversed(range(top))]
    layers = stream(stack, [*up, updater.visit_turn(top), *down])
    boundaries = forward(islice(layers, top), batches, updater)
    head = next(layers)
    updater.before_forward(head)
    loss, gradients = head_gradients(head, boundaries.pop(), batches, z_loss)
    updater.after_backward(head)
    backward(layers, boundaries, gradients, batches, updater)
    return loss


def forward(
    layers: Iterator[Loaded], batches: Sequence[PackedBatch], updater: Updater | None = None
) -> list[list[Tensor]]:
    """Run the layers below the head on every micro-batch.

    Returns:
        The boundaries: for each layer its inputs, one per micro-batch; last, what the head takes. Without an updater
        nothing comes after that needs the others, and only the last is returned.
    """
    hidden: list[Tensor] = [batch.tokens_T for batch in batches]
    boundaries = []
    for loaded in layers:
        if updater is not None:
            updater.before_forward(loaded)
            boundaries.append(hidden)
        parameters = loaded.layout.views(loaded.tensors["weight"])
        with torch.no_grad():
            hidden = [
                functional_call(loaded.module, parameters, (x, batch)) for x, batch in zip(hidden, batches, strict=True)
            ]
    return [*boundaries, hidden]


def backward(
    layers: Iterator[Loaded],
    boundaries: list[list[Tensor]],
    gradients: list[Tensor],
    batches: Sequence[PackedBatch],
    updater: Updater,
) -> None:
    """Carry the gradients of the head's inputs down through the layers, recomputing each from its boundary.

    Boundaries and gradients are consumed: a layer's memory is free as soon as it has been passed.
    """
    for loaded in layers:
        parameters = trainable_views(loaded)
        inputs = boundaries.pop()
        for b, batch in enumerate(batches):
            x = inputs[b].detach()
            x.requires_grad_(x.is_floating_point())
            torch.autograd.backward(functional_call(loaded.module, parameters, (x, batch)), gradients[b])
            if x.grad is not None:
                gradients[b] = x.grad
        updater.after_backward(loaded)


def trainable_views(loaded: Loaded) -> dict[str, Tensor]:
    """Return a layer's parameters such that autograd sums their gradients into the layer's flat gradient, in fp32."""
    parameters = {name: view.detach() for name, view in loaded.layout.views(loaded.tensors["weight"]).items()}
    sums = loaded.layout.views(loaded.tensors["grad"].zero_())
    for name, parameter in parameters.items():
        parameter.requires_grad_()
        if parameter.dtype == sums[name].dtype:
            parameter.grad = sums[name]
        else:
            parameter.register_post_accumulate_grad_hook(_adder(sums[name]))  # type: ignore[no-untyped-call]
    return parameters


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return add


def head_gradients(
    head: Loaded, hidden: list[Tensor], batches: Sequence[PackedBatch], z_loss: float = 0.0
) -> tuple[StepLoss, list[Tensor]]:
    """Compute the loss, the head's gradient and the gradients of its inputs.

    Args:
        head: the head, with a ``grad`` tensor to sum into.
        hidden: the head's inputs, one [T, D] per micro-batch; freed on the way.
        batches: the micro-batches of the whole step.
        z_loss: weight of log(Z)^2, Z the sum of a token's exponentiated logits, which keeps logits from drifting
            (https://arxiv.org/abs/2204.02311, section 5; GPT-J was pre-trained with 1e-4). 0: not computed.

    Returns:
        The loss of the step, and for each micro-batch d(mean loss + mean z-loss)/d(hidden), [T, D].

    Raises:
        NotFinite: the loss; no weight has been touched by this step.
    """
    parameters = trainable_views(head)
    num_targets = sum(batch.num_targets for batch in batches)
    total, z_total, gradients = 0.0, 0.0, []
    for b, batch in enumerate(batches):
        gradient_TD = torch.zeros_like(hidden[b])
        for positions_S in target_chunks(head, batch):
            x_SD = hidden[b][positions_S].requires_grad_()
            logits_SV = functional_call(head.module, parameters, (x_SD,))
            loss = F.cross_entropy(logits_SV, batch.targets_T[positions_S], reduction="sum")
            z = z_loss * logits_SV.logsumexp(-1).square().sum() if z_loss else loss.new_zeros(())
            ((loss + z) / num_targets).backward()  # type: ignore[no-untyped-call]
            gradient_TD[positions_S] = x_SD.grad  # type: ignore[assignment]
            total, z_total = total + loss.item(), z_total + z.item()
        gradients.append(gradient_TD)
        hidden[b] = gradient_TD.new_empty(0)
    if not math.isfinite(total + z_total):
        raise NotFinite("the loss is not finite")
    return StepLoss(total, num_targets, z_total), gradients


def target_chunks(head: Loaded, batch: PackedBatch) -> Sequence[Tensor]:
    """Return the positions that carry a target, in chunks whose logits stay below `HEAD_CHUNK_BYTES`."""
    positions = (batch.targets_T != NO_TARGET).nonzero().squeeze(-1)
    vocabulary = max(shape[0] for shape in head.layout.shapes.values() if len(shape) == 2)
    return torch.split(positions, max(1, HEAD_CHUNK_BYTES // (4 * vocabulary))) if len(positions) else ()


def evaluate_losses(stack: LayerStack, batches: Sequence[PackedBatch]) -> list[StepLoss]:
    """Return the loss of each batch; nothing is trained."""
    hidden, head = _below_head(stack, batches)
    parameters = head.layout.views(head.tensors["weight"])
    losses = []
    for x_TD, batch in zip(hidden, batches, strict=True):
        total = 0.0
        with torch.no_grad():
            for positions_S in target_chunks(head, batch):
                logits_SV = functional_call(head.module, parameters, (x_TD[positions_S],))
                total += F.cross_entropy(logits_SV, batch.targets_T[positions_S], reduction="sum").item()
        losses.append(StepLoss(total, batch.num_targets))
    return losses


def next_token_logits(stack: LayerStack, batch: PackedBatch) -> Tensor:
    """Return the logits after the last token of each document, fp32 [documents, V]."""
    hidden, head = _below_head(stack, [batch])
    last = torch.tensor(batch.cu_seqlens[1:], device=stack.device) - 1
    with torch.no_grad():
        logits: Tensor = functional_call(head.module, head.layout.views(head.tensors["weight"]), (hidden[0][last],))
    return logits


def _below_head(stack: LayerStack, batches: Sequence[PackedBatch]) -> tuple[list[Tensor], Loaded]:
    top = len(stack.layers) - 1
    layers = stream(stack, [Visit(layer) for layer in range(top + 1)])
    (hidden,) = forward(islice(layers, top), batches)
    return hidden, next(layers)
