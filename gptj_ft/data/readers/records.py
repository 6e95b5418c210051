"""Read the rows of a source, each with its line number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gptj_ft.data.readers.conll import read_conll
from gptj_ft.data.readers.hdf5 import read_samples
from gptj_ft.data.readers.json import read_json_lines, read_json_rows
from gptj_ft.data.readers.rows import Findings, Row, numbered_lines, too_long
from gptj_ft.data.readers.source import File, Source
from gptj_ft.data.readers.spreadsheets import read_workbook
from gptj_ft.data.readers.stories import read_presumm, read_story
from gptj_ft.data.readers.tables import read_parquet, read_saved_dataset, read_table
from gptj_ft.data.readers.tfrecord import read_tfrecords
from gptj_ft.data.readers.word import read_document
from gptj_ft.errors import DataError, UsageError

RowReader = Callable[[File, Findings], Iterator[Row]]


def read_rows(source: Source, findings: Findings | None = None) -> Iterator[Row]:
    """Yield the rows of all files of a source.

    Args:
        findings: collects warnings, and unreadable records up to its limit; default: fail at the first one.
    """
    findings = findings or Findings()
    for note in source.notes:
        findings.note(note)
    for file in source.files:
        for note in file.notes:
            findings.note(note)
        empty, name = True, file.name
        for row in _READERS[file.format](file, findings):
            empty = False
            yield row if row.source == name else row._replace(source=name)
        findings.check()
        if empty:
            raise DataError(f"{file.path}: the file has no rows")


def read_documents(file: File, findings: Findings) -> Iterator[Row]:
    """Read plain text, split into documents by line, by file or by blank lines, as the options say."""
    lines = ((number, line.removesuffix("\n").removesuffix("\r")) for number, line in numbered_lines(file, findings))
    documents: Iterator[tuple[int, list[str]]]
    if file.options.documents == "line":
        documents = ((number, [line]) for number, line in lines)
    else:
        documents = _documents(file, lines, are_paragraphs=file.options.documents == "paragraph")
    for start, document in documents:
        if any(line.strip() for line in document):
            yield Row(str(file.path), start, {"text": "\n".join(document).rstrip("\n")})


def _documents(file: File, lines: Iterator[tuple[int, str]], are_paragraphs: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line number, lines) of each document: of each paragraph, or of the whole file."""
    start, document, size = 1, list[str](), 0
    for number, line in lines:
        if are_paragraphs and not line.strip():
            yield start, document
            start, document, size = number + 1, [], 0
            continue
        size += len(line) + 1
        if size > file.options.max_record:
            raise too_long(file, start)
        document.append(line)
    yield start, document


def refuse_prepared(file: File, findings: Findings) -> Iterator[Row]:
    """Reject prepared data where texts are needed."""
    raise UsageError(f"{file.path} is prepared data (tokens); name the original rows instead")


_READERS: dict[str, RowReader] = {
    "jsonl": read_json_lines,
    "json": read_json_rows,
    "csv": read_table,
    "tsv": read_table,
    "parquet": read_parquet,
    "xlsx": read_workbook,
    "docx": read_document,
    "prepared": refuse_prepared,
    "dataset": read_saved_dataset,
    "txt": read_documents,
    "conll": read_conll,
    "story": read_story,
    "presumm": read_presumm,
    "tfrecords": read_tfrecords,
    "hdf5": read_samples,
}
