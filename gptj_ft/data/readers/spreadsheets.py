"""Read Excel workbooks (.xlsx, .xlsm): cells as displayed texts; no formula or macro is run."""

from __future__ import annotations

import datetime
import errno
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, BinaryIO

from gptj_ft.data.readers.rows import Findings, Row
from gptj_ft.data.readers.source import File, names_in_zip, opened_file
from gptj_ft.data.readers.tables import SAMPLE_LINES, Header, check_header
from gptj_ft.errors import DataError, GptjFtError, UsageError, did_you_mean
from gptj_ft.system.plain_text import shortened

HEADER_ROWS = 1000  # the header is within these

ROW_TAG = re.compile(rb"<(?:\w+:)?(?:row|si)[\s/>]")
_READ_BYTES = 2**20
SHEETS_SHOWN = 10


def read_workbook(file: File, findings: Findings) -> Iterator[Row]:
    """Read a sheet of a workbook: the one that the options name, else the first visible one.

    The first non-empty row has the column names; a row's line is its number in the sheet. Numbers are as stored (at
    most 15 digits, without percent or currency), dates and times as ISO 8601, formulas as their saved values, errors
    (``#N/A``) as empty. The first of merged cells has the text. Hidden rows and columns are read; unnamed columns are
    not.
    """
    if file.compression:
        raise DataError(
            f"{file.path}: a compressed workbook cannot be read; decompress the file ({file.compression}) first"
        )
    try:
        import openpyxl
    except ImportError as error:
        raise UsageError(
            f"{file.path} is an Excel workbook, and openpyxl is not installed: pip install 'gptj-ft[xlsx]', or save "
            "the sheet as CSV UTF-8"
        ) from error
    warnings.filterwarnings("ignore", module="openpyxl")  # about styles that it cannot write
    with opened_file(file) as opened, _damage_errors(file):
        _check_size(file, opened)
        # read_only streams rows, data_only gives formulas' saved values, keep_links=False ignores other workbooks.
        book = openpyxl.load_workbook(opened, read_only=True, data_only=True, keep_links=False)
        sheet = _choose_sheet(file, book.worksheets, findings)
        sheet.reset_dimensions()  # some programs store wrong ones
        yield from _rows(file, sheet, findings)


def _choose_sheet(file: File, sheets: Sequence[Any], findings: Findings) -> Any:
    """Return the sheet that the option names, else the first visible one; note that there are others."""
    names = [str(sheet.title) for sheet in sheets]
    shown = ", ".join(f"'{shortened(name)}'" for name in names[:SHEETS_SHOWN])
    if wanted := file.options.sheet:
        if wanted not in names:
            raise UsageError(
                f"{file.path} has no sheet '{shortened(wanted)}'{did_you_mean(wanted, names)}; there are: {shown}"
            )
        return sheets[names.index(wanted)]
    if not sheets:
        raise DataError(f"{file.path}: the workbook has no sheets")
    chosen = next((sheet for sheet in sheets if sheet.sheet_state == "visible"), sheets[0])
    if len(sheets) > 1:
        findings.note(
            f"{file.path}: reading the sheet '{shortened(chosen.title)}' of {shown}; --set sheet=NAME reads another"
        )
    return chosen


def _rows(file: File, sheet: Any, findings: Findings) -> Iterator[Row]:
    rows = enumerate(islice(sheet.iter_rows(), HEADER_ROWS), 1)
    filled = ((number, texts) for number, cells in rows if any(texts := [_text_of(cell) for cell in cells]))
    first, names = next(filled, (0, []))
    # Formatted but empty cells are stored too: without this they would be unnamed columns.
    while names and not names[-1]:
        names.pop()
    records = _records(file, sheet, first + 1, len(names), findings) if names else iter(())
    sample = list(islice(records, SAMPLE_LINES))
    check_header(file, Header(first, names, [cells for _, cells in sample], ", "), findings)
    for number, cells in chain(sample, records):
        yield Row(str(file.path), number, {name: text for name, text in zip(names, cells, strict=True) if name})


def _records(file: File, sheet: Any, first: int, width: int, findings: Findings) -> Iterator[tuple[int, list[str]]]:
    """Yield (row of the sheet, texts of its first cells), starting at a row; empty rows are skipped."""
    # Read one column more than named, to notice that there are others.
    for number, cells in enumerate(sheet.iter_rows(min_row=first, max_col=width + 1), first):
        if number > file.options.limits.sheet_rows:
            raise DataError(f"{file.path}: the sheet has more than {file.options.limits.sheet_rows:,} rows")
        texts = [_text_of(cell) for cell in cells] + [""] * (width - len(cells))
        if any(texts[width:]):
            findings.note(f"{file.path}: cells to the right of the last named column are ignored")
        if any(texts[:width]):
            yield number, texts[:width]


def _text_of(cell: Any) -> str:
    value = cell.value
    if value is None or cell.data_type == "e":
        return ""
    if isinstance(value, str):
        # _x000D_ is Excel's escaped carriage return.
        return value.replace("_x000D_", "\r").replace("\r\n", "\n") if "\r" in value or "_x000D_" in value else value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # Excel keeps 15 digits: 0.1 + 0.2 must read 0.3. From 1e15 on this format would write an exponent.
        return f"{value:.15g}" if abs(value) < 1e15 else repr(value)
    if isinstance(value, datetime.datetime):
        # Excel stores a date as a date and time at midnight.
        return str(value.date() if value.time() == datetime.time() else value)
    return str(value)


def _check_size(file: File, opened: BinaryIO) -> None:
    """Check the decompressed size of a workbook before reading it."""
    if not names_in_zip(opened):
        raise DataError(f"{file.path}: damaged workbook: it has no parts, or too many")
    with zipfile.ZipFile(opened) as archive:
        # zipfile never unpacks more than the sizes in the directory, so checking those stops decompression bombs.
        parts = [part for part in archive.infolist() if part.filename.lower().endswith((".xml", ".rels"))]
        tables = [part for part in parts if re.match(r"xl/(worksheets/|sharedStrings)", part.filename)]
        others = sum(part.file_size for part in parts) - sum(part.file_size for part in tables)
        too_large = f"{file.path}: workbook too large: {{}}; save the sheet as CSV UTF-8"
        limits = file.options.limits
        if sum(part.file_size for part in tables) > limits.sheets or others > limits.other_parts:
            size = sum(part.file_size for part in parts) / 2**30
            raise DataError(too_large.format(f"{size:.1f} GiB decompressed, limit {limits.sheets >> 30} GiB"))
        for part in tables:
            if part.file_size > limits.sheet_piece and _longest_piece(archive, part) > limits.sheet_piece:
                raise DataError(too_large.format(f"a row or text above {limits.sheet_piece >> 20} MiB"))


def _longest_piece(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> int:
    """Return the bytes of the longest row or text, accurate to one read."""
    longest = since = 0
    with archive.open(part) as opened:
        while piece := opened.read(_READ_BYTES):
            # A tag cut in two by the reads is missed, which only makes the result larger.
            since = 0 if ROW_TAG.search(piece) else since + len(piece)
            longest = max(longest, since)
    return longest


@contextmanager
def _damage_errors(file: File) -> Iterator[None]:
    try:
        yield
    except (GptjFtError, MemoryError):
        raise
    except Exception as error:  # openpyxl validates little: damaged files raise any kind of error
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise DataError(f"{file.path}: damaged workbook: {reason[0][:200]}") from error
