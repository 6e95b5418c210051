"""Relation-extraction metrics; a text has one ``subject | relation | object`` per line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gptj_ft.evaluation.metrics.statistic import Statistic, precision_recall_f1

RELATION_SCORES = ("relations_precision", "relations_recall", "relations_f1")


def relations(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
    """Compute micro-averaged precision, recall and F1 of relations.

    The facts of a text are a set: order, repetition, case and the amount of white space are ignored. Each row takes the
    reference with the best F1; a row without references has no facts.
    """
    counts = []
    for prediction, targets in zip(predictions, references, strict=True):
        facts = _facts(prediction)
        # Choose the best reference per row before summing: micro-averages need counts, not scores.
        right = max((_facts(target) for target in targets or [""]), key=lambda target: _dice(facts, target))
        counts.append((len(facts & right), len(facts), len(right)))
    true_positives_N, predicted_N, expected_N = np.asarray(counts, dtype=np.float64).T
    return precision_recall_f1("relations_", true_positives_N, predicted_N, expected_N)


def _facts(text: str) -> frozenset[tuple[str, ...]]:
    """Parse the non-blank lines of a text into relations."""
    lines = (line.casefold().split("|") for line in text.splitlines() if line.strip())
    return frozenset(tuple(" ".join(part.split()) for part in line) for line in lines)


def _dice(facts: frozenset[tuple[str, ...]], others: frozenset[tuple[str, ...]]) -> float:
    """Compute the F1 of two sets; 1 if both are empty."""
    return 2.0 * len(facts & others) / (len(facts) + len(others)) if facts or others else 1.0
