"""Compute results row by row and resume after an interruption: the job of `evaluate`, `predict` and `generate`.

Rows are grouped into batches that depend only on the rows and the settings. Batches with results on disk are skipped,
so a resumed job writes the same bytes as one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import Any

from gptj_ft.data.readers.cells import settings_file
from gptj_ft.errors import DataError, UsageError
from gptj_ft.system.files import disk_errors, keep_folder, open_file, read_text, write_file
from gptj_ft.system.jsonl import JsonLines
from gptj_ft.system.lock import take
from gptj_ft.system.paths import make_home, part_of_home
from gptj_ft.system.signals import stop_message

ROW = "row"  # key of the row's number, from 0
Line = Mapping[str, Any]
Progress = Callable[[int, int], None]  # called with (rows done, rows in all)


def pending_rounds(batches: Sequence[Sequence[int]], done: Set[int], size: int) -> Iterator[Sequence[int]]:
    """Yield the numbers of the batches that have rows to do, ``size`` at a time.

    Args:
        done: rows with results.
        size: number of model replicas, each of which computes one batch of a round.
    """
    pending = [number for number, rows in enumerate(batches) if not done >= set(rows)]
    return (pending[start : start + size] for start in range(0, len(pending), size))


def check_complete(done: Set[int], num_rows: int, place: Callable[[int], str]) -> None:
    """Check that every row has a result. A lost row is a bug, but scores and files without it would look complete.

    Args:
        place: function from a row's number to its place in a file.
    """
    missing = sorted(set(range(num_rows)).difference(done))
    if missing:
        lost = f"{len(missing):,} of {num_rows:,} rows are lost"
        raise DataError(f"{place(missing[0])} has no result, {lost}: this is a bug of gptj-ft, please report it")


class OutputFile:
    """JSON Lines output, one line per row; ``NAME.settings.json`` next to it holds the settings it was made with.

    Args:
        path: the file; new, or started with the same settings.
        settings: everything that determines the lines.
        output: final file if the lines are converted at the end; the settings are next to it. Default: ``path``.

    Raises:
        UsageError: the file exists with other settings, or another process is writing it.
    """

    done: set[int]  # rows in the file

    def __init__(self, path: Path, settings: Mapping[str, Any], output: Path | None = None) -> None:
        self.path, self._lines = path, JsonLines(path)
        self._output = output or path
        self._settings_path = settings_file(self._output)
        self._text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        with disk_errors(path, other=UsageError):
            self._descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
        # Hold the lock as long as the descriptor is open: two processes would append each row twice. Lock before the
        # settings are read: the second of two that start at the same time must not replace those of the first.
        if not take(self._descriptor):
            os.close(self._descriptor)
            raise UsageError(f"{path} is being written by another process; wait until it ends")
        try:
            self._check_settings()
            self.done = {row for row, _ in self._rows()}
        except BaseException:
            if self._is_empty and self._output != path:  # a hidden file, made above
                path.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise

    @staticmethod
    def setting_of(path: Path, name: str) -> Any:
        """Return one setting of an existing output file, or None."""
        try:
            return json.loads(read_text(settings_file(path))).get(name)
        except (OSError, ValueError, AttributeError):
            return None

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._descriptor)

    def write_batches(
        self,
        batches: Sequence[Sequence[int]],
        num_rows: int,
        compute: Callable[[Sequence[int]], Iterable[Iterable[Line]]],
        round_size: int = 1,
        progress: Progress | None = None,
    ) -> None:
        """Compute the batches that are not in the file yet, append their lines, then sort the file by row.

        Args:
            num_rows: number of rows that must be in the file at the end.
            compute: function from the numbers of some batches to the lines of each.
            round_size: number of batches that ``compute`` gets at a time.

        Raises:
            Interrupted: a signal; finished batches are in the file.
            ResourceError: the disk is full.
            DataError: a row got no line.
        """
        kept = f"rows are in {self.path}; the same command resumes there"
        with stop_message(lambda: f"stopped: {len(self.done):,} of {num_rows:,} {kept}"):
            for numbers in pending_rounds(batches, self.done, round_size):
                for number, lines in zip(numbers, compute(numbers), strict=False):
                    # Not strict: a shorter result must not lose the lines at hand. `check_complete` finds lost rows.
                    self.append(zip(batches[number], lines, strict=False))
                if progress:
                    progress(len(self.done), num_rows)
        self._sort()
        check_complete(self.done, num_rows, lambda row: f"{self._output}: row {row}")

    def append(self, lines: Iterable[tuple[int, Line]]) -> None:
        """Append lines of rows that are not in the file; they are on disk when this returns."""
        # A resumed batch computes all its rows again, because samples depend on the whole batch.
        new = {row: line for row, line in lines if row not in self.done}
        self._lines.append(*({ROW: row, **line} for row, line in new.items()))
        self.done |= new.keys()

    def _sort(self) -> None:
        # Batches group rows by length, so lines were appended in another order than the rows'.
        lines = self._rows()
        if (ordered := sorted(lines)) != lines:
            self._lines.replace(line for _, line in ordered)

    def _check_settings(self) -> None:
        # An empty file has nothing to lose: it was made above, or by a process that was killed here.
        exists = not self._is_empty or (self._output != self.path and self._output.exists())
        if self._settings_path.is_file():
            before = read_text(self._settings_path)
            if before == self._text:
                return
            if exists:
                changes = _changed_settings(before, self._text)
                raise UsageError(f"{self._output} exists and was made with other {changes}; name a new --output")
        elif exists:
            raise UsageError(f"{self._output} exists and was not made by this command; name a new --output")
        # Settings first: a crash here leaves settings without an output, which the next run may overwrite.
        with disk_errors(self._settings_path, other=UsageError):
            write_file(self._settings_path, self._text)

    @property
    def _is_empty(self) -> bool:
        return os.fstat(self._descriptor).st_size == 0

    def _rows(self) -> list[tuple[int, bytes]]:
        """Return row number and text of each whole line; a crash may have cut the last line short."""
        rows = []
        for number, (line, values) in enumerate(self._lines.read(), 1):
            try:
                rows.append((int((values or {})[ROW]), line))
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{self.path}:{number}: not a line of this command; name a new --output") from error
        return rows


class ResultCache:
    """Results of an unfinished evaluation by kind and row, in ``evaluations/`` in `home`.

    The file can contain generated text, so `close` deletes it as soon as the results are saved elsewhere.

    Args:
        facts: everything that determines the results, as JSON values; equal facts share a file.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.path = part_of_home("evaluations") / f"{digest[:32]}.jsonl"
        self._results: dict[str, dict[int, Any]] = {}
        for _, line in JsonLines(self.path, is_sealed=True).read():
            if line is not None:  # results in a damaged line are computed again
                results = {int(row): value for row, value in line["findings"].items()}
                self.of(line["kind"]).update(results)

    def of(self, kind: str) -> dict[int, Any]:
        """Return the results of a kind by row."""
        return self._results.setdefault(kind, {})

    def add(self, kind: str, results: Mapping[int, Any]) -> None:
        """Add results; they are on disk when this returns.

        Raises:
            ResourceError: the disk is full.
        """
        self.of(kind).update(results)
        with disk_errors(self.path):
            make_home()
            keep_folder(self.path.parent)
        by_row = {str(row): value for row, value in results.items()}
        JsonLines(self.path, is_sealed=True).append({"kind": kind, "findings": by_row})

    def close(self) -> None:
        self.path.unlink(missing_ok=True)


def _changed_settings(before: str, now: str) -> str:
    try:
        old, new = json.loads(before), json.loads(now)
        return " and ".join(key for key in new if old.get(key) != new[key]) or "settings"
    except (ValueError, AttributeError):
        return "settings"
