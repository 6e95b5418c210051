"""Stream the weights through the device, one layer at a time. This is the page the rest of the program stands on.

    forward   for each layer, upwards:     run every micro-batch; keep the boundaries
    loss      the head, on the positions that carry a target only, in chunks: forward and backward at once
    backward  for each layer, downwards:   run every micro-batch again from its boundary; sum the gradient; send it away
              (the last layers may be kept instead of run again: see `KeptActivations`)

The layer is the outer loop and the micro-batch the inner one: weights cross the link twice per optimizer step however
many micro-batches there are. What is read, updated and written for each layer is one list, see `schedule`. While a
layer computes, the next one is read and updated, and the last one written: `Prefetcher.poll` sees to that, called by
the layers between their operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from itertools import islice
from operator import add
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gptj_ft.errors import NotFinite
from gptj_ft.models.batch import HeadRows, PackedBatch, Poll, rounded_up
from gptj_ft.models.embedding import EmbeddingRows
from gptj_ft.models.linear import Kernel
from gptj_ft.streaming.activations import Activations
from gptj_ft.streaming.lanes import LaneSums, Summing
from gptj_ft.streaming.loss_scale import LossScale
from gptj_ft.streaming.model import OffloadedModel
from gptj_ft.streaming.objective import CrossEntropy, Objective
from gptj_ft.streaming.prefetch import LayerLoad, Prefetcher, Updater
from gptj_ft.streaming.relay import Route
from gptj_ft.streaming.replicas import Unit, batch_of, deal_batches
from gptj_ft.streaming.schedule import PendingUpdates, inference_tasks, training_tasks
from gptj_ft.system.memory import return_free_heap

HEAD_CHUNK_BYTES = 128 * 2**20  # of fp32 logits
FREED = torch.empty(0)  # in the place of a tensor that is not needed any more


class Optimizer(Updater, Protocol):
    """Interface of an optimizer to a training step."""

    updates: PendingUpdates
    loss_scale: LossScale | None

    def add_gradient(self, load: LayerLoad) -> None:
        """Use the layer's gradient, ``load.tensors["grad"]``, as the load's task says."""


@dataclass(frozen=True)
class StepLoss:
    """Sum of the losses of the targets, what it is divided by, and the sum of what training adds, kept apart.

    Attributes:
        total: sum of the losses.
        weight: number of the targets, or of the numbers in them; with class weights, the sum of these.
        z_total: sum of the z-losses.
        num_targets: rows that the head has computed.
    """

    total: float
    weight: float
    z_total: float = 0.0
    num_targets: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else math.nan

    @property
    def z_mean(self) -> float:
        return self.z_total / self.weight if self.weight else math.nan


def train_step(
    model: OffloadedModel,
    optimizer: Optimizer,
    batches: Sequence[PackedBatch],
    objective: Objective = CrossEntropy(),
    lanes: LaneSums | None = None,
) -> StepLoss:
    """Run forward, loss and backward for the micro-batches of one optimizer step.

    The loss is the sum over targets divided by the targets of the whole step, whatever the micro-batches.

    Args:
        model: the offloaded model.
        optimizer: optimizer that takes the gradients, and updates layers while they are loaded.
        batches: the micro-batches.
        objective: objective; default: the next token.
        lanes: sums of gradients that the step has, where these batches are not all, or not one sum.
    """
    relay, top, batches = model.relay, len(model.layers) - 1, filled(model, batches)
    layers = Prefetcher(model, training_tasks(model, optimizer.updates), optimizer)
    first_kept = max(1, model.lowest_trained, top - model.budget.num_kept_layers)
    kept = {layer: KeptActivations() for layer in range(first_kept, top) if relay.has(layer)}
    model.boundaries.begin()
    up, down = route_up(model, batches), route_down(model, batches)
    hidden = forward(layers, batches, up, kept, model.boundaries)
    loss, gradients, summing = None, list[Tensor](), None
    if relay.has_head:
        head = next(layers)
        arriving = up.arriving(top, hidden)
        loss, gradients = head_gradients(head, arriving, batches, objective, optimizer.loss_scale, down, lanes)
        summing = add_gradient(head, optimizer, lanes, None, None)
    up.end()
    backward(layers, optimizer, batches, gradients, kept, down, lanes, summing)
    down.end()
    (found,) = relay.from_head("loss", [asdict(loss)] if loss else None)
    return StepLoss(**found)  # type: ignore[arg-type]


def filled(model: OffloadedModel, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Return micro-batches whose numbers of tokens are few different ones, on a CPU: there each compiles kernels."""
    return [batch.filled() if model.device.type == "cpu" and not batch.cache else batch for batch in batches]


