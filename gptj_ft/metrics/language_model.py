"""Loss, perplexity and token accuracy, from what each row's targets got."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptj_ft.metrics.figures import Figure, Ratio, percent

NAMES = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "token_accuracy")


@dataclass(frozen=True)
class RowLoss:
    """What a model makes of a row.

    Attributes:
        total: sum of the losses of its target tokens, nats.
        targets: how many there are, EOS among them.
        right: how many of them the model thought the likeliest.
        words: in the text of the targets, between white space.
        bytes: of that text, UTF-8.
    """

    total: float
    targets: int
    right: int
    words: int
    bytes: int


def language_model(rows: Sequence[RowLoss]) -> dict[str, Figure]:
    """Return the loss per target token, e to it, e to the loss per word and per byte, and the share of tokens right.

    EOS counts as a token with a loss; it has neither words nor bytes.
    """
    total_N, targets_N, right_N, words_N, bytes_N = np.asarray(
        [(row.total, row.targets, row.right, row.words, row.bytes) for row in rows], dtype=np.float64
    ).T
    return {
        "loss": Ratio(total_N, targets_N),
        "perplexity": Ratio(total_N, targets_N, np.exp),
        "word_perplexity": Ratio(total_N, words_N, np.exp),
        "byte_perplexity": Ratio(total_N, bytes_N, np.exp),
        "token_accuracy": Ratio(right_N, targets_N, percent),
    }


def perplexity(loss: float) -> float:
    """Return e to the mean loss per token (nats); infinity where a float ends."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
