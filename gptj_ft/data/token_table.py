"""Rows as tokens in Arrow files, memory-mapped: `datasets` opens these, too, but takes a second to load."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from gptj_ft.data.arrow_columns import SCHEMA, array_of, values_of

LOOKED_AT = 10_000  # rows at a time


class TokenTable:
    """Rows, of which no more is in memory than is looked at.

    Args:
        batches: all rows of the files, in their order.
        files: where they are from; none if they are in memory.
        indices: which of them are rows of this table; ``None``: all.
    """

    def __init__(
        self,
        batches: Sequence[pyarrow.RecordBatch],
        files: Sequence[Path] = (),
        indices: NDArray[np.int64] | None = None,
    ) -> None:
        self._batches, self._indices = batches, indices
        self._starts = list(accumulate((batch.num_rows for batch in batches), initial=0))
        self.files = tuple(files)

    @classmethod
    def open(cls, files: Sequence[Path]) -> TokenTable:
        """Map files of rows into memory.

        Raises:
            OSError, ValueError: not there, or damaged.
        """
        batches: list[pyarrow.RecordBatch] = []
        for file in files:
            try:
                with pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))) as stream:
                    if not stream.schema.equals(SCHEMA):
                        raise ValueError(f"{file} has other columns than prepared data")
                    batches += [batch for batch in stream if batch.num_rows]
            except pyarrow.ArrowException as error:  # some of which are no ValueErrors
                raise ValueError(str(error)) from error
        return cls(batches, files)

    def validate(self) -> TokenTable:
        """Check that every value is where its file says: what damaged offsets point to may be no memory of ours.

        Raises:
            ValueError: one is not, or is missing.
        """
        for batch in self._batches:
            batch.validate(full=True)
            for column in batch.columns:
                if column.null_count or (pyarrow.types.is_list(column.type) and column.values.null_count):
                    raise ValueError("a value is missing")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of one file, in its order."""
        return self._indices is None and len(self.files) == 1

    def __len__(self) -> int:
        return self._starts[-1] if self._indices is None else len(self._indices)

    def __getitem__(self, name: str) -> Column:
        return Column(self, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches():
            columns = [values_of(batch.column(name)) for name in batch.schema.names]
            for row in zip(*columns, strict=True):
                yield dict(zip(batch.schema.names, row, strict=True))

    def select(self, indices: Iterable[int]) -> TokenTable:
        """Return some of the rows, by their positions."""
        chosen = indices if isinstance(indices, np.ndarray) else np.fromiter(indices, np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"rows {chosen.min()} to {chosen.max()} of {len(self)}")
        return TokenTable(self._batches, self.files, chosen if self._indices is None else self._indices[chosen])

    def batches(self, *names: str, size: int = LOOKED_AT) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows, at most ``size`` at a time.

        Args:
            names: of the columns; none: all.
            size: rows.
        """
        batches = [batch.select(list(names)) for batch in self._batches] if names else self._batches
        if self._indices is None:
            for batch in batches:
                for start in range(0, batch.num_rows, size):
                    yield batch.slice(start, size)
            return
        of = np.searchsorted(self._starts, self._indices, side="right") - 1  # which batch each row is in
        for first, end in pairwise([0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), len(of)]):
            for at in range(first, end, size):
                places = self._indices[at : min(at + size, end)] - self._starts[of[at]]
                yield _taken(batches[of[at]], places)

    def value(self, name: str, number: int) -> Any:
        """Return one value of a column."""
        at = number if self._indices is None else int(self._indices[number])
        batch = bisect_right(self._starts, at) - 1
        return values_of(self._batches[batch].column(name).slice(at - self._starts[batch], 1))[0]


class Column(Sequence[Any]):
    """A column of a table; a value is read from its file when it is asked for."""

    def __init__(self, table: TokenTable, name: str) -> None:
        self._table, self._name = table, name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self._table):
            raise IndexError(f"row {number} of {len(self._table)}")
        return self._table.value(self._name, number)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._table.batches(self._name):
            yield from values_of(batch.column(0))


def _taken(batch: pyarrow.RecordBatch, places: NDArray[np.int64]) -> pyarrow.RecordBatch:
    """Return some rows of a batch; those that stand one after another are not copied."""
    first, count = int(places[0]), len(places)
    if int(places[-1]) == first + count - 1 and bool((np.diff(places) == 1).all()):
        return batch.slice(first, count)
    return batch.take(array_of(pyarrow.int64(), places))
