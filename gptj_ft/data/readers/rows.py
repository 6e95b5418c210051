"""Rows, findings and numbered lines, shared by all readers."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple

from gptj_ft.data.readers.encodings import HOW_TO_SAY, OTHERS, RECODED_BYTES, WINDOWS, as_utf8, guess_encoding
from gptj_ft.data.readers.source import File, opened_file
from gptj_ft.errors import DataError
from gptj_ft.system.plain_text import escape_controls

PLACES_SHOWN = 5  # of each finding
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """A row: one record of a file."""

    source: str  # the file, as the user named it
    line: int  # first line of the record, from 1; in one-line JSON and binary formats, the record number
    values: dict[str, Any]  # column -> cell; rows of tokens have the two columns of `token_row`

    @property
    def where(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass
class Occurrences:
    """Rows with the same finding: their number and the first places (``file:line``)."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, where: str) -> None:
        self.count += 1
        if len(self.first) < PLACES_SHOWN:
            self.first.append(where)


def format_places(places: Sequence[str], count: int) -> str:
    """Format places of rows: each file name once, then its lines.

    Args:
        places: the first places, see `Row.where`.
        count: number of all rows; "..." stands for the others.
    """
    lines: dict[str, list[str]] = {}
    for place in places:
        source, _, line = place.rpartition(":")
        lines.setdefault(source, []).append(line)
    names = [PurePath(source).name for source in lines]
    texts = [
        f"{name if names.count(name) == 1 else source}:{' lines ' if len(of) > 1 else ''}{', '.join(of)}"
        for name, (source, of) in zip(names, lines.items(), strict=True)
    ]
    return "; ".join(texts) + (" ..." if count > len(places) else "")


def token_row(file: File, line: int, input_ids: list[int], trained: list[int]) -> Row:
    """Make a row of tokens.

    Args:
        line: record number.
        input_ids: at least one token id, 0 to 2**31 - 1, not yet compared with the vocabulary. Documents that end with
            EOS include it; none is added.
        trained: bounds of half-open intervals of target indices, in one ascending list: [1, 5, 8, 9] means tokens 1 to
            4, and 8. Token 0 cannot be a target, since nothing predicts it. Empty: no targets.
    """
    return Row(str(file.path), line, {"input_ids": input_ids, "trained": trained})


@dataclass
class Findings:
    """Problems found while reading: unreadable records, and notes."""

    most_bad: int = 0  # unreadable records to tolerate
    bad: list[tuple[str, str]] = field(default_factory=list)  # (file:line, problem) of each unreadable record
    notes: dict[str, None] = field(default_factory=dict)  # sentences, each once
    headless: dict[str, str] = field(default_factory=dict)
    """tables whose first line looks like a row -> their delimiter"""

    def add(self, file: File, line: int, problem: str) -> None:
        """Record an unreadable record."""
        self.bad.append((f"{file.name}:{line}", problem))

    def note(self, text: str) -> None:
        self.notes[escape_controls(text)] = None

    def check(self) -> None:
        """Fail if there are too many unreadable records."""
        if len(self.bad) > self.most_bad:
            where, problem = self.bad[0]
            more = len(self.bad) - 1
            also = f"; {more} more bad line{'s' if more > 1 else ''}" if more else ""
            raise DataError(f"{where}: {problem}{also}")


@contextmanager
def opened_text(file: File, findings: Findings) -> Iterator[BinaryIO]:
    """Open a text file as UTF-8, converted if needed; note an assumed encoding."""
    encoding = file.encoding or guess_encoding(lambda: _pieces(file))
    if encoding != file.encoding and encoding == WINDOWS:
        findings.note(
            f"{file.path} is not UTF-8; assuming Windows-1252 (Western Europe): if letters look wrong, name its "
            f"encoding with --set encoding=..., e.g. {OTHERS}"
        )
    with opened_file(file) as opened:
        yield as_utf8(opened, encoding, file.path)


def _pieces(file: File) -> Iterator[bytes]:
    with opened_file(file) as opened:
        while piece := opened.read(RECODED_BYTES):
            yield piece


def numbered_lines(file: File, findings: Findings) -> Iterator[tuple[int, str]]:
    """Yield (number, line with its ending). Lines end at ``\\n`` only, as in JSON lines."""
    number = blank = blank_lines = 0
    most = file.options.max_record
    with opened_text(file, findings) as opened:
        # One byte above the limit shows that a line is too long without reading all of it.
        while raw := opened.readline(most + 1):
            number += 1
            # A few compressed kilobytes can hold gigabytes of blank lines: limit them like a record.
            if raw.isspace():
                blank, blank_lines = blank + len(raw), blank_lines + 1
                if blank_lines > file.options.limits.blank_lines:
                    raise DataError(
                        f"{file.path}:{number}: {blank_lines - 1:,} blank lines in succession; the file may be "
                        "damaged: remove them"
                    )
            else:
                blank = blank_lines = 0
            if len(raw) > most or blank > most:
                raise too_long(file, number)
            line = _without_mark(raw, file, findings) if number == 1 else raw
            try:
                yield number, line.decode()
            except UnicodeDecodeError as error:
                # Report columns of the raw line, which may begin with a byte-order mark.
                raise _not_utf8(file, number, raw, raw.find(line) + error.start) from error
    if not number:
        raise DataError(f"{file.path}: the file is empty")


def too_long(file: File, line: int) -> DataError:
    """Return the error for a record, or a run of blanks, longer than `max_record`."""
    limit = file.options.max_record
    size = f"{limit // 2**20} MiB" if limit >= 2**20 else f"{limit} bytes"
    return DataError(
        f"{file.path}:{line}: record longer than {size}; the file may be damaged or in another format. If it is one "
        f"record indeed, --set max_record={2 * limit}"
    )


def text_chunks(file: File, findings: Findings) -> Iterator[str]:
    """Yield a text in chunks of `ReadLimits.text_chunk` bytes, regardless of lines."""
    # A chunk may end within a character: the incremental decoder keeps its first bytes.
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened_text(file, findings) as opened:
        size = file.options.limits.text_chunk
        raw = _without_mark(opened.read(size), file, findings)
        if not raw:
            raise DataError(f"{file.path}: the file is empty")
        try:
            while raw:
                yield decoder.decode(raw)
                raw = opened.read(size)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            for _ in numbered_lines(file, findings):
                pass  # raises an error that names the line
            raise


def _without_mark(raw: bytes, file: File, findings: Findings) -> bytes:
    """Remove a byte-order mark at the start of a file; note it, and Windows line endings."""
    if b"\r\n" in raw:
        findings.note(f"{file.path} has Windows line endings, read as plain ones")
    if raw.startswith(BYTE_ORDER_MARK):
        findings.note(f"{file.path} begins with a byte-order mark, which is ignored")
    return raw.removeprefix(BYTE_ORDER_MARK)


def _not_utf8(file: File, line: int, raw: bytes, start: int) -> DataError:
    return DataError(f"{file.path}:{line}: not UTF-8: byte 0x{raw[start]:02x} at column {start + 1}\n{HOW_TO_SAY}")
