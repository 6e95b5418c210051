"""Map columns of the data to fields of the templates, and read cells as texts."""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import (
    ASSISTANT,
    MESSAGES,
    REPLY,
    SYSTEM,
    drop_trailing_messages,
    is_chat,
    read_conversation,
    texts_in,
)
from gptj_ft.data.chat_template import TOOLS, has_template
from gptj_ft.data.template import fields_of, render, stripped_fields
from gptj_ft.errors import DataError, RowSkipped, did_you_mean, listed
from gptj_ft.system.plain_text import quoted, shortened

LABEL = "label"  # field whose values the option `labels` translates
INPUT = "input"  # optional context of an instruction
TURNS = {  # role -> columns that form a conversation of one question and its answer, without a column of messages
    SYSTEM: ("system", "system_prompt"),
    "user": ("instruction", "prompt", "question", "query"),
    INPUT: ("input", "context"),
    ASSISTANT: ("output", "response", "completion", "answer", "reply"),
}
NOT_IN_A_NAME = ",;\t|"  # a "column" with one of these is probably a line with a wrong delimiter
JOINED = "+"  # joins the names of a field's several columns
RELATIONS = "relations"  # metric: each line is a fact, `subject | relation | object`


class FieldTexts(NamedTuple):
    """The texts of a row, ready for the templates."""

    values: dict[str, Any]  # field -> text, or `Conversation`; the first of several answers
    references: list[str]  # every acceptable completion, stripped; empty for plain text
    answer_at: int | None = None  # first character of the answer in the `shorten` field; None: it is not there
    warnings: tuple[str, ...] = ()  # about a row that can be used nevertheless


def recipe_fields(recipe: Recipe) -> tuple[str, ...]:
    """Return the fields of all templates that the data must fill, in order."""
    names = dict.fromkeys(input_fields(recipe) + fields_of(recipe.completion))
    return tuple(name for name in names if name != REPLY or not is_chat(recipe))


def input_fields(recipe: Recipe) -> tuple[str, ...]:
    """Return the fields that the model reads."""
    return tuple(dict.fromkeys(fields_of(recipe.prompt) + fields_of(recipe.pair)))


class UnknownColumn(DataError):
    """The column of a field is missing or ambiguous."""

    def __init__(self, message: str, field: str, choices: Sequence[str]) -> None:
        super().__init__(message)
        self.field, self.choices = field, tuple(choices)  # field of the templates; its possible columns


def choose_columns(names: Iterable[str], recipe: Recipe, fields: Sequence[str] | None = None) -> dict[str, str]:
    """Map each field to a column by its known names, ignoring case. No two fields share a column.

    If several columns match, the one with the field's name, or the recipe's first name for it, wins. A field of the
    answer may have several columns, each with an answer: ``summary1+summary2``, or ``summary*`` in a `map`.

    Args:
        names: the columns of the data.
        recipe: its option `fields` lists known names; other fields are known by their own name.
        fields: the fields needed; default: all fields of the templates.

    Raises:
        UnknownColumn: a field has no column, or ambiguous ones; the message says how to name one.
    """
    columns = list(names)
    if turns := _columns_of_turns(columns, recipe):
        return turns
    fields = recipe_fields(recipe) if fields is None else fields
    chosen = {field: _mapped(field, columns, recipe) for field in fields if field in recipe.map}
    if not_answers := [field for field, column in chosen.items() if len(columns_of(column, columns)) > 1
                       and (not recipe.prompt or field in fields_of(recipe.prompt))]:  # fmt: skip
        raise DataError(
            f"--map {not_answers[0]}={recipe.map[not_answers[0]]}: several columns mean several correct answers, but "
            f"'{not_answers[0]}' is an input; name each column in the template, e.g. {{{{ title }}}} {{{{ text }}}}"
        )
    if unknown := recipe.map.keys() - set(recipe_fields(recipe)):
        raise DataError(
            f"--map: the templates have no field '{min(unknown)}'; they have: {', '.join(recipe_fields(recipe))}"
        )
    for field in fields:
        if field not in chosen:
            taken = {each for column in chosen.values() for each in columns_of(column, columns)}
            free = [column for column in columns if column not in taken]
            chosen[field] = _recognised(field, free, recipe.fields.get(field, (field,)))
    return {field: chosen[field] for field in fields}


