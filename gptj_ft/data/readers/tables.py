"""Read tables: CSV, TSV, Parquet, and folders saved by `datasets`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

from gptj_ft.data.readers.encodings import DETECT
from gptj_ft.data.readers.rows import Findings, Row, numbered_lines, too_long
from gptj_ft.data.readers.source import DATASET_FILES, File, opened_file
from gptj_ft.errors import DataError
from gptj_ft.system.plain_text import shortened

BATCH_ROWS = 1000
MOST_UNPACKED_BYTES = 2**30  # of Parquet that is packed once more, which is read as a whole
# csv refuses cells above 131,072 characters, and documents are longer. This is the most a C long holds everywhere.
csv.field_size_limit(2**31 - 1)
# What separates cells by a file's name, what else may, and what a message calls it.
COLUMN_SEPARATORS = {"csv": ",", "tsv": "\t"}
SEPARATOR_NAMES = {",": "commas", ";": "';'", "\t": "tabs", "|": "'|'"}
# What the separator is chosen by: so much of the beginning.
SAMPLE_LINES, _SAMPLE_CHARACTERS = 100, 2**18
MOST_UNLIKE = 0.5  # share of the records that may have other numbers of cells than the header
SEPARATOR_LINE = re.compile(r"sep=([^\r\n])\r?\n?", re.IGNORECASE)  # Excel's, before the header
NAME_CHARACTERS, NAME_WORDS = 60, 6  # names of columns are not longer
SENTENCE = re.compile(r"\n|[。！？]|(?:\S+\s+){3}.*[.!?…]['”’]?$")  # what is in no name


class Dialect(NamedTuple):
    """The delimiter of a table, and whether quotes enclose cells that hold it."""

    delimiter: str
    quotes: bool

    def reader(self, lines: Iterable[str]) -> Any:
        """Return a reader of records that counts the lines it has taken."""
        if self.quotes:
            return csv.reader(lines, delimiter=self.delimiter, strict=True)
        return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE)


class Header(NamedTuple):
    """The names of a table's columns, their line, the first records after it, and what is to stand between names."""

    line: int
    names: list[str]
    sample: Sequence[Sequence[str]]
    delimiter: str


def read_table(file: File, findings: Findings) -> Iterator[Row]:
    """Read a table of cells separated by commas, tabs, semicolons or pipes.

    The first line has the names of the columns, unless the options have them and the line has as many other cells.
    Quotes enclose cells that hold one of these, quotes or line breaks; in a TSV they are text, as in the published
    benchmarks, unless those around the names of the header say otherwise.
    """
    lines = (line for _, line in numbered_lines(file, findings))
    beginning = _beginning(lines)
    number = 1
    told = SEPARATOR_LINE.fullmatch(beginning[0]) if beginning else None
    if told:
        number, beginning = 2, beginning[1:]
    wanted = file.options.delimiter
    dialect = choose_dialect(file, beginning, told[1] if told and wanted == DETECT else wanted)
    if dialect.delimiter != COLUMN_SEPARATORS[file.format] and wanted == DETECT:
        what = SEPARATOR_NAMES.get(dialect.delimiter, repr(dialect.delimiter))
        findings.note(f"{file.path} is separated by {what}")
    records = _records(file, dialect, number, chain(beginning, lines))
    number, header = next(records, (number, []))
    told_names = list(file.options.header)
    if len(told_names) == len(header) and told_names != header:  # else the table does have a line of names
        records, header = chain([(number, header)], records), told_names
    else:
        check_header(file, Header(number, header, _cells(dialect, beginning)[1:], dialect.delimiter), findings)
    for line, cells in records:
        if len(cells) != len(header):
            findings.add(file, line, f"{len(cells)} cells, the header has {len(header)}")
            continue
        # Line endings are the file's, not the text's: a file written on Windows would teach the model carriage returns.
        yield Row(str(file.path), line, {k: v.replace("\r\n", "\n") for k, v in zip(header, cells, strict=True)})


def choose_dialect(file: File, beginning: Sequence[str], delimiter: str = DETECT) -> Dialect:
    """Choose the delimiter of a table.

    The name of the file is right unless another separator splits the header and the records after it more evenly.

    Args:
        file: its format and its options.
        beginning: the first lines.
        delimiter: known delimiter; default: it is detected.
    """
    by_name = COLUMN_SEPARATORS[file.format]
    if delimiter == DETECT:
        shares = {each: _evenness(_dialect(file, beginning, each), beginning) for each in SEPARATOR_NAMES}
        best = max(shares, key=lambda each: shares[each])  # of several, the first
        delimiter = best if shares[best] > max(shares[by_name], 1 - MOST_UNLIKE) else by_name
    return _dialect(file, beginning, delimiter)


def _dialect(file: File, beginning: Sequence[str], delimiter: str) -> Dialect:
    quotes = file.options.quotes
    if quotes != DETECT:
        return Dialect(delimiter, quotes == "on")
    is_quoted = bool(beginning) and beginning[0].startswith('"') and beginning[0].rstrip().endswith('"')
    return Dialect(delimiter, file.format == "csv" or delimiter != "\t" or is_quoted)


