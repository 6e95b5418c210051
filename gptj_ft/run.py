"""A run folder: what a run was told, what it did, what it left. Never overwritten."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft import __version__
from gptj_ft.durable import append_text, appending, discard, read_text, replace_text, require_plain
from gptj_ft.errors import DataError, GptjFtError, ResourceError, UsageError
from gptj_ft.home import RUNS, is_tuned
from gptj_ft.plain_text import command_line, one_line, without_secrets
from gptj_ft.recipe import Recipe, build, load_options

COMMIT = "commit.json"  # in the state folder of a run whose whole state is on disk: its last step
MANIFEST = "manifest.json"  # in a checkpoint, written last


@dataclass(frozen=True)
class Run:
    """``runs/<name>/`` and the names in it."""

    folder: Path

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def base_file(self) -> Path:
        """The digests of the model that it reads and does not train all of."""
        return self.folder / "base.json"

    @property
    def metrics_file(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint at a step."""
        return self.checkpoints / f"step-{step:06d}"

    def whole_checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints by their steps, oldest first; half-written and half-removed ones are none."""
        found = {}
        for manifest in self.checkpoints.glob(f"step-*/{MANIFEST}"):
            number = manifest.parent.name.removeprefix("step-")
            if number.isdigit():  # not step-000120.tmp
                found[int(number)] = manifest.parent
        return dict(sorted(found.items()))

    def last_commit(self) -> dict[str, Any] | None:
        """Return the last commit of a run whose whole state is on disk; ``None`` if it has none."""
        return read_json(self.state / COMMIT) if (self.state / COMMIT).is_file() else None

    def recipe(self) -> Recipe:
        """Return the recipe that the run was started with; every command that opens a run begins with it.

        Raises:
            UsageError: this is not a run folder.
            DataError: it holds a link to elsewhere, a pipe or a device.
        """
        if not self.recipe_file.is_file():
            raise UsageError(f"{self.folder} is not a run folder: it has no recipe.yaml")
        require_plain(self.folder)
        return build(load_options(self.recipe_file))

    def discard_state(self) -> None:
        """Remove what only an unfinished run needs: the model holds the result."""
        discard(self.state)

    def log(self, line: str) -> None:
        """Add a line, with the time, to ``log.txt``."""
        with appending(self.folder / "log.txt") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {one_line(line)}\n")

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        """Add a line to ``metrics.jsonl``, durably.

        Raises:
            ResourceError: the disk is full, or fails.
        """
        try:
            append_text(self.metrics_file, json.dumps(values) + "\n")
        except OSError as error:
            raise ResourceError(f"cannot write {self.metrics_file}: {error.strerror}") from error

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl``; a last line cut short by a crash is left out."""
        lines = []
        if self.metrics_file.is_file():
            for text in read_text(self.metrics_file).splitlines():
                try:
                    lines.append(json.loads(text))
                except ValueError:
                    break
        return lines

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of what a run resumed after a step will do again."""
        # A validation comes before the step that follows it, so the one at the last step is done again too.
        kept = [json.dumps(line) for line in self.metrics() if line["step"] < step + ("loss" in line)]
        try:
            replace_text(self.metrics_file, "".join(f"{line}\n" for line in kept))
        except OSError as error:
            raise ResourceError(f"cannot write {self.metrics_file}: {error.strerror}") from error


def steps_done(run: Run) -> int:
    """Return the optimizer steps that resuming a run would not do again."""
    last = run.last_commit()
    return int(last["step"]) if last else max(run.whole_checkpoints(), default=0)


def resume_command(run: Run) -> str:
    """Return what to type to go on with a run."""
    return command_line("finetune", "--resume", run.folder)


def what_is_saved(run: Run, nothing: str = "nothing was saved yet") -> str:
    """Say, by what is on the disk, how far a run is, and how to go on with it.

    Args:
        run: it; its folder may not be there yet.
        nothing: said where no step is saved.
    """
    if not run.recipe_file.is_file():
        return nothing
    if is_tuned(run.model):
        return f"all steps are done, and the tuned model is in {run.model}"
    try:
        steps = steps_done(run)
    except GptjFtError as error:
        return str(error)
    return f"{f'the run is saved at step {steps}' if steps else nothing}; go on with\n{resume_command(run)}"


def stopped(run: Run | None) -> str:
    """Say that a signal has stopped a session outside of its steps; ``None``: of a run that has no folder yet."""
    nothing = "nothing was trained yet"
    return f"stopped; {what_is_saved(run, nothing) if run else nothing}"


def choose_folder(recipe: Recipe) -> Path:
    """Return the folder a run will use.

    Raises:
        UsageError: the named one exists.
    """
    if recipe.output is None:
        return next(path for n in range(1, sys.maxsize) if not (path := RUNS / f"{recipe.recipe}-{n}").exists())
    folder = Path(recipe.output).expanduser()
    if os.path.lexists(folder):
        resume = resume_command(Run(folder))
        raise UsageError(f"{folder} exists: name another --output, or continue it with `{resume}`")
    return folder


def record_environment(run: Run, device: str, threads: int, chosen: Mapping[str, str]) -> None:
    """Write ``environment.json``: what a bit-identical repetition needs to be the same; log if it is not any more.

    Args:
        run: where to.
        device: it computes on.
        threads: of the processor.
        chosen: what the plan made of options that say ``auto``.
    """
    from importlib.metadata import version

    packages = ("torch", "transformers", "tokenizers", "datasets", "safetensors")
    facts = {
        "gptj_ft": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: version(name) for name in packages},
        "device": device,
        "threads": threads,
        **chosen,
        "command": without_secrets(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    path = run.folder / "environment.json"
    before = read_json(path) if path.is_file() else {}
    changes = [
        f"{key} {before[key]}, now {facts[key]}"
        for key in ("torch", "device", "threads")
        if key in before and before[key] != facts[key]
    ]
    if changes:
        run.log(f"computed otherwise from here on, so results may change in their last bits: {'; '.join(changes)}")
    write_json(path, facts)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically and durably."""
    try:
        replace_text(path, json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        values = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} does not hold an object")
    return values
