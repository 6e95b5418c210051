"""Metrics of memorization: rates with Wilson intervals, membership inference, exposure of canaries.

Membership: Carlini et al. 2022, https://arxiv.org/abs/2112.03570. Exposure: Carlini et al. 2019,
https://arxiv.org/abs/1802.08232. Continuations: Carlini et al. 2023, https://arxiv.org/abs/2202.07646.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gptj_ft.evaluation.metrics.statistic import Estimate, Vector, divided

FALSE_POSITIVES = 0.01  # rate at which membership's true positives are counted
_NORMAL = 1.959963984540054  # 97.5 % quantile


def wilson_estimate(count: int, total: int) -> Estimate:
    """Estimate a rate times 100 with its Wilson interval, which is wider than 0 also when the count is 0."""
    if not total:
        return Estimate(math.nan, None, None)
    rate, square = count / total, _NORMAL**2 / total
    middle = (rate + square / 2) / (1 + square)
    reach = _NORMAL * math.sqrt(rate * (1 - rate) / total + square / (4 * total)) / (1 + square)
    # Exactly 0 and 100 there: rounding would leave the rate outside its interval.
    low, high = middle - reach if count else 0.0, middle + reach if count < total else 1.0
    return Estimate(100.0 * rate, 100.0 * low, 100.0 * high)


@dataclass(frozen=True)
class TruePositives:
    """True positives at `FALSE_POSITIVES`, times 100: members found by the threshold that few other rows exceed."""

    positive_N: NDArray[np.bool_]  # whether the row is a member
    scores_N: Vector  # more: rather a member
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        order_N, ends_U = self._ranked
        sorted_BN, positive_N = weights_BN[:, order_N], self.positive_N[order_N]
        # Weights of the rows at or above each distinct score.
        positive_BU = (sorted_BN * positive_N).cumsum(-1)[:, ends_U]
        negative_BU = (sorted_BN * ~positive_N).cumsum(-1)[:, ends_U]
        rates_BU = divided(positive_BU, positive_BU[:, -1:] + np.zeros_like(positive_BU))
        is_rare_BU = negative_BU <= FALSE_POSITIVES * negative_BU[:, -1:]
        found_B: Vector = 100.0 * np.where(is_rare_BU, rates_BU, 0.0).max(-1)
        return found_B

    @cached_property
    def _ranked(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows in descending order of score, and the last index of each distinct score in that order."""
        order_N = np.argsort(-self.scores_N, kind="stable")
        is_last_N = np.append(np.diff(self.scores_N[order_N]) != 0, True)
        return order_N, np.flatnonzero(is_last_N)


def exposure(secret: float, others: Sequence[float]) -> float:
    """Return the exposure of a secret in bits: log2 of all candidates, minus log2 of its rank among them.

    Args:
        secret: log-probability of the secret.
        others: log-probabilities of the alternatives.
    """
    # Equal candidates count half, so that a constant model exposes nothing.
    rank = 1 + sum(other > secret for other in others) + sum(other == secret for other in others) / 2
    return math.log2(len(others) + 1) - math.log2(rank)


def chance_exposure(num_candidates: int) -> float:
    """Return the mean exposure of a secret whose rank is uniform, in bits."""
    return math.log2(num_candidates) - math.fsum(map(math.log2, range(1, num_candidates + 1))) / num_candidates
