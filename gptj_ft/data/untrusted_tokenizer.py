"""Reject a tokenizer.json that multiplies texts.

A tokenizer may come from a stranger. Its normalizer can double a text 100 times in a sequence of replacements, which
takes all memory before any result exists; loading already normalizes the added tokens. So the file is checked before.
Regular expressions need no check: Oniguruma gives up after ten million retries, and the library panics
(`errors.panic_in_words`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptj_ft.errors import DataError
from gptj_ft.system.files import read_bytes

MOST_GROWTH = 64  # characters of a text's result per character of the text; published tokenizers: 4
MOST_STEPS = 100  # of normalizer and pre-tokenizer together; published tokenizers: 15
_PARTS = ("normalizer", "pre_tokenizer")
# Without these words, also as escapes of letters, no part of a tokenizer.json can multiply a text or panic.
_SUSPICIOUS = re.compile(rb'"(Replace|Sequence|ByteLevel|FixedLength)"|\\u00[2-7]')
_ADVICE = "use the tokenizer.json of the original model"


def check_growth(path: Path) -> None:
    """Check that a tokenizer.json multiplies texts by a bounded factor.

    Raises:
        DataError: it does not.
    """
    raw = read_bytes(path)
    if not _SUSPICIOUS.search(raw):
        return
    try:
        content = json.loads(raw)
        steps = [step for name in _PARTS for step in _steps(content.get(name))]
    except (ValueError, AttributeError, RecursionError):
        return  # no tokenizer: the library says why
    growth = 1.0
    for number, step in enumerate(steps, start=1):
        growth *= _growth_of(step)
        if growth > MOST_GROWTH:
            raise DataError(f"{path}: its normalizer makes texts over {MOST_GROWTH} times longer; {_ADVICE}")
        if number > MOST_STEPS:
            raise DataError(f"{path}: its normalizer has over {MOST_STEPS} steps; {_ADVICE}")
        if step.get("type") == "FixedLength" and step.get("length") == 0:
            raise DataError(f"{path}: its pre-tokenizer makes pieces of length 0; {_ADVICE}")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of nested sequences."""
    if isinstance(part, dict):
        inner = [each for name in ("normalizers", "pretokenizers") for each in part.get(name) or ()]
        yield from (step for each in inner for step in _steps(each))
        yield part


def _growth_of(step: dict[str, Any]) -> float:
    """Return the largest ratio of characters after a step to those before, if repeating the step repeats it."""
    if step.get("type") == "ByteLevel":
        return 4.0  # a character of four bytes becomes four characters
    content, pattern = step.get("content"), step.get("pattern")
    if step.get("type") != "Replace" or not isinstance(content, str) or not isinstance(pattern, dict):
        return 1.0
    text = pattern.get("String")
    if isinstance(text, str) and text:
        return max(1.0, len(content) / len(text))
    # A regular expression may match one character, or the empty text between two.
    return max(1.0, float(len(content)), 1.0 + len(content) if _may_be_empty(pattern) else 1.0)


def _may_be_empty(pattern: dict[str, Any]) -> bool:
    """Tell whether a pattern may match between characters; when in doubt, it may."""
    # Published ones: " {2,}", "\\s+", " +", "``".
    return not re.fullmatch(r"(\\s|[^\\()\[\]{}|*+?.^$])(\+|\{[1-9]\d?,\})?", str(pattern.get("Regex", "")))
