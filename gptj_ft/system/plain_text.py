"""Escape text of others for display: a terminal obeys control characters, and a log line must stay one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

# C0 and C1 controls, DEL, the line and paragraph separators, and the marks that reorder text on a screen.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
HIDDEN = "***"
_SECRET_NAME = re.compile(r"(^|[-_.])(token|key|apikey|secret|password|passwd)$", re.IGNORECASE)
# Access tokens as the Hub, OpenAI, GitHub and others write them; what a URL has before its @.
_SECRET = re.compile(r"\b(?:hf|api_org|sk|ghp|gho|github_pat|glpat|xoxb)[-_][A-Za-z0-9_-]{16,}|(?<=://)[^/@\s]+(?=@)")
_LINE_CONTROLS = re.compile(f"{_CONTROLS.pattern}|[\t\n]")


def escape_controls(text: str) -> str:
    r"""Return text with its control characters written out (``\x1b``); tabs and line breaks stay."""
    return _CONTROLS.sub(_escaped, text)


def in_json(text: str) -> str:
    r"""Return JSON that means the same, the control characters in it written out (``\u009b``)."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    r"""Return text as a single line, its line breaks, tabs and control characters written out."""
    return _LINE_CONTROLS.sub(_escaped, text)


def shortened(text: str, characters: int = 30) -> str:
    """Return text as a single line, cut after so many characters: the name of a column may be a whole document."""
    return one_line(text if len(text) <= characters else f"{text[:characters]}...")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command with what looks like a password or an access token left out."""
    kept: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if kept and _SECRET_NAME.search(kept[-1]) and kept[-1].startswith("-") and "=" not in kept[-1]:
            word = HIDDEN
        elif equals and value and _SECRET_NAME.search(name):
            word = f"{name}={HIDDEN}"
        kept.append(_SECRET.sub(HIDDEN, word))
    return kept


def command_line(*words: str | Path) -> str:
    r"""Return a command of this program as a shell takes it, to be copied.

    Args:
        words: the arguments; a path that begins with a dash would be taken for an option.
    """
    return " ".join(["gptj-ft", *map(quoted, words)])


def quoted(word: str | Path) -> str:
    r"""Return a word as a shell takes it; control characters are written out (``$'\x1b'``)."""
    text = f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)
    if one_line(text) == text:
        return shlex.quote(text)
    return "$'{}'".format(one_line(text.replace("\\", r"\\").replace("'", r"\'")))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
