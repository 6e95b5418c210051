"""Check tokenized rows of any origin against a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from numpy.typing import NDArray

from gptj_ft.data.dataset import Prepared
from gptj_ft.data.table import bounds_of, numbers_of
from gptj_ft.errors import DataError

CHECKED = ("input_ids", "prompt_length", "untrained", "borders", "marks", "targets", "values", "offsets")
_NO_TARGET = "no token that is trained on"
_Numbers = NDArray[Any]
_Flags = NDArray[np.bool_]


def check_tokens(prepared: Prepared, where: Path, vocab_size: int, max_length: int) -> None:
    """Check token ids, lengths, masks and labels of prepared rows against a model.

    Args:
        where: folder of the rows.
        max_length: most inputs of a row; its last target may be one token beyond.
    """
    bad, targetless, first, start = 0, 0, "", 0
    for batch in prepared.rows.batches(*CHECKED):
        problems = dict(_problems(batch, vocab_size, max_length, len(prepared.report.labels)))
        if problems and not first:
            row = min(problems)
            first = f"{where}:{start + row + 1}: {problems[row]}"
        bad += len(problems)
        targetless += sum(problem == _NO_TARGET for problem in problems.values())
        start += batch.num_rows
    if start and targetless == start:
        raise DataError(f"{where}: no row has a token to train on")
    if bad:
        more = f"; {bad - 1:,} more bad row{'s' if bad > 2 else ''}" if bad > 1 else ""
        raise DataError(f"{first}{more}\nthe rows were made for another model, or are damaged: prepare them again")


class _Lists(NamedTuple):
    """A column of lists of numbers."""

    flat: _Numbers  # the numbers of all rows
    row_of: _Numbers  # row of each number
    counts: _Numbers  # numbers per row

    @classmethod
    def read(cls, column: pyarrow.Array) -> _Lists:
        counts = np.diff(bounds_of(column))
        flat = numbers_of(column.flatten())
        return cls(flat.astype(np.int64) if flat.dtype == np.int32 else flat, np.repeat(np.arange(len(counts)), counts),
                   counts)  # fmt: skip

    def rows_where(self, is_wrong: _Flags) -> _Flags:
        """Flag the rows with a wrong number."""
        rows = np.zeros(len(self.counts), np.bool_)
        rows[self.row_of[is_wrong]] = True
        return rows

    def rows_where_pairs(self, are_wrong: Callable[[_Numbers, _Numbers], _Flags]) -> _Flags:
        """Flag the rows in which a number and its successor are wrong together."""
        rows = np.zeros(len(self.counts), np.bool_)
        in_same_row = self.row_of[1:] == self.row_of[:-1]
        rows[self.row_of[1:][in_same_row & are_wrong(self.flat[:-1], self.flat[1:])]] = True
        return rows


def _problems(
    batch: pyarrow.RecordBatch, vocab_size: int, max_length: int, num_labels: int
) -> Iterator[tuple[int, str]]:
    """Yield (row, problem); a row's most basic problem comes last."""
    prompts = numbers_of(batch.column("prompt_length"))
    masked_spans, targets = _Lists.read(batch.column("untrained")), _Lists.read(batch.column("targets"))
    tokens = batch.column("input_ids")
    starts = bounds_of(tokens)
    ids, lengths = numbers_of(tokens.flatten()), np.diff(starts)
    first_target = np.maximum(prompts, 1)

    row_of, borders = masked_spans.row_of, masked_spans.flat
    span_starts = bounds_of(batch.column("untrained"))
    is_wrong = masked_spans.counts % 2 == 1
    is_wrong |= masked_spans.rows_where_pairs(lambda one, next_: next_ < one)
    is_wrong |= masked_spans.rows_where((borders < first_target[row_of]) | (borders > lengths[row_of]))
    # Masked tokens per row: the sum of ends minus the sum of starts.
    signs = np.where(np.arange(len(borders)) - (span_starts[:-1] - span_starts[0])[row_of] & 1, 1, -1)
    masked = np.bincount(row_of, borders * signs, len(masked_spans.counts))
    yield from _problems_of_labels(batch, lengths, targets, num_labels)
    yield from _each((lengths - first_target - masked < 1) & (targets.counts == 0), _NO_TARGET)
    yield from _each(is_wrong, "untrained spans must be ascending (start, end) pairs after the prompt")
    yield from _each(prompts < 0, "negative prompt length")
    yield from _each(lengths > max_length + 1, f"longer than max_length ({max_length})")
    yield from _each(lengths < 1, "no tokens")
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    # In a slice, bounds count from the start of the whole array, flatten() from that of the slice.
    rows = np.searchsorted(starts - starts[0], wrong, side="right") - 1
    # Reversed, so that the dict keeps the first wrong id of each row.
    for row, id_ in dict(zip(rows[::-1].tolist(), ids[wrong[::-1]].tolist(), strict=True)).items():
        yield row, f"token id {id_}, but the model's ids are 0 to {vocab_size - 1}"


def _problems_of_labels(
    batch: pyarrow.RecordBatch, lengths: _Numbers, targets: _Lists, num_labels: int
) -> Iterator[tuple[int, str]]:
    marks, borders = _Lists.read(batch.column("marks")), _Lists.read(batch.column("borders"))
    values, offsets = _Lists.read(batch.column("values")), _Lists.read(batch.column("offsets"))
    # Only spans have targets without marks: first and last token of the answer.
    is_span = (marks.counts == 0) & (targets.counts == 2)
    yield from _each(~is_span & (marks.counts != targets.counts), "numbers of labels and labelled tokens differ")
    in_span = is_span[targets.row_of]
    ends = np.where(in_span, lengths[targets.row_of], max(num_labels, 2))
    is_wrong = targets.rows_where((targets.flat < 0) | (targets.flat >= ends))
    is_wrong |= is_span & targets.rows_where_pairs(lambda one, next_: next_ < one)
    yield from _each(is_wrong & ~is_span, f"a label id is not one of the {max(num_labels, 2)} labels")
    yield from _each(is_wrong & is_span, "the answer span is outside its window")
    for name, lists in (("labelled tokens", marks), ("borders of token types", borders)):
        is_wrong = lists.rows_where((lists.flat < 0) | (lists.flat >= lengths[lists.row_of]))
        is_wrong |= lists.rows_where_pairs(lambda one, next_: next_ <= one)
        yield from _each(is_wrong, f"{name} must ascend within the row")
    yield from _each(values.rows_where(~np.isfinite(values.flat)), "a value is not a finite number")
    yield from _each((offsets.counts > 0) & (offsets.counts != 2 * lengths), "not two offsets per token")
    yield from _each(offsets.rows_where(offsets.flat < -1), "an offset is below -1")


def _each(is_bad: _Flags, problem: str) -> Iterator[tuple[int, str]]:
    for row in np.flatnonzero(is_bad).tolist():
        yield row, problem
