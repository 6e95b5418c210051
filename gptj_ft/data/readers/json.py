"""Read JSON and JSON lines, holding at most one record of a file in memory.

An own incremental decoder, because the events of `ijson` carry no line numbers, which rows and errors need.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gptj_ft.data.readers.rows import Findings, Row, numbered_lines, text_chunks, too_long
from gptj_ft.data.readers.source import File
from gptj_ft.errors import DataError
from gptj_ft.system.plain_text import shortened


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; refuse a key that is there twice, of which Python would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(_repeated(next(key for key in found if keys.count(key) > 1)))
    return found


def _repeated(key: str) -> str:
    return f"the key '{shortened(key)}' is there twice"


def _float(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {shortened(digits)} is too large")
    return value


def _constant(name: str) -> None:
    """Return null for NaN, which programs write for a missing cell."""
    if name != "NaN":
        raise ValueError(f"{name} is no number")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
MESSAGE_KEYS = ({"role"}, {"from", "value"})  # keys of a conversation's message: OpenAI's or ShareGPT's
LONG_TEXT = 100  # characters; an object with a longer text is a row, not a wrapper of rows
LIST_TASKS = ("token-labels", "sentences")  # whose rows are lists of words or sentences
LISTS_SHOWN = 10
NOT_BLANK = re.compile(r"\S")
CUT_OFF = 16  # characters; a decoding error this near the end of the buffer may vanish once more text is read


def read_json_lines(file: File, findings: Findings) -> Iterator[Row]:
    """Read JSON lines: one object per line; blank lines are skipped."""
    return _rows_of_lines(file, findings, numbered_lines(file, findings))


def _rows_of_lines(file: File, findings: Findings, lines: Iterable[tuple[int, str]]) -> Iterator[Row]:
    source = str(file.path)
    for number, line in lines:
        if line.isspace():
            continue
        value = _parse_object(line)
        if isinstance(value, str):
            findings.add(file, number, value)
        else:
            yield Row(source, number, value)


def _parse_object(line: str) -> dict[str, Any] | str:
    """Return the object in a line, or a description of the problem."""
    text = line.rstrip("\r\n")
    try:
        value, end = DECODER.raw_decode(text)  # faster than `decode`
        if end == len(text) and isinstance(value, dict):
            return value
    except (ValueError, RecursionError):
        pass  # `decode` below gives the error message
    try:
        value = DECODER.decode(text)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} (column {error.colno})"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict):
        return f"expected an object {{...}}, found {_kind(value)}"
    return value


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null", dict: "an object"}
    return names.get(type(value), "a number")


def read_json_rows(file: File, findings: Findings) -> Iterator[Row]:
    """Read a list of objects, ``{"data": [...]}`` (flat or SQuAD), one object, or JSON lines.

    If the file is one object that contains a single list of objects, the rows are that list.
    """
    text = JsonText(file, text_chunks(file, findings))
    first, start = text.peek(), text.line
    if first == "[":
        yield from _rows_of(file, findings, text)
    elif first == "{":
        text.take()
        values: dict[str, Any] = {}
        lists: dict[str, Decoded] = {}
        keys: set[str] = set()
        has_rows = False
        while text.peek() != "}":
            if text.peek() != '"':
                text.expect('"', "Expecting property name enclosed in double quotes")
            key = text.value().value
            if key in keys:
                raise DataError(f"{file.path}:{text.line}: not JSON: {_repeated(key)}")
            keys.add(key)
            text.expect(":", "Expecting ':' delimiter")
            # The usual name for rows: stream them. Other values wait until the end shows whether they are rows.
            if key == "data" and text.peek() == "[":
                has_rows = True
                yield from _rows_of(file, findings, text)
            else:
                decoded = text.value()
                values[key] = decoded.value
                if _is_list_of_rows(decoded.value):
                    lists[key] = decoded
            if text.peek() != "}":
                text.expect(",", "Expecting ',' delimiter")
        text.take()
        end = text.line
        if has_rows and lists:
            raise _ambiguous(file, ["data", *lists])
        if lists and not has_rows and not text.peek() and _only_wraps(values):
            yield from _unwrapped(file, findings, lists, text.is_one_line)
        elif not has_rows:
            if not text.peek() and file.options.task not in LIST_TASKS and _is_columns(values):
                raise DataError(
                    f"{file.path}: its lists may be columns of many rows, or cells of one: write an object for each "
                    "row, or [{...}] around the only one"
                )
            yield Row(str(file.path), start, values)
        if text.peek():
            if has_rows or text.line == end:
                raise DataError(f"{file.path}:{text.line}: not JSON: more text after the end of the object")
            # More objects on later lines: these are JSON lines after all. Read them from the file again.
            rest = (line for line in numbered_lines(file, findings) if line[0] >= text.line)
            yield from _rows_of_lines(file, findings, rest)
    elif first:
        raise DataError(f"{file.path}: expected objects, found {_kind(text.value().value)}")


def _is_list_of_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _only_wraps(values: dict[str, Any]) -> bool:
    """Tell whether an object only wraps rows: it has no long text, and its lists are no conversations."""
    if any(isinstance(value, str) and len(value) > LONG_TEXT for value in values.values()):
        return False
    lists = [value for value in values.values() if _is_list_of_rows(value)]
    return not any(keys <= value[0].keys() for value in lists for keys in MESSAGE_KEYS)


def _is_columns(values: dict[str, Any]) -> bool:
    """Tell whether an object seems to hold columns: lists of one length, at least one of them of texts."""
    lists = list(values.values())
    if not all(isinstance(each, list) and len(each) > 1 for each in lists):
        return False
    is_plain = not any(isinstance(item, list | dict) for each in lists for item in each)
    has_texts = any(all(isinstance(item, str) for item in each) for each in lists)
    return is_plain and has_texts and len(set(map(len, lists))) == 1


def _ambiguous(file: File, lists: list[str]) -> DataError:
    names = ", ".join(f"'{shortened(name)}'" for name in lists[:LISTS_SHOWN])
    return DataError(f"{file.path}: the rows may be in any of {names}: write the right list to a file of its own")


def _unwrapped(file: File, findings: Findings, lists: dict[str, Decoded], is_one_line: bool) -> Iterator[Row]:
    """Yield the rows of the only list of objects in an object."""
    if len(lists) > 1:
        raise _ambiguous(file, list(lists))
    ((name, rows),) = lists.items()
    findings.note(f"{file.path}: the rows are taken from the list '{shortened(name)}'")
    text = JsonText(file, iter([rows.text]), rows.line)
    text.is_one_line = is_one_line
    yield from _rows_of(file, findings, text)


@dataclass(frozen=True)
class Decoded:
    """A JSON value, its text, and the line on which it starts."""

    value: Any
    text: str
    line: int


class JsonText:
    """Incremental JSON decoder that knows the line of each value.

    Args:
        line: line of its first character.
    """

    def __init__(self, file: File, chunks: Iterator[str], line: int = 1) -> None:
        self._file, self._chunks = file, chunks
        self._buffer, self._position, self.line = "", 0, line
        self._more()
        # In minified JSON every row is on line 1: records are counted instead.
        self.is_one_line = "\n" not in self._buffer.strip()

    def peek(self) -> str:
        """Return the next non-blank character; "" at the end."""
        blank = 0
        while True:
            if match := NOT_BLANK.search(self._buffer, self._position):
                self._advance(match.start())
                return match[0]
            blank += len(self._buffer) - self._position
            if blank > self._file.options.max_record:
                raise too_long(self._file, self.line)
            self._advance(len(self._buffer))
            if not self._more():
                return ""

    def take(self) -> None:
        self._advance(self._position + 1)

    def expect(self, character: str, complaint: str) -> None:
        """Skip the next character, which must be the given one."""
        if self.peek() != character:
            raise self._error(complaint, self._position)
        self.take()

    def value(self) -> Decoded:
        self.peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self._buffer, self._position)
            except json.JSONDecodeError as error:
                # An unterminated string is reported at its start, which may be far from the end of the buffer.
                may_go_on = error.msg.startswith("Unterminated") or error.pos >= len(self._buffer) - CUT_OFF
                if may_go_on and self._more():
                    continue
                raise self._error(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{self._file.path}:{self.line}: not JSON: {error}") from error
            if end == len(self._buffer) and self._more():
                continue  # a number may continue in the next chunk
            decoded = Decoded(value, self._buffer[self._position : end], self.line)
            self._advance(end)
            return decoded

    def _advance(self, position: int) -> None:
        self.line += self._buffer.count("\n", self._position, position)
        self._position = position

    def _more(self) -> bool:
        """Read at least as much text as is buffered, so that a long value is decoded only a few times."""
        if len(self._buffer) - self._position > self._file.options.max_record:
            raise too_long(self._file, self.line)
        rest, wanted = self._buffer[self._position :], max(1, len(self._buffer) - self._position)
        pieces, length = [rest], 0
        for chunk in self._chunks:
            pieces.append(chunk)
            length += len(chunk)
            if length >= wanted:
                break
        self._buffer, self._position = "".join(pieces), 0
        return length > 0

    def _error(self, message: str, position: int) -> DataError:
        line = self.line + self._buffer.count("\n", self._position, position)
        start = self._buffer.rfind("\n", 0, position)
        column = f" (column {position - start})" if start >= 0 or line == 1 else ""
        return DataError(f"{self._file.path}:{line}: not JSON: {message}{column}")


def _rows_of(file: File, findings: Findings, text: JsonText) -> Iterator[Row]:
    """Yield the rows of a list, starting at its ``[``: objects, or SQuAD articles."""
    text.take()
    number = index = 0
    while text.peek() != "]":
        item = text.value()
        if isinstance(item.value, dict) and "paragraphs" in item.value:
            for row in _questions(file, item, index, number, text.is_one_line):
                number += 1
                yield row
        else:
            number += 1
            line = number if text.is_one_line else item.line
            if isinstance(item.value, dict):
                yield Row(str(file.path), line, item.value)
            else:
                findings.add(file, line, f"expected an object {{...}}, found {_kind(item.value)}")
        index += 1
        if text.peek() != "]":
            text.expect(",", "Expecting ',' or ']'")
    text.take()


def _questions(file: File, article: Decoded, index: int, number: int, is_one_line: bool) -> Iterator[Row]:
    """Yield the questions of an article of SQuAD v1.1 or v2.0 (https://rajpurkar.github.io/SQuAD-explorer).

    Unanswerable questions (v2.0) have no answers.

    Args:
        index: position of the article in the list.
        number: questions yielded before it.
        is_one_line: whether the file is a single line; then a row's line is the number of its question.
    """
    position = 0
    try:
        for paragraph in article.value["paragraphs"]:
            for question in paragraph["qas"]:
                number += 1
                if not is_one_line:
                    # The decoder gives no positions. Ids are in file order: search for the next one.
                    position = max(position, article.text.find(json.dumps(question.get("id", "")), position))
                values = {
                    "title": article.value.get("title", ""),
                    "context": paragraph["context"],
                    "question": question["question"],
                    "id": question.get("id", ""),
                    "answers": {
                        "text": [answer["text"] for answer in question.get("answers", [])],
                        "answer_start": [answer.get("answer_start") for answer in question.get("answers", [])],
                    },
                }
                line = number if is_one_line else article.line + article.text.count("\n", 0, position)
                yield Row(str(file.path), line, values)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file.path}: not SQuAD's format: data[{index}], after question {number}: {error!r}"
        ) from error
