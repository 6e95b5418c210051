"""Mark the words in which answers and references differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

LONG_CHARACTERS, LONG_LINES = 200, 6  # a page folds longer texts
WORD = re.compile(r"\w+|[^\w\s]")


def marked(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mark unexpected words in answers, and missing words in references."""
    return [
        {
            "place": sample["place"],
            "texts": {
                name: {
                    "parts": _parts(text, sample["texts"]["model" if name == "expected" else "expected"]),
                    "is_long": len(text) > LONG_CHARACTERS or text.count("\n") >= LONG_LINES,
                }
                for name, text in sample["texts"].items()
            },
        }
        for sample in samples
    ]


def _parts(text: str, other: str) -> list[dict[str, Any]]:
    """Split a text into parts that occur in another text, word by word, and parts that differ."""
    words = list(WORD.finditer(text))
    keys, others = ([word[0].lower() for word in WORD.finditer(each)] for each in (text, other))
    blocks = SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks()
    same = {at for block in blocks for at in range(block.a, block.a + block.size)}
    starts = [word.start() if number else 0 for number, word in enumerate(words)]
    parts: list[dict[str, Any]] = []
    for number, (start, end) in enumerate(pairwise([*starts, len(text)])):
        differs = number not in same
        if parts and parts[-1]["differs"] == differs:
            parts[-1]["text"] += text[start:end]
        else:
            parts.append({"text": text[start:end], "differs": differs})
    return parts
