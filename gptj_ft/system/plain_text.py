"""Escape untrusted text for display: a terminal obeys control characters, and a log line must stay one line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

# C0 and C1 controls, DEL, the line and paragraph separators, the marks that reorder text on a screen, and lone
# surrogates, which no encoding can write.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
HIDDEN = "***"
_SECRET_NAME = re.compile(r"(^|[-_.])(token|key|apikey|secret|password|passwd)$", re.IGNORECASE)
# Access tokens of the Hub, OpenAI, GitHub and others; credentials before the @ of a URL.
_SECRET = re.compile(r"\b(?:hf|api_org|sk|ghp|gho|github_pat|glpat|xoxb)[-_][A-Za-z0-9_-]{16,}|(?<=://)[^/@\s]+(?=@)")
_LINE_CONTROLS = re.compile(f"{_CONTROLS.pattern}|[\t\n]")


def escape_controls(text: str) -> str:
    r"""Write out the control characters of text (``\x1b``), except tabs and line breaks."""
    return _CONTROLS.sub(_escaped, text)


def in_json(text: str) -> str:
    r"""Write out the control characters of JSON (``\u009b``), without changing its meaning."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str) -> str:
    r"""Write out line breaks, tabs and control characters, so that text is a single line."""
    return _LINE_CONTROLS.sub(_escaped, text)


def shortened(text: str, characters: int = 30) -> str:
    """Return text as a single line, truncated: the name of a column may be a whole document."""
    return one_line(text if len(text) <= characters else f"{text[:characters]}...")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Hide passwords and access tokens in the words of a command, and escape what is not Unicode."""
    kept: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if kept and _SECRET_NAME.search(kept[-1]) and kept[-1].startswith("-") and "=" not in kept[-1]:
            word = HIDDEN
        elif equals and value and _SECRET_NAME.search(name):
            word = f"{name}={HIDDEN}"
        kept.append(escape_controls(_SECRET.sub(HIDDEN, word)))
    return kept


def command_line(*words: str | Path) -> str:
    """Return a command of this program for a shell; a path that starts with a dash gets ``./`` before it."""
    return " ".join(["gptj-ft", *map(quoted, words)])


def quoted(word: str | Path) -> str:
    r"""Quote a word for a shell, and write out control characters (``$'\x1b'``)."""
    text = f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)
    if one_line(text) == text:
        return shlex.quote(text)
    return "$'{}'".format(one_line(text.replace("\\", r"\\").replace("'", r"\'")))


def _escaped(match: re.Match[str]) -> str:
    if "\udc80" <= match[0] <= "\udcff":  # a byte of a file name in another encoding, see `os.fsdecode`
        return f"\\x{ord(match[0]) - 0xDC00:02x}"
    return match[0].encode("unicode_escape").decode("ascii")