def _recognised(field: str, free: Sequence[str], names: Sequence[str]) -> str:
    """Return a field's column among those that no other field has."""
    # Exact names win over names that differ in case.
    # Reversed: of several columns that differ in case only, the first wins.
    by_name = {column.strip().casefold(): column for column in reversed(free)} | {column: column for column in free}

    def find(name: str) -> str | None:
        column = by_name.get(name) or by_name.get(name.strip().casefold())
        parts = name.split(JOINED)
        if column is None and len(parts) > 1:
            several = [match for part in parts if (match := find(part)) is not None]
            return JOINED.join(several) if len(several) == len(parts) else None
        return column

    matches = list(dict.fromkeys(match for match in map(find, names) if match is not None))
    if not matches:
        others = f"there are: {_listed(free)}" if free else "there is no other column"
        raise UnknownColumn(
            f"no column for '{field}': looked for {', '.join(names)}; {others}\n{_how_to_name(field, free)}",
            field,
            free,
        )
    # Several matches are unambiguous only if the first is the field's own name or the recipe's first name.
    if len(matches) > 1 and matches[0].strip().casefold() not in (field, names[0].strip().casefold()):
        raise UnknownColumn(
            f"'{field}' may be any of the columns {_listed(matches)}; there are: {_listed(free)}\n"
            f"choose one with --map {_pair(field, matches[0])}",
            field,
            matches,
        )
    return matches[0]


def _columns_of_turns(columns: Sequence[str], recipe: Recipe) -> dict[str, str]:
    """Map the columns of question and answer, if the recipe wants conversations and no column has messages."""
    names = {name.casefold() for name in recipe.fields.get(MESSAGES, (MESSAGES,))}
    if not is_chat(recipe) or MESSAGES in recipe.map or any(column.strip().casefold() in names for column in columns):
        return {}
    matches = {role: next((x for x in columns if x.strip().casefold() in of), None) for role, of in TURNS.items()}
    turns = {role: column for role, column in matches.items() if column is not None}
    return turns if {"user", ASSISTANT} <= turns.keys() else {}


def _mapped(field: str, columns: Sequence[str], recipe: Recipe) -> str:
    """Return the column that `--map` names for a field; several are joined by ``+``, in natural order."""
    option = recipe.map[field]
    if option in columns:
        return option
    several: dict[str, None] = {}
    for part in option.split(JOINED):
        matching = sorted(filter(re.compile(fnmatch.translate(part)).match, columns), key=_natural)
        if not matching:
            raise DataError(
                f"--map {field}={shortened(option)}: there is no such column"
                f"{did_you_mean(part, [name for name in columns if shortened(name) == name])}; there are: "
                f"{_listed(columns)}"
            )
        several |= dict.fromkeys([part] if part in columns else matching)
    return JOINED.join(several)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key of natural order: summary10 after summary9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def columns_of(column: str, existing: Container[str]) -> list[str]:
    """Split a field's column, as returned by `choose_columns`, at ``+``, unless a column of this name exists."""
    return [column] if column in existing or JOINED not in column else column.split(JOINED)


def is_column_for(column: str, names: Iterable[str]) -> bool:
    """Tell whether a column, or each of several joined ones, matches one of the names or patterns."""
    wanted = [name.strip().casefold() for name in names]
    if (whole := column.strip().casefold()) in wanted:
        return True
    patterns = [part for name in wanted for part in name.split(JOINED)]
    return all(any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns) for part in whole.split(JOINED))


def _how_to_name(field: str, free: Sequence[str]) -> str:
    """Return the option to type if no column is recognised."""
    separator = next((each for each in NOT_IN_A_NAME if len(free) == 1 and each in free[0]), None)
    if separator is not None:
        name = "tab" if separator == "\t" else quoted(separator)
        return f"if that is several columns, name their separator: --set delimiter={name}"
    return f"name yours with --map {_pair(field, free[0] if len(free) == 1 else '')}"


def _pair(field: str, column: str) -> str:
    """Return ``FIELD=COLUMN`` quoted for a shell; a name that cannot be typed becomes COLUMN."""
    can_be_typed = column.strip() and shortened(column) == column and not any(each in column for each in NOT_IN_A_NAME)
    return quoted(f"{field}={column}") if can_be_typed else f"{field}=COLUMN"


def _listed(columns: Sequence[str]) -> str:
    """List column names for a message, shortened: without a header they are the texts of the first row."""
    return listed(map(shortened, columns))


