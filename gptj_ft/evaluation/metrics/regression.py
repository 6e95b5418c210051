"""Scores of predicted numbers: correlations and errors.

Axis letters: N rows, B samples of the rows, U distinct numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gptj_ft.evaluation.metrics.statistic import Statistic, Vector, divided, mean

REGRESSION_SCORES = ("pearson", "spearman", "mse", "mae")


def regression(numbers: ArrayLike, predictions: ArrayLike) -> dict[str, Statistic]:
    """Compute Pearson and Spearman correlation, times 100, and the mean squared and absolute error.

    Args:
        numbers: target of each row; [N].
        predictions: [N].
    """
    expected_N, predicted_N = (np.asarray(each, dtype=np.float64) for each in (numbers, predictions))
    errors_N = predicted_N - expected_N
    return {
        "pearson": Pearson(expected_N, predicted_N),
        "spearman": Spearman(expected_N, predicted_N),
        "mse": mean(errors_N * errors_N),
        "mae": mean(np.abs(errors_N)),
    }


@dataclass(frozen=True)
class Pearson:
    """Pearson correlation, times 100; undefined if one side is constant."""

    x_N: Vector
    y_N: Vector
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        return _correlation(self.x_N[None], self.y_N[None], weights_BN)


@dataclass(frozen=True)
class Spearman:
    """Spearman rank correlation, times 100; equal numbers share the mean of their ranks."""

    x_N: Vector
    y_N: Vector
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        x_BN, y_BN = (_ranks(codes_N, weights_BN) for codes_N in self._codes)
        return _correlation(x_BN, y_BN, weights_BN)

    @cached_property
    def _codes(self) -> list[NDArray[np.int64]]:
        """Index of each number among the distinct numbers, for both sides."""
        # Ranks depend on the sample, but the order of the numbers does not: sort only once.
        return [np.unique(each, return_inverse=True)[1] for each in (self.x_N, self.y_N)]


def _ranks(codes_N: NDArray[np.int64], weights_BN: Vector) -> Vector:
    # A row that a sample contains several times has as many ranks; they count as equal numbers.
    times_BU = np.stack([np.bincount(codes_N, each) for each in weights_BN])
    # Equal numbers get the ranks from cumsum - times + 1 to cumsum; this is their mean.
    ranks_BU: Vector = times_BU.cumsum(-1) - (times_BU - 1.0) / 2
    return ranks_BU[:, codes_N]


def _correlation(x_BN: Vector, y_BN: Vector, weights_BN: Vector) -> Vector:
    is_defined_B = _varies(x_BN, weights_BN) & _varies(y_BN, weights_BN)
    rows_B1 = weights_BN.sum(-1, keepdims=True)
    x_BN, y_BN = (each - divided((weights_BN * each).sum(-1, keepdims=True), rows_B1) for each in (x_BN, y_BN))
    xy_B, xx_B, yy_B = ((weights_BN * a * b).sum(-1) for a, b in ((x_BN, y_BN), (x_BN, x_BN), (y_BN, y_BN)))
    return 100.0 * divided(xy_B, np.where(is_defined_B, np.sqrt(xx_B * yy_B), 0.0))


def _varies(numbers_BN: Vector, weights_BN: Vector) -> NDArray[np.bool_]:
    """Tell which samples have different numbers; the mean of equal ones may differ from them by rounding."""
    is_in_BN = weights_BN > 0
    lowest_B = np.where(is_in_BN, numbers_BN, np.inf).min(-1)
    varies_B: NDArray[np.bool_] = np.where(is_in_BN, numbers_BN, -np.inf).max(-1) > lowest_B
    return varies_B
