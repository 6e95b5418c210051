"""Tables -> rows: CSV, TSV, Parquet, and the folders that `datasets` saves."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from gptj_ft.data.files import DATASET_FILES, File, opened_file
from gptj_ft.data.rows import Findings, Row, numbered_lines
from gptj_ft.errors import DataError

BATCH_ROWS = 1000
# csv refuses cells above 131,072 characters, and documents are longer. This is the most a C long holds everywhere.
csv.field_size_limit(2**31 - 1)


def read_csv(file: File, findings: Findings) -> Iterator[Row]:
    """Comma-separated, quotes around cells that hold commas, quotes or line breaks."""
    return _read_table(file, findings, delimiter=",", strict=True)


def read_tsv(file: File, findings: Findings) -> Iterator[Row]:
    """Tab-separated; quotes are text, as in the published benchmarks."""
    return _read_table(file, findings, delimiter="\t", quoting=csv.QUOTE_NONE)


def read_quoted_tsv(file: File, findings: Findings) -> Iterator[Row]:
    """Tab-separated, quotes as in CSV."""
    return _read_table(file, findings, delimiter="\t", strict=True)


def read_unquoted_csv(file: File, findings: Findings) -> Iterator[Row]:
    """Comma-separated; quotes are text."""
    return _read_table(file, findings, delimiter=",", quoting=csv.QUOTE_NONE)


def read_parquet(file: File, findings: Findings) -> Iterator[Row]:
    """Apache Parquet, a batch of rows at a time; the number of a row stands for its line."""
    import pyarrow
    from pyarrow import parquet

    try:
        with opened_file(file) as opened:
            # Packed once more by gzip or the like it cannot be read from its end, where Parquet begins.
            source = pyarrow.BufferReader(opened.read()) if file.packing else opened
            number = 0
            for batch in parquet.ParquetFile(source).iter_batches(BATCH_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(str(file.path), number, values)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{file.path}: not a whole Parquet file: {_first_line(error)}") from error


def read_saved_dataset(file: File, findings: Findings) -> Iterator[Row]:
    """A folder that `datasets` has saved; of several splits the one called train."""
    import datasets
    import pyarrow

    try:
        datasets.disable_progress_bars()
        loaded = datasets.load_from_disk(str(file.path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{file.path}: has {' or '.join(DATASET_FILES)}, but cannot be read: {_first_line(error)}"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            names = ", ".join(str(file.path / name) for name in loaded)
            raise DataError(f"{file.path} has no split called train; name one of {names}")
        others = ", ".join(name for name in loaded if name != "train")
        findings.note(f"{file.path}: the split train is read" + (f"; there are also {others}" if others else ""))
        loaded = loaded["train"]
    number = 0
    try:
        loaded.data.validate(full=True)  # what a damaged file points to may be no memory of this process
        for batch in loaded.with_format("arrow").iter(BATCH_ROWS):
            for values in batch.to_pylist():
                number += 1
                yield Row(str(file.path), number, values)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{file.path}: damaged: {_first_line(error)}") from error


def _read_table(file: File, findings: Findings, **dialect: Any) -> Iterator[Row]:
    records = _records(file, findings, dialect)
    _, header = next(records, (0, []))
    repeated = sorted({name for name in header if name and header.count(name) > 1})
    if repeated:
        raise DataError(f"{file.path}:1: the header names column '{repeated[0]}' twice")
    for line, cells in records:
        if len(cells) != len(header):
            findings.add(file, line, f"{len(cells)} cells, the header has {len(header)}")
            continue
        # Line endings are the file's, not the text's: a file written on Windows would teach the model carriage returns.
        yield Row(str(file.path), line, {k: v.replace("\r\n", "\n") for k, v in zip(header, cells, strict=True)})


def _records(file: File, findings: Findings, dialect: dict[str, Any]) -> Iterator[tuple[int, list[str]]]:
    """Yield (physical line on which the record starts, cells); blank lines are no records."""
    reader = csv.reader((line for _, line in numbered_lines(file, findings)), **dialect)
    line = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{file.path}:{line}: not a table: {error}") from error
        if cells is None:
            return
        if cells:
            yield line, cells
        line = reader.line_num + 1


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
