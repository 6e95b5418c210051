"""Repair texts (``prepare-data --fix``) and write the repaired rows to a new file, with a diff next to it.

Each fix makes a text shorter, or removes a control character. So repeating them terminates, and is idempotent.

`ftfy` is not used for wrongly decoded letters: it takes a blank for half of a letter (``â€ z`` becomes ``†z``) and
drops U+FFFD, neither of which can be disabled. This module changes only letters that convert back to exactly the same
bytes.
"""

from __future__ import annotations

import base64
import difflib
import glob
import hashlib
import html
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import MESSAGES
from gptj_ft.data.chat_template import TOOLS
from gptj_ft.data.checks.texts import CONTROL, ENTITY, MOJIBAKE, NEXT, TAG, has_html, is_mojibake, is_treebank
from gptj_ft.data.columns import alternatives_of, columns_of, input_fields, read_fields
from gptj_ft.data.encode import check_templates, parts
from gptj_ft.data.language_model import TOKENS
from gptj_ft.data.prepare import find_columns
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings, Occurrences, Row
from gptj_ft.data.readers.source import SUFFIXES, Source
from gptj_ft.data.template import render
from gptj_ft.errors import DataError, RowSkipped, UsageError
from gptj_ft.system.atomic import atomic_files, require_new
from gptj_ft.system.compression import COMPRESSIONS

# UTF-8 characters, each byte decoded as Windows-1252.
ENCODED = re.compile(f"(?:[Â-ß][{NEXT}]|[à-ï][{NEXT}]{{2}}|[ð-ô][{NEXT}]{{3}})+")
_WINDOWS = {byte: bytes([byte]).decode("cp1252", errors="ignore") for byte in range(0x80, 0xA0)}
BYTES = {ord(letter): byte for byte, letter in _WINDOWS.items() if letter}
TAGS = re.compile(rf"(?<!\s)\s*(?:(?:{TAG.pattern})\s*)+", TAG.flags)
PARAGRAPHS = {"p", "br", *(f"h{level}" for level in range(1, 7))}
INLINE = {"a", "b", "i", "span"}
BRACKETS = {"lrb": "(", "rrb": ")", "lsb": "[", "rsb": "]", "lcb": "{", "rcb": "}"}
TREEBANK_FIXES = (  # (?<! ) avoids quadratic time in long runs of blanks
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
class RepairedText:
    """A repaired text, and the repairs applied (keys of `FIXES`), in order."""

    text: str
    fixes: tuple[str, ...]


def fix_texts(texts: Sequence[str]) -> list[RepairedText]:
    """Repair the texts of a row.

    If one text is split into Treebank tokens, all are joined: otherwise an answer would no longer match its passage.
    """
    fixed = [RepairedText(text, ()) for text in texts]
    while True:  # until nothing changes; each fix shortens a text or removes a control character
        treebank = any(is_treebank(each.text) for each in fixed)
        again = [_fix(each, treebank) for each in fixed]
        if again == fixed:
            return fixed
        fixed = again


def _fix(before: RepairedText, treebank: bool) -> RepairedText:
    text, done = before.text, dict.fromkeys(before.fixes)
    for name, (shows, fix) in FIXES.items():
        if treebank if shows is is_treebank else shows(text):
            text, was = fix(text), text
            if text != was:
                done[name] = None
    return RepairedText(text, tuple(done))


def decode_again(text: str) -> str:
    """Convert ``Ã©`` to é, repeatedly, wherever such a letter is part of a complete UTF-8 character."""
    while marks := {match.start() for match in MOJIBAKE.finditer(text)}:
        before, text = text, ENCODED.sub(partial(_decoded, marks=marks), text)
        if text == before:
            break
    return text


def remove_html(text: str) -> str:
    """Replace entities by characters, and tags by line breaks or nothing."""
    return ENTITY.sub(_character, TAGS.sub(_in_place_of_tags, text))


def join_tokens(text: str) -> str:
    """Join Penn Treebank tokens to plain text."""
    for pattern, replacement in TREEBANK_FIXES:
        text = pattern.sub(replacement, text)
    return text


def _decoded(match: re.Match[str], marks: Set[int]) -> str:
    """Decode letters as UTF-8; return them unchanged if none of them is marked, or they are invalid."""
    # One typical letter is enough to decode its neighbours: the same error has changed all of them.
    if marks.isdisjoint(range(*match.span())):
        return match[0]
    try:
        # A wrongly decoded byte-order mark becomes U+FEFF, which is no text.
        return match[0].translate(BYTES).encode("latin-1").decode().replace("\ufeff", "")
    except UnicodeDecodeError:
        return match[0]


def _in_place_of_tags(match: re.Match[str]) -> str:
    """Return the blanks between tags, with at least the line breaks that the tags mean."""
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
    """Return an entity's character, a plain blank for a no-break space; the entity itself if it has none."""
    character = html.unescape(match[0])
    return match[0] if character == "\ufffd" else character.replace("\xa0", " ")


def _is_at_border(match: re.Match[str]) -> bool:
    """Tell whether a match is at the start or end of its line."""
    text, (start, end) = match.string, match.span()
    return text[start - 1 : start] in ("", "\n") or text[end : end + 1] in ("", "\n")


FIXES: Mapping[str, tuple[Callable[[str], bool], Callable[[str], str]]] = {
    "wrongly decoded letters": (is_mojibake, decode_again),
    "control characters": (  # replaced by the Windows-1252 character of the same code, if any
        lambda text: bool(CONTROL.search(text)),
        lambda text: CONTROL.sub(lambda match: _WINDOWS.get(ord(match[0]), ""), text),
    ),
    "carriage returns": (lambda text: "\r" in text, lambda text: text.replace("\r\n", "\n").replace("\r", "\n")),
    "HTML": (has_html, remove_html),
    "Treebank tokens": (is_treebank, join_tokens),
}


ASIDE = 40  # characters shown on both sides of a change


def _difference(before: str, after: str) -> Iterator[str]:
    """Yield the lines that differ, each with its ending: the old ones (``-``), then the new ones (``+``)."""
    old, new = before.split("\n"), after.split("\n")
    for operation, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new).get_opcodes():
        if operation == "equal":
            continue
        removed, added = old[i1:i2], new[j1:j2]
        if len(removed) == len(added):
            pairs = [_near_the_change(*pair) for pair in zip(removed, added, strict=True)]
            removed, added = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for sign, lines in (("-", removed), ("+", added)):
            yield from (f"{sign}{escape_controls(line)}\n" for line in lines)


