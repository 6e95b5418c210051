"""Files -> rows, each with the line it came from."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from gptj_ft.data.json_records import read_json, read_json_lines
from gptj_ft.data.rows import Row, numbered_lines, raise_first
from gptj_ft.errors import DataError, UsageError, did_you_mean

__all__ = ["FORMATS", "Row", "read_rows", "sha256_of"]

# csv refuses cells above 131,072 characters, and documents are longer. This is the most a C long holds everywhere.
csv.field_size_limit(2**31 - 1)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of one file; its suffix names the format (`FORMATS`).

    Raises:
        UsageError: no such file (with the nearest name), a folder, or not readable.
        DataError: empty, not UTF-8, not what the suffix promises; with file:line.
    """
    _require_file(path)
    if path.suffix.lower() not in FORMATS:
        raise DataError(f"{path}: unknown suffix '{path.suffix}'; rows are read from {', '.join(FORMATS)}")
    empty = True
    for row in FORMATS[path.suffix.lower()](path):
        empty = False
        yield row
    if empty:
        raise DataError(f"{path}: there are no rows in it")


def sha256_of(path: Path) -> str:
    """Return the digest of a file's bytes.

    Raises:
        UsageError: as `read_rows`.
    """
    _require_file(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _require_file(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, and not prepared data (no manifest.json in it); name a file")
    if not path.exists():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(f"no such file: {path}{did_you_mean(path.name, siblings)}")


def _read_csv(path: Path) -> Iterator[Row]:
    return _read_table(path, delimiter=",", strict=True)


def _read_tsv(path: Path) -> Iterator[Row]:
    return _read_table(path, delimiter="\t", quoting=csv.QUOTE_NONE)


def _read_table(path: Path, **dialect: Any) -> Iterator[Row]:
    records = _records(path, dialect)
    _, header = next(records, (0, []))
    repeated = sorted({name for name in header if name and header.count(name) > 1})
    if repeated:
        raise DataError(f"{path}:1: the header names column '{repeated[0]}' twice")
    for line, cells in records:
        if len(cells) != len(header):
            lengths = ((number, len(found)) for number, found in chain([(line, cells)], records))
            raise_first(path, ((n, f"{k} cells, the header has {len(header)}") for n, k in lengths if k != len(header)))
        # Line endings are the file's, not the text's: a file written on Windows would teach the model carriage returns.
        yield Row(str(path), line, {k: v.replace("\r\n", "\n") for k, v in zip(header, cells, strict=True)})


def _records(path: Path, dialect: dict[str, Any]) -> Iterator[tuple[int, list[str]]]:
    """Yield (physical line on which the record starts, cells); blank lines are no records."""
    reader = csv.reader((line for _, line in numbered_lines(path)), **dialect)
    line = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{path}:{line}: not a table: {error}") from error
        if cells is None:
            return
        if cells:
            yield line, cells
        line = reader.line_num + 1


def _read_text(path: Path) -> Iterator[Row]:
    """Documents are separated by blank lines."""
    start, document = 0, ""
    for number, line in numbered_lines(path):
        if line.strip():
            start = start if document else number
            document += line.removesuffix("\n").removesuffix("\r") + "\n"
        elif document:
            yield Row(str(path), start, {"text": document.removesuffix("\n")})
            document = ""
    if document:
        yield Row(str(path), start, {"text": document.removesuffix("\n")})


FORMATS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".json": read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".txt": _read_text,
}
