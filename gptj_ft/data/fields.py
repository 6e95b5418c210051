"""Which column of the data is which field of the templates, and what a cell says as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptj_ft.data.placeholders import fields_of, render
from gptj_ft.data.template import RowSkipped
from gptj_ft.errors import DataError, did_you_mean
from gptj_ft.recipe import Recipe

LABEL = "label"  # the field whose values `labels` translates
NAME_CHARACTERS, NAMES_SHOWN = 40, 20  # of columns, in messages


@dataclass(frozen=True)
class FieldTexts:
    """A row, ready for the templates.

    Attributes:
        values: field -> text; of several answers the first.
        references: every acceptable completion, stripped; empty for plain text.
    """

    values: dict[str, str]
    references: list[str]


def recipe_fields(recipe: Recipe) -> tuple[str, ...]:
    """Return the fields of both templates, in order."""
    return tuple(dict.fromkeys(fields_of(recipe.prompt) + fields_of(recipe.completion)))


def choose_columns(found: Iterable[str], recipe: Recipe, fields: Sequence[str] | None = None) -> dict[str, str]:
    """Return field -> column: for each field the first recognised name that is there, whatever its case.

    Args:
        found: the columns of the data.
        recipe: its `fields` name the columns recognised; a field not listed there is recognised by its own name.
        fields: those needed; all of the templates' by default. No two take the same column.

    Raises:
        DataError: a field has no column; says what was looked for, what there is, and how to name it.
    """
    columns = list(found)
    wanted = recipe_fields(recipe) if fields is None else fields
    chosen = {field: _mapped(field, columns, recipe) for field in wanted if field in recipe.map}
    if unknown := recipe.map.keys() - set(recipe_fields(recipe)):
        raise DataError(
            f"--map: '{min(unknown)}' is no field of the templates; they have: {', '.join(recipe_fields(recipe))}"
        )
    for field in wanted:
        if field in chosen:
            continue
        names = recipe.fields.get(field, (field,))
        free = [column for column in columns if column not in chosen.values()]
        # An exact name before one that differs in case.
        by_name = {column.strip().casefold(): column for column in reversed(free)} | {column: column for column in free}
        matches = (by_name.get(name) or by_name.get(name.strip().casefold()) for name in names)
        column = next((match for match in matches if match is not None), None)
        if column is None:
            raise DataError(
                f"no column for '{field}': looked for {', '.join(names)}; there are: {_listed(free)}\n"
                f"name yours with --map {field}=COLUMN"
            )
        chosen[field] = column
    return {field: chosen[field] for field in wanted}


def _mapped(field: str, columns: Sequence[str], recipe: Recipe) -> str:
    """Return the column that the user has named for a field."""
    column = recipe.map[field]
    if column not in columns:
        raise DataError(
            f"--map {field}={column}: there is no such column{did_you_mean(column, columns)}; there are: "
            f"{_listed(columns)}"
        )
    return column


def _listed(columns: Sequence[str]) -> str:
    """Return column names for a message; where the header is missing they are the first row's texts, so not in full."""
    names = [name if len(name) <= NAME_CHARACTERS else f"{name[:NAME_CHARACTERS]}..." for name in columns]
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more or "none"


def text_of(value: Any) -> str | None:
    """Return a cell as text; lists are joined by blanks; ``None`` if there is nothing.

    Raises:
        RowSkipped: an object.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        parts = [part for item in value if (part := text_of(item)) is not None]
        return " ".join(parts) if parts else None
    raise RowSkipped("an object where text is expected")


def alternatives_of(value: Any) -> list[str]:
    """Return the answers in a cell: a text, a list of them, or ``{"text": [...]}`` as in the Hub's SQuAD."""
    if isinstance(value, dict) and "text" in value:
        value = value["text"]
    items = value if isinstance(value, list) else [value]
    answers = [text for item in items if (text := text_of(item)) is not None]
    return list(dict.fromkeys(answers))


def read_fields(row: Mapping[str, Any], columns: Mapping[str, str], recipe: Recipe) -> FieldTexts:
    """Return the texts of a row's fields, and the acceptable completions.

    In a field of the completion a list means alternatives (the first is trained on), unless the recipe says that the
    column's lists are sentences; elsewhere, and in plain text, parts of one text.

    Raises:
        RowSkipped: a column has no value in this row, or one that is no text.
    """
    answers = set(fields_of(recipe.completion)) - set(fields_of(recipe.prompt)) if recipe.prompt else set()
    alternatives: dict[str, list[str]] = {}
    for field, column in columns.items():
        cell = row.get(column)
        try:
            if isinstance(cell, list) and _is_of_sentences(column, recipe):
                cell = "\n".join(part for item in cell if (part := text_of(item)) is not None)
            found = alternatives_of(cell) if field in answers else _as_list(text_of(cell))
        except RowSkipped as reason:
            raise RowSkipped(f"column '{column}': {reason}") from reason
        if not found and field in answers and recipe.no_answer and isinstance(cell, list | dict):
            found = [recipe.no_answer]
        if field == LABEL and recipe.labels:
            found = [_word_for(label, recipe) for label in found]
        if not found:
            raise RowSkipped(f"no value for column '{column}'")
        if any(not _is_unicode(text) for text in found):
            raise RowSkipped(f"column '{column}': half a surrogate pair, which is no character")
        alternatives[field] = found
    values = {field: found[0] for field, found in alternatives.items()}
    if not answers or not answers <= columns.keys():
        return FieldTexts(values, [])
    choices = max(len(found) for found in alternatives.values())
    completions = (
        render(recipe.completion, {field: found[min(choice, len(found) - 1)] for field, found in alternatives.items()})
        for choice in range(choices)
    )
    return FieldTexts(values, list(dict.fromkeys(text.strip() for text in completions if text.strip())))


def _word_for(label: str, recipe: Recipe) -> str:
    """Return the word for a label of the data; whole numbers may be written as 1.0 there.

    Raises:
        RowSkipped: it is not one of those that the recipe knows.
    """
    words = {key.strip().casefold(): word for key, word in recipe.labels.items()}
    text = label.strip().casefold()
    word = words.get(text) or words.get(text.removesuffix(".0"))
    if word is None:
        raise RowSkipped(f"label '{label.strip()[:40]}' is none of {', '.join(recipe.labels)}")
    return word


def _is_of_sentences(column: str, recipe: Recipe) -> bool:
    return column.strip().casefold() in {name.casefold() for name in recipe.sentences}


def _as_list(text: str | None) -> list[str]:
    return [] if text is None else [text]


def _is_unicode(text: str) -> bool:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
