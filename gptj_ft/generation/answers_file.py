"""Answers in a file of JSON lines: each is there once and whole; neither a kill nor a power cut loses one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.system.files import (
    SHARED_FILE,
    create_file,
    hidden_name,
    open_file,
    read_bytes,
    read_text,
    sync_path,
    write_file,
)
from gptj_ft.system.lock import take

ROW = "row"  # of the input, from 0


class AnswersFile:
    """Lines, each with the row it belongs to; beside them, in ``NAME.settings.json``, what they were made of and how.

    Args:
        path: the file; new, or begun with the same settings.
        settings: rows, model and options that the answers depend on.

    Attributes:
        done: rows that are in the file.

    Raises:
        UsageError: the file is there and is of something else, or another process writes it.
        DataError: it has been changed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.done = path, set[int]()
        self._settings_path = _settings_path(path)
        self._text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        self._check_settings()
        try:
            self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, SHARED_FILE)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
        if not take(self._descriptor):
            os.close(self._descriptor)
            raise UsageError(f"{path} is being written by another process; wait until it ends")
        self._read()

    @staticmethod
    def setting_of(path: Path, name: str) -> Any:
        """Return a setting that a file of answers was made with; ``None`` if there is no such file."""
        try:
            return json.loads(read_text(_settings_path(path))).get(name)
        except (OSError, ValueError, AttributeError):
            return None

    def __enter__(self) -> AnswersFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._descriptor)

    def append(self, lines: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Add lines of rows that are not there yet; they are on the disk when this returns.

        Raises:
            ResourceError: the disk is full.
        """
        new = {row: line for row, line in lines if row not in self.done}
        text = "".join(json.dumps({ROW: row, **line}, ensure_ascii=False) + "\n" for row, line in new.items()).encode()
        try:
            while text:
                text = text[os.write(self._descriptor, text) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise ResourceError(
                f"cannot write {self.path}: {error.strerror or error}; make room, and the same command goes on"
            ) from error
        self.done |= new.keys()

    def finish(self) -> None:
        """Put the lines into the order of the rows."""
        lines = self._lines()
        ordered = sorted(lines, key=lambda line: int(line[ROW]))
        if lines == ordered:
            return
        whole = hidden_name(self.path, "sorted")
        with os.fdopen(create_file(whole, SHARED_FILE), "w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in ordered)
            file.flush()
            os.fsync(file.fileno())
        whole.replace(self.path)
        sync_path(self.path.parent)

    def _check_settings(self) -> None:
        if self._settings_path.is_file():
            there = read_text(self._settings_path)
            if there != self._text and self.path.exists():
                raise UsageError(
                    f"{self.path} is there and was made {_difference(there, self._text)}; name a new --output"
                )
            if there == self._text:
                return
        elif self.path.exists():
            raise UsageError(f"{self.path} is there already, and not of this command; name a new --output")
        try:
            write_file(self._settings_path, self._text, SHARED_FILE)
        except OSError as error:
            raise UsageError(f"cannot write {self._settings_path}: {error.strerror or error}") from error

    def _read(self) -> None:
        """Find the rows that are done; cut off a line that a kill has left unfinished."""
        content = read_bytes(self.path)
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._descriptor, whole)
        self.done = {int(line[ROW]) for line in self._lines()}

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        for number, text in enumerate(read_bytes(self.path).splitlines(), 1):
            try:
                line = json.loads(text)
                lines.append({**line, ROW: int(line[ROW])})
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{self.path}:{number}: not a line of this command; name a new --output") from error
        return lines


def _settings_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.settings.json")


def _difference(there: str, here: str) -> str:
    try:
        one, other = json.loads(there), json.loads(here)
        changed = [key for key in other if one.get(key) != other[key]]
    except (ValueError, AttributeError):
        changed = []
    return f"with other {' and '.join(changed)}" if changed else "otherwise"
