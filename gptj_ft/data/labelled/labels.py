"""Know the labels of a task: their names, the order of their ids, how often each is there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gptj_ft.data.readers.rows import PLACES_SHOWN, Occurrences
from gptj_ft.errors import DataError, RowSkipped
from gptj_ft.models.supported import MOST_LABELS
from gptj_ft.system.plain_text import shortened

RARE = 5  # rows, below which a label is called rare
NAMED = 8  # labels named in a sentence
# From so many labels on, and for so many rows each, labels are taken for free texts or measurements.
MANY_LABELS, FEW_ROWS_EACH = 50, 2
WHOLE_NUMBER = re.compile(r"([+-]?\d+)\.0+")
INTEGER = re.compile(r"[+-]?\d{1,18}")
DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def label_text(text: str) -> str:
    """Return a label as it is compared: stripped, a whole number without its decimal point.

    >>> label_text(" 1.0 "), label_text("1.05"), label_text("v1.0")
    ('1', '1.05', 'v1.0')
    """
    text = text.strip()
    whole = WHOLE_NUMBER.fullmatch(text)
    return whole[1] if whole else text


class LabelSet:
    """The labels of a task.

    Their order is that given; else the recipe's; else, once all rows are read, the model's if it has exactly the names
    that were found; else integers rise, and other names are sorted.

    Args:
        translations: a value of the data -> its name, in the order of ids; the recipe's `labels`.
        given: names in the order of ids, as those of the training rows are for validation rows.
        known: the names that the model has, in its order.

    Attributes:
        found: name -> the rows that have it, in the order of their first rows.
    """

    def __init__(
        self, translations: Mapping[str, str] = {}, given: Sequence[str] = (), known: Sequence[str] = ()
    ) -> None:
        names = tuple(given) or tuple(dict.fromkeys(translations.values()))
        self._translations = translations
        self._words = {name.casefold(): name for name in translations.values()}
        self._words |= {key.strip().casefold(): name for key, name in translations.items()}
        self._given, self._known, self._fixed = bool(given), tuple(known), names
        self._ids = {name: number for number, name in enumerate(names)}
        self.found: dict[str, Occurrences] = {name: Occurrences() for name in names}

    def name_of(self, text: str) -> str:
        """Return the name of a label of the data.

        Raises:
            RowSkipped: it has none.
        """
        name = label_text(text)
        if self._words:
            key = text.strip().casefold()
            word = self._words.get(key) or self._words.get(label_text(key))
            if word is None:
                raise RowSkipped(f"label '{shortened(name)}' is none of {', '.join(self._translations)}")
            name = word
        elif not name:
            raise RowSkipped("the label is empty")
        if self._fixed and name not in self._ids:
            whose = ", the labels of the training rows" if self._given else ""
            raise RowSkipped(f"label '{shortened(name)}' is none of {_listed(self._fixed)}{whose}")
        return name

    def add(self, name: str, where: str) -> int:
        """Count a label of a row that is kept; return its id, which `order` may change.

        Raises:
            DataError: there are too many labels.
        """
        self.expect((name,))
        if len(self.found) > MOST_LABELS:
            raise DataError(f"more than {MOST_LABELS:,} labels: this is no task of labels, or another column's")
        self.found[name].add(where)
        return self._ids[name]

    def expect(self, names: Iterable[str]) -> None:
        """Note labels that there are, even if no row has one of them."""
        for name in names:
            if name not in self._ids:
                self._ids[name] = len(self._ids)
                self.found[name] = Occurrences()

    def order(self) -> tuple[str, ...]:
        """Return the names in the order of their ids."""
        if self._fixed:
            return self._fixed
        found = list(self.found)
        if not found:
            return self._known
        if self._known and set(self._known) == set(found) and len(self._known) == len(found):
            return self._known
        if all(INTEGER.fullmatch(name) for name in found):
            return tuple(sorted(found, key=int))
        return tuple(sorted(found))

    def renumbering(self) -> NDArray[np.int32]:
        """Return the final id of each id that `add` has returned."""
        place = {name: number for number, name in enumerate(self.order())}
        return np.array([place[name] for name in self.found], np.int32)

    def counts(self) -> tuple[int, ...]:
        """Return the number of rows that have each label, in the order of their ids."""
        return tuple(self.found[name].count if name in self.found else 0 for name in self.order())

    def check(self, rows: int, fewest: int = 2, what: str = "rows") -> None:
        """Check that the training rows can teach their labels.

        Args:
            rows: those that are kept.
            fewest: labels that are needed.
            what: name of the things that have a label, in the plural; default: rows.

        Raises:
            DataError: there are fewer labels, or so many that they are none.
        """
        there = [name for name, of in self.found.items() if of.count]
        if self._given or not rows:
            return
        if len(there) < fewest:
            only = f"all have the label '{shortened(there[0])}'" if there else "none has a label"
            raise DataError(f"of the {rows:,} {what} {only}: there is nothing to tell apart")
        if not self._fixed and len(there) > max(MANY_LABELS, rows / FEW_ROWS_EACH):
            are_numbers = all(DECIMAL.fullmatch(name) for name in there)
            other = "a measurement is learnt by --set task=regression" if are_numbers else "texts are no labels"
            raise DataError(
                f"{len(there):,} labels in {rows:,} {what}, e.g. {_listed(there[:3])}: most are there only once; "
                f"{other}"
            )

    def warnings(self, what: str = "rows") -> dict[str, Occurrences]:
        """Warn of rare and absent labels, and of labels that differ in case only.

        Args:
            what: name of the things that have a label, in the plural; default: rows.
        """
        warnings: dict[str, Occurrences] = {}
        rare = {name: of for name, of in self.found.items() if 0 < of.count < RARE}
        if rare and not self._given:
            named = ", ".join(f"'{shortened(name)}' {of.count}" for name, of in list(rare.items())[:NAMED])
            more = f" and {len(rare) - NAMED:,} more" if len(rare) > NAMED else ""
            places = [place for of in rare.values() for place in of.first][:PLACES_SHOWN]
            total = sum(of.count for of in rare.values())
            warnings[f"labels of fewer than {RARE} {what}: {named}{more}"] = Occurrences(total, places)
        if absent := [name for name, of in self.found.items() if not of.count]:
            warnings[f"labels that no row has: {_listed(absent)}"] = Occurrences(len(absent), [])
        spellings: dict[str, list[str]] = {}
        for name in self.found:
            spellings.setdefault(name.casefold(), []).append(name)
        for names in spellings.values():
            if len(names) > 1:
                rarest = self.found[min(names, key=lambda name: self.found[name].count)]
                warnings[f"labels that differ in upper and lower case only: {_listed(names)}"] = rarest
        return warnings


def _listed(names: Sequence[str]) -> str:
    """List names for a sentence, the first of many."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(f"'{shortened(name)}'" for name in names[:NAMED]) + more
