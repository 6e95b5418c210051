"""Two texts -> what differs, for people: whole lines, of long ones what is near the change."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

ASIDE = 40  # characters shown on both sides of a change


def difference(before: str, after: str) -> Iterator[str]:
    """Yield the lines that differ, each with its ending: first as they were (``-``), then as they are (``+``)."""
    old, new = before.split("\n"), after.split("\n")
    for what, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new).get_opcodes():
        if what == "equal":
            continue
        removed, added = old[i1:i2], new[j1:j2]
        if len(removed) == len(added):
            pairs = [_near_the_change(*pair) for pair in zip(removed, added, strict=True)]
            removed, added = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for sign, lines in (("-", removed), ("+", added)):
            yield from (f"{sign}{visible(line)}\n" for line in lines)


def _near_the_change(before: str, after: str) -> tuple[str, str]:
    """Cut off what two lines have in common at both ends, but for some characters."""
    start = _common(before, after)
    end = _common(before[start:][::-1], after[start:][::-1])
    skip, keep = max(start - ASIDE, 0), max(end - ASIDE, 0)

    def near(text: str) -> str:
        return ("…" if skip else "") + text[skip : len(text) - keep] + ("…" if keep else "")

    return near(before), near(after)


def visible(line: str) -> str:
    """Return a line with control characters, line breaks and the like spelled out."""
    return "".join(letter if letter.isprintable() or letter == "\t" else ascii(letter)[1:-1] for letter in line)


def _common(before: str, after: str) -> int:
    """Return how many characters two texts begin with that are the same."""
    low, high = 0, min(len(before), len(after))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if before.startswith(after[low:middle], low) else (low, middle - 1)
    return low
