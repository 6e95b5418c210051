"""Statistics as functions of row weights: one formula gives the score, its interval, and that of any subset.

Axis letters: N rows, B samples of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class Statistic(Protocol):
    """A statistic of N rows."""

    def evaluate(self, weights_BN: Vector) -> Vector:
        """Return its value for each sample, in which row ``n`` stands ``weights_BN[b, n]`` times; [B]."""

    @property
    def rows_N(self) -> Vector | None:
        """Its value for each row alone; ``None`` if it says nothing of one row."""


def same(values: Vector) -> Vector:
    """Return the values unchanged."""
    return values


def percent(values: Vector) -> Vector:
    """Multiply by 100."""
    return 100.0 * values


def divided(above: Vector, below: Vector, empty: float = np.nan) -> Vector:
    """Divide; where the divisor is 0 the quotient is ``empty``."""
    quotient: Vector = np.full(np.shape(above), empty)
    np.divide(above, below, out=quotient, where=below != 0)
    return quotient


@dataclass(frozen=True)
class Ratio:
    """A ratio of two sums over rows: means, micro-averages, perplexities.

    Attributes:
        above_N: numerator of each row.
        below_N: denominator of each row.
        finish: function applied to the ratio.
        empty: the value where the divisor is 0, before ``finish``.
    """

    above_N: Vector
    below_N: Vector
    finish: Callable[[Vector], Vector] = same
    empty: float = np.nan

    def evaluate(self, weights_BN: Vector) -> Vector:
        return self._quotient(weights_BN @ self.above_N, weights_BN @ self.below_N)

    @property
    def rows_N(self) -> Vector | None:
        return self._quotient(self.above_N, self.below_N)

    def _quotient(self, above: Vector, below: Vector) -> Vector:
        with np.errstate(over="ignore"):  # a perplexity beyond what a float holds is infinite
            return self.finish(divided(above, below, self.empty))


def mean(values: Sequence[float] | Vector, of: Sequence[bool] | None = None) -> Ratio:
    """Build the mean over rows, or over a subset."""
    values_N = np.asarray(values, dtype=np.float64)
    counted_N = np.ones_like(values_N) if of is None else np.asarray(of, dtype=np.float64)
    return Ratio(values_N * counted_N, counted_N)


def precision_recall_f1(name: str, both: Vector, given: Vector, expected: Vector) -> dict[str, Statistic]:
    """Build micro-averaged precision, recall and F1 of things found, times 100.

    They are tp / given, tp / expected, and 2 tp / (given + expected). A quotient with the divisor 0 is 0, but all are
    100 where nothing was given and nothing expected.

    Args:
        name: text before the names of the scores.
        both: number of things that are given and expected, for each row.
        given: number of things that are given.
        expected: number of things that are expected.
    """
    empty = 0.0 if given.any() or expected.any() else 1.0
    return {
        f"{name}precision": Ratio(both, given, percent, empty),
        f"{name}recall": Ratio(both, expected, percent, empty),
        f"{name}f1": Ratio(2.0 * both, given + expected, percent, 1.0),
    }


@dataclass(frozen=True)
class MacroF1:
    """Macro F1: F1 of each label, averaged over the labels that occur; times 100.

    F1 of a label is 2 tp / (2 tp + fp + fn). An answer that is no row's label lowers the F1 of the row's label only
    (scikit-learn's ``f1_score(average="macro", labels=those of y_true)``).

    Attributes:
        labels: true label of each row.
        answers: predicted label of each row.
    """

    labels: Sequence[str]
    answers: Sequence[str]
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        labels_N, answers_N = self._codes
        num_labels = int(labels_N.max()) + 1

        def counts(codes_N: NDArray[np.int64], chosen_N: NDArray[np.bool_]) -> Vector:
            codes, weights = codes_N[chosen_N], weights_BN[:, chosen_N]
            return np.stack([np.bincount(codes, each, num_labels) for each in weights]).astype(np.float64)

        right_BL = counts(labels_N, labels_N == answers_N)
        of_label_BL = counts(labels_N, np.ones_like(labels_N, dtype=np.bool_))
        of_answer_BL = counts(answers_N, answers_N < num_labels)
        there = of_label_BL > 0
        # tp + fn are the rows of a label, tp + fp the rows that were given it.
        f1_BL = np.divide(2 * right_BL, of_label_BL + of_answer_BL, out=np.zeros_like(right_BL), where=there)
        return divided(100.0 * f1_BL.sum(-1), there.sum(-1))

    @cached_property
    def _codes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        codes = {label: code for code, label in enumerate(dict.fromkeys(self.labels))}
        labels = [codes[label] for label in self.labels]
        return np.asarray(labels), np.asarray([codes.get(answer, len(codes)) for answer in self.answers])


def values(figures: Mapping[str, Statistic], num_rows: int) -> dict[str, float]:
    """Evaluate statistics on all rows, by name."""
    all_rows = np.ones((1, num_rows))
    return {name: float(figure.evaluate(all_rows)[0]) for name, figure in figures.items()}
