"""Read texts and pairs of texts with a label, several labels, or a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow

from gptj_ft.config.options import Recipe
from gptj_ft.data.columns import FieldReader, FieldTexts, cell_text, columns_of
from gptj_ft.data.dataset import document_hash
from gptj_ft.data.encoder import EncodedDocument, EncodedRow, RowCounts, Setting, TaskReader
from gptj_ft.data.labelled.assembly import (
    JOINT,
    add_special_tokens,
    check_stride,
    longest_first,
    num_special_tokens,
    truncate,
    windows_of,
)
from gptj_ft.data.labelled.label_order import renumbered, with_columns
from gptj_ft.data.labelled.labels import label_text
from gptj_ft.data.labelled.words import parsed_list
from gptj_ft.data.readers.rows import Row
from gptj_ft.data.table import SCHEMA, TokenTable, empty_lists, to_arrow, to_python
from gptj_ft.data.template import fields_of, render
from gptj_ft.data.tokenization import tokenize
from gptj_ft.errors import DataError, RowSkipped, UsageError
from gptj_ft.system.plain_text import shortened

LABEL_SEPARATORS = (";", "|", ",")  # between labels in one text; the first one that occurs in any row
YES, NO = frozenset(("1", "1.0", "true", "yes", "y", "t")), frozenset(("0", "0.0", "false", "no", "n", "f", "", "-"))


class RowLabels(NamedTuple):
    """The labels of a row, or its number."""

    names: Sequence[str] = ()
    value: float | None = None


class _Read(NamedTuple):
    fields: FieldTexts
    answer: RowLabels


class TextReader(TaskReader):
    """Read texts or pairs with one label each; base class of the readers of numbers and label sets."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        recipe, frame = setting.recipe, setting.frame
        self._is_pair = bool(recipe.pair)
        inputs = {*fields_of(recipe.prompt), *fields_of(recipe.pair)}
        self._inputs = FieldReader({name: of for name, of in setting.columns.items() if name in inputs}, recipe)
        self._targets = {name: of for name, of in setting.columns.items() if name in fields_of(recipe.completion)}
        self._cut_side = _cut_side(recipe)
        if not frame.exists:
            frame = frame._replace(middle=tuple(tokenize(setting.tokenizer, [JOINT])[0]))
        self._frame = frame
        self._room = recipe.max_length - num_special_tokens(frame, self._is_pair)
        if self._room < 1 + self._is_pair:
            raise UsageError(f"max_length: {recipe.max_length} tokens leave no room for a text")
        if recipe.on_long == "split":
            check_stride(recipe.stride, recipe.max_length, frame, self._is_pair)

    def read(self, row: Row) -> tuple[list[str], _Read]:
        recipe = self.setting.recipe
        fields = self._inputs.read(row.values)
        for name in (*fields_of(recipe.prompt), *fields_of(recipe.pair)):
            if not fields.values[name].strip():
                raise RowSkipped(f"the field '{name}' is empty")
        texts = [render(template, fields.values) for template in (recipe.prompt, recipe.pair) if template]
        answer = self._answer(row, fields.values) if self.setting.needs_target else RowLabels()
        self.setting.checks.check_row(row, fields, "\0".join(texts), ", ".join(answer.names))
        return texts, _Read(fields, answer)

    def row_of(self, row: Row, read: _Read, tokens: list[Any]) -> EncodedRow:
        pieces, tokens_cut = self._pieces(tokens)
        documents = []
        label, references, targets, values = self._labelled(row, read.answer)
        for first, second in pieces:
            ids, borders = add_special_tokens(self._frame, first, second)
            # An encoder is read at [CLS]. Of a decoder, only the last token has seen the whole text.
            mark = 0 if self._frame.exists else len(ids) - 1
            documents.append(EncodedDocument(ids, borders, (mark,), targets, values))
        group = document_hash(self.setting.recipe, read.fields.values)
        return EncodedRow(documents, group, label, references, tokens_cut)

    def finish(self, table: TokenTable, counts: RowCounts) -> TokenTable:
        if not self.setting.needs_target:
            return table
        self.setting.labels.check(counts.numbers["rows_kept"])
        return renumbered(table, self.setting.labels.renumbering())

    def warnings(self) -> dict[str, Any]:
        return self.setting.labels.warnings() if self.setting.needs_target else {}

    def _answer(self, row: Row, values: Mapping[str, Any]) -> RowLabels:
        """Read the label of a row.

        Raises:
            RowSkipped: it has none, several, or an unknown one.
        """
        names = dict.fromkeys(self.setting.labels.name_of(text) for text in self._target_texts(row, values))
        if len(names) > 1:
            raise RowSkipped("several labels in one row, which is for task=multi-label")
        return RowLabels(tuple(names))

    def _labelled(self, row: Row, answer: RowLabels) -> tuple[str, Sequence[str], Sequence[int], Sequence[float]]:
        """Return label, references, targets and values of a kept row; count its labels."""
        if not answer.names:
            return "", (), (0,), ()
        (name,) = answer.names
        return name, (name,), (self.setting.labels.add(name, row.where),), ()

    def _target_texts(self, row: Row, values: Mapping[str, Any]) -> list[str]:
        """Return the rendered completions: one, or one for each item of a list."""
        cells = {}
        for field, column in self._targets.items():
            cell = row.values.get(column)
            texts = [cell_text(item) for item in (cell if isinstance(cell, list) else [cell])]
            cells[field] = [text for text in texts if text is not None and text.strip()]
            if not cells[field]:
                raise RowSkipped(f"no value for column '{shortened(column)}'")
        count = max(map(len, cells.values()))
        chosen = [
            {field: texts[min(number, len(texts) - 1)] for field, texts in cells.items()} for number in range(count)
        ]
        return [render(self.setting.recipe.completion, {**values, **each}) for each in chosen]

    def _pieces(self, tokens: list[Any]) -> tuple[list[tuple[Sequence[int], Sequence[int] | None]], int]:
        """Return the tokens of the first and second text of each document, and the number of tokens lost."""
        first, second = tokens if self._is_pair else (tokens[0], None)
        if not len(first) or (second is not None and not len(second)):
            raise RowSkipped("no tokens")
        recipe, room = self.setting.recipe, self._room
        count = len(first) + len(second or ())
        if count <= room:
            return [(first, second)], 0
        if recipe.on_long == "skip":
            raise RowSkipped("longer than max_length")
        if recipe.on_long == "error":
            whole = recipe.max_length - room + count
            raise DataError(
                f"{whole} tokens, max_length is {recipe.max_length}; raise it, or set on_long to shorten, split or skip"
            )
        if recipe.on_long == "split":
            if second is None:
                return [(first[start:end], None) for start, end in windows_of(count, room, recipe.stride)], 0
            spans = windows_of(len(second), room - len(first), recipe.stride)
            return [(first, second[start:end]) for start, end in spans], 0
        if second is None:
            return [(truncate(first, room, recipe.cut), None)], count - room
        keep = self._lengths(len(first), len(second))
        return [(truncate(first, keep[0], recipe.cut), truncate(second, keep[1], recipe.cut))], count - room

    def _lengths(self, first: int, second: int) -> tuple[int, int]:
        """Return the number of tokens to keep of each text of a pair, see `longest_first`."""
        if self._cut_side is None:
            return longest_first(first, second, self._room)
        other = second if self._cut_side == 0 else first
        if other >= self._room:
            raise RowSkipped(f"too long: no room for any part of '{self.setting.recipe.shorten}'")
        return (self._room - other, other) if self._cut_side == 0 else (other, self._room - other)


