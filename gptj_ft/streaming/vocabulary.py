"""Gradients of a large vocabulary, in tiles of its rows: neither all logits nor a whole fp32 gradient ever exist.

Axis letters: T tokens of a micro-batch, S its targets, D width, U rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.batch import HeadRows, PackedBatch
from gptj_ft.streaming.exchange import GradientReducer
from gptj_ft.streaming.loaded_layer import LoadedLayer, sum_into

if TYPE_CHECKING:
    from gptj_ft.streaming.step import Step

TILE_BYTES = 64 * 2**20  # of the fp32 logits that exist at once


@dataclass
class VocabularyRows:
    """Targets of a micro-batch on their way through the head."""

    x_TD: Tensor  # input of the head
    x_SD: Tensor  # target rows of it, a leaf; with padding rows that repeat position 0
    h_SD: Tensor  # output of the norm, with its graph
    positions: Tensor  # int64, without padding
    targets_S: Tensor  # with padding
    log_sums_S: Tensor  # log of the sum of exponentiated logits, over the tiles so far
    gradient_SD: Tensor  # of ``h_SD``, summed over the tiles so far, fp32

    @classmethod
    def of(
        cls, head: LoadedLayer, parameters: Mapping[str, Tensor], x_TD: Tensor, batch: PackedBatch, num_padding: int
    ) -> VocabularyRows:
        """Run the head's norm on the targets of a micro-batch."""
        positions_S = batch.target_positions_T
        x_SD = x_TD[F.pad(positions_S, (0, num_padding))].requires_grad_(head.task.needs_input_gradient)
        h_SD = head.run(parameters, x_SD, HeadRows(), method="normed")
        return cls(
            x_TD, x_SD, h_SD, positions_S, F.pad(batch.targets_T[positions_S], (0, num_padding)),
            torch.full((len(x_SD),), -torch.inf, device=x_TD.device),
            torch.zeros(h_SD.shape, dtype=torch.float32, device=x_TD.device),
        )  # fmt: skip

    def parts(self, num_columns: int) -> Iterator[slice]:
        """Yield slices of rows whose logits take at most `TILE_BYTES`."""
        size = max(1, TILE_BYTES // (4 * num_columns))
        return (slice(start, start + size) for start in range(0, len(self.h_SD), size))

    def backward(self) -> Tensor:
        """Run backward through the norm; return the gradient of the head's input, [T, D]."""
        gradient_TD = torch.zeros_like(self.x_TD)
        if len(self.positions) and self.h_SD.requires_grad:
            torch.autograd.backward(self.h_SD, self.gradient_SD.to(self.h_SD.dtype))
            if self.x_SD.grad is not None:
                gradient_TD[self.positions] = self.x_SD.grad[: len(self.positions)]
        return gradient_TD


def sum_losses(
    head: LoadedLayer, parameters: Mapping[str, Tensor], rows: Sequence[VocabularyRows], z_loss: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute loss and z-loss of each micro-batch; complete `VocabularyRows.log_sums_S`."""
    name, layout = head.layout.vocabulary, head.layout
    assert name is not None
    logits_of_targets = [torch.zeros_like(each.log_sums_S) for each in rows]
    for tile in layout.tiles:
        part = layout.tile_rows(tile)
        for each, of_targets_S in zip(rows, logits_of_targets, strict=True):
            for at in each.parts(part.stop - part.start):
                with torch.no_grad():
                    weights = {name: parameters[name][part]}
                    logits_SU = head.run(weights, each.h_SD[at], HeadRows(), method="logits")
                    local_S = each.targets_S[at] - part.start
                    own_S = ((local_S >= 0) & (local_S < logits_SU.shape[1])).nonzero()[:, 0]
                    of_targets_S[at][own_S] = logits_SU[own_S, local_S[own_S]]
                    each.log_sums_S[at] = torch.logaddexp(each.log_sums_S[at], logits_SU.logsumexp(-1))
    zero = torch.zeros((), device=head.device)
    losses, z_losses = [zero], [zero]
    for each, of_targets_S in zip(rows, logits_of_targets, strict=True):
        count = len(each.positions)
        losses.append((each.log_sums_S - of_targets_S)[:count].sum())
        if z_loss:
            z_losses.append(z_loss * each.log_sums_S[:count].square().sum())
    return losses, z_losses


def vocabulary_gradients(
    step: Step, head: LoadedLayer, parameters: Mapping[str, Tensor], rows: Sequence[VocabularyRows], factor: float
) -> list[Tensor]:
    """Compute and reduce the head's gradient tile by tile, recomputing the logits.

    Args:
        parameters: parameters of the head, as leaves.
        factor: derivative of the step's loss by a target's loss.

    Returns:
        The gradients of the head's inputs; an empty list if `Step.down` has sent them.
    """
    name, layout, z_loss = head.layout.vocabulary, head.layout, getattr(step.objective, "z_loss", 0.0)
    assert name is not None
    gradients: list[Tensor] = []
    for tile in layout.tiles:
        part = layout.tile_rows(tile)
        leaf = parameters[name].detach()[part].requires_grad_()
        for local, total in head.gradient.begin_tile(tile).items():
            sum_into(leaf if local == name else parameters[local], total)
        step.reducer.begin(head)
        for b, each in enumerate(rows):
            for at in each.parts(part.stop - part.start):
                add_tile(head, {name: leaf}, each, at, part.start, (factor, 2 * z_loss * factor))
            if head.gradient.is_last_tile:
                gradient_TD = each.backward()
                if not step.down.send(head.index, gradient_TD):
                    gradients.append(gradient_TD)
            step.reducer.end_micro_batch(head, b + 1)
        step.reducer.end(head)
    return gradients


def add_tile(
    head: LoadedLayer, weights: Mapping[str, Tensor], rows: VocabularyRows, at: slice, start: int,
    factors: tuple[float, float],
) -> None:  # fmt: skip
    """Add a tile's gradients for some rows.

    Args:
        start: first row of the tile in the vocabulary.
        factors: derivatives of the step's loss by a target's loss, and by half the square of its log-sum.
    """
    h_SD = rows.h_SD[at].detach().requires_grad_(rows.h_SD.requires_grad)
    logits_SU = head.run(weights, h_SD, HeadRows(), method="logits")
    # d loss / d logits is softmax - one-hot; of the z-loss, 2 z log(Z) softmax.
    with torch.no_grad():
        log_sums_S, local_S = rows.log_sums_S[at], rows.targets_S[at] - start
        is_target_S = torch.arange(at.start, at.start + len(h_SD), device=h_SD.device) < len(rows.positions)
        scale_S = (factors[0] + factors[1] * log_sums_S) * is_target_S
        gradient_SU = logits_SU.detach().sub_(log_sums_S[:, None]).exp_().mul_(scale_S[:, None])
        own_S = ((local_S >= 0) & (local_S < logits_SU.shape[1]) & is_target_S).nonzero()[:, 0]
        gradient_SU[own_S, local_S[own_S]] -= factors[0]
    torch.autograd.backward(logits_SU, gradient_SU)
    if h_SD.grad is not None:
        rows.gradient_SD[at] += h_SD.grad


class RowGradients(NamedTuple):
    """Gradients of looked-up rows of a vocabulary."""

    rows: Tensor  # ascending
    values: Tensor  # [rows, D]


def row_gradients(parameters: Mapping[str, Tensor], layer: LoadedLayer, batch: PackedBatch) -> RowGradients:
    """Take the gradient of an embedding after backward of one micro-batch."""
    name = layer.layout.vocabulary
    assert name is not None
    gradient = parameters[name].grad
    parameters[name].grad = None
    if gradient is None:  # a replay without data
        return RowGradients(batch.tokens_T[:0], batch.tokens_T[:0, None])
    if gradient.is_sparse:
        # Autograd forgets that `embedding` has coalesced it.
        return RowGradients(gradient._indices()[0], gradient._values())
    rows = batch.tokens_T.unique()  # type: ignore[no-untyped-call]
    return RowGradients(rows, gradient[rows])


def add_rows(reducer: GradientReducer, layer: LoadedLayer, looked_up: Sequence[RowGradients]) -> None:
    """Sum and reduce an embedding's gradient tile by tile.

    Args:
        looked_up: gradients of each micro-batch.
    """
    name, layout = layer.layout.vocabulary, layer.layout
    assert name is not None
    for tile in layout.tiles:
        part = layout.tile_rows(tile)
        total_UD = layer.gradient.begin_tile(tile)[name]
        reducer.begin(layer)
        for b, each in enumerate(looked_up):
            if len(each.rows):
                own = ((each.rows >= part.start) & (each.rows < part.stop)).nonzero()[:, 0]
                total_UD.index_add_(0, each.rows[own] - part.start, each.values[own].to(total_UD.dtype))
            reducer.end_micro_batch(layer, b + 1)
        reducer.end(layer)
