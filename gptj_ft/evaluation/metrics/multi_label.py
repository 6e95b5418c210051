"""Scores of several labels a row, from the probability of each label by itself.

Axis letters: N rows, C labels, B samples of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gptj_ft.evaluation.metrics.class_counts import ClassCounts
from gptj_ft.evaluation.metrics.statistic import Statistic, Vector, mean, precision_recall_f1

MULTI_LABEL_SCORES = (
    "micro_f1", "macro_f1", "weighted_f1", "micro_precision", "micro_recall", "subset_accuracy",
)  # fmt: skip


def multi_label(labels: ArrayLike, probabilities: ArrayLike, threshold: float) -> dict[str, Statistic]:
    """Compute F1 in its averages, and how often all labels of a row are right; times 100.

    Args:
        labels: 1 where the row has the label, else 0; [N, C].
        probabilities: probability of each label; [N, C].
        threshold: probability from which a label is given.
    """
    has_NC = np.asarray(labels, dtype=np.float64) > 0.5
    given_NC = np.asarray(probabilities, dtype=np.float64) >= threshold
    both_N, of_row_N, given_N = ((each.sum(-1)).astype(np.float64) for each in (has_NC & given_NC, has_NC, given_NC))
    micro = precision_recall_f1("micro_", both_N, given_N, of_row_N)
    return {
        "micro_f1": micro["micro_f1"],
        "macro_f1": CountedLabels(has_NC, given_NC, ClassCounts.macro_f1),
        "weighted_f1": CountedLabels(has_NC, given_NC, ClassCounts.weighted_f1),
        "micro_precision": micro["micro_precision"],
        "micro_recall": micro["micro_recall"],
        "subset_accuracy": mean(100.0 * (has_NC == given_NC).all(-1)),
    }


@dataclass(frozen=True)
class CountedLabels:
    """A score that follows from how many rows have each label, were given it, and both.

    Attributes:
        has_NC: whether the row has the label.
        given_NC: whether it was given it.
        formula: the score of counts.
    """

    has_NC: NDArray[np.bool_]
    given_NC: NDArray[np.bool_]
    formula: Callable[[ClassCounts], Vector]
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        return self.formula(self.count(weights_BN))

    def count(self, weights_BN: Vector) -> ClassCounts:
        """Count the rows of each label in each sample."""
        return ClassCounts(*(weights_BN @ each for each in (self.has_NC & self.given_NC, self.has_NC, self.given_NC)))


def best_threshold(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Choose the threshold with the highest micro F1 on some rows, which should not be those that are scored.

    Of thresholds that give the same labels it is the middle one; of equally good ones the nearest to 0.5.

    Args:
        labels: 1 where the row has the label, else 0; [N, C].
        probabilities: probability of each label; [N, C].
    """
    has, given = np.asarray(labels, dtype=np.float64).ravel() > 0.5, np.asarray(probabilities, np.float64).ravel()
    order = np.argsort(-given, kind="stable")
    given, right = given[order], has[order].cumsum()
    # The first so many are given their label; equal probabilities are given it all or none.
    ends = np.flatnonzero(np.append(given[1:] < given[:-1], True)) if len(given) else np.array([], np.int64)
    f1 = 2.0 * right[ends] / (ends + 1 + has.sum())
    if not len(ends) or not f1.max():  # nothing was found, so nothing says where
        return 0.5
    thresholds = (given[ends] + np.append(given, 0.0)[ends + 1]) / 2
    best = thresholds[f1 == f1.max()]
    return float(best[np.abs(best - 0.5).argmin()])
