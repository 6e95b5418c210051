"""Text of others made safe to show: a terminal obeys control characters, and a log line must stay one line."""

from __future__ import annotations

import re

# C0 and C1 controls, DEL, the line and paragraph separators, and the marks that reorder text on a screen.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LINE_CONTROLS = re.compile(f"{_CONTROLS.pattern}|[\t\n]")


def escape_controls(text: str) -> str:
    r"""Return text with its control characters written out (``\x1b``); tabs and line breaks stay."""
    return _CONTROLS.sub(_escaped, text)


def one_line(text: str) -> str:
    r"""Return text as a single line, its line breaks, tabs and control characters written out."""
    return _LINE_CONTROLS.sub(_escaped, text)


def shortened(text: str, characters: int = 30) -> str:
    """Return text as a single line, cut after so many characters: the name of a column may be a whole document."""
    return one_line(text if len(text) <= characters else f"{text[:characters]}...")


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
