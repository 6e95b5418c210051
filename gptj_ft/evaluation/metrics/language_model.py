"""Language-model metrics from per-row losses: loss, perplexity, token accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptj_ft.evaluation.metrics.statistic import Ratio, Statistic, percent

LOSS_SCORES = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "token_accuracy")


@dataclass(frozen=True)
class RowLoss:
    """Loss of one row, with the counts that its averages need."""

    total: float  # sum over the target tokens, nats
    targets: int  # number of target tokens, including EOS
    right: int  # targets that are the argmax
    words: int | None  # white-space separated words of the target text; None if some targets are no text
    bytes: int | None  # UTF-8 bytes of the target text; None if some targets are no text


def language_model(rows: Sequence[RowLoss]) -> dict[str, Statistic]:
    """Compute loss per token, perplexity per token, word and byte, and token accuracy.

    EOS counts as a token, but has neither words nor bytes. Perplexities per word and byte need targets that are text in
    every row.
    """
    total_N, targets_N, right_N = np.asarray([(row.total, row.targets, row.right) for row in rows], dtype=np.float64).T
    sizes = [(row.words, row.bytes) for row in rows if row.words is not None and row.bytes is not None]
    of_text: dict[str, Statistic] = {}
    if len(sizes) == len(rows):
        words_N, bytes_N = np.asarray(sizes, dtype=np.float64).T
        of_text["word_perplexity"] = Ratio(total_N, words_N, np.exp)
        of_text["byte_perplexity"] = Ratio(total_N, bytes_N, np.exp)
    return {
        "loss": Ratio(total_N, targets_N),
        "perplexity": Ratio(total_N, targets_N, np.exp),
        **of_text,
        "token_accuracy": Ratio(right_N, targets_N, percent),
    }