def route_up(model: OffloadedModel, batches: Sequence[PackedBatch]) -> Route:
    """Return the way of hidden states, from the embedding to the head."""
    tokens = [len(batch.tokens_T) for batch in batches]
    return Route(model.relay, range(len(model.layers)), tokens, model.compute_dtype, model.device)


def route_down(model: OffloadedModel, batches: Sequence[PackedBatch]) -> Route:
    """Return the way of their gradients, from the head to the lowest layer that is trained."""
    tokens = [len(batch.tokens_T) for batch in batches]
    layers = range(len(model.layers) - 1, model.lowest_trained - 1, -1)
    return Route(model.relay, layers, tokens, model.compute_dtype, model.device)


class SavedView(NamedTuple):
    """Position of a view in one of a layer's flat tensors."""

    which: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class KeptActivations:
    """The autograd graphs of a layer, one per micro-batch, kept from forward to backward instead of recomputed.

    The layer's weights do not stay in between: what a graph has saved of them is noted as a place in the flat tensor,
    and looked up in the slot that the layer is in when backward comes to it; unless they have no slot and stay.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._weights: tuple[Tensor, ...] = ()
        self._numbers: dict[int, int] = {}  # of the weights, by the address of their memory

    def run(
        self, loaded: LayerLoad, arriving: Iterable[Tensor], batches: Sequence[PackedBatch], poll: Poll, up: Route
    ) -> list[Tensor]:
        """Run the layer on every micro-batch; return its outputs, without history, unless they were handed on."""
        self.load(loaded)
        self.parameters = trainable_leaves(loaded)
        here = []
        with loaded.saving_places(self._pack, self._unpack):
            for values, batch in zip(arriving, batches, strict=True):
                x = values.detach().requires_grad_(loaded.is_above_trained)
                self.inputs.append(x)
                self.outputs.append(run_layer(loaded, self.parameters, x, batch, poll))
                if not up.hand_on(loaded.index, self.outputs[-1]):
                    here.append(self.outputs[-1].detach())
        return here

    def load(self, loaded: LayerLoad) -> None:
        """Note where the layer's weights are now."""
        self._weights = loaded.frozen, *((loaded.tensors["weight"],) if loaded.layout.numel else ())
        addresses = [flat.untyped_storage().data_ptr() for flat in self._weights]
        self._numbers = {at: which for which, at in enumerate(addresses) if self._weights[which].numel()}

    def _pack(self, saved: Tensor) -> Tensor | SavedView:
        which = self._numbers.get(saved.untyped_storage().data_ptr())
        if which is None:
            return saved
        offset = int(saved.storage_offset() - self._weights[which].storage_offset())
        return SavedView(which, offset, saved.shape, saved.stride())

    def _unpack(self, packed: Tensor | SavedView) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        flat = self._weights[packed.which]
        return flat.as_strided(packed.shape, packed.stride, flat.storage_offset() + packed.offset)


def forward(
    layers: Prefetcher,
    batches: Sequence[PackedBatch],
    up: Route,
    kept: Mapping[int, KeptActivations] | None = None,
    boundaries: Activations | None = None,
) -> list[Tensor]:
    """Run the layers below the head, those that this process has, on every micro-batch.

    Args:
        layers: the layers as they come; the head is left for the caller.
        batches: the micro-batches.
        up: route that hands on their outputs.
        kept: layers whose activations training keeps, by number; default: none.
        boundaries: store of the inputs of the others, in training; default: none.

    Returns:
        The outputs of the last of them, [T, D] per micro-batch; empty if another process has got them.
    """
    hidden: list[Tensor] = [batch.tokens_T for batch in batches]
    relay, most_bytes = layers.model.relay, layers.model.budget.forward_bytes
    for loaded in islice(layers, relay.owners[:-1].count(relay.group.rank)):
        arriving = up.arriving(loaded.index, hidden)
        if kept and loaded.index in kept:
            hidden = kept[loaded.index].run(loaded, arriving, batches, layers.poll, up)
            if most_bytes is not None:  # what a layer frees lies between what it keeps: the next may not fit in there
                return_free_heap(above=most_bytes)
            continue
        keeps = boundaries is not None and loaded.is_in_backward
        parameters = loaded.parameters_for(batches) if batches else {}
        inputs, here = list[Tensor](), list[Tensor]()
        # Nothing that decoding leaves behind is ever trained on, so that autograd need not hear of it at all.
        is_decoding = bool(batches) and batches[0].kernel == "decoding"
        with torch.inference_mode() if is_decoding else torch.no_grad():
            for x, batch in zip(arriving, batches, strict=True):
                output = run_layer(loaded, parameters, x, batch, layers.poll)
                if not up.hand_on(loaded.index, output):
                    here.append(output)
                if keeps:
                    inputs.append(x)
        if boundaries is not None and inputs:
            boundaries.put(loaded.index, inputs)
        hidden = here
    return hidden