def _near_the_change(before: str, after: str) -> tuple[str, str]:
    """Cut the common start and end of two lines, except `ASIDE` characters."""
    start = _common(before, after)
    end = _common(before[start:][::-1], after[start:][::-1])
    skip, keep = max(start - ASIDE, 0), max(end - ASIDE, 0)

    def near(text: str) -> str:
        return ("…" if skip else "") + text[skip : len(text) - keep] + ("…" if keep else "")

    return near(before), near(after)


def _common(before: str, after: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(before), len(after))
    while low < high:  # a loop over characters takes seconds for long rows
        middle = (low + high + 1) // 2
        low, high = (middle, high) if before[low:middle] == after[low:middle] else (low, middle - 1)
    return low


def escape_controls(line: str) -> str:
    """Escape control characters and line breaks."""
    return "".join(letter if letter.isprintable() or letter == "\t" else ascii(letter)[1:-1] for letter in line)


_REPEATED, _EMPTY, _UNREADABLE = "the same row again", "a field is empty", "cannot be read"


@dataclass
class RepairReport:
    """Counts of a repaired file."""

    file: str  # the new file
    diff: str  # the file of changes
    rows_read: int = 0  # ``rows_written`` plus all dropped rows
    rows_written: int = 0
    rows_changed: int = 0  # written rows that differ from the source
    rows_dropped: dict[str, Occurrences] = field(default_factory=dict)
    cells: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIXES, 0))
    """fix -> number of changed cells in written rows"""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def choose_target(source: Path, named: Path | None) -> Path:
    """Choose the file of repaired rows: the one named, else ``NAME.fixed.jsonl`` next to the source."""
    if named is None and glob.has_magic(str(source)) and not source.exists():
        raise UsageError(f"{source} matches several files: name the new file with --fixed FILE.jsonl")
    if named is not None and SUFFIXES.get(named.suffix.lower()) != "jsonl":
        raise UsageError(f"--fixed {named}: the file has JSON lines, so its name must end with .jsonl")
    if named is not None and source.is_dir() and named.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"--fixed {named} is in {source}, which would then have its rows twice; name another folder")
    target = named or source.with_name(f"{_stem(source)}.fixed.jsonl")
    if target.exists():
        raise UsageError(f"{target} exists already: prepare it with --data {target}, or name another file with --fixed")
    require_new(diff_of(target))
    return target


