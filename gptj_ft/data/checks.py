"""What is wrong with rows that can be trained on: seen while they are read, said before anything is trained.

A check looks at one row, or remembers digests of all of them; none keeps a text. Nothing is changed here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gptj_ft.data.fields import FieldTexts
from gptj_ft.data.placeholders import fields_of, parse_template
from gptj_ft.recipe import Recipe

PLACES_SHOWN = 5  # for each warning

MOJIBAKE = re.compile("Ã[\u0080-\u00bf‚-™]|â€|Â[\u00a0-\u00bf]|ï»¿|\ufffd")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ue000-\uf8ff]")
TREEBANK = re.compile(r"-(?:lrb|rrb|lsb|rsb)-|</?s>|``|(?: n't| 's) ", re.IGNORECASE)
HTML = re.compile(r"</?(?:p|br|div|span|a|b|i|table|td|tr|li|ul|h[1-6])\b[^<>]*>|&(?:amp|nbsp|quot|lt|gt|#\d+);", re.I)
EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]*\w")
DIGITS = re.compile(r"\d(?:[ .()-]{0,3}\d){6}")  # what is in all of the next; begins with a set, which `re` finds fast
PHONE = re.compile(r"(?<![\w.])(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,4}\)|\d{3})[ .-]\d{3,4}[ .-]\d{3,4}(?![\w-])")
SOCIAL_SECURITY = re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])")
CARD = re.compile(r"(?<!\d)(?:\d[ -]?){12,18}\d(?!\d)")
MANY_TREEBANK = 2  # marks in one text, before it is called tokenized
TREEBANK_PARTS = ("b-", "s>", "``", " n't ", " 's ")  # one of them is in every mark, in lower case
LONG_ENOUGH = 60  # letters of a text that may be called all lower case


@dataclass
class Found:
    """A kind of problem: how many rows have it, and where the first are (``file:line``)."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, where: str) -> None:
        """Count one more row."""
        self.count += 1
        if len(self.first) < PLACES_SHOWN:
            self.first.append(where)


class Checks:
    """Looks at rows as they come by.

    Attributes:
        found: what was found, by the sentence that says it.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.found: dict[str, Found] = {}
        self._recipe = recipe
        self._seen: dict[bytes, tuple[bytes, str]] = {}  # of a prompt: digest of its completion, and where
        self._delimiters = delimiters_of(recipe)
        self._inputs = fields_of(recipe.prompt)

    def look(self, where: str, found: FieldTexts, prompt: str, completion: str) -> None:
        """Look at a row, before it is shortened."""
        self._look_for_repetition(where, prompt, completion)
        values = found.values
        for text in values.values():
            for what, shows in ODDITIES.items():
                if shows(text):
                    self._add(what, where)
        for name, text in values.items():
            for delimiter in self._delimiters:
                if delimiter in text:
                    self._add(f"the text of '{name}' has '{delimiter.strip()}' in it, as the template has", where)
        longest = max((len(values[name]) for name in self._inputs), default=0)
        if self._recipe.shorten in self._inputs and len(completion) > longest:
            self._add("the answer is longer than what it is drawn from", where)

    def _look_for_repetition(self, where: str, prompt: str, completion: str) -> None:
        asked, answered = _digest(prompt or completion), _digest(completion)
        before = self._seen.setdefault(asked, (answered, where))
        if before[1] == where:
            return
        if before[0] == answered:
            self._add("the same row again", where)
        else:
            self._add("the same question as another row, with another answer", where)

    def _add(self, what: str, where: str) -> None:
        self.found.setdefault(what, Found()).add(where)


def delimiters_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the texts of a prompt that a model takes for borders: what a line of its own begins with, and a colon."""
    texts = [line.strip() for text, _ in parse_template(recipe.prompt) for line in text.split("\n")]
    return tuple(dict.fromkeys("\n" + text for text in texts if text.endswith(":") and len(text) > 3))


def is_mojibake(text: str) -> bool:
    """Tell whether a text was decoded by a wrong table: ``Ã©`` for é, ``â€™`` for an apostrophe."""
    return ("Ã" in text or "â" in text or "Â" in text or "ï" in text or "\ufffd" in text) and bool(
        MOJIBAKE.search(text)
    )


def is_treebank(text: str) -> bool:
    """Tell whether a text is split into tokens as the Penn Treebank does (``-lrb-``, ``do n't``, ``<s>``)."""
    lowered = text.lower()
    if not any(part in lowered for part in TREEBANK_PARTS):
        return False
    return sum(1 for _, _ in zip(TREEBANK.finditer(text), range(MANY_TREEBANK), strict=False)) >= MANY_TREEBANK


def is_lower_case(text: str) -> bool:
    """Tell whether a text of some length has letters, and no capital among them (in scripts that have capitals)."""
    return len(text) >= LONG_ENOUGH and text.islower()


def has_personal_data(text: str) -> bool:
    """Tell whether there is something that looks like an address, a telephone, a social security or a card number."""
    if "@" in text and EMAIL.search(text):
        return True
    if not DIGITS.search(text):
        return False
    if PHONE.search(text) or SOCIAL_SECURITY.search(text):
        return True
    return any(_passes_luhn(match[0]) for match in CARD.finditer(text))


def _passes_luhn(text: str) -> bool:
    """Card numbers end with a check digit (https://www.iso.org/standard/70484.html, annex B)."""
    digits = [int(character) for character in text if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return len(set(digits)) > 1 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


ODDITIES: Mapping[str, Callable[[str], bool]] = {
    "letters that look wrongly decoded (Ã©, â€™): save the file as UTF-8 from its source": is_mojibake,
    "control characters": lambda text: bool(CONTROL.search(text)),
    "text split into Treebank tokens (-lrb-, do n't, <s>): the model would learn to write so": is_treebank,
    "no capital letter in a long text": is_lower_case,
    "HTML tags or entities": lambda text: ("<" in text or "&" in text) and bool(HTML.search(text)),
    "what looks like personal data (e-mail, telephone, social security or card number)": has_personal_data,
}


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.strip().encode(errors="replace"), digest_size=8).digest()