def run_layer(
    loaded: LayerLoad, parameters: Mapping[str, Tensor | EmbeddingRows], x: Tensor, batch: PackedBatch, poll: Poll
) -> Tensor:
    """Run a layer below the head on a micro-batch."""
    poll()
    return loaded.run(parameters, x, batch, poll)


def backward(
    layers: Prefetcher,
    optimizer: Optimizer,
    batches: Sequence[PackedBatch],
    gradients: list[Tensor],
    kept: dict[int, KeptActivations],
    down: Route,
    lanes: LaneSums | None = None,
    summing: LayerSum | None = None,
) -> None:
    """Carry the gradients of the head's inputs down through the layers, recomputing those that are not kept.

    Boundaries, gradients and kept activations are consumed: a layer's memory is free as soon as it has been passed.
    What is ``summing`` ends while the next layer computes.
    """
    boundaries = layers.model.boundaries
    # `planning.timeline` replays this loop and that of `forward` without computing: what changes here changes there.
    # tests/simulated/test_forecasts.py compares its seconds with those of the operations that a step asks a device for.
    for loaded in layers:
        arriving, here = down.arriving(loaded.index, gradients), list[Tensor]()
        graph = kept.pop(loaded.index, None)
        inputs = graph.inputs if graph else boundaries.take(loaded.index) if batches else []
        if graph is not None:
            graph.load(loaded)
        parameters, begun = graph.parameters if graph else trainable_leaves(loaded), None
        if not batches and loaded.is_trained:  # all rows of the step are other processes'
            begun = sum_gradients(loaded, parameters, lanes)
        for b, batch in enumerate(batches):
            if graph is not None:
                x, output = inputs[b], graph.outputs[b]
                inputs[b] = graph.outputs[b] = FREED
                layers.poll()
            else:
                x = inputs[b].detach()
                x.requires_grad_(loaded.is_above_trained)
                output = run_layer(loaded, parameters, x, batch, layers.poll)
            # Not before: while the first micro-batch was recomputed, the gradient above could leave.
            if b == 0 and loaded.is_trained:
                begun = sum_gradients(loaded, parameters, lanes)
            torch.autograd.backward(output, next(arriving))
            if lanes and loaded.is_trained:
                lanes.close(loaded.gradient_sums(), b + 1)
            if x.grad is not None and not down.hand_on(loaded.index, x.grad):
                here.append(x.grad)
        gradients = here
        summing = add_gradient(loaded, optimizer, lanes, begun, summing)
    if summing:
        summing.end(optimizer)


def trainable_leaves(loaded: LayerLoad) -> dict[str, Tensor]:
    """Return a layer's parameters, those that are trained as leaves of a graph."""
    trained = {name: view.detach().requires_grad_() for name, view in loaded.trained_parameters().items()}
    return {**loaded.parameters(), **trained}


def sum_gradients(loaded: LayerLoad, parameters: dict[str, Tensor], lanes: LaneSums | None = None) -> Tensor | None:
    """Have autograd sum the gradients of these leaves into the layer's flat gradient, in fp32.

    Those of tied parameters go into the flat gradient of the layer that they are of.

    Returns:
        With lanes, what another layer has begun the sum with: it is of all lanes already, and is added at their end.
    """
    begun = None
    totals = loaded.gradients()
    if lanes:
        if loaded.is_tied_source:
            begun = loaded.tensors["grad"].clone()
            loaded.tensors["grad"].zero_()
        lanes.begin(loaded.gradient_sums())
        lanes.close(loaded.gradient_sums(), 0)
    for name, total in totals.items():
        sum_into(parameters[name], total)
    return begun


