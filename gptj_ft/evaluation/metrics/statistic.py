"""Statistics over rows, with confidence intervals by the paired bootstrap (percentile method).

A statistic is a function of row weights. So one formula gives the score, its interval and the score of any subset.

Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13; paired as in Koehn (2004),
https://aclanthology.org/W04-3250: both systems are scored on the same samples of the rows.

Axis letters: N rows, B samples of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_SAMPLES = 1000
_TOGETHER = 50  # samples, so that their weights take little memory
PERCENTILES = (2.5, 97.5)


class Statistic(Protocol):
    """A statistic of N rows."""

    def evaluate(self, weights_BN: Vector) -> Vector:
        """Compute the value for each sample, which contains row ``n`` ``weights_BN[b, n]`` times; [B]."""

    @property
    def rows_N(self) -> Vector | None:
        """Value of each row alone; None if single rows have none."""


def same(values: Vector) -> Vector:
    """Return the values unchanged."""
    return values


def percent(values: Vector) -> Vector:
    """Multiply by 100."""
    return 100.0 * values


def divided(above: Vector, below: Vector, empty: float = np.nan) -> Vector:
    """Divide; the quotient of a zero divisor is ``empty``."""
    quotient: Vector = np.full(np.shape(above), empty)
    np.divide(above, below, out=quotient, where=below != 0)
    return quotient


@dataclass(frozen=True)
class Ratio:
    """A ratio of two sums over rows: means, micro-averages, perplexities."""

    above_N: Vector
    below_N: Vector
    finish: Callable[[Vector], Vector] = same  # applied to the ratio
    empty: float = np.nan  # ratio if the divisor is 0

    def evaluate(self, weights_BN: Vector) -> Vector:
        return self._quotient(weights_BN @ self.above_N, weights_BN @ self.below_N)

    @property
    def rows_N(self) -> Vector | None:
        return self._quotient(self.above_N, self.below_N)

    def _quotient(self, above: Vector, below: Vector) -> Vector:
        with np.errstate(over="ignore"):  # a perplexity may overflow to infinity
            return self.finish(divided(above, below, self.empty))


def mean(values: Sequence[float] | Vector, of: Sequence[bool] | None = None) -> Ratio:
    """Build the mean over rows, or over a subset."""
    values_N = np.asarray(values, dtype=np.float64)
    counted_N = np.ones_like(values_N) if of is None else np.asarray(of, dtype=np.float64)
    return Ratio(values_N * counted_N, counted_N)


def precision_recall_f1(name: str, true_positives: Vector, predicted: Vector, expected: Vector) -> dict[str, Statistic]:
    """Build micro-averaged precision, recall and F1, times 100.

    They are tp / predicted, tp / expected and 2 tp / (predicted + expected); 0 if the divisor is 0. If no row has a
    predicted or expected item, all three are 100.

    Args:
        name: prefix of the scores' names.
        true_positives: number of right predictions of each row.
        predicted: number of predicted items of each row.
        expected: number of expected items of each row.
    """
    empty = 0.0 if predicted.any() or expected.any() else 1.0
    return {
        f"{name}precision": Ratio(true_positives, predicted, percent, empty),
        f"{name}recall": Ratio(true_positives, expected, percent, empty),
        f"{name}f1": Ratio(2.0 * true_positives, predicted + expected, percent, 1.0),
    }


def values(figures: Mapping[str, Statistic], num_rows: int) -> dict[str, float]:
    """Evaluate statistics on all rows, by name."""
    all_rows = np.ones((1, num_rows))
    return {name: float(figure.evaluate(all_rows)[0]) for name, figure in figures.items()}


@dataclass(frozen=True)
class Estimate:
    """A score or a difference of scores, with its 95 % interval; a single row has no interval."""

    value: float
    low: float | None
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether 0 is outside the interval: a difference is then significant."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class PairedEstimates:
    """Estimates by score name: of the system, of its baseline, and of their difference on the same rows."""

    scores: Mapping[str, Estimate]
    baseline: Mapping[str, Estimate]
    differences: Mapping[str, Estimate]


def estimate_scores(
    figures: Mapping[str, Statistic],
    baseline: Mapping[str, Statistic],
    num_rows: int,
    seed: int,
    part: Vector | None = None,
) -> PairedEstimates:
    """Estimate the scores of one or two systems on the same rows, and their differences.

    Args:
        baseline: statistics of the baseline; empty: none.
        seed: seed of the resampling.
        part: weights of the rows, 1 to count a row and 0 to ignore it; default: all count.
    """
    part_N = np.ones(num_rows) if part is None else part
    # The same seed draws the same samples for both systems, which makes the differences paired.
    ours, theirs = _resampled(figures, part_N, seed), _resampled(baseline, part_N, seed)
    with np.errstate(invalid="ignore"):  # both infinite
        differences = {name: ours[name] - theirs[name] for name in ours.keys() & theirs.keys()}
    num_counted = int(part_N.sum())
    return PairedEstimates(
        {name: _estimate(ours[name], num_counted) for name in ours},
        {name: _estimate(theirs[name], num_counted) for name in theirs},
        {name: _estimate(differences[name], num_counted) for name in ours if name in differences},
    )


def _resampled(figures: Mapping[str, Statistic], part_N: Vector, seed: int) -> dict[str, Vector]:
    """Evaluate each score on all rows, then on each sample."""
    # The weights of the part itself, as a sample in which each of its rows occurs once.
    values: dict[str, list[Vector]] = {name: [figure.evaluate(part_N[None])] for name, figure in figures.items()}
    for weights_BN in _weights(part_N, seed) if figures else ():
        for name, figure in figures.items():
            values[name].append(figure.evaluate(weights_BN))
    return {name: np.concatenate(each) for name, each in values.items()}


def _weights(part_N: Vector, seed: int) -> Iterator[Vector]:
    """Draw samples with replacement, as counts of each row."""
    generator = np.random.Generator(np.random.PCG64(seed))
    rows = np.flatnonzero(part_N)
    for start in range(0, _SAMPLES, _TOGETHER):
        count = min(_TOGETHER, _SAMPLES - start)
        # Offset each sample's row numbers, so that one bincount counts the rows of all samples.
        drawn = rows[generator.integers(0, len(rows), (count, len(rows)))] + len(part_N) * np.arange(count)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=count * len(part_N))
        yield counts.reshape(count, len(part_N)).astype(np.float64)


def _estimate(values: Vector, num_rows: int) -> Estimate:
    """Build an estimate from the value of all rows, which comes first, and the values of the samples."""
    samples = values[1:][~np.isnan(values[1:])]
    if num_rows < 2 or not len(samples):
        return Estimate(float(values[0]), None, None)
    # Interpolating between infinite samples gives NaN: then there is no interval.
    low, high = np.percentile(samples, PERCENTILES) if np.isfinite(samples).all() else (np.nan, np.nan)
    bounds = [None if math.isnan(bound) else float(bound) for bound in (low, high)]
    return Estimate(float(values[0]), bounds[0], bounds[1])