def _cut_side(recipe: Recipe) -> int | None:
    """Return the text of a pair to truncate, 0 or 1; ``None``: the longer one."""
    if not recipe.shorten:
        return None
    return 0 if recipe.shorten in fields_of(recipe.prompt) else 1


class NumberReader(TextReader):
    """Read texts or pairs with a number each."""

    def _answer(self, row: Row, values: Mapping[str, Any]) -> RowLabels:
        texts = self._target_texts(row, values)
        try:
            (number,) = map(float, texts)
        except ValueError:
            raise RowSkipped(f"'{shortened(texts[0].strip())}' is not a number") from None
        if not math.isfinite(number):
            raise RowSkipped(f"'{texts[0].strip()}' is not a finite number")
        return RowLabels(value=number)

    def _labelled(self, row: Row, answer: RowLabels) -> tuple[str, Sequence[str], Sequence[int], Sequence[float]]:
        if answer.value is None:
            return "", (), (0,), ()
        return "", (repr(answer.value),), (0,), (answer.value,)

    def finish(self, table: TokenTable, counts: RowCounts) -> TokenTable:
        return table

    def warnings(self) -> dict[str, Any]:
        return {}


class SetReader(TextReader):
    """Read texts or pairs with any number of labels: in a list, in one text, or as one yes/no column per label."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if setting.needs_target and len(self._targets) != 1:
            raise UsageError(
                "completion: task=multi-label needs a single field, e.g. {{ label }}; for one column per label use "
                "--map label=first+second"
            )
        self._known = frozenset(setting.labels.rows)  # before any row: the order of rows must not matter
        self._separator = self._find_separator() if setting.needs_target else ""

    def _answer(self, row: Row, values: Mapping[str, Any]) -> RowLabels:
        (column,) = self._targets.values()
        several = columns_of(column, row.values)
        if len(several) > 1:
            # Each column is a label, even if no row has a yes in it.
            self.setting.labels.expect(map(self.setting.labels.name_of, several))
            labels = [name for name in several if self._is_yes(name, row.values.get(name))]
        else:
            labels = self._in_cell(row, column, row.values.get(column))
        names = dict.fromkeys(self.setting.labels.name_of(text) for text in labels)
        return RowLabels(tuple(names))

    def _in_cell(self, row: Row, column: str, cell: Any) -> list[str]:
        """Return the labels in a cell: the items of a list, or the parts of a text."""
        if cell is None:
            raise RowSkipped(f"no value for column '{shortened(column)}'")
        if isinstance(cell, dict):
            return [name for name, value in cell.items() if self._is_yes(name, value)]
        if isinstance(cell, str):
            cell = self._items_in(row, cell)
        items = cell if isinstance(cell, list) else [cell]
        texts = [text for item in items if (text := cell_text(item)) is not None]
        return [text for text in texts if text.strip()]

    def _items_in(self, row: Row, text: str) -> list[Any]:
        stripped = text.strip()
        if (items := parsed_list(stripped)) is not None:
            return items
        if label_text(stripped) in self._known:  # a label with a comma in its name
            return [stripped]
        separator = self._separator
        for other in LABEL_SEPARATORS:
            if separator and other != separator and other in stripped:
                warning = f"labels with '{other}' in their names, because other rows separate labels by '{separator}'"
                self.setting.checks.add(warning, row.where)
        if separator and separator in stripped:
            self.setting.checks.add(f"a text with several labels, separated by '{separator}'", row.where)
            return stripped.split(separator)
        return [stripped] if stripped else []

    def _find_separator(self) -> str:
        """Return the separator of all rows: a comma is one only if no row has a semicolon."""
        (column,) = self._targets.values()
        found = set[str]()
        for row in self.setting.rows():
            cell = row.values.get(column)
            if len(columns_of(column, row.values)) > 1 or LABEL_SEPARATORS[0] in found:
                break
            if isinstance(cell, str) and parsed_list(cell) is None and label_text(cell) not in self._known:
                found.update(separator for separator in LABEL_SEPARATORS if separator in cell)
        return next((separator for separator in LABEL_SEPARATORS if separator in found), "")

    def _is_yes(self, name: str, cell: Any) -> bool:
        """Tell whether the cell in a label's own column means yes.

        Raises:
            RowSkipped: it means neither yes nor no.
        """
        text = "" if cell is None else str(cell).strip().casefold()
        if text not in YES and text not in NO:
            raise RowSkipped(f"column '{shortened(name)}' has '{shortened(text)}', which is neither 1 nor 0")
        return text in YES

    def _labelled(self, row: Row, answer: RowLabels) -> tuple[str, Sequence[str], Sequence[int], Sequence[float]]:
        ids = [self.setting.labels.add(name, row.where) for name in answer.names]
        names = tuple(answer.names)
        return "; ".join(sorted(names)), names, ids, ()  # `finish` converts ids to values when all labels are known

    def finish(self, table: TokenTable, counts: RowCounts) -> TokenTable:
        labels = self.setting.labels
        if self.setting.needs_target:
            labels.check(counts.numbers["rows_kept"], fewest=1)
        count, ids = len(labels.rows), labels.renumbering()

        def change(columns: dict[str, pyarrow.Array]) -> dict[str, pyarrow.Array]:
            targets = columns["targets"]
            values = np.zeros((len(targets), count))
            for row, own_ids in enumerate(to_python(targets)):
                # `add` numbered the labels in the order of the rows. `ids` has their final numbers.
                values[row, ids[own_ids]] = 1.0
            kind = SCHEMA.field("values").type
            has_values = self.setting.needs_target
            return {
                "targets": to_arrow(SCHEMA.field("targets").type, [(0,)] * len(targets)),
                "values": to_arrow(kind, values.tolist()) if has_values else empty_lists(kind, len(targets)),
            }

        return with_columns(table, change)