def sum_into(parameter: Tensor, total: Tensor) -> None:
    """Have autograd sum the gradients of a leaf into a tensor in fp32."""
    if parameter.dtype == total.dtype:
        parameter.grad = total
    elif total.device.type == "cpu":  # `linear.project` adds to it as products come
        parameter.grad_dtype = total.dtype
        parameter.grad = total
    else:
        parameter.register_post_accumulate_grad_hook(_adder(total))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class LayerSum:
    """A layer whose gradient is being summed up with other processes, while the next one computes."""

    loaded: LayerLoad
    summing: Summing

    def end(self, optimizer: Optimizer) -> None:
        """Give the gradient to the optimizer, when it is there."""
        (total,) = self.summing.end()
        self.loaded.lease_gradient().copy_(total)
        optimizer.add_gradient(self.loaded)
        self.loaded.release_gradient()


def add_gradient(
    loaded: LayerLoad, optimizer: Optimizer, lanes: LaneSums | None, begun: Tensor | None, earlier: LayerSum | None
) -> LayerSum | None:
    """Give a layer's gradient to the optimizer, with lanes their sum, and that of the layer before.

    Args:
        loaded: the layer; its micro-batches are done.
        optimizer: optimizer that takes it.
        lanes: sums of gradients that the step has.
        begun: sum that another layer has begun; ``None``: there is none.
        earlier: the layer before, if its gradient is still on its way.

    Returns: the layer, if its gradient is on its way now.
    """
    if lanes and loaded.is_trained:
        # A layer that is updated at once needs its weights here, and one with tied parameters has two gradients.
        is_apart = loaded.task.gradient == "write" and not loaded.layout.tied and begun is None
        if is_apart and lanes.group.size > 1:
            following = LayerSum(loaded, lanes.start())
            loaded.release_gradient()  # its sums are copies; the layer before gets the memory
            if earlier:
                earlier.end(optimizer)
            return following
        lanes.total(loaded.gradient_sums())
        if begun is not None:
            loaded.tensors["grad"].add_(begun)
    if earlier:
        earlier.end(optimizer)
    if loaded.task.gradient:
        optimizer.add_gradient(loaded)
    return None


def _adder(total: Tensor) -> Callable[[Tensor], None]:
    def add_to_total(parameter: Tensor) -> None:
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None

    return add_to_total


def head_gradients(
    head: LayerLoad,
    hidden: Iterable[Tensor],
    batches: Sequence[PackedBatch],
    objective: Objective,
    loss_scale: LossScale | None,
    down: Route,
    lanes: LaneSums | None = None,
) -> tuple[StepLoss, list[Tensor]]:
    """Compute the loss, the head's gradient and the gradients of its inputs.

    Args:
        head: the head.
        hidden: the head's inputs, one [T, D] per micro-batch, as they come.
        batches: the micro-batches of the whole step.
        objective: objective.
        loss_scale: factor of all gradients, in fp16. A loss that is not finite is then for the optimizer to see, by its
            gradients.
        down: route that hands on the gradients of its inputs.
        lanes: sums of gradients that the step has.

    Returns:
        The loss of the step, and for each micro-batch d(mean loss + mean of what is added)/d(hidden), [T, D]; nothing
        if another process has got them.

    Raises:
        NotFinite: the loss, without a scale; no weight has been touched by this step.
    """
    scale = loss_scale.scale if loss_scale else 1.0
    parameters = trainable_leaves(head)
    if head.is_trained:
        sum_gradients(head, parameters, lanes)
    weight = lanes.weight if lanes else sum(objective.weight(batch) for batch in batches)
    gradients: list[Tensor] = []
    losses, z_losses = [torch.zeros((), device=head.device)], [torch.zeros((), device=head.device)]
    for b, (batch, x_TD) in enumerate(zip(batches, hidden, strict=True)):
        gradient_TD = torch.zeros_like(x_TD)
        for positions_S, rows in head_pieces(head, batch, objective):
            count = num_fillers(head, positions_S, objective)
            x_SD = x_TD[F.pad(positions_S, (0, count))].requires_grad_(head.is_above_trained)
            output_SC = head.run(parameters, x_SD, rows.filled(count))
            loss, added = objective.loss(output_SC, batch, positions_S)
            losses.append(loss.detach())
            if added is not None:
                z_losses.append(added.detach())
                loss = loss + added
            (loss / weight * scale).backward()  # type: ignore[no-untyped-call]
            if x_SD.grad is not None:
                gradient_TD[positions_S] = x_SD.grad[: len(positions_S)]
        if not down.hand_on(head.index, gradient_TD):
            gradients.append(gradient_TD)
        if lanes and head.is_trained:
            lanes.close(head.gradient_sums(), b + 1)
    total, z_total = sums(losses, z_losses, lanes=lanes)
    if loss_scale is None and not math.isfinite(total + z_total):
        raise NotFinite("the loss is not finite")
    num_targets = lanes.num_targets if lanes else sum(batch.num_targets for batch in batches)
    return StepLoss(total, weight, z_total, num_targets), gradients


