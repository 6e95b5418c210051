"""How many tokens a document has, and which are targets: those after its prompt, but for stretches that are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from datasets import Dataset

LOOKED_AT = 10_000  # documents at a time


def lengths_of(rows: Dataset) -> NDArray[np.int32]:
    """Return the tokens of each document of a data set; the tokens themselves are not looked at."""
    import pyarrow.compute

    batches = rows.select_columns(["input_ids"]).with_format("arrow").iter(LOOKED_AT)
    counts = [pyarrow.compute.list_value_length(batch["input_ids"]).to_numpy() for batch in batches]
    return np.concatenate([np.empty(0, np.int32), *counts])


def stretches(row: Mapping[str, Any]) -> list[int]:
    """Return where a prepared row begins, then in turn where it begins and ceases to be trained on; its end is last."""
    return [0, row["prompt_length"], *row["untrained"], len(row["input_ids"])]


def num_targets(length: int, prompt_length: int, untrained: Sequence[int] = ()) -> int:
    """Return how many tokens of a document are targets.

    Args:
        length: of the document, in tokens.
        prompt_length: tokens at its start that are not trained on; the first never is, since nothing predicts it.
        untrained: what else is not, as (start, end) pairs in one flat list, all of it after the prompt.
    """
    return length - max(prompt_length, 1) - sum(untrained[1::2]) + sum(untrained[::2])
