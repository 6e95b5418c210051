"""Map columns of the data to fields of the templates, and read cells as texts."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import ASSISTANT, MESSAGES, REPLY, SYSTEM, is_chat, read_conversation, up_to_the_last_answer
from gptj_ft.data.template import fields_of, render, stripped_fields
from gptj_ft.errors import DataError, RowSkipped, did_you_mean, listed
from gptj_ft.system.plain_text import quoted, shortened

LABEL = "label"  # the field whose values `labels` translates
INPUT = "input"  # what an instruction is about
# Columns that make a conversation of one question and its answer, where there is none of messages.
TURNS = {
    SYSTEM: ("system", "system_prompt"),
    "user": ("instruction", "prompt", "question", "query"),
    INPUT: ("input", "context"),
    ASSISTANT: ("output", "response", "completion", "answer", "reply"),
}
NOT_IN_A_NAME = ",;\t|"  # what rather separates two
JOINED = "+"  # between the columns of a field that has several


class FieldTexts(NamedTuple):
    """The fields of a row, ready for the templates.

    Attributes:
        values: field -> text, or `Conversation`; of several answers the first.
        references: every acceptable completion, stripped; empty for plain text.
        answer_at: first character of the answer in the `shorten` field; ``None``: it is not there.
        warnings: warnings about a row that can be used all the same.
    """

    values: dict[str, Any]
    references: list[str]
    answer_at: int | None = None
    warnings: tuple[str, ...] = ()


def recipe_fields(recipe: Recipe) -> tuple[str, ...]:
    """Return the fields of all templates that the data has to fill, in order."""
    names = dict.fromkeys(input_fields(recipe) + fields_of(recipe.completion))
    return tuple(name for name in names if name != REPLY or not is_chat(recipe))


def input_fields(recipe: Recipe) -> tuple[str, ...]:
    """Return the fields of what a model reads."""
    return tuple(dict.fromkeys(fields_of(recipe.prompt) + fields_of(recipe.pair)))


class UnknownColumn(DataError):
    """The column of a field is missing or ambiguous.

    Attributes:
        field: field of the templates.
        choices: the columns it may be.
    """

    def __init__(self, message: str, field: str, choices: Sequence[str]) -> None:
        super().__init__(message)
        self.field, self.choices = field, tuple(choices)


def choose_columns(found: Iterable[str], recipe: Recipe, fields: Sequence[str] | None = None) -> dict[str, str]:
    """Map each field to the one column of a recognised name, ignoring case.

    Of several, the one called as the field is, or as the recipe's first name for it, is taken; else it is not clear.
    A field of the answer may have several columns, each an answer: ``summary1+summary2``, or ``summary*`` in a `map`.

    Args:
        found: the columns of the data.
        recipe: its `fields` name the columns recognised; a field not listed there is recognised by its own name.
        fields: those needed; all of the templates' by default. No two take the same column.

    Raises:
        UnknownColumn: a field has no column, or several; says what was looked for, what there is, how to name it.
    """
    columns = list(found)
    if turns := _columns_of_turns(columns, recipe):
        return turns
    wanted = recipe_fields(recipe) if fields is None else fields
    chosen = {field: _mapped(field, columns, recipe) for field in wanted if field in recipe.map}
    if not_answers := [field for field, column in chosen.items() if len(columns_of(column, columns)) > 1
                       and (not recipe.prompt or field in fields_of(recipe.prompt))]:  # fmt: skip
        raise DataError(
            f"--map {not_answers[0]}={recipe.map[not_answers[0]]}: several columns are several right answers, and "
            f"'{not_answers[0]}' is no answer; name each in the template, e.g. {{{{ title }}}} {{{{ text }}}}"
        )
    if unknown := recipe.map.keys() - set(recipe_fields(recipe)):
        raise DataError(
            f"--map: '{min(unknown)}' is no field of the templates; they have: {', '.join(recipe_fields(recipe))}"
        )
    for field in wanted:
        if field not in chosen:
            taken = {each for column in chosen.values() for each in columns_of(column, columns)}
            free = [column for column in columns if column not in taken]
            chosen[field] = _recognised(field, free, recipe.fields.get(field, (field,)))
    return {field: chosen[field] for field in wanted}


def _recognised(field: str, free: Sequence[str], names: Sequence[str]) -> str:
    """Return the column of a field among those that no other field has."""
    # An exact name before one that differs in case.
    by_name = {column.strip().casefold(): column for column in reversed(free)} | {column: column for column in free}

    def known(name: str) -> str | None:
        found = by_name.get(name) or by_name.get(name.strip().casefold())
        parts = name.split(JOINED)
        if found is None and len(parts) > 1:
            several = [column for part in parts if (column := known(part)) is not None]
            return JOINED.join(several) if len(several) == len(parts) else None
        return found

    found = map(known, names)
    matches = list(dict.fromkeys(match for match in found if match is not None))
    if not matches:
        there = f"there are: {_listed(free)}" if free else "there is no other column"
        raise UnknownColumn(
            f"no column for '{field}': looked for {', '.join(names)}; {there}\n{_how_to_name(field, free)}",
            field,
            free,
        )
    if len(matches) > 1 and matches[0].strip().casefold() not in (field, names[0].strip().casefold()):
        raise UnknownColumn(
            f"'{field}' may be any of the columns {_listed(matches)}; there are: {_listed(free)}\n"
            f"say which with --map {_pair(field, matches[0])}",
            field,
            matches,
        )
    return matches[0]


def _columns_of_turns(columns: Sequence[str], recipe: Recipe) -> dict[str, str]:
    """Map the columns of question and answer, where the recipe wants conversations and no column holds messages."""
    names = {name.casefold() for name in recipe.fields.get(MESSAGES, (MESSAGES,))}
    if not is_chat(recipe) or MESSAGES in recipe.map or any(column.strip().casefold() in names for column in columns):
        return {}
    found = {role: next((x for x in columns if x.strip().casefold() in of), None) for role, of in TURNS.items()}
    turns = {role: column for role, column in found.items() if column is not None}
    return turns if {"user", ASSISTANT} <= turns.keys() else {}


def _mapped(field: str, columns: Sequence[str], recipe: Recipe) -> str:
    """Return the column that `--map` names for a field; several are joined by ``+``, in natural order."""
    named = recipe.map[field]
    if named in columns:
        return named
    several: dict[str, None] = {}
    for part in named.split(JOINED):
        matching = sorted(filter(re.compile(fnmatch.translate(part)).match, columns), key=_natural)
        if not matching:
            raise DataError(
                f"--map {field}={shortened(named)}: there is no such column"
                f"{did_you_mean(part, [name for name in columns if shortened(name) == name])}; there are: "
                f"{_listed(columns)}"
            )
        several |= dict.fromkeys([part] if part in columns else matching)
    return JOINED.join(several)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return the key of natural order: summary10 after summary9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def columns_of(column: str, there: Container[str]) -> list[str]:
    """Return the columns of a field: the one, or those joined by ``+``.

    Args:
        column: as `choose_columns` returns it.
        there: the columns of the data, or of a row.
    """
    return [column] if column in there or JOINED not in column else column.split(JOINED)


def is_column_for(column: str, names: Iterable[str]) -> bool:
    """Tell whether a column, or all of several, matches one of the names or patterns."""
    wanted = [name.strip().casefold() for name in names]
    if (whole := column.strip().casefold()) in wanted:
        return True
    patterns = [part for name in wanted for part in name.split(JOINED)]
    return all(any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns) for part in whole.split(JOINED))


def _how_to_name(field: str, free: Sequence[str]) -> str:
    """Return the option to type where no column is recognised."""
    separator = next((each for each in NOT_IN_A_NAME if len(free) == 1 and each in free[0]), None)
    if separator is not None:
        name = "tab" if separator == "\t" else quoted(separator)
        return f"if that is several columns, say what separates them: --set delimiter={name}"
    return f"name yours with --map {_pair(field, free[0] if len(free) == 1 else '')}"


def _pair(field: str, column: str) -> str:
    """Return ``FIELD=COLUMN`` quoted for a shell; COLUMN stands for a name that cannot be typed."""
    can_be_typed = column.strip() and shortened(column) == column and not any(each in column for each in NOT_IN_A_NAME)
    return quoted(f"{field}={column}") if can_be_typed else f"{field}=COLUMN"


def _listed(columns: Sequence[str]) -> str:
    """List column names for a message, shortened: without a header they are the first row's texts."""
    return listed(map(shortened, columns))


