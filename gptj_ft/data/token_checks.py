"""Prepared rows against a model: what came as a folder of somebody's is checked as rows of any other file are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from gptj_ft.data.arrow_columns import bounds_of, numbers_of
from gptj_ft.data.dataset import Prepared
from gptj_ft.errors import DataError

CHECKED = ("input_ids", "prompt_length", "untrained")


def check_tokens(prepared: Prepared, where: Path, vocab_size: int, max_length: int) -> None:
    """Check that every row is one that preparing could have made for a model.

    Args:
        prepared: the rows.
        where: their folder.
        vocab_size: token ids that the model has.
        max_length: inputs of a row; its last target may be one token beyond.

    Raises:
        DataError: the first bad row, what is wrong with it, and how many more there are.
    """
    bad, targetless, first, start = 0, 0, "", 0
    for batch in prepared.rows.batches(*CHECKED):
        problems = dict(_problems(batch, vocab_size, max_length))
        if problems and not first:
            row = min(problems)
            first = f"{where}:{start + row + 1}: {problems[row]}"
        bad += len(problems)
        targetless += sum(what == NO_TARGET for what in problems.values())
        start += batch.num_rows
    if start and targetless == start:
        raise DataError(f"{where}: no row has a token to train on")
    if bad:
        more = f"; {bad - 1:,} more bad row{'s' if bad > 2 else ''}" if bad > 1 else ""
        raise DataError(f"{first}{more}\nthese rows were not made for this model, or are damaged: prepare them again")


NO_TARGET = "no token that is trained on"


def _problems(batch: pyarrow.RecordBatch, vocab_size: int, max_length: int) -> Iterator[tuple[int, str]]:
    """Yield (row, what is wrong with it); of several problems of a row the first to be looked for comes last."""
    tokens, prompts, untrained = (batch.column(name) for name in CHECKED)
    starts, gap_starts = bounds_of(tokens), bounds_of(untrained)
    ids = numbers_of(tokens.values)[starts[0] : starts[-1]]
    borders = numbers_of(untrained.values)[gap_starts[0] : gap_starts[-1]].astype(np.int64)
    lengths, counts = np.diff(starts), np.diff(gap_starts)
    first_target = np.maximum(numbers_of(prompts), 1)

    of = np.repeat(np.arange(len(counts)), counts)  # the row that each border is of
    later = of[1:] == of[:-1]
    steps = np.diff(borders)
    is_odd = counts % 2 == 1
    is_wrong = is_odd.copy()
    is_wrong[of[1:][later & (steps < 0)]] = True
    is_wrong[of[(borders < first_target[of]) | (borders > lengths[of])]] = True
    signs = np.where(np.arange(len(borders)) - (gap_starts[:-1] - gap_starts[0])[of] & 1, 1, -1)
    left_out = np.bincount(of, borders * signs, len(counts))
    yield from _each(lengths - first_target - left_out < 1, NO_TARGET)
    yield from _each(is_wrong, "its untrained tokens are no (start, end) pairs in order, after the prompt")
    yield from _each(numbers_of(prompts) < 0, "a prompt of fewer than no tokens")
    yield from _each(lengths > max_length + 1, f"longer than max_length ({max_length})")
    yield from _each(lengths < 1, "no tokens")
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    rows = np.searchsorted(starts - starts[0], wrong, side="right") - 1
    for row, id_ in dict(zip(rows[::-1].tolist(), ids[wrong[::-1]].tolist(), strict=True)).items():
        yield row, f"token id {id_}, but the model's ids are 0 to {vocab_size - 1}"


def _each(is_bad: NDArray[Any], what: str) -> Iterator[tuple[int, str]]:
    for row in np.flatnonzero(is_bad).tolist():
        yield row, what
