"""How many tokens a document has, and which are targets: those after its prompt, but for stretches that are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from datasets import Dataset

LOOKED_AT = 10_000  # documents at a time


def lengths_of(rows: Dataset) -> NDArray[np.int32]:
    """Return the tokens of each document of a data set; the tokens themselves are not looked at."""
    import pyarrow.compute

    counts = [pyarrow.compute.list_value_length(batch).to_numpy() for batch in _batches(rows, "input_ids")]
    return np.concatenate([np.empty(0, np.int32), *counts])


def column_of(rows: Dataset, name: str, dtype: type[np.generic]) -> NDArray[Any]:
    """Return a column of numbers."""
    return np.concatenate([np.empty(0, dtype), *(batch.to_numpy() for batch in _batches(rows, name))])


def numbers_of(rows: Dataset, name: str) -> NDArray[np.int32]:
    """Return a number for each text of a column: its place among the texts that there are, in their order."""
    seen: dict[str, int] = {}
    found = [np.empty(0, np.int32)]
    for batch in _batches(rows, name):
        for chunk in batch.chunks:
            encoded = chunk.dictionary_encode()
            numbers = [seen.setdefault(text, len(seen)) for text in encoded.dictionary.to_pylist()]
            found.append(np.array(numbers, np.int32)[encoded.indices.to_numpy()])
    place = {text: number for number, text in enumerate(sorted(seen))}
    return np.array([place[text] for text in seen], np.int32)[np.concatenate(found)]


def count_targets(rows: Dataset) -> int:
    """Return how many tokens of a data set are targets."""
    import pyarrow.compute

    total = int(lengths_of(rows).sum()) - int(np.maximum(column_of(rows, "prompt_length", np.int32), 1).sum())
    for batch in _batches(rows, "untrained"):
        borders = pyarrow.compute.list_flatten(batch).to_numpy()  # of each row pairs, so all of them are
        total -= int(borders[1::2].sum()) - int(borders[::2].sum())
    return total


def _batches(rows: Dataset, column: str) -> Iterator[Any]:
    return (batch[column] for batch in rows.select_columns([column]).with_format("arrow").iter(LOOKED_AT))


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
