"""JSON and JSON lines -> rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from gptj_ft.data.rows import Row, numbered_lines, raise_first
from gptj_ft.errors import DataError


def read_json_lines(path: Path) -> Iterator[Row]:
    """One object a line; blank lines are no rows."""
    lines = numbered_lines(path)
    for number, line in lines:
        if line.isspace():
            continue
        value = _parse_object(line)
        if isinstance(value, str):
            later = ((n, _parse_object(text)) for n, text in lines if not text.isspace())
            bad = ((n, problem) for n, problem in later if isinstance(problem, str))
            raise_first(path, chain([(number, value)], bad))
        else:
            yield Row(str(path), number, value)


def _parse_object(line: str) -> dict[str, Any] | str:
    """Return the object in a line, or what is wrong with it."""
    try:
        value = json.loads(line.rstrip("\r\n"))
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


def read_json(path: Path) -> Iterator[Row]:
    """A list of objects, ``{"data": [...]}`` (flat or SQuAD), one object, or JSON lines after all."""
    text = "".join(line for _, line in numbered_lines(path))
    start = len(text) - len(text.lstrip())
    if start == len(text):
        return
    if text[start] == "[":
        yield from _read_list(path, text, start)
        return
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if text[end:].strip():
        yield from read_json_lines(path)
    elif not isinstance(value, dict):
        raise DataError(f"{path}: expected objects, found {_kind(value)}")
    elif not isinstance(value.get("data"), list):
        yield Row(str(path), 1, value)
    elif any(isinstance(item, dict) and "paragraphs" in item for item in value["data"]):
        yield from _read_squad(path, text, value["data"])
    else:
        yield from _read_list(path, text, text.index("[", text.index('"data"', start)))


def _read_list(path: Path, text: str, start: int) -> Iterator[Row]:
    """Decode a list element by element, so that each row knows its line. ``start`` is at the ``[``."""
    decoder, line_of = json.JSONDecoder(), _LineCounter(text)
    position, number = _skip_space(text, start + 1), 0
    while text[position : position + 1] != "]":
        number += 1
        try:
            value, end = decoder.raw_decode(text, position)
            end = _skip_space(text, end)
            if text[end : end + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{line_of(position, number)}: not JSON: {error}") from error
        line = line_of(position, number)
        if not isinstance(value, dict):
            raise DataError(f"{path}:{line}: expected an object {{...}}, found {_kind(value)}")
        yield Row(str(path), line, value)
        position = _skip_space(text, end + 1) if text[end] == "," else end


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1].isspace():
        position += 1
    return position


class _LineCounter:
    """(position, record) -> line, for positions that only grow; the record's number if all is one line."""

    def __init__(self, text: str) -> None:
        self.text, self.position, self.line = text, 0, 1
        self.single = "\n" not in text.strip()

    def __call__(self, position: int, record: int) -> int:
        self.line += self.text.count("\n", self.position, position)
        self.position = max(position, self.position)
        return record if self.single else self.line


def _read_squad(path: Path, text: str, articles: list[Any]) -> Iterator[Row]:
    """SQuAD v1.1 and v2.0 (https://rajpurkar.github.io/SQuAD-explorer): one row per question.

    A question that cannot be answered (v2.0) has no answers.
    """
    line_of, number, position = _LineCounter(text), 0, 0
    for index, article in enumerate(articles):
        try:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    number += 1
                    # The decoder gives no positions; ids come in file order, so the next occurrence is the question.
                    position = max(position, text.find(json.dumps(question.get("id", "")), position))
                    values = {
                        "title": article.get("title", ""),
                        "context": paragraph["context"],
                        "question": question["question"],
                        "id": question.get("id", ""),
                        "answers": [answer["text"] for answer in question.get("answers", [])],
                    }
                    yield Row(str(path), line_of(position, number), values)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: not SQuAD's form: data[{index}], after question {number}: {error!r}") from error
