"""How many tokens a document has, which are targets (those after its prompt, but for stretches that are not), and which
are inputs: all, but for the last of a document that is one token longer than the window, which is a target only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gptj_ft.data.token_table import TokenTable


def lengths_of(rows: TokenTable) -> NDArray[np.int32]:
    """Return the tokens of each document; the tokens themselves are not looked at."""
    from gptj_ft.data.arrow_columns import bounds_of

    counts = [np.diff(bounds_of(batch.column(0))) for batch in rows.batches("input_ids")]
    return np.concatenate([np.empty(0, np.int32), *counts])


def column_of(rows: TokenTable, name: str, dtype: type[np.generic]) -> NDArray[Any]:
    """Return a column of numbers."""
    from gptj_ft.data.arrow_columns import numbers_of

    return np.concatenate([np.empty(0, dtype), *(numbers_of(batch.column(0)) for batch in rows.batches(name))])


def places_of(texts: Sequence[str]) -> NDArray[np.int32]:
    """Return a number for each text of a column: its place among the texts that there are, in their order."""
    seen: dict[str, int] = {}
    numbers = np.fromiter((seen.setdefault(text, len(seen)) for text in texts), np.int32, len(texts))
    place = {text: number for number, text in enumerate(sorted(seen))}
    return np.array([place[text] for text in seen], np.int32)[numbers]


def count_targets(rows: TokenTable) -> int:
    """Return how many tokens are targets."""
    from gptj_ft.data.arrow_columns import bounds_of, numbers_of

    total = int(lengths_of(rows).sum()) - int(np.maximum(column_of(rows, "prompt_length", np.int32), 1).sum())
    for batch in rows.batches("untrained"):
        bounds = bounds_of(batch.column(0))
        borders = numbers_of(batch.column(0).values)[bounds[0] : bounds[-1]]  # of each row pairs, so all of them are
        total -= int(borders[1::2].sum()) - int(borders[::2].sum())
    return total


def stretches(row: Mapping[str, Any]) -> list[int]:
    """Return where a prepared row begins, then in turn where it begins and ceases to be trained on; its end is last."""
    return [0, row["prompt_length"], *row["untrained"], len(row["input_ids"])]


def num_inputs(length: int, window: int | None) -> int:
    """Return how many tokens of a document the model reads.

    A window of n positions has n inputs and n targets, the last of which no position reads: it is made of n + 1 tokens.

    Args:
        length: of the document, in tokens.
        window: most inputs; ``None``: no limit.
    """
    return length - (window is not None and length > window)


def num_targets(length: int, prompt_length: int, untrained: Sequence[int] = ()) -> int:
    """Return how many tokens of a document are targets.

    Args:
        length: of the document, in tokens.
        prompt_length: tokens at its start that are not trained on; the first never is, since nothing predicts it.
        untrained: what else is not, as (start, end) pairs in one flat list, all of it after the prompt.
    """
    targets = length - max(prompt_length, 1)
    return targets - sum(untrained[1::2]) + sum(untrained[::2]) if untrained else targets
