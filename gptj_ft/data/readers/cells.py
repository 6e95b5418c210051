"""Guard texts in CSV against spreadsheet programs, which compute cells that begin with = + - @.

Rule: an apostrophe goes before every part of a text that begins with one of these characters, also full-width, possibly
after blanks or quotes. Parts begin at the start of the text and after each semicolon, tab and line break, because
programs may take these for separators. A text that is a number stays as it is. Removing one apostrophe from each such
part restores the text.

Source: https://owasp.org/www-community/attacks/CSV_Injection
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from gptj_ft.system.files import read_text

CELLS, GUARDED, RAW = "cells", "guarded", "raw"  # setting of a written table, and its values
_FIRST = "=+\\-@\uff1d\uff0b\uff0d\uff20"
# Programs drop blanks, controls and invisible characters around a cell, and quotes.
_DROPPED = "[ '\"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\xa0\u1680\u2000-\u200f\u2028-\u202f\u205f-\u2064\u3000\ufeff]*"
_PART = r"(?:\A|(?<=[;\t\r\n]))"
_IS_FORMULA = f"(?={_DROPPED}[{_FIRST}])"
_IS_BREAK = f"(?={_DROPPED}[\t\r\n])"
_UNGUARDED = re.compile(rf"{_PART}{_IS_FORMULA}|\A{_IS_BREAK}")
_GUARD = re.compile(rf"{_PART}'{_IS_FORMULA}|\A'{_IS_BREAK}")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def guarded(text: str) -> str:
    """Insert the apostrophes."""
    return text if _NUMBER.fullmatch(text) else _UNGUARDED.sub("'", text)


def unguarded(text: str) -> str:
    """Remove the apostrophes of `guarded`."""
    return _GUARD.sub("", text)


def settings_file(path: Path) -> Path:
    """Return the file next to an output that holds the settings it was made with."""
    return path.with_name(f"{path.name}.settings.json")


def is_guarded(path: Path) -> bool:
    """Tell whether a table has guarded texts, by the settings next to it."""
    try:
        return bool(json.loads(read_text(settings_file(path)))[CELLS] == GUARDED)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False
