"""Scores of labels from probabilities: one label per row, or several.

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
MULTI_LABEL_SCORES = (
    "micro_f1", "macro_f1", "weighted_f1", "micro_precision", "micro_recall", "subset_accuracy",
)  # fmt: skip
NUM_BINS = 15
_MANY_CLASSES = 10  # above this, report top-5 accuracy
_Codes = NDArray[np.int64]


def softmax(logits: ArrayLike) -> Vector:
    """Compute probabilities that sum to 1 along the last axis, in fp64."""
    logits = np.asarray(logits, dtype=np.float64)
    powers: Vector = np.exp(logits - logits.max(-1, keepdims=True))
    powers /= powers.sum(-1, keepdims=True)
    return powers


def sigmoid(logits: ArrayLike) -> Vector:
    """Compute the probability of each logit by itself, in fp64."""
    logits = np.asarray(logits, dtype=np.float64)
    powers: Vector = np.exp(-np.abs(logits))  # never overflows
    return np.where(logits >= 0, 1.0, powers) / (1.0 + powers)


def single_label(labels: ArrayLike, probabilities: ArrayLike) -> dict[str, Statistic]:
    """Compute accuracy, averaged F1, Matthews correlation and calibration error of one label per row; times 100.

    Two classes also get the F1 of class 1, as in GLUE, and the area under the ROC curve. More than ten classes get
    top-5 accuracy. Micro F1 equals accuracy.

    Args:
        labels: class id of each row; [N].
        probabilities: probability of each class; [N, C]. The most likely class is the answer, the first of equal ones.
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
        # Class ids are 0 and 1: products and sums count the rows of class 1.
        both_N = (labels_N * answers_N).astype(np.float64)
        scores["positive_f1"] = Ratio(2.0 * both_N, (labels_N + answers_N).astype(np.float64), percent, 0.0)
        scores["roc_auc"] = RocAuc(labels_N == 1, probabilities_NC[:, 1])
    if num_classes > _MANY_CLASSES:
        best_N5 = np.argsort(-probabilities_NC, axis=-1, kind="stable")[:, :5]
        scores["top5_accuracy"] = mean(100.0 * (best_N5 == labels_N[:, None]).any(-1))
    scores["ece"] = CalibrationError(labels_N == answers_N, probabilities_NC.max(-1))
    return scores


def multi_label(labels: ArrayLike, probabilities: ArrayLike, threshold: float) -> dict[str, Statistic]:
    """Compute averaged F1 and the share of rows with all labels right; times 100.

    Args:
        labels: 1 where the row has the label, else 0; [N, C].
        probabilities: probability of each label by itself; [N, C].
        threshold: lowest probability of a predicted label.
    """
    has_NC = np.asarray(labels, dtype=np.float64) > 0.5
    predicted_NC = np.asarray(probabilities, dtype=np.float64) >= threshold
    both_N, expected_N, predicted_N = (
        (each.sum(-1)).astype(np.float64) for each in (has_NC & predicted_NC, has_NC, predicted_NC)
    )
    micro = precision_recall_f1("micro_", both_N, predicted_N, expected_N)
    return {
        "micro_f1": micro["micro_f1"],
        "macro_f1": LabelSetScore(has_NC, predicted_NC, ClassCounts.macro_f1),
        "weighted_f1": LabelSetScore(has_NC, predicted_NC, ClassCounts.weighted_f1),
        "micro_precision": micro["micro_precision"],
        "micro_recall": micro["micro_recall"],
        "subset_accuracy": mean(100.0 * (has_NC == predicted_NC).all(-1)),
    }


@dataclass(frozen=True)
class ClassCounts:
    """Number of rows of each class in B samples; [B, C]."""

    right: Vector  # true positives
    expected: Vector  # rows that have the class
    predicted: Vector  # rows that were predicted to have it

    @property
    def f1(self) -> Vector:
        """F1 of each class; 0 if there are no rows."""
        rows_BC = self.expected + self.predicted
        return divided(2.0 * self.right, rows_BC, empty=0.0)

    def macro_f1(self) -> Vector:
        """Average F1 over the classes that some row has or was predicted to have, times 100; [B].

        Equals scikit-learn's ``f1_score(average="macro")`` for one label per row; for several, with
        ``zero_division=nan``.
        """
        occurs_BC = self.expected + self.predicted > 0
        return 100.0 * divided(self.f1.sum(-1), occurs_BC.sum(-1))

    def weighted_f1(self) -> Vector:
        """Average F1 over the classes, weighted by their rows, times 100; [B]."""
        return 100.0 * divided((self.f1 * self.expected).sum(-1), self.expected.sum(-1))

    def matthews(self) -> Vector:
        """Compute Matthews correlation coefficient, times 100; 0 if it is undefined; [B].

        For more than two classes: Gorodkin (2004), https://doi.org/10.1016/j.compbiolchem.2004.09.006.
        """
        rows_B = self.expected.sum(-1)
        # Covariance of labels and answers over the root of the product of their variances.
        covariance_B = rows_B * self.right.sum(-1) - (self.expected * self.predicted).sum(-1)
        expected_B, predicted_B = (rows_B**2 - (each**2).sum(-1) for each in (self.expected, self.predicted))
        return 100.0 * divided(covariance_B, np.sqrt(expected_B * predicted_B), empty=0.0)


