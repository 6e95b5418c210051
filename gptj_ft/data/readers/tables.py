"""Read tables: CSV, TSV, Parquet, and folders saved by `datasets`."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

from gptj_ft.data.readers.cells import unguarded
from gptj_ft.data.readers.encodings import DETECT
from gptj_ft.data.readers.rows import Findings, Row, numbered_lines, too_long
from gptj_ft.data.readers.source import File, opened_file
from gptj_ft.errors import DataError
from gptj_ft.system.plain_text import one_line, shortened

BATCH_ROWS = 1000

# csv's default limit is 131,072 characters per cell; documents are longer. A C long has at least 32 bits.
csv.field_size_limit(2**31 - 1)
COLUMN_SEPARATORS = {"csv": ",", "tsv": "\t"}  # by format
SEPARATOR_NAMES = {",": "commas", ";": "';'", "\t": "tabs", "|": "'|'"}  # possible separators, as messages name them
SAMPLE_LINES, _SAMPLE_CHARACTERS = 100, 2**18  # start of the file that detects the separator
MOST_UNLIKE = 0.5  # share of records that may have another number of cells than the header
SEPARATOR_LINE = re.compile(r"sep=([^\r\n])\r?\n?", re.IGNORECASE)  # Excel's, before the header
NAME_CHARACTERS, NAME_WORDS = 60, 6  # longest column name
SENTENCE = re.compile(r"\n|[。！？]|(?:\S+\s+){3}.*[.!?…]['”’]?$")  # not part of any column name


class Dialect(NamedTuple):
    """The delimiter of a table, and whether quotes enclose cells."""

    delimiter: str
    quotes: bool

    def reader(self, lines: Iterable[str]) -> Any:
        """Return a csv reader; it counts the lines it has read."""
        if self.quotes:
            # Not strict, csv would accept an unclosed quote and merge the rest of the file into a cell.
            return csv.reader(lines, delimiter=self.delimiter, strict=True)
        return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE)


class Header(NamedTuple):
    """Column names, their line number, the first records after them, and the delimiter between names."""

    line: int
    names: list[str]
    sample: Sequence[Sequence[str]]
    delimiter: str


def read_table(file: File, findings: Findings) -> Iterator[Row]:
    """Read a table of cells separated by commas, tabs, semicolons or pipes.

    The first line has the column names, unless the option `header` names as many columns. Quotes enclose cells with
    separators, quotes or line breaks. In a TSV they are plain characters, as in the published benchmarks, unless they
    enclose the names in the header.
    """
    lines = (line for _, line in numbered_lines(file, findings))
    beginning = _beginning(lines)
    number = 1
    separator_line = SEPARATOR_LINE.fullmatch(beginning[0]) if beginning else None
    if separator_line:
        number, beginning = 2, beginning[1:]
    option = file.options.delimiter
    dialect = choose_dialect(file, beginning, separator_line[1] if separator_line and option == DETECT else option)
    if dialect.delimiter != COLUMN_SEPARATORS[file.format] and option == DETECT:
        name = SEPARATOR_NAMES.get(dialect.delimiter, repr(dialect.delimiter))
        findings.note(f"{file.path} is separated by {name}")
    records = _records(file, dialect, number, chain(beginning, lines), findings)
    number, header = next(records, (number, []))
    names = list(file.options.header)
    if len(names) == len(header) and names != header:  # otherwise the file has its own header line
        records, header = chain([(number, header)], records), names
    else:
        check_header(file, Header(number, header, _cells(dialect, beginning)[1:], dialect.delimiter), findings)
    text_of: Callable[[str], str] = str
    if file.is_guarded:
        text_of, header = unguarded, [unguarded(name) for name in header]
        findings.note(f"{file.path} was written by `predict`: its apostrophes before = + - @ are removed")
    for line, cells in records:
        if len(cells) != len(header):
            findings.add(file, line, f"{len(cells)} cells, the header has {len(header)}")
            continue
        # Windows line endings belong to the file: left in the text they would teach the model carriage returns.
        yield Row(
            str(file.path), line, {k: text_of(v).replace("\r\n", "\n") for k, v in zip(header, cells, strict=True)}
        )


def choose_dialect(file: File, beginning: Sequence[str], delimiter: str = DETECT) -> Dialect:
    """Choose the delimiter of a table.

    The delimiter of the format is used, unless another one gives more records as many cells as the header.

    Args:
        beginning: the first lines.
        delimiter: known delimiter; default: detect it.
    """
    by_name = COLUMN_SEPARATORS[file.format]
    if delimiter == DETECT:
        shares = {each: _evenness(_dialect(file, beginning, each), beginning) for each in SEPARATOR_NAMES}
        best = max(shares, key=lambda each: shares[each])  # the first, if several are equal
        delimiter = best if shares[best] > max(shares[by_name], 1 - MOST_UNLIKE) else by_name
    return _dialect(file, beginning, delimiter)


def _dialect(file: File, beginning: Sequence[str], delimiter: str) -> Dialect:
    quotes = file.options.quotes
    if quotes != DETECT:
        return Dialect(delimiter, quotes == "on")
    is_quoted = bool(beginning) and beginning[0].startswith('"') and beginning[0].rstrip().endswith('"')
    # GLUE and other benchmarks have lone quotes in their TSV files: quoting would join lines there.
    return Dialect(delimiter, file.format == "csv" or delimiter != "\t" or is_quoted)


def _evenness(dialect: Dialect, beginning: Sequence[str]) -> float:
    """Return the share of the first records with as many cells as the header; 0 for a single column."""
    header, *records = _cells(dialect, beginning) or [[]]
    if len(header) < 2:
        return 0.0
    return sum(len(cells) == len(header) for cells in records) / len(records) if records else 1.0


def _cells(dialect: Dialect, beginning: Sequence[str]) -> list[list[str]]:
    """Return the first records of a table, up to a damaged or truncated one."""
    records: list[list[str]] = []
    with suppress(csv.Error):
        records.extend(cells for cells in dialect.reader(beginning) if cells)
    return records


def check_header(file: File, header: Header, findings: Findings) -> None:
    """Check that column names are unique, and note a table that seems to lack a header."""
    if looks_like_a_row(header.names, header.sample):
        findings.headless[str(file.path)] = header.delimiter
    repeated = sorted({name for name in header.names if name and header.names.count(name) > 1})
    if repeated:
        check_headers(findings, ("document", "summary"))
        raise DataError(f"{file.path}:{header.line}: the header names column '{shortened(repeated[0])}' twice")


def looks_like_a_row(header: Sequence[str], records: Sequence[Sequence[str]]) -> bool:
    """Tell whether the first line of a table is a row rather than a header.

    It is a row if a cell is too long for a name, has several lines, ends like a sentence, is a number (except years and
    consecutive column numbers), or occurs again in its column.
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
    """Check that the tables have headers; called when no known column was found."""
    for path, delimiter in findings.headless.items():
        raise DataError(
            f"{path}: the first line looks like a row, not like column names: add a header line, e.g. "
            f"{delimiter.join(names)}, or --set header={','.join(names)}\n"
            "(if it does have the column names, choose among them with --map)"
        )


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"[-+]?\d[\d.,:/-]*", text)) and not re.fullmatch(r"(19|20)\d\d", text)


