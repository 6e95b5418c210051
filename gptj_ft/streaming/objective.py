"""Losses of the tasks. No other module of the engine knows a task.

Axis letters: S input rows of the head, C outputs of the head per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.config.options import Recipe
from gptj_ft.models.batch import NO_TARGET, PackedBatch
from gptj_ft.streaming.cross_entropy import summed_cross_entropy

# Bits, because an answer of one token is both.
FIRST, LAST = 1, 2  # bits in the target of an answer's first and last token


class Objective(Protocol):
    """Interface of a training objective."""

    @property
    def reads_documents(self) -> bool:
        """Whether the loss needs all rows of a document at once, so that a batch goes to the head in one chunk."""

    def weight(self, batch: PackedBatch) -> float:
        """Return the divisor of a batch's loss. A step's divisor is the sum over its batches."""

    def loss(self, output_SC: Tensor, batch: PackedBatch, rows_S: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the loss of some rows.

        Args:
            output_SC: outputs of the head, fp32. `CrossEntropy` accepts padding rows at the end, and in training may
                overwrite them.
            rows_S: positions of the rows in the batch.

        Returns:
            The sum of the losses, and the sum of the z-losses if training uses them.
        """


@dataclass(frozen=True)
class StepLoss:
    """Summed losses of a step or a batch."""

    total: float
    weight: float  # divisor of the totals: targets, numbers in them, or the sum of class weights
    z_total: float = 0.0  # sum of the z-losses, which `total` excludes
    num_targets: int = 0  # rows that the head has computed

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else math.nan

    @property
    def z_mean(self) -> float:
        return self.z_total / self.weight if self.weight else math.nan


@dataclass(frozen=True)
class CrossEntropy:
    """One class per row: the next token, the label of a text or of a word."""

    z_loss: float = 0.0
    """Weight of log(Z)^2, Z the sum of a row's exponentiated logits. It keeps logits from drifting
    (https://arxiv.org/abs/2204.02311, section 5; pre-training of the 6B model used 1e-4). 0: not computed."""
    class_weights: tuple[float, ...] = ()  # weight of each class; empty: 1

    reads_documents = False

    def weight(self, batch: PackedBatch) -> float:
        if not self.class_weights:
            return batch.num_targets
        targets_T = batch.on_host("targets_T")
        return float(torch.tensor(self.class_weights, dtype=torch.float64)[targets_T[targets_T >= 0]].sum())

    def loss(self, output_SC: Tensor, batch: PackedBatch, rows_S: Tensor) -> tuple[Tensor, Tensor | None]:
        weights = torch.tensor(self.class_weights, device=output_SC.device) if self.class_weights else None
        targets_S = F.pad(batch.targets_T[rows_S], (0, len(output_SC) - len(rows_S)), value=NO_TARGET)
        if output_SC.device.type == "cpu" and weights is None and not self.z_loss:
            return summed_cross_entropy(output_SC, targets_S), None
        loss = F.cross_entropy(output_SC, targets_S, weights, ignore_index=NO_TARGET, reduction="sum")
        if not self.z_loss:
            return loss, None
        return loss, self.z_loss * output_SC[: len(rows_S)].logsumexp(-1).square().sum()


@dataclass(frozen=True)
class Numbers:
    """Numbers per row: 0 or 1 for each label of a text, or scores."""

    are_labels: bool  # outputs are logits of labels; otherwise predictions of scores

    reads_documents = True

    def weight(self, batch: PackedBatch) -> float:
        return 0 if batch.values_SC is None else batch.values_SC.numel()

    def loss(self, output_SC: Tensor, batch: PackedBatch, rows_S: Tensor) -> tuple[Tensor, Tensor | None]:
        assert batch.values_SC is not None
        loss = F.binary_cross_entropy_with_logits if self.are_labels else F.mse_loss
        return loss(output_SC, batch.values_SC, reduction="sum"), None


@dataclass(frozen=True)
class Spans:
    """First and last token of an answer among a document's tokens; [CLS] if there is no answer."""

    reads_documents = True

    def weight(self, batch: PackedBatch) -> float:
        return len(batch.cu_seqlens) - 1

    def loss(self, output_SC: Tensor, batch: PackedBatch, rows_S: Tensor) -> tuple[Tensor, Tensor | None]:
        targets_S = batch.targets_T[rows_S]
        total = output_SC.new_zeros(())
        for column, code in enumerate((FIRST, LAST)):
            scores_S = output_SC[:, column]
            # Each document's softmax covers its own rows only.
            norms = [scores_S[start:end].logsumexp(0) for start, end in pairwise((0, *batch.row_ends))]
            total = total + (torch.stack(norms).sum() - (scores_S * ((targets_S & code) != 0)).sum()) / 2
        return total, None


@dataclass(frozen=True)
class Sentences:
    """Whether each sentence of a document belongs to its summary."""

    reads_documents = True

    def weight(self, batch: PackedBatch) -> float:
        return batch.num_targets

    def loss(self, output_SC: Tensor, batch: PackedBatch, rows_S: Tensor) -> tuple[Tensor, Tensor | None]:
        targets_S = batch.targets_T[rows_S].float()
        return F.binary_cross_entropy_with_logits(output_SC[:, 0], targets_S, reduction="sum"), None


def objective_of(recipe: Recipe, class_weights: tuple[float, ...] = ()) -> Objective:
    """Return the objective of a recipe's task."""
    if recipe.task in ("multi-label", "regression"):
        return Numbers(recipe.task == "multi-label")
    if recipe.task == "spans":
        return Spans()
    return Sentences() if recipe.task == "sentences" else CrossEntropy(recipe.z_loss, class_weights)
