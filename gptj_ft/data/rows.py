"""A row, and the numbered lines of a file: what every reader is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.errors import DataError, UsageError


@dataclass(frozen=True)
class Row:
    """One record.

    Attributes:
        source: the file, as the user named it.
        line: where the record starts, from 1. In JSON written on a single line: the number of the record.
        values: column -> cell.
    """

    source: str
    line: int
    values: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.source}:{self.line}"


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number, line with its ending); lines end at ``\\n`` only, as in JSON lines."""
    try:
        if not path.stat().st_size:
            raise DataError(f"{path}: the file is empty")
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}:{number}: not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}\n"
                        f"save it as UTF-8, e.g. `iconv -f WINDOWS-1252 -t UTF-8 {path.name}`"
                    ) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def raise_first(path: Path, problems: Iterable[tuple[int, str]]) -> None:
    """Raise for the first bad line of a file, and say how many more there are."""
    rest = iter(problems)
    first = next(rest, None)
    if first is not None:
        more = sum(1 for _ in rest)
        also = f"; {more} more bad line{'s' if more > 1 else ''} in this file" if more else ""
        raise DataError(f"{path}:{first[0]}: {first[1]}{also}")
