"""Store tokenized rows in a memory-mapped Arrow file, which `datasets.Dataset.from_file` can open too.

This module avoids `datasets` (a second to import) and Arrow's conversion from Python (several times slower, imports
pandas).
"""

from __future__ import annotations

import os
import secrets
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from gptj_ft.system.files import create_file, link_or_copy
from gptj_ft.system.paths import home, make_home

SCHEMA = pyarrow.schema(
    {
        "input_ids": pyarrow.list_(pyarrow.int32()),
        "prompt_length": pyarrow.int32(),  # untrained tokens at the start
        "untrained": pyarrow.list_(pyarrow.int32()),  # further untrained spans, see `encode.Encoded`
        "references": pyarrow.list_(pyarrow.string()),  # acceptable completions, for scoring
        "source": pyarrow.string(),
        "line": pyarrow.int64(),
        "group": pyarrow.int64(),  # see `dataset.document_hash`
        "label": pyarrow.string(),  # empty if the rows have no labels
        # Whether the first token repeats the last token of the row before; for tasks with labels, whether this is a
        # further window of the same row.
        "continues": pyarrow.bool_(),
        # The other columns belong to tasks with labels; for language models they are empty lists.
        "borders": pyarrow.list_(pyarrow.int32()),  # tokens at which the token type flips
        "marks": pyarrow.list_(pyarrow.int32()),  # tokens that the head reads; empty: all
        "targets": pyarrow.list_(pyarrow.int32()),  # class ids of the marks; for spans, first and last token
        "values": pyarrow.list_(pyarrow.float64()),  # 0 or 1 for each label, or one number
        "texts": pyarrow.list_(pyarrow.string()),  # context, words or sentences
        "offsets": pyarrow.list_(pyarrow.int32()),  # first and end character of each token in the context
    }
)
LABELLED = SCHEMA.names[SCHEMA.get_field_index("borders") :]
_UNLABELLED = pyarrow.schema([SCHEMA.field(name) for name in SCHEMA.names if name not in LABELLED])  # version 7
READ_ROWS = 10_000  # rows converted at a time
BATCH_BYTES = 16 * 2**20  # opening a file reads the header of every record batch: keep batches few
COPY_ROWS = 1000
UNSAVED = ".rows-"  # prefix of scratch files


def to_arrow(kind: pyarrow.DataType, values: Sequence[Any] | NDArray[Any]) -> pyarrow.Array:
    """Convert numbers, booleans, texts, or lists of them, to an Arrow array; ``None`` is not allowed."""
    children = []
    if pyarrow.types.is_list(kind):
        # Tokens come as arrays of 32-bit integers: joining their bytes avoids a Python object per token.
        is_packed = len(values) and isinstance(values[0], array)
        flat = np.frombuffer(b"".join(values), np.int32) if is_packed else list(chain.from_iterable(values))
        buffers, children = [None, _offsets(values)], [to_arrow(kind.value_type, flat)]
    elif pyarrow.types.is_string(kind):
        encoded = [value.encode() for value in values]
        buffers = [None, _offsets(encoded), pyarrow.py_buffer(b"".join(encoded))]
    elif pyarrow.types.is_boolean(kind):
        buffers = [None, pyarrow.py_buffer(np.packbits(np.array(values, np.bool_), bitorder="little"))]
    else:
        buffers = [None, pyarrow.py_buffer(np.asarray(values, kind.to_pandas_dtype()))]
    return pyarrow.Array.from_buffers(kind, len(values), buffers, 0, children=children)


def empty_lists(kind: pyarrow.DataType, count: int) -> pyarrow.Array:
    """Return an Arrow array of empty lists."""
    offsets = pyarrow.py_buffer(np.zeros(count + 1, np.int32))
    return pyarrow.Array.from_buffers(kind, count, [None, offsets], 0, children=[to_arrow(kind.value_type, [])])


def _offsets(values: Iterable[Sized]) -> pyarrow.Buffer:
    return pyarrow.py_buffer(np.fromiter(accumulate(map(len, values), initial=0), np.int32))


