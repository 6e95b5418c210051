"""Estimate confidence intervals by the paired bootstrap over rows (percentile method).

Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13; paired, as in Koehn (2004),
https://aclanthology.org/W04-3250: both systems are scored on the same samples of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gptj_ft.evaluation.metrics.statistic import Statistic, Vector

_SAMPLES = 1000
_TOGETHER = 50  # samples, so that their weights take little memory
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class Estimate:
    """A score or a difference of scores, with its 95 % interval; none for a single row."""

    value: float
    low: float | None
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether 0 is outside the interval: of a difference, whether there is one beyond the luck of the rows."""
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
        figures: statistics of the system.
        baseline: statistics of the baseline; empty: none.
        num_rows: rows of both.
        seed: seed of the resampling.
        part: weights of the rows, 1 for those that count and 0 for the others; default: all count.
    """
    part_N = np.ones(num_rows) if part is None else part
    ours, theirs = _sampled(figures, part_N, seed), _sampled(baseline, part_N, seed)
    with np.errstate(invalid="ignore"):  # both infinite
        differences = {name: ours[name] - theirs[name] for name in ours.keys() & theirs.keys()}
    num_counted = int(part_N.sum())
    return PairedEstimates(
        {name: _estimate(ours[name], num_counted) for name in ours},
        {name: _estimate(theirs[name], num_counted) for name in theirs},
        {name: _estimate(differences[name], num_counted) for name in ours if name in differences},
    )


def _sampled(figures: Mapping[str, Statistic], part_N: Vector, seed: int) -> dict[str, Vector]:
    """Evaluate each score on all rows, then on each sample."""
    found: dict[str, list[Vector]] = {name: [figure.evaluate(part_N[None])] for name, figure in figures.items()}
    for weights_BN in _weights(part_N, seed) if figures else ():
        for name, figure in figures.items():
            found[name].append(figure.evaluate(weights_BN))
    return {name: np.concatenate(values) for name, values in found.items()}


def _weights(part_N: Vector, seed: int) -> Iterator[Vector]:
    """Draw samples with replacement, as counts of each row."""
    generator = np.random.Generator(np.random.PCG64(seed))
    rows = np.flatnonzero(part_N)
    for start in range(0, _SAMPLES, _TOGETHER):
        count = min(_TOGETHER, _SAMPLES - start)
        drawn = rows[generator.integers(0, len(rows), (count, len(rows)))] + len(part_N) * np.arange(count)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=count * len(part_N))
        yield counts.reshape(count, len(part_N)).astype(np.float64)


def _estimate(values: Vector, num_rows: int) -> Estimate:
    """Build an estimate from the value of all rows, which comes first, and those of the samples."""
    samples = values[1:][~np.isnan(values[1:])]
    if num_rows < 2 or not len(samples):
        return Estimate(float(values[0]), None, None)
    low, high = np.percentile(samples, PERCENTILES) if np.isfinite(samples).all() else (np.nan, np.nan)
    bounds = [None if math.isnan(bound) else float(bound) for bound in (low, high)]
    return Estimate(float(values[0]), bounds[0], bounds[1])
