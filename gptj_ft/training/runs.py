"""List runs with their progress, losses and size; find and remove files that they no longer need."""

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
from gptj_ft.config.saved_values import RowsCount, checked
from gptj_ft.errors import GptjFtError, UsageError
from gptj_ft.system import files
from gptj_ft.system.digests import read_json
from gptj_ft.system.files import disk_bytes, files_in, hidden_name
from gptj_ft.system.lock import holder, locked
from gptj_ft.system.paths import RUNS, is_tuned, written_at
from gptj_ft.system.units import gigabytes


@dataclass(frozen=True)
class Summary:
    """Summary of a run."""

    folder: str  # run folder
    recipe: str  # name of its preset
    status: str  # ``finished``, ``stopped``, or the activity of the process that uses it, such as ``training``
    process: int | None  # number of the process that uses it
    step: int  # steps done; of a stopped run, those that a resume keeps
    steps: int | None  # of the whole run; None if its rows are missing
    saved_at: float | None  # last write of state or model, seconds since 1970
    loss_before: float | None  # validation loss before training
    loss_after: float | None  # newest validation loss after training started
    checkpoints: list[int]  # steps of the checkpoints
    bytes: int  # size on disk
    problem: str | None = None  # damage that hides the other fields

    @property
    def name(self) -> str:
        return Path(self.folder).resolve().name

    def to_dict(self) -> dict[str, Any]:
        """Return the object of `--json`, with times in ISO 8601."""
        saved_at = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self.saved_at)) if self.saved_at else None
        return {"name": self.name, **asdict(self), "saved_at": saved_at}


@dataclass(frozen=True)
class Leftovers:
    """Files that a run does not need, and the disk space that their removal frees."""

    run: str
    paths: list[Path]
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {"run": self.run, "paths": [str(path) for path in self.paths], "bytes": self.bytes}


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in folders, oldest first.

    Args:
        folders: each is a run or a folder of runs; empty: ``runs`` in the working folder.
    """
    runs: dict[Path, Run] = {}  # by folder without links: a link beside its run is the same run
    for folder in folders or [RUNS]:
        if folders and not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: name a run, or a folder of runs")
        inside = [folder] if Run(folder).recipe_file.is_file() else folder.glob("*")
        for path in sorted(inside, key=Path.is_symlink):
            if (run := Run(path)).recipe_file.is_file() and path.name[:1] != ".":
                runs.setdefault(path.resolve(), run)
    return sorted(runs.values(), key=lambda run: run.recipe_file.stat().st_mtime)


def summarize_run(run: Run) -> Summary:
    """Summarize a run that may be changing; describe a damaged run as far as it can be read."""
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
        steps = recipe.num_steps(checked(RowsCount, read_json(rows), rows)["windows"]) if rows.is_file() else None
        commit = run.last_commit()
        step = commit["step"] if commit else max(checkpoints, default=0)
    except GptjFtError as error:
        problem = str(error)
    # While a process trains, metrics are newer than the last checkpoint.
    if is_finished or worker:
        step = max((line["step"] for line in lines if "loss" in line), default=step)
    return Summary(
        str(run.folder), name, status, worker.process if worker else None, step, steps,
        max(filter(None, (*map(_written_at, saved), written_at(run.model))), default=None),
        losses.get(0), next((losses[step] for step in sorted(losses, reverse=True) if step), None),
        checkpoints, disk_bytes(files_in(run.folder)), problem,
    )  # fmt: skip


def run_rows(runs: Sequence[Summary]) -> list[tuple[str, ...]]:
    """Return runs as rows of a table, after a row of column names."""
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
    """Find the files that runs do not need; the runs stay locked until the end of the ``with`` block.

    A finished run needs neither state nor checkpoints. An unfinished run needs everything except the leftovers of a
    crash. A run that was killed before it got its name needs nothing.

    Raises:
        UsageError: a folder is not a run, or is in use.
        DataError: a run contains a link out of its folder.
    """
    runs = list({run.folder.resolve(): run for run in runs}.values())
    with ExitStack() as stack:
        for run in runs:
            folder = hidden_name(run.folder, "starting")
            if run.recipe_file.is_file() or not folder.is_dir() or folder.is_symlink():
                run.recipe()
                folder = run.folder
            stack.enter_context(locked(folder, "cleaning"))
        yield [Leftovers(str(run.folder), paths := _not_needed(run), _freed_bytes(paths)) for run in runs]


def tidy(run: Run) -> None:
    """Remove state and temporary files of a finished run that was killed before it could do so."""
    for path in (*run.states, *_beside(run), *files.leftovers_in(run.folder)):
        files.discard(path)


def remove_leftovers(leftovers: Leftovers) -> None:
    """Remove the files that `leftovers` found; raise `UsageError` if one cannot be removed."""
    for path in leftovers.paths:
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
        # Without this check a lost commit would look like scratch, and cleaning would remove the state.
        run.check_saved()
        if run.state.exists() and not (run.state / COMMIT).is_file():
            whole = [run.state]
    left = [path for path in files.leftovers_in(run.folder) if not any(path.is_relative_to(each) for each in whole)]
    return [*_beside(run), *left, *whole]


def _beside(run: Run) -> list[Path]:
    """Return the hidden folder of a run with this name that was killed while starting."""
    draft = hidden_name(run.folder, "starting")
    return [draft] if os.path.lexists(draft) else []


def _freed_bytes(paths: Sequence[Path]) -> int:
    """Return the space that removing files frees; a file with another hard link elsewhere frees none."""
    files = [file for path in paths for file in (files_in(path) if path.is_dir() else [path])]
    statuses = {file: file.lstat() for file in files}
    links = Counter((status.st_dev, status.st_ino) for status in statuses.values())
    removed = (file for file, status in statuses.items() if links[status.st_dev, status.st_ino] == status.st_nlink)
    return disk_bytes(removed)
