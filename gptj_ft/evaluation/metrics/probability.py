"""Probabilities of logits, in double precision."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from gptj_ft.evaluation.metrics.statistic import Vector


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