def to_python(array: pyarrow.Array) -> list[Any]:
    """Convert an Arrow array to Python values; the inverse of `to_arrow`."""
    kind = array.type
    if pyarrow.types.is_list(kind):
        # In a slice, bounds count from the start of the whole array, flatten() from that of the slice.
        bounds, inner = bounds_of(array), to_python(array.flatten())
        return [inner[start:end] for start, end in pairwise((bounds - bounds[0]).tolist())]
    if pyarrow.types.is_integer(kind):
        return list(numbers_of(array).tolist())
    return list(array.to_pylist())


def numbers_of(array: pyarrow.Array) -> NDArray[Any]:
    """View an Arrow array of integers as a NumPy array."""
    # A slice shares the buffer of the whole array and begins at an offset in it.
    content = np.frombuffer(array.buffers()[1] or b"", array.type.to_pandas_dtype())
    return content[array.offset : array.offset + len(array)]


def bounds_of(array: pyarrow.Array) -> NDArray[np.int32]:
    """Return the offsets of an Arrow array of lists, [n + 1]."""
    return numbers_of(array.offsets)


class TokenTable:
    """Tokenized rows. Rows are read from the file on access.

    Args:
        batches: record batches of all rows.
        path: the file of these batches; ``None`` if they are in memory.
        indices: positions of this table's rows; ``None``: all.
    """

    def __init__(
        self, batches: Sequence[pyarrow.RecordBatch], path: Path | None = None, indices: NDArray[np.int64] | None = None
    ) -> None:
        self._batches, self._indices, self.path = batches, indices, path
        self._starts = list(accumulate((batch.num_rows for batch in batches), initial=0))

    @classmethod
    def open(cls, path: Path) -> TokenTable:
        """Memory-map a file of rows; rows of version 7 get empty label columns.

        Raises:
            OSError, ValueError: the file is missing or damaged.
        """
        try:
            with pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) as stream:
                if not stream.schema.equals(SCHEMA) and not stream.schema.equals(_UNLABELLED):
                    raise ValueError(f"{path} has other columns than prepared data")
                return cls([_with_labels(batch) for batch in stream if batch.num_rows], path)
        except pyarrow.ArrowException as error:  # not every subclass is a ValueError
            raise ValueError(str(error)) from error

    def validate(self) -> TokenTable:
        """Check all offsets and nulls: damaged offsets may point outside this process's memory.

        Raises:
            ValueError: an offset is out of range, or a value is missing.
        """
        for batch in self._batches:
            batch.validate(full=True)
            for column in batch.columns:
                if column.null_count or (pyarrow.types.is_list(column.type) and column.values.null_count):
                    raise ValueError("a value is missing")
        return self

    def save(self, path: Path) -> None:
        """Write the rows to a new file. A whole table is hard-linked: row files never change."""
        if self.path and self._indices is None:
            link_or_copy(self.path, path)
            return
        with TableWriter(path) as writer:
            for batch in self.batches(size=COPY_ROWS):
                writer.write(batch)

    def __len__(self) -> int:
        return self._starts[-1] if self._indices is None else len(self._indices)

    def __getitem__(self, name: str) -> Column:
        return Column(self, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.batches():
            for row in zip(*map(to_python, batch.columns), strict=True):
                yield dict(zip(SCHEMA.names, row, strict=True))

    def select(self, indices: Iterable[int]) -> TokenTable:
        """Return a view of rows by position."""
        chosen = indices if isinstance(indices, np.ndarray) else np.fromiter(indices, np.int64)
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"rows {chosen.min()} to {chosen.max()} of {len(self)}")
        return TokenTable(self._batches, self.path, chosen if self._indices is None else self._indices[chosen])

    def batches(self, *names: str, size: int = READ_ROWS) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows as record batches.

        Args:
            names: columns; none: all.
            size: most rows of a batch.
        """
        batches = [batch.select(list(names)) for batch in self._batches] if names else self._batches
        if self._indices is None:
            for batch in batches:
                for start in range(0, batch.num_rows, size):
                    yield batch.slice(start, size)
            return
        # Consecutive rows of one batch are read together.
        batch_of = np.searchsorted(self._starts, self._indices, side="right") - 1
        for first, end in pairwise([0, *(np.flatnonzero(np.diff(batch_of)) + 1).tolist(), len(batch_of)]):
            for start in range(first, end, size):
                rows = self._indices[start : min(start + size, end)] - self._starts[batch_of[start]]
                if (np.diff(rows) == 1).all():  # slicing consecutive rows copies nothing
                    yield batches[batch_of[start]].slice(int(rows[0]), len(rows))
                else:
                    yield batches[batch_of[start]].take(to_arrow(pyarrow.int64(), rows))

    def lengths(self) -> NDArray[np.int32]:
        """Return the number of tokens of each row, without reading the tokens."""
        counts = [np.diff(bounds_of(batch.column(0))) for batch in self.batches("input_ids")]
        return np.concatenate([np.empty(0, np.int32), *counts])

    def numbers(self, name: str) -> NDArray[Any]:
        """Return a column of integers."""
        dtype = SCHEMA.field(name).type.to_pandas_dtype()
        return np.concatenate([np.empty(0, dtype), *(numbers_of(each.column(0)) for each in self.batches(name))])

    def num_targets(self) -> int:
        """Count the targets: tokens, marks, or windows with a span."""
        # Rows with labels add 0 here: their prompt is the whole document.
        total = int(self.lengths().sum()) - int(np.maximum(self.numbers("prompt_length"), 1).sum())
        for batch in self.batches("untrained"):
            borders = numbers_of(batch.column(0).flatten())  # (start, end) pairs of all rows
            total -= int(borders[1::2].sum()) - int(borders[::2].sum())
        for batch in self.batches("marks", "targets"):
            marks, targets = (np.diff(bounds_of(column)) for column in batch.columns)
            # Only spans have targets without marks: one for each window.
            total += int(marks.sum()) + int(((targets > 0) & (marks == 0)).sum())
        return total

    def value(self, name: str, number: int) -> Any:
        at = number if self._indices is None else int(self._indices[number])
        batch = bisect_right(self._starts, at) - 1
        return to_python(self._batches[batch].column(name).slice(at - self._starts[batch], 1))[0]


def _with_labels(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Add the missing label columns to a batch, as empty lists."""
    lacking = [empty_lists(field.type, batch.num_rows) for field in SCHEMA if field.name not in batch.schema.names]
    return pyarrow.RecordBatch.from_arrays([*batch.columns, *lacking], schema=SCHEMA) if lacking else batch


