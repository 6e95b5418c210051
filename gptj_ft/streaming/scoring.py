"""Compute losses, head outputs and token log-probabilities without training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gptj_ft.models.batch import HeadRows, PackedBatch
from gptj_ft.models.linear import Kernel
from gptj_ft.streaming.cross_entropy import target_log_probabilities
from gptj_ft.streaming.exchange import Query
from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.objective import CrossEntropy, Objective, StepLoss
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import inference_tasks
from gptj_ft.streaming.step import forward, head_chunk_size, head_chunks, open_channel, pad_batches


class TokenQuery(NamedTuple):
    """Tokens to score."""

    positions_S: Tensor  # positions that predict the tokens
    tokens_SK: Tensor  # up to K token ids to score at each position; the rest is `NO_TARGET`


class TokenScores(NamedTuple):
    """Scores of the tokens of a `TokenQuery`, on the CPU."""

    log_probabilities_SK: Tensor  # fp32
    is_argmax_SK: Tensor

    @property
    def loss(self) -> StepLoss:
        """Loss of the tokens as targets."""
        count = len(self.log_probabilities_SK)
        return StepLoss(-float(self.log_probabilities_SK.double().sum()), count, num_targets=count)


def evaluate_losses(
    model: OffloadedModel, batches: Sequence[PackedBatch], objective: Objective = CrossEntropy()
) -> list[StepLoss]:
    """Return the loss of each batch."""
    losses = _compute_losses(model, batches, objective)
    return model.exchange.broadcast_losses(losses if model.exchange.has(len(model.layers) - 1) else None)


def _compute_losses(model: OffloadedModel, batches: Sequence[PackedBatch], objective: Objective) -> list[StepLoss]:
    if isinstance(objective, CrossEntropy) and not objective.class_weights:
        # A vocabulary's logits do not fit for all positions at once; `score_tokens` computes them in chunks.
        return [each.loss for each in score_tokens(model, batches, list(map(target_query, batches)))]
    losses = []
    for batch, output_SC in zip(batches, head_outputs(model, batches, objective), strict=True):
        loss, _ = objective.loss(output_SC, batch, batch.target_positions_T)
        losses.append(StepLoss(float(loss), objective.weight(batch), num_targets=batch.num_targets))
    return losses


def head_outputs(model: OffloadedModel, batches: Sequence[PackedBatch], objective: Objective) -> Iterator[Tensor]:
    """Yield the head's outputs at the target positions of each batch, fp32 [S, C] on the device.

    For heads with few outputs per position. `score_tokens` is for a vocabulary: it never holds all logits at once.
    """
    compute = partial(compute_outputs, model, objective)
    for (output_SC,) in model.exchange.map_batches("outputs", batches, [()] * len(batches), compute):
        yield output_SC.to(model.device)


def compute_outputs(
    model: OffloadedModel, objective: Objective, batches: Sequence[PackedBatch], queries: Sequence[Query]
) -> Iterator[tuple[Tensor]]:
    """Compute `head_outputs` of the local share of the batches; the queries are empty."""
    hidden, head = forward_trunk(model, batches)
    if head is None:
        return
    parameters = head.parameters()
    for x_TD, batch in zip(hidden, batches, strict=True):
        with torch.no_grad():
            chunks = [head.run(parameters, x_TD[at], rows) for at, rows in head_chunks(head, batch, objective)]
            yield (torch.cat(chunks) if chunks else x_TD.new_empty(0, 1, dtype=torch.float32),)


def target_query(batch: PackedBatch) -> TokenQuery:
    """Query the targets of a batch."""
    return TokenQuery(batch.target_positions_T, batch.targets_T[batch.target_positions_T][:, None])


def score_tokens(
    model: OffloadedModel, batches: Sequence[PackedBatch], queries: Sequence[TokenQuery]
) -> list[TokenScores]:
    """Score tokens; at most `HEAD_CHUNK_BYTES` of logits exist at once.

    Args:
        model: a model for inference.
        batches: micro-batches that share a pass over the weights.
        queries: tokens to score in each batch.

    Returns: the scores of each batch, in the order of its query.
    """
    results = model.exchange.map_batches("scores", batches, queries, partial(compute_scores, model))
    return [TokenScores(*result) for result in results]


def compute_scores(
    model: OffloadedModel, batches: Sequence[PackedBatch], queries: Sequence[Query]
) -> Iterable[TokenScores]:
    """Compute `score_tokens` of the local share of the batches."""
    hidden, head = forward_trunk(model, batches)
    return score_hidden(head, hidden, queries) if head else []


def score_hidden(
    head: LoadedLayer, hidden: Sequence[Tensor], queries: Sequence[Query], kernel: Kernel = "training"
) -> list[TokenScores]:
    """Score tokens, given the head's inputs."""
    parameters, size = head.parameters(), head_chunk_size(head)
    scores = []
    for x_TD, query in zip(hidden, queries, strict=True):
        # `torch.cat` needs a first tensor, even for an empty query.
        log_probabilities, is_argmax = [torch.empty(0)], [torch.empty(0, dtype=torch.bool)]
        for start in range(0, len(query[0]), size):
            positions_S, tokens_SK = (values[start : start + size] for values in query)
            with torch.no_grad():
                logits_SV = head.run(parameters, x_TD[positions_S], HeadRows(kernel))
                log_probabilities.append(target_log_probabilities(logits_SV, tokens_SK).cpu())
                is_argmax.append((logits_SV.argmax(-1)[:, None] == tokens_SK).cpu())
        scores.append(TokenScores(torch.cat(log_probabilities), torch.cat(is_argmax)))
    return scores


def forward_trunk(model: OffloadedModel, batches: Sequence[PackedBatch]) -> tuple[list[Tensor], LoadedLayer | None]:
    """Run the layers below the head; return the head's inputs and the head, or None if the head is not local."""
    batches, top = pad_batches(model, batches), len(model.layers) - 1
    layers, up = Prefetcher(model, inference_tasks(model.local_layers)), open_channel(model, range(top + 1), batches)
    outputs = forward(layers, batches, up)
    head, hidden = None, list[Tensor]()
    if model.exchange.has(top):
        hidden = list(up.inputs(top, outputs))
        head = next(layers)
    up.close()
    return hidden, head
