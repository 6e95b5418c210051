"""Rows on their way to a table: in a file of this program's own, until they are saved or nobody needs them."""

from __future__ import annotations

import os
import secrets
import weakref
from pathlib import Path

import pyarrow

from gptj_ft.data.arrow_columns import SCHEMA
from gptj_ft.data.token_table import TokenTable
from gptj_ft.system.files import create_file
from gptj_ft.system.paths import home, make_home

BATCH_BYTES = 16 * 2**20  # opening a file looks at the head of every batch, and maps what is around it
UNSAVED = ".rows-"  # how files of rows begin that have not been saved


class RowWriter:
    """Writes rows to an Arrow stream, in batches of some megabytes."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(create_file(path), "wb")
        self._writer = pyarrow.ipc.new_stream(self._file, SCHEMA)
        self._waiting: list[pyarrow.RecordBatch] = []
        self._waiting_bytes = 0

    def write(self, batch: pyarrow.RecordBatch) -> None:
        """Append rows."""
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes > BATCH_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._writer.close()
        self._file.close()

    def _flush(self) -> None:
        for batch in pyarrow.Table.from_batches(self._waiting, SCHEMA).combine_chunks().to_batches():
            self._writer.write_batch(batch)
        self._waiting.clear()
        self._waiting_bytes = 0


class RowFile:
    """A file in the home folder, of which no more is in memory than is looked at; it goes with the table made of it."""

    def __init__(self) -> None:
        folder = make_home()  # not where temporary files go: that may be memory
        _remove_leftovers()
        self._path = folder / f"{UNSAVED}{os.getpid()}-{secrets.token_hex(8)}.arrow"
        self._writer = RowWriter(self._path)
        self.write = self._writer.write
        self._is_used = False

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_used:
            self._writer.close()
            self._path.unlink(missing_ok=True)

    def table(self) -> TokenTable:
        """Return all rows; nothing can be added any more."""
        self._writer.close()
        table = TokenTable.open([self._path])
        self._is_used = True  # saving them links the file
        weakref.finalize(table, self._path.unlink, missing_ok=True)
        return table


def _remove_leftovers() -> None:
    """Remove the files of rows that processes which have ended could not."""
    import psutil

    for path in home().glob(f"{UNSAVED}*.arrow"):
        process = path.name.removeprefix(UNSAVED).partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            path.unlink(missing_ok=True)