class Column(Sequence[Any]):
    """A column of a table; values are read from the file on access."""

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
            yield from to_python(batch.column(0))


class TableWriter(AbstractContextManager["TableWriter"]):
    """Write rows to a new Arrow stream, in record batches of some megabytes.

    Args:
        path: the file; ``None``: a scratch file in the home folder, deleted with its table.
    """

    def __init__(self, path: Path | None = None, batch_bytes: int = BATCH_BYTES) -> None:
        self._path, self._is_kept, self._batch_bytes = path or _scratch_path(), path is not None, batch_bytes
        self._file = os.fdopen(create_file(self._path), "wb")
        self._stream = pyarrow.ipc.new_stream(self._file, SCHEMA)
        self._pending: list[pyarrow.RecordBatch] = []
        self._pending_bytes = 0

    def __exit__(self, *error: object) -> None:
        if not self._file.closed:
            self._close()
        if not self._is_kept:
            self._path.unlink(missing_ok=True)

    def write(self, batch: pyarrow.RecordBatch) -> None:
        self._pending.append(batch)
        self._pending_bytes += batch.nbytes
        if self._pending_bytes > self._batch_bytes:
            self._flush()

    def table(self) -> TokenTable:
        """Close the file and return its rows."""
        self._close()
        # The scratch file lives as long as the table. Saving the table hard-links the file, which survives then.
        table, self._is_kept = TokenTable.open(self._path), True
        weakref.finalize(table, self._path.unlink, missing_ok=True)
        return table

    def _close(self) -> None:
        self._flush()
        self._stream.close()
        self._file.close()

    def _flush(self) -> None:
        for batch in pyarrow.Table.from_batches(self._pending, SCHEMA).combine_chunks().to_batches():
            self._stream.write_batch(batch)
        self._pending.clear()
        self._pending_bytes = 0


def _scratch_path() -> Path:
    """Return a new scratch path in the home folder, since `/tmp` may be memory; delete files of dead processes."""
    import psutil

    folder = make_home()
    for path in home().glob(f"{UNSAVED}*.arrow"):
        process = path.name.removeprefix(UNSAVED).partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            path.unlink(missing_ok=True)
    return folder / f"{UNSAVED}{os.getpid()}-{secrets.token_hex(8)}.arrow"