@dataclass(frozen=True)
class ConfusionScore:
    """A score of one label per row that is a function of `ClassCounts`."""

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
class LabelSetScore:
    """A score of several labels per row that is a function of `ClassCounts`."""

    has_NC: NDArray[np.bool_]  # whether the row has the label
    predicted_NC: NDArray[np.bool_]  # whether the label was predicted
    formula: Callable[[ClassCounts], Vector]
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        counts = (weights_BN @ each for each in (self.has_NC & self.predicted_NC, self.has_NC, self.predicted_NC))
        return self.formula(ClassCounts(*counts))


@dataclass(frozen=True)
class RocAuc:
    """Area under the ROC curve, times 100: the share of pairs in which the positive row scores above the negative one.

    Pairs with equal scores count half (Mann and Whitney). Undefined if all rows are positive, or all negative.
    """

    positive_N: NDArray[np.bool_]  # whether the row is positive
    scores_N: Vector  # probability of being positive, or any other score
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        order_N, starts_U = self._ranked
        sorted_BN, positive_N = weights_BN[:, order_N], self.positive_N[order_N]
        positive_BU = np.add.reduceat(sorted_BN * positive_N, starts_U, axis=-1)
        negative_BU = np.add.reduceat(sorted_BN * ~positive_N, starts_U, axis=-1)
        # Weight of the negative rows below each score, counting half of those with an equal score.
        below_BU = negative_BU.cumsum(-1) - negative_BU / 2
        pairs_B = positive_BU.sum(-1) * negative_BU.sum(-1)
        return 100.0 * divided((positive_BU * below_BU).sum(-1), pairs_B)

    @cached_property
    def _ranked(self) -> tuple[_Codes, _Codes]:
        """Rows in ascending order of score, and the first index of each distinct score in that order."""
        order_N = np.argsort(self.scores_N, kind="stable")
        return order_N, np.unique(self.scores_N[order_N], return_index=True)[1]


@dataclass(frozen=True)
class CalibrationBin:
    """Rows with similar confidence."""

    low: float  # exclusive bound of the confidence
    high: float  # inclusive bound
    rows: int
    confidence: float  # mean probability of the answers
    accuracy: float  # share of right answers


@dataclass(frozen=True)
class CalibrationError:
    """Expected calibration error, times 100: difference of confidence and accuracy, averaged over 15 equal bins.

    Bins are weighted by their rows (Guo et al. 2017, https://arxiv.org/abs/1706.04599).
    """

    right_N: NDArray[np.bool_]  # whether the answer is right
    confidence_N: Vector  # probability of the answer
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        excess_BN = weights_BN * (self.confidence_N - self.right_N)
        excess_BK = np.stack([np.bincount(self._bins_N, each, NUM_BINS) for each in excess_BN])
        return 100.0 * divided(np.abs(excess_BK).sum(-1), weights_BN.sum(-1))

    @property
    def bins(self) -> list[CalibrationBin]:
        """Bins that have rows."""
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
        # Only inner bounds: a confidence of 0 or 1 then falls into the first or last bin.
        return np.digitize(self.confidence_N, np.linspace(0.0, 1.0, NUM_BINS + 1)[1:-1], right=True)


def best_threshold(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Choose the threshold with the highest micro F1; use other rows than those to be scored.

    Among thresholds that predict the same labels it is the middle one, among equally good ones the nearest to 0.5.

    Args:
        labels: 1 where the row has the label, else 0; [N, C].
        probabilities: probability of each label; [N, C].
    """
    has, unsorted = np.asarray(labels, dtype=np.float64).ravel() > 0.5, np.asarray(probabilities, np.float64).ravel()
    order = np.argsort(-unsorted, kind="stable")
    descending, right = unsorted[order], has[order].cumsum()
    # A threshold predicts the labels up to some index of the sorted ones, never only some of equally likely ones.
    ends = (
        np.flatnonzero(np.append(descending[1:] < descending[:-1], True)) if len(descending) else np.array([], np.int64)
    )
    f1 = 2.0 * right[ends] / (ends + 1 + has.sum())
    if not len(ends) or not f1.max():
        return 0.5
    # Halfway to the next lower probability, or to 0 after the last.
    thresholds = (descending[ends] + np.append(descending, 0.0)[ends + 1]) / 2
    best = thresholds[f1 == f1.max()]
    return float(best[np.abs(best - 0.5).argmin()])
