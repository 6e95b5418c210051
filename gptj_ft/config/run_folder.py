"""Read and write the run folder: options, metrics, checkpoints, state, model. It is never overwritten."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gptj_ft import __version__
from gptj_ft.config.options import FREE_ON_RESUME, YOUNGER, Recipe
from gptj_ft.config.presets import load_options
from gptj_ft.config.resolve import build
from gptj_ft.errors import DataError, GptjFtError, UsageError
from gptj_ft.system.digests import digest_of, read_json, read_sealed, write_sealed
from gptj_ft.system.files import appending, discard, disk_errors, replace_text, require_plain, sync_path
from gptj_ft.system.jsonl import JsonLines
from gptj_ft.system.machine import cpu_kernels
from gptj_ft.system.paths import RUNS, is_tuned
from gptj_ft.system.plain_text import command_line, one_line, without_secrets

ENVIRONMENT_FILE = "environment.json"  # with what a run is computed, and on which machines
LAYERS = "layers"  # there: which process has which
COMMIT = "commit.json"  # in the state folder of a run whose whole state is on disk: its last step
MERGED = "merged"  # beside an adapter: the model with it
MANIFEST = "manifest.json"  # in a checkpoint, written last
STEP_FOLDER = re.compile(r"step-([0-9]{1,18})")  # a checkpoint's folder
START = "start"  # the name of no checkpoint: where a run began


class Run:
    """``runs/<name>/`` and the names in it.

    Attributes:
        folder: the run folder.
        recipe_file: the resolved recipe.
        record_file: the options that it was started with, and where it was last saved.
        base_file: digests of the model that it started from.
        metrics_file: one line for each step and validation.
        data: folder of the prepared rows.
        state: folder of what only an unfinished run needs.
        checkpoints: folder of the checkpoints.
        model: folder of the tuned model.
        writes: whether this process writes what the run has once; of several processes that share it, one does.
    """

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes
        self.recipe_file, self.record_file = folder / "recipe.yaml", folder / "run.json"
        self.base_file, self.metrics_file = folder / "base.json", folder / "metrics.jsonl"
        self.data, self.state = folder / "data", folder / "state"
        self.checkpoints, self.model = folder / "checkpoints", folder / "model"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint at a step."""
        return self.checkpoints / f"step-{step:06d}"

    def whole_checkpoints(self) -> dict[int, Path]:
        """Return the checkpoints by their steps, oldest first; half-written and half-removed ones are none."""
        found = {}
        for manifest in self.checkpoints.glob(f"step-*/{MANIFEST}"):
            if name := STEP_FOLDER.fullmatch(manifest.parent.name):  # not step-000120.tmp
                found[int(name[1])] = manifest.parent
        return dict(sorted(found.items()))

    def last_commit(self) -> dict[str, Any] | None:
        """Return the last commit of a run whose whole state is on disk; ``None`` if it has none.

        Raises:
            DataError: it is damaged.
        """
        return _read_saved(self.state / COMMIT) if (self.state / COMMIT).is_file() else None

    def manifest(self, step: int) -> dict[str, Any]:
        """Read the manifest of a checkpoint.

        Raises:
            DataError: that is missing, damaged, or of another step.
        """
        path = self.checkpoint(step) / MANIFEST
        values = _read_saved(path)
        if values["step"] != step:
            raise DataError(f"{path} is of step {values['step']}")
        return values

    def record(self) -> dict[str, Any]:
        """Return ``recipe``, the options that decide the run's numbers, and ``saved``, the file that it goes on from.

        Raises:
            DataError: the file is missing or damaged.
        """
        path = self.record_file
        if not path.is_file():
            raise DataError(
                f"{path} is missing: put it back from a copy of the run. A run that an earlier version of gptj-ft "
                "began has none, and has to be finished by that version"
            )
        values = read_sealed(path)
        if not isinstance(values.get("recipe"), dict) or not isinstance(values.get("saved"), str | None):
            raise DataError(f"{path} is not the record of a run")
        return values

    def start_record(self, recipe: Recipe) -> None:
        """Write the record of a new run: nothing has been saved yet."""
        write_sealed(self.record_file, {"recipe": deciding_options(recipe), "saved": None})

    def note_saved(self, path: Path | None) -> None:
        """Note which file the run goes on from, so that its loss is noticed; ``None``: from the start.

        It is written once for a run on disk, and for each checkpoint of another.
        """
        if not self.writes:
            return
        record, saved = self.record(), str(path.relative_to(self.folder)) if path else None
        if record["saved"] != saved:
            sync_path(self.folder)  # the name of the folder that it is in must not be lost with the note kept
            write_sealed(self.record_file, {**record, "saved": saved})

    def check_saved(self) -> None:
        """Check that what the run goes on from is there. Without this, a lost file would look like a run just begun.

        Raises:
            DataError: a file is missing; names it.
        """
        saved = self.record()["saved"]
        # A commit counts whatever was noted: it is replaced by a checkpoint, or left for one, after that was noted.
        if saved and not (self.state / COMMIT).is_file() and not (self.folder / saved).is_file():
            raise DataError(
                f"{self.folder / saved} is missing, which this run goes on from: put it back from a copy. Nothing was "
                f"changed; to go back to what is left, or to step 0, add --from CHECKPOINT or --from {START}"
            )

    def check_recipe(self, recipe: Recipe) -> None:
        """Check that the options which decide numbers are those that the run began with.

        Raises:
            DataError: one is not; names it.
        """
        began, now = self.record()["recipe"], deciding_options(recipe)
        for key in sorted(began.keys() | now.keys()):
            if began.get(key) != now.get(key):
                raise DataError(
                    f"{self.recipe_file}: {key} is {now.get(key)!r}, the run began with {began.get(key)!r}: put that "
                    "back, another value would make another run of it"
                )

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

    @property
    def states(self) -> list[Path]:
        """Folders of state, with the copies of processes that were killed."""
        return [self.state, *self.folder.glob("replica-*")]

    def discard_state(self) -> None:
        """Remove what only an unfinished run needs: the model holds the result."""
        if self.writes:
            for folder in self.states:
                discard(folder)

    def log(self, line: str) -> None:
        """Add a line, with the time, to ``log.txt``."""
        if not self.writes:
            return
        with appending(self.folder / "log.txt") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {one_line(line)}\n")

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        """Add a line to ``metrics.jsonl``, durably.

        Raises:
            ResourceError: the disk is full, or fails.
        """
        if self.writes:
            JsonLines(self.metrics_file, is_sealed=True).append(values)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of ``metrics.jsonl``, except those that `metrics_problems` reports."""
        return [line for _, line in self._metrics_lines() if line is not None]

    def metrics_problems(self, step: int = 0) -> list[str]:
        """Return the problems of ``metrics.jsonl``: damaged lines, and steps that have none.

        Args:
            step: the run has got to, at least. A step's line is on the disk before the step is committed.
        """
        lines = list(self._metrics_lines())
        found = {int(line["step"]) for _, line in lines if line and "loss" in line}
        problems, before = [], 0
        for number, (_, line) in enumerate(lines, start=1):
            if line is None:
                problems.append(f"{self.metrics_file}:{number}: damaged: a line that follows step {before}")
            else:
                before = line["step"]
        if missing := [at for at in range(1, max([step, *found]) + 1) if at not in found]:
            problems.append(f"{self.metrics_file}: no line for step {', '.join(map(str, missing[:9]))}")
        return problems

    def _metrics_lines(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Yield each line and its values, ``None`` if it is damaged."""
        is_sealed = self.record_file.is_file()  # not where an earlier version began the run
        for line, values in JsonLines(self.metrics_file, is_sealed).read():
            yield line, values if values and type(values.get("step")) is int else None

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines that a run resumed after a step will write again."""
        if not self.writes:
            return
        kept = [
            line
            for line, values in self._metrics_lines()
            # A validation comes before the step that follows it, so the one at the last step is done again too.
            # Damaged lines stay; somebody may still read something in them.
            if (step > 0 if values is None else values["step"] < step + ("loss" in values))
        ]
        JsonLines(self.metrics_file).replace(kept)


def steps_done(run: Run) -> int:
    """Return the optimizer steps that resuming a run would not do again."""
    last = run.last_commit()
    return int(last["step"]) if last else max(run.whole_checkpoints(), default=0)


def resume_command(run: Run) -> str:
    """Return the command that resumes a run."""
    return command_line("finetune", "--resume", run.folder)


def what_is_saved(run: Run, nothing: str = "nothing was saved yet") -> str:
    """Describe how far a run has got, by what is on the disk, and how to resume it.

    Args:
        run: the run; its folder need not exist yet.
        nothing: text where no step is saved.
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