def cell_text(value: Any) -> str | None:
    """Convert a cell to text; join lists by blanks; return ``None`` for an empty cell.

    Raises:
        RowSkipped: the cell is an object.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, list):
        parts = [part for item in value if (part := cell_text(item)) is not None]
        return " ".join(parts) if parts else None
    raise RowSkipped("an object where text is expected")


def alternatives_of(value: Any) -> list[str]:
    """Return the answers in a cell: a text, a list of texts, or ``{"text": [...]}`` as in the Hub's SQuAD."""
    if isinstance(value, dict) and "text" in value:
        value = value["text"]
    items = value if isinstance(value, list) else [value]
    answers = [text for item in items if (text := cell_text(item)) is not None]
    return list(dict.fromkeys(answers))


class FieldReader:
    """Read the texts of a row's fields, and the acceptable completions.

    In a field of the completion, a list means alternative answers, of which the first is trained on, unless the recipe
    declares the column's lists to be sentences. In other fields, and in plain text, a list is joined. Several columns
    are alternatives too; empty ones are ignored. Texts are stripped, see `stripped_fields`.
    """

    def __init__(self, columns: Mapping[str, str], recipe: Recipe) -> None:
        self._columns, self._recipe, self._is_chat = columns, recipe, is_chat(recipe)
        inputs, outputs = set(fields_of(recipe.prompt)), set(fields_of(recipe.completion))
        self._answers = outputs - inputs if recipe.prompt else set()
        sentences = {name.casefold() for name in recipe.sentences}
        self._sentence_columns = {column for column in columns.values() if column.strip().casefold() in sentences}
        self._stripped = stripped_fields(recipe.prompt, recipe.completion)
        self._words = {key.strip().casefold(): word for key, word in recipe.labels.items()}

    def read(self, row: Mapping[str, Any]) -> FieldTexts:
        """Read a row.

        Raises:
            RowSkipped: a column is empty in this row, or its cell is not text.
        """
        if self._is_chat:
            return _read_chat(row, self._columns, has_template(self._recipe))
        recipe, answers, columns = self._recipe, self._answers, self._columns
        if (values := self._one_text_each(row)) is not None:
            if not answers or not answers <= columns.keys():
                return FieldTexts(values, [])
            completion = render(recipe.completion, values).strip()
            answer_at = _answer_at(row, columns, recipe, values, answers) if recipe.cut == "answer" else None
            return FieldTexts(values, [completion] if completion else [], answer_at)
        alternatives = {field: self._of_columns(field, column, row) for field, column in columns.items()}
        values = {field: texts[0] for field, texts in alternatives.items()}
        if not answers or not answers <= columns.keys():
            return FieldTexts(values, [])
        completions = []
        for choice in range(max(map(len, alternatives.values()))):
            # A field with fewer alternatives repeats its last one.
            chosen = {field: texts[min(choice, len(texts) - 1)] for field, texts in alternatives.items()}
            completions.append(render(recipe.completion, chosen).strip())
        references = [text for text in dict.fromkeys(completions) if text]
        return FieldTexts(values, references, _answer_at(row, columns, recipe, values, answers))

    def _one_text_each(self, row: Mapping[str, Any]) -> dict[str, str] | None:
        """Return field -> text if every cell is text, as in most rows: the fast path of `_alternatives`."""
        values = {}
        for field, column in self._columns.items():
            cell = row.get(column)
            if not isinstance(cell, str) or not is_unicode(cell):
                return None
            text = cell.strip() if field in self._stripped else cell
            values[field] = self._word_for(cell) if field == LABEL and self._words else text
        return values

    def _of_columns(self, field: str, column: str, row: Mapping[str, Any]) -> list[str]:
        """Return the texts of a field from all of its columns."""
        several = columns_of(column, row)
        if len(several) == 1:
            return self._alternatives(field, column, row.get(column))
        cells = [(each, row.get(each)) for each in several]
        alternatives = [self._alternatives(field, each, cell) for each, cell in cells if cell is not None]
        texts = [text for alternative in alternatives for text in alternative if text.strip()]
        if not texts:
            raise RowSkipped(f"no value for columns '{column}'")
        return list(dict.fromkeys(texts))

    def _alternatives(self, field: str, column: str, cell: Any) -> list[str]:
        is_answer = field in self._answers
        texts = [cell] if isinstance(cell, str) else self._texts_in(column, cell, is_answer)
        if not texts and is_answer and self._recipe.no_answer and isinstance(cell, list | dict):
            texts = [self._recipe.no_answer]
        if field == LABEL and self._words:
            texts = [self._word_for(label) for label in texts]
        if not texts:
            raise RowSkipped(f"no value for column '{shortened(column)}'")
        if not all(map(is_unicode, texts)):
            raise RowSkipped(f"column '{shortened(column)}': unpaired surrogate (invalid Unicode)")
        return [text.strip() for text in texts] if field in self._stripped else texts

    def _texts_in(self, column: str, cell: Any, is_answer: bool) -> list[str]:
        try:
            if isinstance(cell, list) and column in self._sentence_columns:
                items = map(_fact, cell) if RELATIONS in self._recipe.metrics else cell
                cell = "\n".join(part for item in items if (part := cell_text(item)) is not None)
            if is_answer:
                return alternatives_of(cell)
            text = cell_text(cell)
        except RowSkipped as reason:
            raise RowSkipped(f"column '{shortened(column)}': {reason}") from reason
        return [] if text is None else [text]

    def _word_for(self, label: str) -> str:
        """Translate a label of the data to its word; whole numbers may be written like 1.0."""
        text = label.strip().casefold()
        word = self._words.get(text) or self._words.get(text.removesuffix(".0"))
        if word is None:
            raise RowSkipped(f"label '{shortened(label.strip())}' is none of {', '.join(self._recipe.labels)}")
        return word


