"""Loss, perplexity and token accuracy, from what each row's targets got."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptj_ft.evaluation.metrics.statistic import Ratio, Statistic, percent

NAMES = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "token_accuracy")


@dataclass(frozen=True)
class RowLoss:
    """What a model makes of a row.

    Attributes:
        total: sum of the losses of its target tokens, nats.
        targets: how many there are, EOS among them.
        right: how many of them the model thought the likeliest.
        words: in the text of the targets, between white space; ``None`` if not all of them are text.
        bytes: of that text, UTF-8; likewise.
    """

    total: float
    targets: int
    right: int
    words: int | None
    bytes: int | None


def language_model(rows: Sequence[RowLoss]) -> dict[str, Statistic]:
    """Return the loss per target token, e to it, e to the loss per word and per byte, and the share of tokens right.

    EOS counts as a token with a loss; it has neither words nor bytes. Where some targets are no text, the perplexities
    of words and bytes are left out.
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


def perplexity(loss: float) -> float:
    """Return e to the mean loss per token (nats); infinity where a float ends."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
