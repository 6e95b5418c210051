"""Collect the labels of a task: names, order of ids, number of rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gptj_ft.data.columns import is_unicode
from gptj_ft.data.readers.rows import PLACES_SHOWN, Occurrences
from gptj_ft.errors import DataError, RowSkipped
from gptj_ft.models.supported import MOST_LABELS
from gptj_ft.system.plain_text import shortened

RARE = 5  # a label of fewer rows causes a warning
NAMED = 8  # labels named in a message
# More labels than this, with fewer rows each, must be free texts or measurements.
MANY_LABELS, FEW_ROWS_EACH = 50, 2
WHOLE_NUMBER = re.compile(r"([+-]?\d+)\.0+")
INTEGER = re.compile(r"[+-]?\d{1,18}")
DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def label_text(text: str) -> str:
    """Normalize a label for comparison: strip it, and drop the decimal part of a whole number.

    >>> label_text(" 1.0 "), label_text("1.05"), label_text("v1.0")
    ('1', '1.05', 'v1.0')
    """
    text = text.strip()
    whole = WHOLE_NUMBER.fullmatch(text)
    return whole[1] if whole else text


class LabelSet:
    """The labels of a task.

    Their order is ``fixed``, else that of the recipe, else (after reading all rows) the model's if it has exactly the
    same names; else integers ascend and other names are sorted.

    Args:
        translations: value in the data -> name, in the order of ids; the recipe's `labels`.
        fixed: names in the order of ids, e.g. of the training rows when reading validation rows.
        known: names of the model, in its order.
    """

    def __init__(
        self, translations: Mapping[str, str] = {}, fixed: Sequence[str] = (), known: Sequence[str] = ()
    ) -> None:
        names = tuple(fixed) or tuple(dict.fromkeys(translations.values()))
        self._translations = translations
        self._words = {name.casefold(): name for name in translations.values()}
        self._words |= {key.strip().casefold(): name for key, name in translations.items()}
        self._is_fixed, self._known, self._names = bool(fixed), tuple(known), names
        self._ids = {name: number for number, name in enumerate(names)}
        self.rows: dict[str, Occurrences] = {name: Occurrences() for name in names}  # by name, in order of first rows

    def name_of(self, text: str) -> str:
        """Return the name of a label in the data.

        Raises:
            RowSkipped: the label is unknown or empty.
        """
        if not is_unicode(text):
            raise RowSkipped("the label has an unpaired surrogate (invalid Unicode)")
        name = label_text(text)
        if self._words:
            key = text.strip().casefold()
            # pandas writes integers as 1.0 if their column has gaps.
            word = self._words.get(key) or self._words.get(label_text(key))
            if word is None:
                raise RowSkipped(f"label '{shortened(name)}' is none of {', '.join(self._translations)}")
            name = word
        elif not name:
            raise RowSkipped("the label is empty")
        if self._names and name not in self._ids:
            whose = ", the labels of the training rows" if self._is_fixed else ""
            raise RowSkipped(f"label '{shortened(name)}' is none of {_listed(self._names)}{whose}")
        return name

    def add(self, name: str, where: str) -> int:
        """Count a label of a kept row; return its id, which `order` may change."""
        self.expect((name,))
        if len(self.rows) > MOST_LABELS:
            raise DataError(f"more than {MOST_LABELS:,} labels: probably this is not the column of labels")
        self.rows[name].add(where)
        return self._ids[name]

    def expect(self, names: Iterable[str]) -> None:
        """Register labels, even if no row has them."""
        for name in names:
            if name not in self._ids:
                self._ids[name] = len(self._ids)
                self.rows[name] = Occurrences()

    def order(self) -> tuple[str, ...]:
        """Return the names in the order of their ids."""
        if self._names:
            return self._names
        names = list(self.rows)
        if not names:
            return self._known
        if self._known and set(self._known) == set(names) and len(self._known) == len(names):
            return self._known
        if all(INTEGER.fullmatch(name) for name in names):
            return tuple(sorted(names, key=int))
        return tuple(sorted(names))

    def renumbering(self) -> NDArray[np.int32]:
        """Return the final id of each id returned by `add`."""
        number = {name: number for number, name in enumerate(self.order())}
        return np.array([number[name] for name in self.rows], np.int32)

    def counts(self) -> tuple[int, ...]:
        """Return the number of rows of each label, in the order of ids."""
        return tuple(self.rows[name].count if name in self.rows else 0 for name in self.order())

    def check(self, num_rows: int, fewest: int = 2, unit: str = "rows") -> None:
        """Check that the training rows can teach their labels.

        Args:
            num_rows: kept rows.
            fewest: labels needed.
            unit: the labelled things, in the plural.
        """
        labels = [name for name, rows in self.rows.items() if rows.count]
        if self._is_fixed or not num_rows:
            return
        if len(labels) < fewest:
            only = f"all have the label '{shortened(labels[0])}'" if labels else "none has a label"
            raise DataError(f"of the {num_rows:,} {unit} {only}: there is nothing to tell apart")
        if not self._names and len(labels) > max(MANY_LABELS, num_rows / FEW_ROWS_EACH):
            are_numbers = all(DECIMAL.fullmatch(name) for name in labels)
            advice = "for measurements use --set task=regression" if are_numbers else "free texts cannot be labels"
            raise DataError(
                f"{len(labels):,} labels in {num_rows:,} {unit}, e.g. {_listed(labels[:3])}: most occur only once; "
                f"{advice}"
            )

    def warnings(self, unit: str = "rows") -> dict[str, Occurrences]:
        """Warn of rare and absent labels, and of labels that differ only in case.

        Args:
            unit: the labelled things, in the plural.
        """
        warnings: dict[str, Occurrences] = {}
        rare = {name: rows for name, rows in self.rows.items() if 0 < rows.count < RARE}
        if rare and not self._is_fixed:
            named = ", ".join(f"'{shortened(name)}' {rows.count}" for name, rows in list(rare.items())[:NAMED])
            more = f" and {len(rare) - NAMED:,} more" if len(rare) > NAMED else ""
            places = [place for rows in rare.values() for place in rows.first][:PLACES_SHOWN]
            total = sum(rows.count for rows in rare.values())
            warnings[f"labels of fewer than {RARE} {unit}: {named}{more}"] = Occurrences(total, places)
        if absent := [name for name, rows in self.rows.items() if not rows.count]:
            warnings[f"labels that no row has: {_listed(absent)}"] = Occurrences(len(absent), [])
        spellings: dict[str, list[str]] = {}
        for name in self.rows:
            spellings.setdefault(name.casefold(), []).append(name)
        for names in spellings.values():
            if len(names) > 1:
                rarest = self.rows[min(names, key=lambda name: self.rows[name].count)]
                warnings[f"labels that differ in upper and lower case only: {_listed(names)}"] = rarest
        return warnings


def _listed(names: Sequence[str]) -> str:
    """List names for a message; of many, the first ones."""
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(f"'{shortened(name)}'" for name in names[:NAMED]) + more
