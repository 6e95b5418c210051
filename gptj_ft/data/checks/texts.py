"""Warn of problems in usable rows, and of duplicates; change nothing.

A check looks at one row, or remembers a digest of every row; no text stays in memory.
"""

from __future__ import annotations

import heapq
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import MESSAGES
from gptj_ft.data.columns import FieldTexts
from gptj_ft.data.readers.rows import PLACES_SHOWN, Occurrences, Row
from gptj_ft.data.template import fields_of, parse_template
from gptj_ft.system.paths import make_home

_RECORD = np.dtype([("prompt", "<u8"), ("answer", "<u8"), ("source", "<u4"), ("line", "<u8")])
HELD = 2**14  # records in memory before they are written
BUCKET = 2**18  # records compared at once


class Duplicates:
    """Find rows with equal prompts by digests on disk: memory does not grow with the number of rows."""

    def __init__(self, bucket: int = BUCKET, held: int = HELD) -> None:
        self._bucket, self._most_held = bucket, held
        self._sources: dict[str, int] = {}
        self._held: list[tuple[int, int, int, int]] = []
        # Not in the folder of temporary files, which may be in memory.
        self._file = tempfile.TemporaryFile(dir=make_home())  # noqa: SIM115 - closed by `close`

    def add(self, prompt: int, answer: int, source: str, line: int) -> None:
        """Add a row: 64-bit digests of its prompt and answer, and its place."""
        self._held.append((prompt, answer, self._sources.setdefault(source, len(self._sources)), line))
        if len(self._held) == self._most_held:
            self._write()

    def count(self, places: int) -> dict[bool, tuple[int, list[str]]]:
        """Count the rows whose prompt occurred before, and locate the first ``places`` of them.

        Returns:
            Results for rows with the same answer as the prompt's first row (``True``), and another one (``False``).
        """
        self._write()
        total = self._file.tell() // _RECORD.itemsize
        count = {True: 0, False: 0}
        first: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # (row number, source, line)
        # Equal prompts fall into the same bucket. The file is read once per bucket.
        for bucket in range(buckets := max(1, -(-total // self._bucket))):
            for number, is_same, source, line in _repeated(*self._rows_of(bucket, buckets)):
                count[is_same] += 1
                first[is_same].append((number, source, line))
            # Buckets do not follow the order of rows: the first places may come from any.
            first = {is_same: heapq.nsmallest(places, rows) for is_same, rows in first.items()}
        names = list(self._sources)
        return {same: (count[same], [f"{names[source]}:{line}" for _, source, line in first[same]]) for same in count}

    def close(self) -> None:
        """Delete the file of digests."""
        self._file.close()

    def _write(self) -> None:
        # `_rows_of` moves the position.
        self._file.seek(0, 2)
        self._file.write(np.array(self._held, _RECORD).tobytes())
        self._held.clear()

    def _rows_of(self, bucket: int, buckets: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the records of a bucket, and their row numbers."""
        self._file.seek(0)
        kept, numbers, start = [], [], 0
        while read := self._file.read(self._most_held * _RECORD.itemsize):
            records = np.frombuffer(read, _RECORD)
            chosen = np.flatnonzero(records["prompt"] % np.uint64(buckets) == bucket)
            kept.append(records[chosen])
            numbers.append(chosen + start)
            start += len(records)
        return np.concatenate([np.empty(0, _RECORD), *kept]), np.concatenate([np.empty(0, np.int64), *numbers])


def _repeated(records: NDArray[Any], numbers: NDArray[np.int64]) -> Iterator[tuple[int, bool, int, int]]:
    """Yield (row number, whether the answer is the same, source, line) of records whose prompt occurred before."""
    order = np.argsort(records["prompt"], kind="stable")
    prompts, answers = records["prompt"][order], records["answer"][order]
    is_first = np.ones(len(prompts), bool)
    is_first[1:] = prompts[1:] != prompts[:-1]
    # For each row the start of its group of equal prompts, whose first row comes first in the file.
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(prompts)), 0))
    repeated = np.flatnonzero(~is_first)
    same = answers[repeated] == answers[first[repeated]]
    rows = records[order[repeated]]
    columns = (numbers[order[repeated]], same, rows["source"], rows["line"])
    yield from zip(*(column.tolist() for column in columns), strict=True)


_FIXES = "`prepare-data --fix` repairs"

# UTF-8 decoded as Windows-1252 shows one of these letters, followed by characters of the bytes 0x80 to 0xBF. Some of
# those characters are also quotation marks: after "AMANHÃ" they are correct, unless the word continues.
MOJIBAKE_LETTERS = "ÃÂâïÐÑãäåæçèéð\ufffd"
QUOTES = "‚„…‘’“”–—»"
NEXT = "\u0080-\u00bf€ƒ†‡ˆ‰Š‹ŒŽ•˜™š›œžŸ‚„…‘’“”–—"
MOJIBAKE = re.compile(  # `re` searches fast for patterns that begin with a character set
    f"[{MOJIBAKE_LETTERS}](?:(?<=Ã)(?:(?![{QUOTES}])[{NEXT}]|[{QUOTES}](?=\\w)|(?<=[a-zß-ÿ]Ã)[{QUOTES}])"
    f"|(?<=Â)[\u00a0-\u00bf]|(?<=â)(?:€|[‚„†ˆ˜][{NEXT}])|(?<=ï)»¿|(?<=\ufffd)|(?<=[ÐÑ])[{NEXT}][ÐÑ][{NEXT}]"
    f"|(?<=[ã-é])[{NEXT}]{{2}}[ã-é][{NEXT}]{{2}}|(?<=ð)[{NEXT}]{{3}})"
)
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ue000-\uf8ff]")
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
TREEBANK = re.compile(r"-(?:l[rsc]b|r[rsc]b)-|</?s>|``|(?: n't| 's) ", re.IGNORECASE)
# Require values of attributes: otherwise `i<a and b>c` would match as a link.
TAG = re.compile(
    r"</?(p|br|div|span|a|b|i|table|td|tr|li|ul|h[1-6])"
    r"(?:\s+[\w:-]+\s*=\s*(?:\"[^\"<>]*\"|'[^'<>]*'|[^\s\"'<>]+))*\s*/?>",
    re.IGNORECASE,
)
ENTITY = re.compile(r"&(?:amp|nbsp|quot|apos|lt|gt|#\d{1,7}|#x[0-9a-f]{1,6});", re.I)
EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]*\w")
PHONE = re.compile(r"(?<![\w.])(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,4}\)|\d{3})[ .-]\d{3,4}[ .-]\d{3,4}(?![\w-])")
SOCIAL_SECURITY = re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])")
NUMBER_LIKE = re.compile(r"[0-9(][0-9() .-]{10}")  # part of any phone, card or social security number
CARD = re.compile(r"(?<!\d)(?:\d[ -]?){12,18}\d(?!\d)")
# ASCII characters that no check looks for, except the one for capitals; and those that some check does look for.
PLAIN = bytes({*b"\n\t", *range(32, 127)} - {*b"0123456789#:'-<>&@`"})
_MARKS = b"0123456789#:'-<>&@`"
CACHED_TEXTS = 64
MANY_TREEBANK = 2  # marks in a tokenized text
LONG_ENOUGH = 60  # characters of a text to warn about missing capitals


class Checks:
    """Collect warnings about rows."""

    def __init__(self, recipe: Recipe) -> None:
        self.warnings: dict[str, Occurrences] = {}
        self._rows = Duplicates()
        self._delimiters = delimiters_of(recipe)
        self._cache: dict[str, list[str]] = {}
        self._inputs, self._outputs = fields_of(recipe.prompt), {MESSAGES, *fields_of(recipe.completion)}
        self._is_summary = recipe.shorten in self._inputs and not recipe.labels

    def check_row(self, row: Row, fields: FieldTexts, prompt: str, completion: str) -> None:
        """Check a row before it is truncated."""
        self._rows.add(_digest(prompt or completion), _digest(completion), row.source, row.line)
        values = {name: str(value) for name, value in fields.values.items()}
        for warning in fields.warnings:
            self.add(warning, row.where)
        for name, text in values.items():
            for warning in self._warnings_of(text):
                if name in self._outputs:
                    self.add(warning, row.where)
                elif warning != LOWER_CASE:  # harmless in inputs, as the model does not learn to write them
                    self.add(TREEBANK_READ if warning == TREEBANK_WRITTEN else warning, row.where)
        for name, text in values.items():
            for delimiter in self._delimiters:
                if delimiter in text:
                    self.add(
                        f"the text of '{name}' contains '{delimiter.strip()}', a delimiter of the prompt", row.where
                    )
        if self._is_summary and all(len(completion.strip()) > len(values[name]) for name in self._inputs):
            self.add("the answer is longer than the input", row.where)

    def close(self) -> None:
        """Add the warnings about duplicates; delete the file of digests."""
        sentences = {
            True: "the same row again; `prepare-data --fix` drops it",
            False: "the same question as another row, with another answer",
        }
        for is_same, (count, first) in self._rows.count(PLACES_SHOWN).items():
            if count:
                self.warnings[sentences[is_same]] = Occurrences(count, first)
        self._rows.close()

    def _warnings_of(self, text: str) -> list[str]:
        """Return the warnings about a text; cached, since consecutive rows often share a passage."""
        warnings = self._cache.get(text)
        if warnings is None:
            rest = text.encode(errors="replace").translate(None, PLAIN)
            warnings = [name for name, (may_match, matches) in CHECKS.items() if may_match(rest) and matches(text)]
            if len(self._cache) == CACHED_TEXTS:
                self._cache.clear()
            self._cache[text] = warnings
        return warnings

    def add(self, warning: str, where: str) -> None:
        """Add a warning about a row."""
        self.warnings.setdefault(warning, Occurrences()).add(where)


def delimiters_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the delimiters of a prompt: template lines that end with a colon."""
    texts = [line.strip() for text in parse_template(recipe.prompt).literals for line in text.split("\n")]
    return tuple(dict.fromkeys("\n" + text for text in texts if text.endswith(":") and len(text) > 3))


def has_control(text: str) -> bool:
    """Tell whether a text has control characters (except line ends and tabs) or private-use characters."""
    # The first test is fast, and false for most texts.
    return not text.replace("\n", "").replace("\t", "").isprintable() and bool(CONTROL.search(text))


def is_mojibake(text: str) -> bool:
    """Tell whether a text was decoded with a wrong encoding: ``Ã©`` for é, ``â€™`` for an apostrophe."""
    return not text.isascii() and bool(MOJIBAKE.search(text))


def has_html(text: str) -> bool:
    """Tell whether a text has HTML tags or entities."""
    return ("<" in text and bool(TAG.search(text))) or ("&" in text and bool(ENTITY.search(text)))


def is_treebank(text: str) -> bool:
    """Tell whether a text is split into Penn Treebank tokens (``-lrb-``, ``do n't``, ``<s>``)."""
    # Every match contains one of these. Searching for single characters is many times faster than the pattern.
    if not (
        ("'" in text and (" '" in text or " n'" in text or " N'" in text))
        or ("-" in text and ("b-" in text or "B-" in text))
        or ">" in text
        or "`" in text
    ):
        return False
    return sum(1 for _, _ in zip(TREEBANK.finditer(text), range(MANY_TREEBANK), strict=False)) >= MANY_TREEBANK


def is_lower_case(text: str) -> bool:
    """Tell whether a long text has letters but no capitals (in scripts that have capitals)."""
    return len(text) >= LONG_ENOUGH and text.islower()


def has_personal_data(text: str) -> bool:
    """Tell whether a text seems to contain an e-mail address, phone, social security or card number."""
    if "@" in text and EMAIL.search(text):
        return True
    if b"000" not in text.encode(errors="replace").translate(_DIGITS) or not NUMBER_LIKE.search(text):
        return False  # without three digits in a row no pattern below matches; this test is much faster
    if PHONE.search(text) or SOCIAL_SECURITY.search(text):
        return True
    return any(_passes_luhn(match[0]) for match in CARD.finditer(text))


def _passes_luhn(text: str) -> bool:
    """Verify a card number's check digit (https://www.iso.org/standard/70484.html, annex B)."""
    digits = [int(character) for character in text if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    # A repeated digit, such as zeros in a form, may pass the check too.
    return len(set(digits)) > 1 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


LOWER_CASE = "no capital letter in a long text"
TREEBANK_WRITTEN = (
    f"text split into Treebank tokens (-lrb-, do n't, <s>): the model would learn to write so; {_FIXES} it"
)
TREEBANK_READ = f"text split into Treebank tokens (-lrb-, do n't, <s>): prompts must then be split too; {_FIXES} it"
# Warning -> (fast test of the bytes not in `PLAIN`, exact test of the text).
CHECKS: Mapping[str, tuple[Callable[[bytes], bool], Callable[[str], bool]]] = {
    f"wrongly decoded letters (Ã©, â€™): save the file as UTF-8 from its source; {_FIXES} what can be": (
        lambda rest: not rest.isascii(), is_mojibake,
    ),
    f"control characters; {_FIXES} them": (lambda rest: bool(rest.strip(_MARKS)), has_control),
    f"carriage returns inside the text; {_FIXES} them": (lambda rest: b"\r" in rest, lambda text: "\r" in text),
    TREEBANK_WRITTEN: (
        lambda rest: b"'" in rest or b"-" in rest or b">" in rest or b"`" in rest, is_treebank,
    ),
    LOWER_CASE: (lambda rest: True, is_lower_case),
    f"HTML tags or entities; {_FIXES} them": (lambda rest: b"<" in rest or b"&" in rest, has_html),
    "what looks like personal data (e-mail, telephone, social security or card number)": (
        lambda rest: b"@" in rest or b"000" in rest.translate(_DIGITS), has_personal_data,
    ),
}  # fmt: skip


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.strip().encode(errors="replace"))
