"""List runs: progress, losses, size on the disk; find and remove files that they no longer need."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptj_ft.config.run_folder import COMMIT, MANIFEST, Run
from gptj_ft.errors import GptjFtError, UsageError
from gptj_ft.system import files
from gptj_ft.system.digests import read_json
from gptj_ft.system.files import disk_bytes, files_in, hidden_name
from gptj_ft.system.lock import holder, locked
from gptj_ft.system.paths import RUNS, is_tuned, written_at
from gptj_ft.system.units import gigabytes


@dataclass(frozen=True)
class Summary:
    """A run at a glance.

    Attributes:
        folder: run folder.
        recipe: name of its preset.
        status: ``finished``, ``stopped``, or what a process is doing with it now: ``training``.
        process: process that works on it; ``None`` if there is none.
        step: steps done, or if the run is stopped those that it goes on from.
        steps: optimizer steps of the whole run; ``None`` if its rows are not there.
        saved_at: time at which its state or model was last written, seconds since 1970; ``None``: never.
        loss_before: validation loss before training.
        loss_after: the newest validation loss after that.
        checkpoints: steps of those there are.
        bytes: size on the disk.
        problem: reason why nothing more is known of it.
    """

    folder: str
    recipe: str
    status: str
    process: int | None
    step: int
    steps: int | None
    saved_at: float | None
    loss_before: float | None
    loss_after: float | None
    checkpoints: list[int]
    bytes: int
    problem: str | None = None

    @property
    def name(self) -> str:
        return Path(self.folder).resolve().name

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; times as ISO 8601."""
        saved_at = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.saved_at)) if self.saved_at else None
        return {"name": self.name, **asdict(self), "saved_at": saved_at}


@dataclass(frozen=True)
class Leftovers:
    """What a run does not need, and the disk space that is free without it."""

    run: str
    paths: list[Path]
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {"run": self.run, "paths": [str(path) for path in self.paths], "bytes": self.bytes}


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in some folders, each of them a run or a folder of runs; oldest first.

    Args:
        folders: none: ``runs`` in the working folder.

    Raises:
        UsageError: there is no such folder.
    """
    found = []
    for folder in folders or [RUNS]:
        if folders and not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: name a run, or a folder of runs")
        inside = [folder] if Run(folder).recipe_file.is_file() else folder.glob("*")
        found += [run for path in inside if (run := Run(path)).recipe_file.is_file() and path.name[:1] != "."]
    return sorted(found, key=lambda run: run.recipe_file.stat().st_mtime)


def summarize_run(run: Run) -> Summary:
    """Look at a run, which may be changing meanwhile; a damaged one is described as far as it can be read."""
    worker = holder(run.folder)
    is_finished = is_tuned(run.model)
    status = worker.work if worker else "finished" if is_finished else "stopped"
    checkpoints = list(run.whole_checkpoints())
    saved = [run.state / COMMIT, *(run.checkpoint(step) / MANIFEST for step in checkpoints)]
    lines = run.metrics()
    losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    name, steps, step, problem = "", None, 0, None
    try:
        recipe = run.recipe()
        name = recipe.recipe
        rows = run.data / "train" / MANIFEST
        steps = recipe.num_steps(read_json(rows)["windows"]) if rows.is_file() else None
        commit = run.last_commit()
        step = commit["step"] if commit else max(checkpoints, default=0)
    except (GptjFtError, KeyError) as error:
        problem = str(error)
    if is_finished or worker:
        step = max((line["step"] for line in lines if "loss" in line), default=step)
    return Summary(
        str(run.folder), name, status, worker.process if worker else None, step, steps,
        max(filter(None, (*map(_written_at, saved), written_at(run.model))), default=None),
        losses.get(0), next((losses[step] for step in sorted(losses, reverse=True) if step), None),
        checkpoints, disk_bytes(files_in(run.folder)), problem,
    )  # fmt: skip


def run_rows(runs: Sequence[Summary]) -> list[tuple[str, ...]]:
    """Return runs as rows of a table, under the names of its columns."""
    rows: list[tuple[str, ...]] = [("run", "recipe", "step", "saved", "status", "validation loss", "disk")]
    for run in runs:
        losses = [f"{loss:.4f}" for loss in (run.loss_before, run.loss_after) if loss is not None]
        saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.saved_at)) if run.saved_at else "never"
        rows.append(
            (
                run.folder, run.recipe, f"{run.step}/{run.steps or '?'}", saved,
                run.status + (f" ({run.process})" if run.process else ""), " -> ".join(losses) or "-",
                gigabytes(run.bytes) + (f"  {run.problem}" if run.problem else ""),
            )
        )  # fmt: skip
    return rows


@contextmanager
def leftovers(runs: Sequence[Run]) -> Iterator[list[Leftovers]]:
    """Find what runs do not need any more; nobody works on any of them before the end of the ``with`` block.

    A finished run needs neither state nor checkpoints. One that goes on needs everything but what a crash left behind.
    Of one that was killed before it had its name, there is nothing but what the crash left.

    Raises:
        UsageError: one of them is not a run, or in use.
        DataError: one holds a link to elsewhere.
    """
    with ExitStack() as stack:
        for run in runs:
            folder = hidden_name(run.folder, "starting")
            if run.recipe_file.is_file() or not folder.is_dir() or folder.is_symlink():
                run.recipe()
                folder = run.folder
            stack.enter_context(locked(folder, "cleaning"))
        yield [Leftovers(str(run.folder), paths := _not_needed(run), _freed_bytes(paths)) for run in runs]


def tidy(run: Run) -> None:
    """Remove what a run that is finished has left if it was cut off in its last moments; what it keeps stays."""
    for path in (*run.states, *_beside(run), *files.leftovers_in(run.folder)):
        files.discard(path)


def remove_leftovers(found: Leftovers) -> None:
    """Remove what `leftovers` has found.

    Raises:
        UsageError: it cannot be removed.
    """
    for path in found.paths:
        try:
            files.remove(path)
        except OSError as error:
            raise UsageError(f"cannot remove {path}: {error.strerror}") from error


def _written_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _not_needed(run: Run) -> list[Path]:
    whole = [path for path in (*run.states, run.checkpoints) if is_tuned(run.model) and path.exists()]
    if run.recipe_file.is_file() and not is_tuned(run.model):
        run.check_saved()
        if run.state.exists() and not (run.state / COMMIT).is_file():
            whole = [run.state]
    left = [path for path in files.leftovers_in(run.folder) if not any(path.is_relative_to(each) for each in whole)]
    return [*_beside(run), *left, *whole]


def _beside(run: Run) -> list[Path]:
    """Return the unfinished folders of a run of this name."""
    draft = hidden_name(run.folder, "starting")
    return [draft] if os.path.lexists(draft) else []


def _freed_bytes(paths: Sequence[Path]) -> int:
    """Return the space that is free once files are removed: not that of a file which keeps another name elsewhere."""
    files = [file for path in paths for file in (files_in(path) if path.is_dir() else [path])]
    found = {file: file.lstat() for file in files}
    names = Counter((status.st_dev, status.st_ino) for status in found.values())
    return disk_bytes(file for file, status in found.items() if names[status.st_dev, status.st_ino] == status.st_nlink)