def deciding_options(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe that decide numbers, as JSON has them; the model has digests of its own.

    Options that came later than runs that can be resumed count where they are not the default.
    """
    unset = {name for name in YOUNGER if getattr(recipe, name) == Recipe.model_fields[name].default}
    options = {key: value for key, value in recipe.to_dict().items() if key not in FREE_ON_RESUME | unset | {"model"}}
    return json.loads(json.dumps(options))  # type: ignore[no-any-return]


def recipe_digest(recipe: Recipe) -> str:
    """Return the digest of `deciding_options`, which every commit and checkpoint carries."""
    return digest_of(deciding_options(recipe))


def _read_saved(path: Path) -> dict[str, Any]:
    """Read a commit or the manifest of a checkpoint.

    Raises:
        DataError: missing, damaged, or of another form.
    """
    values = read_sealed(path)
    step, facts, update = (values.get(key) for key in ("step", "facts", "update"))
    if type(step) is not int or step < 0 or not isinstance(facts, dict) or not isinstance(update, dict | None):
        raise DataError(f"{path} is damaged: it does not say step and facts")
    return values


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


def environment_changes(run: Run, device: str, threads: int) -> str | None:
    """Describe what a run would compute with that it has not computed with before; ``None``: nothing. Writes nothing.

    Args:
        run: the run.
        device: device that computes.
        threads: number of CPU threads.
    """
    path = run.folder / ENVIRONMENT_FILE
    before = read_json(path) if path.is_file() else {}
    if before and device == "cpu":
        before.setdefault("kernels", "products of MKL")  # as it was before they were noted
    now = _computing(device, threads)
    changes = [
        f"{key} {one_line(str(before[key]))}, now {now[key]}"
        for key in ("torch", "device", "threads", *(["kernels"] if device == "cpu" else []))
        if key in before and before[key] != now[key]
    ]
    if not changes:
        return None
    return f"computed otherwise from here on, so results may change in their last bits: {'; '.join(changes)}"


def record_environment(run: Run, device: str, threads: int, chosen: Mapping[str, str]) -> None:
    """Write ``environment.json``: what a bit-identical repetition needs to be the same.

    Args:
        run: the run.
        device: device that computes.
        threads: number of CPU threads.
        chosen: values that the plan chose for options that say ``auto``.
    """
    if not run.writes:
        return
    facts = {
        "gptj_ft": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **_computing(device, threads),
        **chosen,
        "command": without_secrets(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    path = run.folder / ENVIRONMENT_FILE
    before = read_json(path) if path.is_file() else {}
    if LAYERS in before and "processes" in chosen:
        facts[LAYERS] = before[LAYERS]  # until they are where they are trained now
    write_json(path, facts)


def _computing(device: str, threads: int) -> dict[str, Any]:
    """Return the facts that the last bits of a run depend on."""
    import torch

    products = "oneDNN" if torch.backends.mkldnn.is_available() else "torch"  # type: ignore[no-untyped-call]
    kernels = f"{cpu_kernels()}, products of {products}"
    return {**_versions(), "device": device, "threads": threads, "kernels": kernels}


@cache
def _versions() -> dict[str, str]:
    """Look up the releases of the packages that numbers depend on, once in a process: each takes 2 ms."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "tokenizers", "datasets")}


def note_layers(run: Run, owners: Mapping[str, Sequence[int]]) -> None:
    """Write down in ``environment.json`` which process of a shared run has which layers, by name."""
    if run.writes and owners:
        path = run.folder / ENVIRONMENT_FILE
        texts = [f"{name}: {' '.join(map(str, layers))}" for name, layers in owners.items()]
        write_json(path, {**read_json(path), LAYERS: "; ".join(texts)})


def owner_of(run: Run, layer: int) -> str:
    """Return the name of the process that has had a layer, as `note_layers` has written it; empty: not known."""
    path = run.folder / ENVIRONMENT_FILE
    noted = read_json(path).get(LAYERS, "") if path.is_file() else ""
    owners = (text.rpartition(": ") for text in str(noted).split("; "))
    return next((one_line(name) for name, _, layers in owners if str(layer) in layers.split()), "")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically and durably.

    Raises:
        ResourceError: the disk is full, or fails.
    """
    with disk_errors(path):
        replace_text(path, json.dumps(values, indent=2) + "\n")
