"""Read the rows of a source, each with the line it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from gptj_ft.data.readers.hdf5 import read_samples
from gptj_ft.data.readers.json import read_json_lines, read_json_rows
from gptj_ft.data.readers.rows import Findings, Row, numbered_lines, too_long
from gptj_ft.data.readers.source import File, FileOptions, Source, identify
from gptj_ft.data.readers.spreadsheets import read_workbook
from gptj_ft.data.readers.tables import read_parquet, read_saved_dataset, read_table
from gptj_ft.data.readers.tfrecord import read_tfrecords
from gptj_ft.errors import DataError, UsageError

Reader = Callable[[File, Findings], Iterator[Row]]


def read_rows(
    source: Path | Source, findings: Findings | None = None, options: FileOptions = FileOptions()
) -> Iterator[Row]:
    """Yield the rows of a file, of the files in a folder, or of those that match a pattern.

    Args:
        source: path as the user named it, or the identified files.
        findings: collects warnings, and unreadable records up to its limit; default: none is allowed.
        options: options of the readers; of a `Source` its own hold.

    Raises:
        UsageError: there is no such file (with the nearest name), or it cannot be read.
        DataError: empty, not of the encoding it should be, not what it should be; with file:line.
    """
    findings = findings or Findings()
    for file in identify(source, options).files:
        for note in file.notes:
            findings.note(note)
        empty = True
        for row in _READERS[file.format](file, findings):
            empty = False
            yield row
        findings.check()
        if empty:
            raise DataError(f"{file.path}: there are no rows in it")


def _read_text(file: File, findings: Findings) -> Iterator[Row]:
    """Read plain text, split into documents as the options say."""
    readers = {"file": read_document, "line": read_lines, "paragraph": read_paragraphs}
    return readers[file.options.documents](file, findings)


def read_paragraphs(file: File, findings: Findings) -> Iterator[Row]:
    """Read plain text; documents are separated by blank lines."""
    start, lines, size = 0, list[str](), 0
    for number, line in numbered_lines(file, findings):
        if line.strip():
            start, size = (start, size + len(line)) if lines else (number, len(line))
            if size > file.options.max_record:
                raise too_long(file, start)
            lines.append(line.removesuffix("\n").removesuffix("\r"))
        elif lines:
            yield Row(str(file.path), start, {"text": "\n".join(lines)})
            lines.clear()
    if lines:
        yield Row(str(file.path), start, {"text": "\n".join(lines)})


def read_lines(file: File, findings: Findings) -> Iterator[Row]:
    """Read plain text; every line that is not blank is a document."""
    for number, line in numbered_lines(file, findings):
        if line.strip():
            yield Row(str(file.path), number, {"text": line.removesuffix("\n").removesuffix("\r")})


def read_document(file: File, findings: Findings) -> Iterator[Row]:
    """Read plain text; the file is one document."""
    lines, size = list[str](), 0
    for _, line in numbered_lines(file, findings):
        lines.append(line.replace("\r\n", "\n"))
        size += len(line)
        if size > file.options.max_record:
            raise too_long(file, 1)
    text = "".join(lines)
    if text.strip():
        yield Row(str(file.path), 1, {"text": text.rstrip("\n")})


def refuse_prepared(file: File, findings: Findings) -> Iterator[Row]:
    """Refuse prepared data where texts are needed."""
    raise UsageError(f"{file.path} is prepared data, whose rows are tokens: name the rows that it was prepared from")


_READERS: dict[str, Reader] = {
    "jsonl": read_json_lines,
    "json": read_json_rows,
    "csv": read_table,
    "tsv": read_table,
    "parquet": read_parquet,
    "xlsx": read_workbook,
    "prepared": refuse_prepared,
    "dataset": read_saved_dataset,
    "txt": _read_text,
    "tfrecords": read_tfrecords,
    "hdf5": read_samples,
}