def _evenness(dialect: Dialect, beginning: Sequence[str]) -> float:
    """Return the share of the first records that have as many cells as the header; 0 if that has one only."""
    header, *records = _cells(dialect, beginning) or [[]]
    if len(header) < 2:
        return 0.0
    return sum(len(cells) == len(header) for cells in records) / len(records) if records else 1.0


def _cells(dialect: Dialect, beginning: Sequence[str]) -> list[list[str]]:
    """Return the first records of a table, up to one that is damaged or cut off."""
    records: list[list[str]] = []
    with suppress(csv.Error):
        records.extend(cells for cells in dialect.reader(beginning) if cells)
    return records


def check_header(file: File, header: Header, findings: Findings) -> None:
    """Check that the names of a table's columns differ, and note a table that seems to have none.

    Raises:
        DataError: a name stands there twice.
    """
    if looks_like_a_row(header.names, header.sample):
        findings.headless[str(file.path)] = header.delimiter
    repeated = sorted({name for name in header.names if name and header.names.count(name) > 1})
    if repeated:
        check_headers(findings, ("document", "summary"))
        raise DataError(f"{file.path}:{header.line}: the header names column '{shortened(repeated[0])}' twice")


def looks_like_a_row(header: Sequence[str], records: Sequence[Sequence[str]]) -> bool:
    """Tell whether the first line of a table is a row rather than a header.

    Texts are longer than names, or have several lines, or end as sentences do; numbers name nothing, unless they are
    years or count the columns; and what a column holds again is no name of it.
    """
    names = [name.strip() for name in header]
    if any(len(name) > NAME_CHARACTERS or len(name.split()) > NAME_WORDS or SENTENCE.search(name) for name in names):
        return True
    if any(map(_is_number, names)) and names != [str(number) for number in range(len(names))]:
        return True
    others = [[cell.strip() for cell in cells] for cells in records if len(cells) == len(header)]
    return any(
        name and any(cells[index] == name for cells in others if cells != names) for index, name in enumerate(names)
    )


def check_headers(findings: Findings, names: Sequence[str]) -> None:
    """Check that the tables had headers, after no known column was found.

    Raises:
        DataError: one begins with a row; says nothing of what is in it.
    """
    for path, delimiter in findings.headless.items():
        raise DataError(
            f"{path}: the first line looks like a row, not like names of columns: add a header line, e.g. "
            f"{delimiter.join(names)}, or say --set header={','.join(names)}\n"
            "(or, if those are the names, say which are meant with --map)"
        )


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"[-+]?\d[\d.,:/-]*", text)) and not re.fullmatch(r"(19|20)\d\d", text)


def read_parquet(file: File, findings: Findings) -> Iterator[Row]:
    """Read Apache Parquet in batches; a row's line is its number."""
    import pyarrow
    from pyarrow import parquet

    try:
        with opened_file(file) as opened:
            # Packed once more by gzip or the like it cannot be read from its end, where Parquet begins.
            source = pyarrow.BufferReader(_unpacked(file, opened)) if file.compression else opened
            yield from _rows_of(file, parquet.ParquetFile(source).iter_batches(BATCH_ROWS))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{file.path}: not a whole Parquet file: {_first_line(error)}") from error


def read_saved_dataset(file: File, findings: Findings) -> Iterator[Row]:
    """Read a folder saved by `datasets`; of several splits the one called train."""
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
    try:
        loaded.data.validate(full=True)  # what a damaged file points to may be no memory of this process
        yield from _rows_of(file, loaded.with_format("arrow").iter(BATCH_ROWS))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{file.path}: damaged: {_first_line(error)}") from error


def _rows_of(file: File, batches: Iterable[Any]) -> Iterator[Row]:
    """Yield the rows of record batches, numbered from 1."""
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    yield from (Row(str(file.path), number, values) for number, values in enumerate(rows, 1))


def _unpacked(file: File, opened: BinaryIO) -> bytes:
    content = opened.read(MOST_UNPACKED_BYTES + 1)
    if len(content) > MOST_UNPACKED_BYTES:
        raise DataError(f"{file.path}: longer than {MOST_UNPACKED_BYTES // 2**30} GiB: unpack it first")
    return content


def _beginning(lines: Iterator[str]) -> list[str]:
    """Take the first lines of a table."""
    found, characters = list[str](), 0
    for line in lines:
        found.append(line)
        characters += len(line)
        if len(found) == SAMPLE_LINES or characters > _SAMPLE_CHARACTERS:
            break
    return found


def _records(file: File, dialect: Dialect, line: int, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (physical line on which the record starts, from ``line``, cells); blank lines are no records."""
    size = 0

    def bounded() -> Iterator[str]:
        nonlocal size
        for text in lines:
            size += len(text)
            if size > file.options.max_record:  # a quote that is never closed takes all that follows
                raise too_long(file, line)
            yield text

    reader, before = dialect.reader(bounded()), line - 1
    while True:
        size = 0
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{file.path}:{line}: not a table: {error}") from error
        if cells is None:
            return
        if cells:
            yield line, cells
        line = before + reader.line_num + 1


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
