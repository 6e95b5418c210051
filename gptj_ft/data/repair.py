"""What can be mended in a text without knowing what it means. Found by `checks`, done by ``prepare-data --fix``.

Each fix makes a text shorter, or takes a control character out of it, so that doing them until nothing changes comes
to an end, and doing them again changes nothing.

Wrongly decoded letters are mended here and not by `ftfy`: that takes a blank for half of a letter (``â€ z`` becomes
``†z``), loses U+FFFD, and cannot be told not to. Only what turns back into the very same letters is touched here.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

from gptj_ft.data.validation import CONTROL, ENTITY, MOJIBAKE, NEXT, TAG, has_html, is_mojibake, is_treebank

# Characters of UTF-8, each of its bytes read as one of Windows-1252.
ENCODED = re.compile(f"(?:[Â-ß][{NEXT}]|[à-ï][{NEXT}]{{2}}|[ð-ô][{NEXT}]{{3}})+")
WINDOWS = {byte: bytes([byte]).decode("cp1252", errors="ignore") for byte in range(0x80, 0xA0)}
BYTES = {ord(letter): byte for byte, letter in WINDOWS.items() if letter}
TAGS = re.compile(rf"(?<!\s)\s*(?:(?:{TAG.pattern})\s*)+", TAG.flags)
PARAGRAPHS = {"p", "br", *(f"h{level}" for level in range(1, 7))}
INLINE = {"a", "b", "i", "span"}
BRACKETS = {"lrb": "(", "rrb": ")", "lsb": "[", "rsb": "]", "lcb": "{", "rcb": "}"}
TREEBANK_FIXES = (  # (?<! ) because looking for `X` behind each blank of a long row of them takes for ever
    (re.compile(r"-(l[rsc]b)- *", re.I), lambda match: BRACKETS[match[1].lower()]),
    (re.compile(r"(?<! ) *-(r[rsc]b)-", re.I), lambda match: BRACKETS[match[1].lower()]),
    (re.compile(r"(?<![ \t])(?:[ \t]*</?s>)+[ \t]*", re.I), lambda match: "" if _is_at_border(match) else " "),
    (re.compile(r"`` *"), lambda match: '"'),
    (re.compile(r"(?<! ) *''"), lambda match: '"'),
    (re.compile(r"(?<! ) +(n't|'(?:s|m|d|re|ve|ll))\b", re.I), lambda match: match[1]),
    (re.compile(r"(?<! ) +([.,;:!?%)\]}]+)(?=[\s\"')\]}]|$)"), lambda match: match[1]),
    (re.compile(r"([(\[{]|\$(?= +\d)) +"), lambda match: match[1]),
)


@dataclass(frozen=True)
class Fixed:
    """A text as it is now, and the names of what was done to it (keys of `FIXES`), in order."""

    text: str
    fixes: tuple[str, ...]


def fix_texts(texts: Sequence[str]) -> list[Fixed]:
    """Mend the texts of a row.

    Where one of them is split into Treebank tokens all are joined, or an answer would no longer stand in its passage.
    """
    fixed = [Fixed(text, ()) for text in texts]
    while True:
        treebank = any(is_treebank(each.text) for each in fixed)
        again = [_fix(each, treebank) for each in fixed]
        if again == fixed:
            return fixed
        fixed = again


def _fix(before: Fixed, treebank: bool) -> Fixed:
    text, done = before.text, dict.fromkeys(before.fixes)
    for name, (shows, fix) in FIXES.items():
        if treebank if shows is is_treebank else shows(text):
            text, was = fix(text), text
            if text != was:
                done[name] = None
    return Fixed(text, tuple(done))


def decode_again(text: str) -> str:
    """Turn ``Ã©`` into é, wherever a letter that shows it is part of a whole character of UTF-8, also twice over."""
    while marks := {match.start() for match in MOJIBAKE.finditer(text)}:
        before, text = text, ENCODED.sub(partial(_decoded, marks=marks), text)
        if text == before:
            break
    return text


def remove_controls(text: str) -> str:
    """Remove control characters and those without a meaning; what Windows-1252 has in their place is put there."""
    return CONTROL.sub(lambda match: WINDOWS.get(ord(match[0]), ""), text)


def unify_line_ends(text: str) -> str:
    """Have lines end as they do everywhere else."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def remove_html(text: str) -> str:
    """Put characters for entities, and line breaks or nothing for tags."""
    return ENTITY.sub(_character, TAGS.sub(_in_place_of_tags, text))


def join_tokens(text: str) -> str:
    """Write a text that is split into Penn Treebank tokens as people write."""
    for pattern, replacement in TREEBANK_FIXES:
        text = pattern.sub(replacement, text)
    return text


def _decoded(match: re.Match[str], marks: Set[int]) -> str:
    """Return the characters of UTF-8 that are in some letters; the letters themselves if nothing shows it."""
    if marks.isdisjoint(range(*match.span())):
        return match[0]
    try:
        return match[0].translate(BYTES).encode("latin-1").decode().replace("\ufeff", "")
    except UnicodeDecodeError:
        return match[0]


def _in_place_of_tags(match: re.Match[str]) -> str:
    """Return the blanks among some tags, and at least the line breaks that the tags mean."""
    names = [name.lower() for name in TAG.findall(match[0])]
    blanks = TAG.sub("", match[0])
    if INLINE.issuperset(names):
        return blanks
    if match.start() == 0 or match.end() == len(match.string):
        return ""
    if set(names) <= INLINE | {"td"}:
        return blanks or " "
    return "\n" * min(max(sum(name in PARAGRAPHS for name in names), blanks.count("\n"), 1), 2)


def _character(match: re.Match[str]) -> str:
    """Return the character that an entity means, a plain blank for one that does not break; itself if there is none."""
    character = html.unescape(match[0])
    return match[0] if character == "\ufffd" else character.replace("\xa0", " ")


def _is_at_border(match: re.Match[str]) -> bool:
    """Tell whether nothing stands before or after a match on its line."""
    text, (start, end) = match.string, match.span()
    return text[start - 1 : start] in ("", "\n") or text[end : end + 1] in ("", "\n")


FIXES: Mapping[str, tuple[Callable[[str], bool], Callable[[str], str]]] = {
    "wrongly decoded letters": (is_mojibake, decode_again),
    "control characters": (lambda text: bool(CONTROL.search(text)), remove_controls),
    "carriage returns": (lambda text: "\r" in text, unify_line_ends),
    "HTML": (has_html, remove_html),
    "Treebank tokens": (is_treebank, join_tokens),
}
