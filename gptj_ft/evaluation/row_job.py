"""Resumable file of answers as JSON lines: each row once and whole, after a kill or a power cut, too."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from gptj_ft.errors import DataError, UsageError
from gptj_ft.system.files import SHARED_FILE, disk_errors, keep_folder, open_file, read_text, write_file
from gptj_ft.system.jsonl import JsonLines
from gptj_ft.system.lock import take
from gptj_ft.system.paths import make_home, part_of_home

ROW = "row"  # of the input, from 0


class OutputFile:
    """Lines, each with the row it belongs to; beside them, in ``NAME.settings.json``, what they were made of and how.

    Args:
        path: the file; new, or begun with the same settings.
        settings: rows, model and options that the answers depend on.
        output: file that the lines become in the end, beside which the settings are; default: the file itself.

    Attributes:
        done: rows that are in the file.

    Raises:
        UsageError: the file is there and is of something else, or another process writes it.
        DataError: it has been changed.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], output: Path | None = None) -> None:
        self.path, self._lines = path, JsonLines(path, mode=SHARED_FILE)
        self._output = output or path
        self._settings_path = _settings_path(self._output)
        self._text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        self._check_settings()
        with disk_errors(path, other=UsageError):
            self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT, SHARED_FILE)
        if not take(self._descriptor):
            os.close(self._descriptor)
            raise UsageError(f"{path} is being written by another process; wait until it ends")
        self.done = {row for row, _ in self._rows()}

    @staticmethod
    def setting_of(path: Path, name: str) -> Any:
        """Return a setting that a file of answers was made with; ``None`` if there is no such file."""
        try:
            return json.loads(read_text(_settings_path(path))).get(name)
        except (OSError, ValueError, AttributeError):
            return None

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._descriptor)

    def append(self, lines: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Add lines of rows that are not there yet; they are on the disk when this returns.

        Raises:
            ResourceError: the disk is full.
        """
        new = {row: line for row, line in lines if row not in self.done}
        self._lines.append(*({ROW: row, **line} for row, line in new.items()))
        self.done |= new.keys()

    def finish(self) -> None:
        """Put the lines into the order of the rows."""
        lines = self._rows()
        if (ordered := sorted(lines)) != lines:
            self._lines.replace(line for _, line in ordered)

    def _check_settings(self) -> None:
        is_there = self.path.exists() or self._output.exists()
        if self._settings_path.is_file():
            there = read_text(self._settings_path)
            if there != self._text and is_there:
                raise UsageError(
                    f"{self._output} is there and was made {_difference(there, self._text)}; name a new --output"
                )
            if there == self._text:
                return
        elif is_there:
            raise UsageError(f"{self._output} is there already, and not of this command; name a new --output")
        with disk_errors(self._settings_path, other=UsageError):
            write_file(self._settings_path, self._text, SHARED_FILE)

    def _rows(self) -> list[tuple[int, bytes]]:
        """Return the row of each line and the line, but for one that a kill has left unfinished."""
        rows = []
        for number, (line, values) in enumerate(self._lines.read(), 1):
            try:
                rows.append((int((values or {})[ROW]), line))
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{self.path}:{number}: not a line of this command; name a new --output") from error
        return rows


def _settings_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.settings.json")


def _difference(there: str, here: str) -> str:
    try:
        one, other = json.loads(there), json.loads(here)
        changed = [key for key in other if one.get(key) != other[key]]
    except (ValueError, AttributeError):
        changed = []
    return f"with other {' and '.join(changed)}" if changed else "otherwise"


class ResultCache:
    """Results by kind and row, in ``evaluations/`` in `home`, under a digest of all that they depend on.

    They may hold texts that a model wrote, so the file is removed when the evaluation is done.

    Args:
        facts: everything that the results depend on, as JSON holds it; the same facts name the same file.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.path = part_of_home("evaluations") / f"{digest[:32]}.jsonl"
        self._found: dict[str, dict[int, Any]] = {}
        for _, line in JsonLines(self.path, is_sealed=True).read():
            if line is not None:  # what a damaged one held is found out again
                found = {int(row): value for row, value in line["findings"].items()}
                self._found.setdefault(line["kind"], {}).update(found)

    def of(self, kind: str) -> dict[int, Any]:
        """Return the results of a kind, by row."""
        return self._found.setdefault(kind, {})

    def add(self, kind: str, findings: Mapping[int, Any]) -> None:
        """Add results, durably.

        Raises:
            ResourceError: they cannot be written.
        """
        self.of(kind).update(findings)
        with disk_errors(self.path):
            make_home()
            keep_folder(self.path.parent)
        by_row = {str(row): value for row, value in findings.items()}
        JsonLines(self.path, is_sealed=True).append({"kind": kind, "findings": by_row})

    def close(self) -> None:
        """Remove the file: all is known."""
        self.path.unlink(missing_ok=True)