def _fact(item: Any) -> Any:
    """Write a fact that is a list of subject, relation and object as one text, as the metric reads it."""
    if not isinstance(item, list):
        return item
    parts = [cell_text(part) for part in item]
    if len(parts) != 3 or not all(parts):
        raise RowSkipped("a list of a fact has three texts: subject, relation, object")
    return " | ".join(part for part in parts if part)


def read_fields(row: Mapping[str, Any], columns: Mapping[str, str], recipe: Recipe) -> FieldTexts:
    """Read one row; see `FieldReader`."""
    return FieldReader(columns, recipe).read(row)


def _read_chat(row: Mapping[str, Any], columns: Mapping[str, str], for_template: bool) -> FieldTexts:
    answers = list[str]()  # of a single question
    if MESSAGES in columns:
        conversation = read_conversation(row.get(columns[MESSAGES]), for_template)
    else:
        answers = [text for text in alternatives_of(row.get(columns[ASSISTANT])) if text.strip()]
        cells = {role: cell_text(row.get(of)) or "" for role, of in columns.items() if role != ASSISTANT}
        question = "\n\n".join(text for text in (cells["user"], cells.get(INPUT, "")) if text.strip())
        contents = {SYSTEM: cells.get(SYSTEM, ""), "user": question, ASSISTANT: next(iter(answers), "")}
        turns = [{"role": role, "content": text} for role, text in contents.items() if role != SYSTEM or text.strip()]
        conversation = read_conversation(turns, for_template)
    used = drop_trailing_messages(conversation)
    values = {MESSAGES: used, **tools_of(row, for_template)}
    if not all(map(is_unicode, texts_in([*values.values(), answers]))):
        raise RowSkipped("unpaired surrogate (invalid Unicode)")
    dropped = len(conversation) - len(used)
    warnings = ("messages after the assistant's last one, which are left out",) if dropped else ()
    last = str(used[-1].get("content") or "")
    return FieldTexts(values, list(dict.fromkeys(text.strip() for text in answers or [last])), None, warnings)


def tools_of(row: Mapping[str, Any], for_template: bool) -> dict[str, Any]:
    """Return the functions that the assistant may call in a row, as the field of a chat template."""
    tools = row.get(TOOLS) if for_template else None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowSkipped("the tools are a text, not a list") from error
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RowSkipped("the tools are not a list of JSON schemas")
    return {TOOLS: tools} if tools else {}


def _answer_at(
    row: Mapping[str, Any], columns: Mapping[str, str], recipe: Recipe, values: Mapping[str, str], answers: set[str]
) -> int | None:
    """Return the answer's position in the document: as the data says, if that is correct, else by search."""
    if recipe.cut != "answer" or recipe.shorten not in values:
        return None
    document, whole = values[recipe.shorten], row.get(columns[recipe.shorten])
    stripped = whole.find(document) if isinstance(whole, str) else 0  # white space removed before the document
    for field in answers & values.keys():
        cell = row.get(columns[field])
        starts = cell.get("answer_start") if isinstance(cell, dict) else None
        start = starts[0] if isinstance(starts, list) and starts else None
        # answer_start counts from the unstripped text. Data sets may have wrong positions: verify.
        if isinstance(start, int) and start >= stripped and document.startswith(values[field], start - stripped):
            return start - stripped
        if (position := document.find(values[field])) >= 0:
            return position
    return None


def is_unicode(text: str) -> bool:
    """Tell whether a text is valid Unicode: JSON can spell lone surrogates, which no tokenizer accepts."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
