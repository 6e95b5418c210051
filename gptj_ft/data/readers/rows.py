"""Rows, findings and numbered lines: the parts shared by all readers."""

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

CHUNK_BYTES = 2**20
PLACES_SHOWN = 5  # of each finding
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """A row: one record of a file.

    Attributes:
        source: the file, as the user named it.
        line: first line of the record, from 1. In JSON written on a single line, and in files without lines: the
            number of the record.
        values: column -> cell; of a row that comes as tokens, the two columns of `token_row`.
    """

    source: str
    line: int
    values: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass
class Occurrences:
    """The rows of one finding: their number, and the places of the first (``file:line``)."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, where: str) -> None:
        """Count one more row."""
        self.count += 1
        if len(self.first) < PLACES_SHOWN:
            self.first.append(where)


def format_places(places: Sequence[str], count: int) -> str:
    """Format the places of rows: each file once, by its name, then its lines.

    Args:
        places: the first of them, as `Row.where` has them.
        count: number of all rows; three points stand for those that are not named.
    """
    lines: dict[str, list[str]] = {}
    for place in places:
        source, _, line = place.rpartition(":")
        lines.setdefault(source, []).append(line)
    names = [PurePath(source).name for source in lines]
    said = [
        f"{name if names.count(name) == 1 else source}:{' lines ' if len(of) > 1 else ''}{', '.join(of)}"
        for name, (source, of) in zip(names, lines.items(), strict=True)
    ]
    return "; ".join(said) + (" ..." if count > len(places) else "")


def token_row(file: File, line: int, input_ids: list[int], trained: list[int]) -> Row:
    """Make a row of tokens: the contract between its readers and `tokenize_rows`.

    Args:
        file: file of the row.
        line: the number of its record.
        input_ids: at least one token id, 0 to 2**31 - 1; whether the model has them is not known here. Where a document
            ended with EOS, so do they; no EOS is to be added.
        trained: targets, that is, the tokens that the loss is taken on: the bounds of half-open intervals of indices,
            all in one list, ascending. [1, 5, 8, 9] is tokens 1 to 4, and 8. Token 0 never is, as nothing predicts it.
            Empty if there is no target: nothing is to be learnt from such a row.
    """
    return Row(str(file.path), line, {"input_ids": input_ids, "trained": trained})


@dataclass
class Findings:
    """Findings of the readers: unreadable records, and notes.

    Attributes:
        most_bad: records that may be unreadable before reading them is given up.
        bad: (file:line, what is wrong with it), of as many records.
        notes: sentences.
        headless: tables whose first line looks like a row, not like names; and what separates their cells.
    """

    most_bad: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    headless: dict[str, str] = field(default_factory=dict)

    def add(self, file: File, line: int, problem: str) -> None:
        """Note a record that cannot be read."""
        self.bad.append((f"{file.path}:{line}", problem))

    def note(self, text: str) -> None:
        """Note something odd, once."""
        self.notes[text] = None

    def check(self) -> None:
        """Give up if there are too many bad records.

        Raises:
            DataError: the first of them, and how many more there are.
        """
        if len(self.bad) > self.most_bad:
            where, problem = self.bad[0]
            more = len(self.bad) - 1
            also = f"; {more} more bad line{'s' if more > 1 else ''}" if more else ""
            raise DataError(f"{where}: {problem}{also}")


@contextmanager
def opened_text(file: File, findings: Findings) -> Iterator[BinaryIO]:
    """Open a text as UTF-8, whatever its encoding; note one that is assumed.

    Raises:
        UsageError, DataError: as `opened_file`.
    """
    encoding = file.encoding or guess_encoding(lambda: _pieces(file))
    if encoding != file.encoding and encoding == WINDOWS:
        findings.note(
            f"{file.path} is not UTF-8; it is read as Windows-1252 (Western Europe), which is assumed: if letters look "
            f"wrong, name its encoding with --set encoding=..., e.g. {OTHERS}"
        )
    with opened_file(file) as opened:
        yield as_utf8(opened, encoding, file.path)


def _pieces(file: File) -> Iterator[bytes]:
    with opened_file(file) as opened:
        while piece := opened.read(RECODED_BYTES):
            yield piece


def numbered_lines(file: File, findings: Findings) -> Iterator[tuple[int, str]]:
    """Yield (number, line with its ending); lines end at ``\\n`` only, as in JSON lines.

    Raises:
        DataError: empty, or not UTF-8 (names the byte), or a line that is too long.
    """
    number = blank = 0
    most = file.options.max_record
    with opened_text(file, findings) as opened:
        while raw := opened.readline(most + 1):
            number += 1
            blank = blank + len(raw) if raw.isspace() else 0
            if len(raw) > most or blank > most:
                raise too_long(file, number)
            line = _without_mark(raw, file, findings) if number == 1 else raw
            try:
                yield number, line.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(file, number, raw, raw.find(line) + error.start) from error
    if not number:
        raise DataError(f"{file.path}: the file is empty")


def too_long(file: File, line: int) -> DataError:
    """Return the error of a record, or of blanks where one should be, above the recipe's `max_record`."""
    limit = file.options.max_record
    size = f"{limit // 2**20} MiB" if limit >= 2**20 else f"{limit} bytes"
    return DataError(
        f"{file.path}:{line}: longer than {size}: damaged, or not what it seems; if this is one record indeed, "
        f"--set max_record={2 * limit}"
    )


def text_chunks(file: File, findings: Findings) -> Iterator[str]:
    """Yield a text in pieces of some `CHUNK_BYTES`, wherever its lines end.

    Raises:
        DataError: as `numbered_lines`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened_text(file, findings) as opened:
        raw = _without_mark(opened.read(CHUNK_BYTES), file, findings)
        if not raw:
            raise DataError(f"{file.path}: the file is empty")
        try:
            while raw:
                yield decoder.decode(raw)
                raw = opened.read(CHUNK_BYTES)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            for _ in numbered_lines(file, findings):
                pass  # which says in what line
            raise


def _without_mark(raw: bytes, file: File, findings: Findings) -> bytes:
    """Remove a byte-order mark at the beginning of a file; note it, and line endings of Windows."""
    if b"\r\n" in raw:
        findings.note(f"{file.path} has the line endings of Windows, which are read as plain ones")
    if raw.startswith(BYTE_ORDER_MARK):
        findings.note(f"{file.path} begins with a byte-order mark, which is left out")
    return raw.removeprefix(BYTE_ORDER_MARK)


def _not_utf8(file: File, line: int, raw: bytes, start: int) -> DataError:
    return DataError(f"{file.path}:{line}: not UTF-8: byte 0x{raw[start]:02x} at column {start + 1}\n{HOW_TO_SAY}")