def diff_of(target: Path) -> Path:
    """Return the path of the diff."""
    return target.with_suffix(".diff")


def fix_rows(
    recipe: Recipe, source: Source, target: Path, progress: Callable[[int], None] | None = None
) -> RepairReport:
    """Write the rows of a source to a new file, with the recipe's columns repaired.

    Drop unreadable records, rows with an empty field, and rows that repeat an earlier one in all that is trained. The
    source is read twice; memory holds one row and a digest of every row.

    Args:
        target: the new file; see `choose_target`.
        progress: called with the number of rows done.
    """
    check_templates(recipe)
    columns = find_columns(source, recipe.model_copy(update={"max_bad_rows": sys.maxsize}))
    if TOKENS in columns:
        raise UsageError(f"{source.path}: the rows are tokens, which cannot be repaired: leave out --fix")
    report = RepairReport(str(target), str(diff_of(target)))
    with atomic_files(diff_of(target), target) as (diff, out):
        diff.write(escape_controls(f"--- {source.path}") + "\n" + escape_controls(f"+++ {target}") + "\n")
        fixer = _Repairer(recipe, columns, report, diff)
        findings = Findings(sys.maxsize)
        for row in read_rows(source, findings):
            fixer.drop_unreadable(findings)
            if (values := fixer.fix(row)) is not None:
                out.write(_json_line(values))
            if progress:
                progress(report.rows_read)
        fixer.drop_unreadable(findings)
        if not report.rows_written:
            reasons = ", ".join(f"{reason} ({rows.count})" for reason, rows in report.rows_dropped.items())
            raise DataError(f"{source.path}: none of the {report.rows_read} rows is left: {reasons}")
    dropped = sum(rows.count for rows in report.rows_dropped.values())
    assert report.rows_read == report.rows_written + dropped
    return report


