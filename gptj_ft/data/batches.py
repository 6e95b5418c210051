"""Which rows a step takes, and how they are packed. A step is addressed by its number alone: nothing is replayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gptj_ft.layers import PackedBatch, pack

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Rows:
    """What training needs of prepared rows.

    Attributes:
        documents: token ids of each; of a data set, read from its memory-mapped file when asked for.
        prompt_lengths: tokens at each document's start that are not trained on.
    """

    documents: Sequence[Sequence[int]]
    prompt_lengths: Sequence[int]

    @classmethod
    def of(cls, rows: Dataset | None) -> Rows:
        """Return the rows of a data set; none of ``None``."""
        return cls([], []) if rows is None else cls(rows["input_ids"], list(rows["prompt_length"]))

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def batches(self, rows: Iterable[int], budget_tokens: int) -> list[PackedBatch]:
        """Return some rows as micro-batches; see `micro_batches`."""
        chosen = list(rows)
        documents = [self.documents[row] for row in chosen]
        return micro_batches(documents, [self.prompt_lengths[row] for row in chosen], budget_tokens)


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Return the optimizer steps of one pass over the rows; the last may take fewer rows than the others."""
    return -(-num_rows // batch_size)


def rows_of_step(step: int, num_rows: int, batch_size: int, seed: int) -> list[int]:
    """Return the rows of one optimizer step.

    Each epoch takes every row once, in an order that depends on (seed, epoch) alone; no step straddles two epochs.

    Args:
        step: from 0.
        num_rows: rows of the data set, at least 1.
        batch_size: rows per step, at least 1.
        seed: the recipe's.
    """
    assert step >= 0
    assert num_rows > 0
    assert batch_size > 0
    epoch, index = divmod(step, steps_per_epoch(num_rows, batch_size))
    order = _order_of_epoch(num_rows, seed, epoch)[index * batch_size : (index + 1) * batch_size]
    return [int(row) for row in order]


@lru_cache(maxsize=2)
def _order_of_epoch(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # numpy may change Generator.permutation between releases, and a run resumed after an upgrade must see the same
    # rows; it guarantees the raw stream of a bit generator (NEP 19).
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


def micro_batches(
    documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int], budget_tokens: int
) -> list[PackedBatch]:
    """Pack documents, in order, into micro-batches of at most ``budget_tokens`` tokens; no padding.

    A document above the budget has a micro-batch to itself.

    Args:
        documents: token ids of each.
        prompt_lengths: tokens at each document's start that are not trained on.
        budget_tokens: tokens computed at once.
    """
    groups: list[list[int]] = []
    tokens = 0
    for index, document in enumerate(documents):
        if not groups or tokens + len(document) > budget_tokens:
            groups.append([])
            tokens = 0
        groups[-1].append(index)
        tokens += len(document)
    return [pack([documents[i] for i in group], [prompt_lengths[i] for i in group]) for group in groups]