def cell_text(value: Any) -> str | None:
    """Convert a cell to text; lists are joined by blanks; ``None`` if it is empty.

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
        parts = [part for item in value if (part := cell_text(item)) is not None]
        return " ".join(parts) if parts else None
    raise RowSkipped("an object where text is expected")


def alternatives_of(value: Any) -> list[str]:
    """Return the answers in a cell: a text, a list of them, or ``{"text": [...]}`` as in the Hub's SQuAD."""
    if isinstance(value, dict) and "text" in value:
        value = value["text"]
    items = value if isinstance(value, list) else [value]
    answers = [text for item in items if (text := cell_text(item)) is not None]
    return list(dict.fromkeys(answers))


class FieldReader:
    """Reads the texts of a row's fields, and the acceptable completions.

    In a field of the completion a list means alternatives (the first is trained on), unless the recipe says that the
    column's lists are sentences; elsewhere, and in plain text, parts of one text. Of several columns each is an
    alternative, but for those in which a row has nothing. White space at the ends is left out, see `stripped_fields`.
    """

    def __init__(self, columns: Mapping[str, str], recipe: Recipe) -> None:
        self._columns, self._recipe, self._is_chat = columns, recipe, is_chat(recipe)
        inputs, outputs = set(fields_of(recipe.prompt)), set(fields_of(recipe.completion))
        self._answers = outputs - inputs if recipe.prompt else set()
        sentences = {name.casefold() for name in recipe.sentences}
        self._of_sentences = {column for column in columns.values() if column.strip().casefold() in sentences}
        self._stripped = stripped_fields(recipe.prompt, recipe.completion)
        self._words = {key.strip().casefold(): word for key, word in recipe.labels.items()}

    def read(self, row: Mapping[str, Any]) -> FieldTexts:
        """Read a row.

        Raises:
            RowSkipped: a column has no value in this row, or one that is no text.
        """
        if self._is_chat:
            return _read_chat(row, self._columns)
        recipe, answers, columns = self._recipe, self._answers, self._columns
        if (values := self._one_text_each(row)) is not None:
            if not answers or not answers <= columns.keys():
                return FieldTexts(values, [])
            completion = render(recipe.completion, values).strip()
            answer_at = _answer_at(row, columns, recipe, values, answers) if recipe.cut == "answer" else None
            return FieldTexts(values, [completion] if completion else [], answer_at)
        alternatives = {field: self._of_columns(field, column, row) for field, column in columns.items()}
        values = {field: found[0] for field, found in alternatives.items()}
        if not answers or not answers <= columns.keys():
            return FieldTexts(values, [])
        completions = []
        for choice in range(max(map(len, alternatives.values()))):
            chosen = {field: of[min(choice, len(of) - 1)] for field, of in alternatives.items()}
            completions.append(render(recipe.completion, chosen).strip())
        references = [text for text in dict.fromkeys(completions) if text]
        return FieldTexts(values, references, _answer_at(row, columns, recipe, values, answers))

    def _one_text_each(self, row: Mapping[str, Any]) -> dict[str, str] | None:
        """Return field -> text if every cell is a text, as most are: the fast path of `_alternatives`."""
        values = {}
        for field, column in self._columns.items():
            cell = row.get(column)
            if not isinstance(cell, str) or not _is_unicode(cell):
                return None
            text = cell.strip() if field in self._stripped else cell
            values[field] = self._word_for(cell) if field == LABEL and self._words else text
        return values

    def _of_columns(self, field: str, column: str, row: Mapping[str, Any]) -> list[str]:
        """Return the texts of a field, from all of its columns."""
        several = columns_of(column, row)
        if len(several) == 1:
            return self._alternatives(field, column, row.get(column))
        cells = [(each, row.get(each)) for each in several]
        found = [self._alternatives(field, each, cell) for each, cell in cells if cell is not None]
        texts = [text for of_one in found for text in of_one if text.strip()]
        if not texts:
            raise RowSkipped(f"no value for columns '{column}'")
        return list(dict.fromkeys(texts))

    def _alternatives(self, field: str, column: str, cell: Any) -> list[str]:
        is_answer = field in self._answers
        if isinstance(cell, str):
            found = [cell]
        else:
            found = self._texts_in(column, cell, is_answer)
        if not found and is_answer and self._recipe.no_answer and isinstance(cell, list | dict):
            found = [self._recipe.no_answer]
        if field == LABEL and self._words:
            found = [self._word_for(label) for label in found]
        if not found:
            raise RowSkipped(f"no value for column '{shortened(column)}'")
        if not all(map(_is_unicode, found)):
            raise RowSkipped(f"column '{shortened(column)}': half a surrogate pair, which is no character")
        return [text.strip() for text in found] if field in self._stripped else found

    def _texts_in(self, column: str, cell: Any, is_answer: bool) -> list[str]:
        try:
            if isinstance(cell, list) and column in self._of_sentences:
                cell = "\n".join(part for item in cell if (part := cell_text(item)) is not None)
            if is_answer:
                return alternatives_of(cell)
            text = cell_text(cell)
        except RowSkipped as reason:
            raise RowSkipped(f"column '{shortened(column)}': {reason}") from reason
        return [] if text is None else [text]

    def _word_for(self, label: str) -> str:
        """Translate a label of the data to its word; whole numbers may be written as 1.0 there."""
        text = label.strip().casefold()
        word = self._words.get(text) or self._words.get(text.removesuffix(".0"))
        if word is None:
            raise RowSkipped(f"label '{shortened(label.strip())}' is none of {', '.join(self._recipe.labels)}")
        return word