def sums(*series: Sequence[Tensor], lanes: LaneSums | None = None) -> list[float]:
    """Return the sum of each series of scalars, in fp64, in their order; the program waits once for all of them."""
    values = iter(torch.stack([value for values in series for value in values]).tolist())
    found = [list(islice(values, len(each))) for each in series]
    return [reduce(add, each, 0.0) for each in (lanes.losses(found) if lanes else found)]


def head_pieces(head: LayerLoad, batch: PackedBatch, objective: Objective) -> Iterator[tuple[Tensor, HeadRows]]:
    """Yield the positions that carry a target, in chunks that the head computes at once, and each chunk's `HeadRows`.

    The logits of a chunk stay below `HEAD_CHUNK_BYTES`, but for an objective that reads whole documents: one chunk.
    """
    if not batch.num_targets:
        return
    if objective.reads_documents:
        yield batch.target_positions_T, batch.head_rows(0, batch.num_targets, with_ends=True)
        return
    start = 0
    for positions_S in torch.split(batch.target_positions_T, _chunk_size(head)):
        yield positions_S, batch.head_rows(start, start + len(positions_S))
        start += len(positions_S)


def num_fillers(head: LayerLoad, positions_S: Tensor, objective: Objective) -> int:
    """Count the rows of no document that the head takes behind these, see `filled`."""
    is_filled = head.device.type == "cpu" and not objective.reads_documents
    return rounded_up(len(positions_S)) - len(positions_S) if is_filled else 0


