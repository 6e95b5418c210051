"""Scores of one label a row, from the probability of each class.

Axis letters: N rows, C classes, B samples of the rows, U distinct probabilities, K bins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gptj_ft.evaluation.metrics.statistic import Ratio, Statistic, Vector, divided, mean, percent, precision_recall_f1

SINGLE_LABEL_SCORES = (
    "accuracy", "macro_f1", "micro_f1", "weighted_f1", "mcc", "positive_f1", "roc_auc", "top5_accuracy", "ece",
)  # fmt: skip
NUM_BINS = 15
_MANY_CLASSES = 10  # above which the five most likely ones are worth a score
_Codes = NDArray[np.int64]
MULTI_LABEL_SCORES = (
    "micro_f1", "macro_f1", "weighted_f1", "micro_precision", "micro_recall", "subset_accuracy",
)  # fmt: skip


def single_label(labels: ArrayLike, probabilities: ArrayLike) -> dict[str, Statistic]:
    """Compute accuracy, F1 in its averages, Matthews' correlation, the calibration error; times 100.

    Of two classes also F1 of the positive one (id 1), as GLUE has it, and the area under the ROC curve; of more than
    ten, how often the label is among the five most likely ones. Micro F1 is the accuracy here.

    Args:
        labels: class id of each row; [N].
        probabilities: probability of each class; [N, C]. The first of the most likely ones is the answer.
    """
    labels_N, probabilities_NC = np.asarray(labels, dtype=np.int64), np.asarray(probabilities, dtype=np.float64)
    num_classes = probabilities_NC.shape[1]
    answers_N = probabilities_NC.argmax(-1)
    right = mean(100.0 * (labels_N == answers_N))
    scores: dict[str, Statistic] = {
        "accuracy": right,
        "macro_f1": ConfusionScore(labels_N, answers_N, num_classes, ClassCounts.macro_f1),
        "micro_f1": right,
        "weighted_f1": ConfusionScore(labels_N, answers_N, num_classes, ClassCounts.weighted_f1),
        "mcc": ConfusionScore(labels_N, answers_N, num_classes, ClassCounts.matthews),
    }
    if num_classes == 2:
        both_N = (labels_N * answers_N).astype(np.float64)
        scores["positive_f1"] = Ratio(2.0 * both_N, (labels_N + answers_N).astype(np.float64), percent, 0.0)
        scores["roc_auc"] = RocAuc(labels_N == 1, probabilities_NC[:, 1])
    if num_classes > _MANY_CLASSES:
        best_N5 = np.argsort(-probabilities_NC, axis=-1, kind="stable")[:, :5]
        scores["top5_accuracy"] = mean(100.0 * (best_N5 == labels_N[:, None]).any(-1))
    scores["ece"] = CalibrationError(labels_N == answers_N, probabilities_NC.max(-1))
    return scores


@dataclass(frozen=True)
class ConfusionScore:
    """A score that follows from how many rows each class has, was given to, and both.

    Attributes:
        labels_N: class of each row.
        answers_N: class that it was given.
        num_classes: number of classes.
        formula: the score of counts.
    """

    labels_N: _Codes
    answers_N: _Codes
    num_classes: int
    formula: Callable[[ClassCounts], Vector]
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        return self.formula(self.count(weights_BN))

    def count(self, weights_BN: Vector) -> ClassCounts:
        """Count the rows of each class in each sample."""
        right_N = self.labels_N == self.answers_N

        def sums(codes: _Codes, weights: Vector) -> Vector:
            return np.stack([np.bincount(codes, each, self.num_classes) for each in weights])

        return ClassCounts(
            sums(self.labels_N[right_N], weights_BN[:, right_N]),
            sums(self.labels_N, weights_BN),
            sums(self.answers_N, weights_BN),
        )


@dataclass(frozen=True)
class RocAuc:
    """Area under the ROC curve, times 100: how often a positive row is more likely positive than a negative one is.

    Equal probabilities count half (Mann and Whitney). Undefined where all rows are of one kind.

    Attributes:
        positive_N: whether the row is positive.
        scores_N: probability that it is, or any other score.
    """

    positive_N: NDArray[np.bool_]
    scores_N: Vector
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        order_N, starts_U = self._ranked
        sorted_BN, positive_N = weights_BN[:, order_N], self.positive_N[order_N]
        positive_BU = np.add.reduceat(sorted_BN * positive_N, starts_U, axis=-1)
        negative_BU = np.add.reduceat(sorted_BN * ~positive_N, starts_U, axis=-1)
        below_BU = negative_BU.cumsum(-1) - negative_BU / 2
        pairs_B = positive_BU.sum(-1) * negative_BU.sum(-1)
        return 100.0 * divided((positive_BU * below_BU).sum(-1), pairs_B)

    @cached_property
    def _ranked(self) -> tuple[_Codes, _Codes]:
        """Rows in ascending order, and where in it each distinct value begins."""
        order_N = np.argsort(self.scores_N, kind="stable")
        return order_N, np.unique(self.scores_N[order_N], return_index=True)[1]


@dataclass(frozen=True)
class CalibrationBin:
    """Rows of about the same confidence.

    Attributes:
        low: lower end of the bin, not in it.
        high: upper end, in it.
        rows: number of rows.
        confidence: mean probability of the answer.
        accuracy: share of right answers.
    """

    low: float
    high: float
    rows: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class CalibrationError:
    """Expected calibration error, times 100: by how much confidence and accuracy differ, on average over the rows.

    Of 15 bins of the same width, each counts with its rows (Guo et al. 2017, https://arxiv.org/abs/1706.04599).

    Attributes:
        right_N: whether the answer is right.
        confidence_N: probability of the answer.
    """

    right_N: NDArray[np.bool_]
    confidence_N: Vector
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        excess_BN = weights_BN * (self.confidence_N - self.right_N)
        excess_BK = np.stack([np.bincount(self._bins_N, each, NUM_BINS) for each in excess_BN])
        return 100.0 * divided(np.abs(excess_BK).sum(-1), weights_BN.sum(-1))

    @property
    def bins(self) -> list[CalibrationBin]:
        """The bins that have rows."""
        rows_K, confidence_K, right_K = (
            np.bincount(self._bins_N, each, NUM_BINS)
            for each in (np.ones_like(self.confidence_N), self.confidence_N, self.right_N)
        )
        return [
            CalibrationBin(
                low=float(bin / NUM_BINS),
                high=float((bin + 1) / NUM_BINS),
                rows=int(rows_K[bin]),
                confidence=float(confidence_K[bin] / rows_K[bin]),
                accuracy=float(right_K[bin] / rows_K[bin]),
            )
            for bin in np.flatnonzero(rows_K)
        ]

    @cached_property
    def _bins_N(self) -> _Codes:
        return np.digitize(self.confidence_N, np.linspace(0.0, 1.0, NUM_BINS + 1)[1:-1], right=True)


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


@dataclass(frozen=True)
class ClassCounts:
    """Rows of each class in B samples, by what they are and what they were taken for; [B, C].

    Attributes:
        right: rows of the class that were given it.
        expected: rows of the class.
        given: rows that were given the class.
    """

    right: Vector
    expected: Vector
    given: Vector

    @property
    def f1(self) -> Vector:
        """F1 of each class; 0 where there are no rows."""
        rows_BC = self.expected + self.given
        return divided(2.0 * self.right, rows_BC, empty=0.0)

    def macro_f1(self) -> Vector:
        """Average F1 over the classes that are a row's own or given to one, times 100; [B].

        As scikit-learn's ``f1_score(average="macro")`` for one label a row; for several, with ``zero_division=nan``.
        """
        there_BC = self.expected + self.given > 0
        return 100.0 * divided(self.f1.sum(-1), there_BC.sum(-1))

    def weighted_f1(self) -> Vector:
        """Average F1 over the classes, each with the number of its rows as its weight, times 100; [B]."""
        return 100.0 * divided((self.f1 * self.expected).sum(-1), self.expected.sum(-1))

    def matthews(self) -> Vector:
        """Compute Matthews' correlation coefficient, times 100; 0 where it is undefined; [B].

        It is the covariance of labels and answers over the root of the product of their variances, of which one is 0
        where all rows have, or were given, the same class. For several classes see Gorodkin (2004),
        https://doi.org/10.1016/j.compbiolchem.2004.09.006.
        """
        rows_B = self.expected.sum(-1)
        both_B = rows_B * self.right.sum(-1) - (self.expected * self.given).sum(-1)
        expected_B, given_B = (rows_B**2 - (each**2).sum(-1) for each in (self.expected, self.given))
        return 100.0 * divided(both_B, np.sqrt(expected_B * given_B), empty=0.0)


def softmax(logits: ArrayLike) -> Vector:
    """Compute probabilities that sum to 1 along the last axis."""
    logits = np.asarray(logits, dtype=np.float64)
    powers: Vector = np.exp(logits - logits.max(-1, keepdims=True))
    powers /= powers.sum(-1, keepdims=True)
    return powers


def sigmoid(logits: ArrayLike) -> Vector:
    """Compute the probability of each logit by itself."""
    logits = np.asarray(logits, dtype=np.float64)
    powers: Vector = np.exp(-np.abs(logits))  # never overflows
    return np.where(logits >= 0, 1.0, powers) / (1.0 + powers)