def read_fields(row: Mapping[str, Any], columns: Mapping[str, str], recipe: Recipe) -> FieldTexts:
    """Read one row; see `FieldReader`."""
    return FieldReader(columns, recipe).read(row)


def _read_chat(row: Mapping[str, Any], columns: Mapping[str, str]) -> FieldTexts:
    if MESSAGES in columns:
        conversation = read_conversation(row.get(columns[MESSAGES]))
    else:
        cells = {role: cell_text(row.get(column)) or "" for role, column in columns.items()}
        asked = "\n\n".join(text for text in (cells["user"], cells.get(INPUT, "")) if text.strip())
        contents = {SYSTEM: cells.get(SYSTEM, ""), "user": asked, ASSISTANT: cells[ASSISTANT]}
        turns = [{"role": role, "content": text} for role, text in contents.items() if role != SYSTEM or text.strip()]
        conversation = read_conversation(turns)
    used = up_to_the_last_answer(conversation)
    if any(not _is_unicode(message["content"]) for message in used):
        raise RowSkipped("half a surrogate pair, which is no character")
    left_out = len(conversation) - len(used)
    warnings = ("messages after the assistant's last one, which are left out",) if left_out else ()
    return FieldTexts({MESSAGES: used}, [used[-1]["content"]], None, warnings)


def _answer_at(
    row: Mapping[str, Any], columns: Mapping[str, str], recipe: Recipe, values: Mapping[str, str], answers: set[str]
) -> int | None:
    """Return the position of the answer in the document: as the data says, if that is right, else by search."""
    if recipe.cut != "answer" or recipe.shorten not in values:
        return None
    document, whole = values[recipe.shorten], row.get(columns[recipe.shorten])
    lost = whole.find(document) if isinstance(whole, str) else 0  # white space before it
    for field in answers & values.keys():
        cell = row.get(columns[field])
        told = cell.get("answer_start") if isinstance(cell, dict) else None
        start = told[0] if isinstance(told, list) and told else None
        if isinstance(start, int) and start >= lost and document.startswith(values[field], start - lost):
            return start - lost
        if (found := document.find(values[field])) >= 0:
            return found
    return None


def _is_unicode(text: str) -> bool:
    """Tell whether a text is Unicode: JSON can spell half a surrogate pair, which no tokenizer takes."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