class _Repairer:
    """Repair rows, count them, and write the diff."""

    def __init__(self, recipe: Recipe, columns: Mapping[str, str], report: RepairReport, diff: TextIO) -> None:
        self._recipe, self._columns, self._report, self._diff = recipe, columns, report, diff
        self._seen: dict[bytes, str] = {}  # digest of `_content_of` -> first place

    def drop_unreadable(self, findings: Findings) -> None:
        """Count the records that became unreadable since the last call."""
        for where, problem in findings.bad:
            self._drop(where, _UNREADABLE, problem)
        findings.bad.clear()

    def fix(self, row: Row) -> dict[str, Any] | None:
        """Return the repaired values of a row; ``None`` if it is dropped."""
        columns = [each for column in self._columns.values() for each in columns_of(column, row.values)]
        names = [column for column in columns if column in row.values]
        if self._recipe.task != "token-labels":
            joined = {column: _sentences(row.values[column]) for column in names}
            if any(is_treebank(text) for cell in joined.values() for text in _texts_in(cell)):
                row = row._replace(values={**row.values, **joined})
        before = {column: list(_texts_in(row.values[column])) for column in names}
        # All cells of a row together: if one has Treebank tokens, the others must be joined too.
        fixed = iter(fix_texts([text for texts in before.values() for text in texts]))
        after = {column: [next(fixed) for _ in texts] for column, texts in before.items()}
        cells = {
            column: _with_texts(row.values[column], iter([each.text for each in after[column]])) for column in names
        }
        values = {**row.values, **cells}
        content = self._content_of(values)
        if (content is None or self._recipe.task != "language-model") and (empty := self._empty_columns(values)):
            self._drop(row.where, _EMPTY, ", ".join(f"column '{column}'" for column in empty))
            return None
        if content is not None:
            digest = hashlib.blake2b(_json_line({"content": content}).encode(), digest_size=16).digest()
            if digest in self._seen:
                self._drop(row.where, _REPEATED, f"as {self._seen[digest]}")
                return None
            self._seen[digest] = row.where
        self._report.rows_read += 1
        self._report.rows_written += 1
        self._report.rows_changed += values != row.values
        for column in names:
            self._write_changes(row, column, before[column], after[column])
        return values

    def _content_of(self, values: Mapping[str, Any]) -> list[Any] | None:
        """Return all that is trained of a row, which only repeated rows share; ``None`` if its cells are no texts."""
        recipe, inputs = self._recipe, input_fields(self._recipe)
        is_labelled = recipe.task != "language-model"
        try:
            columns = {name: column for name, column in self._columns.items() if name in inputs or not is_labelled}
            fields = read_fields(values, columns, recipe)
            if not is_labelled:
                texts = [text.strip() for text, _ in parts(recipe, fields.values)]
                # Chat templates also read thoughts, calls of functions, and the functions.
                messages = [dict(message) for message in fields.values.get(MESSAGES, ())]
                return [*texts, *fields.references, messages, fields.values.get(TOOLS)]
        except RowSkipped:
            return None
        texts = [render(template, fields.values).strip() for template in (recipe.prompt, recipe.pair)]
        cells = []
        for name, column in self._columns.items():
            for each in columns_of(column, values):
                cell = values.get(each)
                # A list of words or sentences is more than its text.
                if name not in inputs or not isinstance(cell, str):
                    cells.append(cell.strip() if isinstance(cell, str) else cell)
        return [*texts, *cells]

    def _empty_columns(self, values: Mapping[str, Any]) -> list[str]:
        """Return the columns of a row that lack a text or label."""
        recipe, empty = self._recipe, list[str]()
        has_empty_targets = recipe.task == "multi-label" or (recipe.task == "spans" and bool(recipe.no_answer))
        for name, column in self._columns.items():
            several = columns_of(column, values)
            if has_empty_targets and name not in input_fields(recipe):
                # An empty list means no label, or no answer. Of several columns, each is a label, and none means no.
                empty += [each for each in several if len(several) == 1 and values.get(each) is None]
            else:
                empty += [each for each in several if _is_empty(values.get(each))]
        return empty

    def _drop(self, where: str, reason: str, detail: str) -> None:
        self._report.rows_read += 1
        self._report.rows_dropped.setdefault(reason, Occurrences()).add(where)
        self._diff.write(escape_controls(f"@@ {where} dropped: {reason}: {detail} @@") + "\n")

    def _write_changes(self, row: Row, column: str, before: list[str], after: list[RepairedText]) -> None:
        fixes = dict.fromkeys(fix for each in after for fix in each.fixes)
        for fix in fixes:
            self._report.cells[fix] += 1
        if fixes:
            place = f"{row.where}, now line {self._report.rows_written}, column '{column}'"
            self._diff.write(escape_controls(f"@@ {place}: {', '.join(fixes)} @@") + "\n")
        for old, new in zip(before, after, strict=True):
            self._diff.writelines(_difference(old, new.text))


def _sentences(value: Any) -> Any:
    """Join the words of sentences that are lists, as the reader does."""
    if not isinstance(value, list):
        return value
    are_words = [isinstance(item, list) and all(isinstance(word, str) for word in item) for item in value]
    return [" ".join(item) if is_list else item for item, is_list in zip(value, are_words, strict=True)]


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of a cell, however nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(item)


def _with_texts(value: Any, replacements: Iterator[str]) -> Any:
    """Replace the texts of a cell, in the order of `_texts_in`."""
    if isinstance(value, str):
        return next(replacements)
    if isinstance(value, dict):
        return {name: _with_texts(item, replacements) for name, item in value.items()}
    return [_with_texts(item, replacements) for item in value] if isinstance(value, list) else value


def _is_empty(value: Any) -> bool:
    """Tell whether a cell has no text."""
    try:
        return not any(text.strip() for text in alternatives_of(value))
    except RowSkipped:
        return False


def _json_line(values: Mapping[str, Any]) -> str:
    """Write a row as a line of JSON, whatever its cells contain."""
    try:
        line = json.dumps(values, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:  # JSON has no NaN or infinity
        line = json.dumps(_finite(values), ensure_ascii=False, default=_plain)
    try:
        line.encode()
    except UnicodeEncodeError:  # a lone surrogate: escape it
        line = json.dumps(json.loads(line))
    return line + "\n"


def _plain(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _stem(source: Path) -> str:
    """Return a file name without its format and compression suffixes."""
    path = Path(source.name)
    if path.suffix.lower() in COMPRESSIONS:
        path = Path(path.stem)
    return path.stem if path.suffix.lower() in SUFFIXES else path.name
