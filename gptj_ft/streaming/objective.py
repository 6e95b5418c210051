"""What is learned: the loss of what a head gives for its rows, task by task. The rest of the engine names no task.

Axis letters: S rows that the head takes, C its outputs for each.
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

FIRST, LAST = 1, 2  # what is added to the target of the first and of the last token of an answer


class Objective(Protocol):
    """Interface of what is learned."""

    @property
    def reads_documents(self) -> bool:
        """Whether all rows of a document belong together, so that a batch goes to the head in one piece."""

    def weight(self, batch: PackedBatch) -> float:
        """Return the divisor of a batch's loss; that of a step is the sum over its batches."""

    def loss(self, output_SC: Tensor, batch: PackedBatch, rows_S: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the loss of some rows.

        Args:
            output_SC: outputs of the head for them, fp32; for one class each, rows of no document may follow.
            batch: micro-batch.
            rows_S: tokens of the batch that they are.

        Returns:
            The sum of their losses, and what training adds to it, if it does.
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
    """One class for each row: the next token, the label of a text or of a word.

    Attributes:
        z_loss: weight of log(Z)^2, Z the sum of a row's exponentiated logits, which keeps logits from drifting
            (https://arxiv.org/abs/2204.02311, section 5; GPT-J was pre-trained with 1e-4). 0: not computed.
        class_weights: weight of the rows of each class; empty: all are alike.
    """

    z_loss: float = 0.0
    class_weights: tuple[float, ...] = ()

    reads_documents = False

    def weight(self, batch: PackedBatch) -> float:
        if not self.class_weights:
            return batch.num_targets
        targets_T = batch.on_host("targets_T")
        return float(torch.tensor(self.class_weights, dtype=torch.float64)[targets_T[targets_T >= 0]].sum())

    def loss(self, output_SC: Tensor, batch: PackedBatch, rows_S: Tensor) -> tuple[Tensor, Tensor | None]:
        weights = torch.tensor(self.class_weights, device=output_SC.device) if self.class_weights else None
        targets_S = F.pad(batch.targets_T[rows_S], (0, len(output_SC) - len(rows_S)), value=NO_TARGET)
        loss = F.cross_entropy(output_SC, targets_S, weights, ignore_index=NO_TARGET, reduction="sum")
        if not self.z_loss:
            return loss, None
        return loss, self.z_loss * output_SC[: len(rows_S)].logsumexp(-1).square().sum()


@dataclass(frozen=True)
class Numbers:
    """Numbers for each row: whether each label is given, or a score.

    Attributes:
        are_labels: whether the numbers are 0 and 1, and the outputs logits of them.
    """

    are_labels: bool

    reads_documents = True

    def weight(self, batch: PackedBatch) -> float:
        return 0 if batch.values_SC is None else batch.values_SC.numel()

    def loss(self, output_SC: Tensor, batch: PackedBatch, rows_S: Tensor) -> tuple[Tensor, Tensor | None]:
        assert batch.values_SC is not None
        loss = F.binary_cross_entropy_with_logits if self.are_labels else F.mse_loss
        return loss(output_SC, batch.values_SC, reduction="sum"), None


@dataclass(frozen=True)
class Spans:
    """The first and the last token of an answer, among all tokens of a document; [CLS] where it has none."""

    reads_documents = True

    def weight(self, batch: PackedBatch) -> float:
        return len(batch.cu_seqlens) - 1

    def loss(self, output_SC: Tensor, batch: PackedBatch, rows_S: Tensor) -> tuple[Tensor, Tensor | None]:
        targets_S = batch.targets_T[rows_S]
        total = output_SC.new_zeros(())
        for column, code in enumerate((FIRST, LAST)):
            scores_S = output_SC[:, column]
            norms = [scores_S[start:end].logsumexp(0) for start, end in pairwise((0, *batch.row_ends))]
            total = total + (torch.stack(norms).sum() - (scores_S * ((targets_S & code) != 0)).sum()) / 2
        return total, None


@dataclass(frozen=True)
class Sentences:
    """Whether each sentence of a document is part of its summary."""

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