def _chunk_size(head: LayerLoad) -> int:
    vocabulary = max(len(parameter) for parameter in head.parameters().values() if parameter.ndim == 2)
    return max(1, HEAD_CHUNK_BYTES // (4 * vocabulary))


def evaluate_losses(
    model: OffloadedModel, batches: Sequence[PackedBatch], objective: Objective = CrossEntropy()
) -> list[StepLoss]:
    """Return the loss of each batch; nothing is trained."""
    losses = _losses_here(model, batches, objective)
    found = model.relay.from_head("losses", [asdict(loss) for loss in losses] if model.relay.has_head else None)
    return [StepLoss(**each) for each in found]  # type: ignore[arg-type]


def _losses_here(model: OffloadedModel, batches: Sequence[PackedBatch], objective: Objective) -> list[StepLoss]:
    """Compute the loss of each batch in the process that has the head; elsewhere an empty list."""
    if isinstance(objective, CrossEntropy) and not objective.class_weights:
        return [
            StepLoss(-float(found.log_probabilities_S.double().sum()), count, num_targets=count)
            for found in score_tokens(model, batches, [target_queries(batch) for batch in batches])
            for count in [len(found.log_probabilities_S)]
        ]
    losses = []
    for batch, output_SC in zip(batches, head_outputs(model, batches, objective), strict=True):
        loss, _ = objective.loss(output_SC, batch, batch.target_positions_T)
        losses.append(StepLoss(float(loss), objective.weight(batch), num_targets=batch.num_targets))
    return losses


def head_outputs(model: OffloadedModel, batches: Sequence[PackedBatch], objective: Objective) -> Iterator[Tensor]:
    """Yield the head's outputs for the rows of each batch that carry a target, fp32 [S, C] on the device.

    It is for heads of few outputs: those of a vocabulary are never all there at once, see `score_tokens`. Batches are
    dealt out to the model's replicas, if it has any.
    """
    if model.replicas.size > 1:
        compute = partial(compute_outputs, model, objective)
        found = deal_batches(model, "outputs", batches, [{}] * len(batches), compute)
        yield from (torch.from_numpy(output_SC).to(model.device) for output_SC in found)
        return
    yield from _outputs_here(model, batches, objective)


def _outputs_here(model: OffloadedModel, batches: Sequence[PackedBatch], objective: Objective) -> Iterator[Tensor]:
    hidden, head = forward_trunk(model, batches)
    if head is None:
        return
    parameters = head.parameters()
    for x_TD, batch in zip(hidden, batches, strict=True):
        with torch.no_grad():
            pieces = [head.run(parameters, x_TD[at], rows) for at, rows in head_pieces(head, batch, objective)]
            yield torch.cat(pieces) if pieces else x_TD.new_empty(0, 1, dtype=torch.float32)


def compute_outputs(model: OffloadedModel, objective: Objective, units: Sequence[Unit]) -> Iterator[NDArray[Any]]:
    """Yield `head_outputs` of this process's share of the micro-batches."""
    batches = [batch_of(unit, model.device) for unit in units]
    yield from (output_SC.cpu().numpy() for output_SC in _outputs_here(model, batches, objective))


@dataclass(frozen=True)
class TokenQuery:
    """Token queries: target ids, and the positions that predict them (a position may repeat)."""

    positions_S: Tensor
    tokens_S: Tensor


@dataclass(frozen=True)
class TokenScores:
    """Per-token log-probabilities (fp32), and whether each token is the argmax."""

    log_probabilities_S: Tensor
    is_argmax_S: Tensor


def target_queries(batch: PackedBatch) -> TokenQuery:
    """Ask about the targets of a batch."""
    return TokenQuery(batch.target_positions_T, batch.targets_T[batch.target_positions_T])


def score_tokens(
    model: OffloadedModel, batches: Sequence[PackedBatch], wanted: Sequence[TokenQuery]
) -> list[TokenScores]:
    """Score token queries; at most `HEAD_CHUNK_BYTES` of logits exist at once.

    Batches are dealt out to the model's replicas, if it has any.

    Args:
        model: the offloaded model; nothing of it is trained.
        batches: micro-batches that share a pass over the weights.
        wanted: token queries of each batch.

    Returns: the scores of each batch, on the CPU, in the order asked.
    """
    if model.replicas.size > 1:
        asked = [{"positions": each.positions_S, "tokens": each.tokens_S} for each in wanted]
        found = deal_batches(model, "scores", batches, asked, partial(compute_scores, model))
        return [TokenScores(*map(torch.from_numpy, each)) for each in found]
    return _scores_here(model, batches, wanted)


def _scores_here(
    model: OffloadedModel, batches: Sequence[PackedBatch], wanted: Sequence[TokenQuery]
) -> list[TokenScores]:
    hidden, head = forward_trunk(model, batches)
    return score_hidden(head, hidden, wanted) if head else []


def compute_scores(model: OffloadedModel, units: Sequence[Unit]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Score the token queries of this process's share of the micro-batches."""
    wanted = [
        TokenQuery(*(torch.from_numpy(unit[name]).to(model.device) for name in ("positions", "tokens")))
        for unit in units
    ]
    found = _scores_here(model, [batch_of(unit, model.device) for unit in units], wanted)
    return [(each.log_probabilities_S.numpy(), each.is_argmax_S.numpy()) for each in found]


def score_hidden(
    head: LayerLoad, hidden: Sequence[Tensor], wanted: Sequence[TokenQuery], kernel: Kernel = "training"
) -> list[TokenScores]:
    """Score token queries, given the head's inputs."""
    parameters, size = head.parameters(), _chunk_size(head)
    scores = []
    for x_TD, asked in zip(hidden, wanted, strict=True):
        log_probabilities, likeliest = [torch.empty(0)], [torch.empty(0, dtype=torch.bool)]
        for start in range(0, len(asked.positions_S), size):
            positions_S, tokens_S = asked.positions_S[start : start + size], asked.tokens_S[start : start + size]
            with torch.no_grad():
                logits_SV = head.run(parameters, x_TD[positions_S], HeadRows(kernel))
                log_probabilities.append(-F.cross_entropy(logits_SV, tokens_S, reduction="none").cpu())
                likeliest.append((logits_SV.argmax(-1) == tokens_S).cpu())
        scores.append(TokenScores(torch.cat(log_probabilities), torch.cat(likeliest)))
    return scores


def forward_trunk(model: OffloadedModel, batches: Sequence[PackedBatch]) -> tuple[list[Tensor], LayerLoad | None]:
    """Run the layers below the head; return the head's inputs, and the head, if this process has it."""
    batches = filled(model, batches)
    layers, up = Prefetcher(model, inference_tasks(model.own_layers)), route_up(model, batches)
    here = forward(layers, batches, up)
    head, hidden = None, list[Tensor]()
    if model.relay.has_head:
        hidden = list(up.arriving(len(model.layers) - 1, here))
        head = next(layers)
    up.end()
    return hidden, head