def read_parquet(file: File, findings: Findings) -> Iterator[Row]:
    """Read Apache Parquet in batches; a row's line is its number."""
    import pyarrow
    from pyarrow import parquet

    try:
        with opened_file(file) as opened:
            # Parquet is read from its end: a gzip or xz stream must be decompressed into memory first.
            source = pyarrow.BufferReader(_unpacked(file, opened)) if file.compression else opened
            yield from _rows_of(file, parquet.ParquetFile(source).iter_batches(BATCH_ROWS))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{file.path}: damaged Parquet file: {_first_line(error)}") from error


def read_saved_dataset(file: File, findings: Findings) -> Iterator[Row]:
    """Read a folder saved by `datasets`; of several splits, the split ``train``."""
    import datasets
    import pyarrow

    try:
        datasets.disable_progress_bars()
        loaded = datasets.load_from_disk(str(file.path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file.path}: damaged dataset of the library `datasets`: {_first_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            names = ", ".join(str(file.path / name) for name in loaded)
            raise DataError(f"{file.path} has no split 'train'; name one of {names}")
        others = ", ".join(name for name in loaded if name != "train")
        findings.note(f"{file.path}: reading the split train" + (f"; there are also {others}" if others else ""))
        loaded = loaded["train"]
    try:
        loaded.data.validate(full=True)  # damaged offsets may point outside this process's memory
        yield from _rows_of(file, loaded.with_format("arrow").iter(BATCH_ROWS))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise DataError(f"{file.path}: damaged: {_first_line(error)}") from error


def _rows_of(file: File, batches: Iterable[Any]) -> Iterator[Row]:
    """Yield the rows of record batches, numbered from 1."""
    rows = chain.from_iterable(_values_in(file, batch) for batch in batches)
    yield from (Row(str(file.path), number, values) for number, values in enumerate(rows, 1))


def _values_in(file: File, batch: Any) -> list[dict[str, Any]]:
    names = batch.schema.names
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{file.path}: there are two columns '{shortened(repeated)}': rename or remove one")
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        raise  # the file is damaged
    except ValueError as error:  # such as two fields of one name in a structure, or a date beyond Python's
        raise DataError(f"{file.path}: a value has no form in Python: {one_line(str(error))}") from error


def _unpacked(file: File, opened: BinaryIO) -> bytes:
    most = file.options.limits.parquet
    content = opened.read(most + 1)
    if len(content) > most:
        raise DataError(f"{file.path}: longer than {most // 2**30} GiB; decompress the file first")
    return content


def _beginning(lines: Iterator[str]) -> list[str]:
    """Take the first lines of a table."""
    sample, characters = list[str](), 0
    for line in lines:
        sample.append(line)
        characters += len(line)
        if len(sample) == SAMPLE_LINES or characters > _SAMPLE_CHARACTERS:
            break
    return sample


def _records(
    file: File, dialect: Dialect, line: int, lines: Iterable[str], findings: Findings
) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line of the record, cells); blank lines are skipped.

    Raises:
        DataError: the first record is malformed, or the last one has no end.
    """
    size, is_first, is_at_end = 0, True, False

    def bounded() -> Iterator[str]:
        nonlocal size, is_at_end
        for text in lines:
            size += len(text)
            if size > file.options.max_record:  # an unclosed quote would swallow the rest of the file
                raise too_long(file, line)
            yield text
        is_at_end = True

    reader, before = dialect.reader(bounded()), line - 1
    while True:
        size = 0
        try:
            cells = next(reader, None)
        except csv.Error as error:
            problem = f"malformed table: {error}"
            if is_first or is_at_end:
                raise DataError(f"{file.path}:{line}: {problem}") from error
            if (last := before + reader.line_num) > line:
                problem += f"; its quotes enclose everything up to line {last}"
            findings.add(file, line, problem)
            cells = []  # the reader goes on at the next line
        if cells is None:
            return
        if cells:
            is_first = False
            yield line, cells
        # A quoted cell may contain line breaks, so count the reader's lines, not records.
        line = before + reader.line_num + 1


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
