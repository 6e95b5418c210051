"""Read and write the run folder: options, metrics, checkpoints, state, model. It is never overwritten."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

from gptj_ft import __version__
from gptj_ft.config.options import FREE_ON_RESUME, OLD_VALUES, YOUNGER, Recipe, field_of
from gptj_ft.config.presets import load_options
from gptj_ft.config.resolve import build
from gptj_ft.config.saved_values import Environment, MetricsLine, Record, SavedState, checked, is_valid
from gptj_ft.errors import DataError, GptjFtError, UsageError
from gptj_ft.system.digests import digest_of, read_json, read_sealed, write_sealed
from gptj_ft.system.files import (
    appending,
    discard,
    disk_error,
    disk_errors,
    hidden_name,
    replace_text,
    require_plain,
    sync_path,
)
from gptj_ft.system.jsonl import JsonLines
from gptj_ft.system.lock import holder
from gptj_ft.system.machine import cpu_kernels
from gptj_ft.system.paths import RUNS, is_tuned
from gptj_ft.system.plain_text import command_line, one_line, without_secrets

ENVIRONMENT_FILE = "environment.json"  # versions, device and machines of a run
LAYERS = "layers"  # key in ENVIRONMENT_FILE: the layers of each process
COMMIT = "commit.json"  # last step of a run from disk, in its state folder
MERGED = "merged"  # model with the adapter merged in, next to the adapter
MANIFEST = "manifest.json"  # written last: marks a checkpoint as complete
STEP_FOLDER = re.compile(r"step-([0-9]{1,18})")  # folder of a checkpoint
MOST_GAPS = 9  # in a message
START = "start"  # reserved name: the state before step 1


class Run:
    """Run folder ``runs/<name>/`` and its files."""

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self.folder = folder
        self.writes = writes  # True in exactly one of the processes that share a run
        self.recipe_file = folder / "recipe.yaml"  # resolved recipe
        self.record_file = folder / "run.json"  # options at the start, and the last save
        self.base_file = folder / "base.json"  # digests of the model that the run started from
        self.metrics_file = folder / "metrics.jsonl"  # a line for each step and each validation
        self.data = folder / "data"  # prepared rows
        self.state = folder / "state"  # removed when the run is finished
        self.checkpoints = folder / "checkpoints"
        self.model = folder / "model"  # tuned model

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint at a step."""
        return self.checkpoints / f"step-{step:06d}"

    def whole_checkpoints(self) -> dict[int, Path]:
        """Return the complete checkpoints by step, oldest first."""
        checkpoints = {}
        for manifest in self.checkpoints.glob(f"step-*/{MANIFEST}"):
            if name := STEP_FOLDER.fullmatch(manifest.parent.name):  # not step-000120.tmp
                checkpoints[int(name[1])] = manifest.parent
        return dict(sorted(checkpoints.items()))

    def last_commit(self) -> dict[str, Any] | None:
        """Return the last commit of a run from disk, or ``None``."""
        return _read_saved(self.state / COMMIT) if (self.state / COMMIT).is_file() else None

    def manifest(self, step: int) -> dict[str, Any]:
        """Read the manifest of a checkpoint.

        Raises:
            DataError: the manifest is missing, damaged, or of another step.
        """
        path = self.checkpoint(step) / MANIFEST
        values = _read_saved(path)
        if values["step"] != step:
            raise DataError(f"{path} belongs to step {values['step']}: `gptj-ft runs verify` names damaged checkpoints")
        return values

    def record(self) -> dict[str, Any]:
        """Return ``recipe``, the options that decide numbers, and ``saved``, the file that the run resumes from."""
        path = self.record_file
        if not path.is_file():
            raise DataError(
                f"{path} is missing: restore it from a copy of the run. A run started by an earlier version of gptj-ft "
                "has no such file; finish it with that version"
            )
        return checked(Record, read_sealed(path), path)

    def start_record(self, recipe: Recipe) -> None:
        """Write the record of a new run."""
        write_sealed(self.record_file, {"recipe": deciding_options(recipe), "saved": None})

    def note_saved(self, path: Path | None) -> None:
        """Record the file that the run resumes from; ``None``: it restarts.

        Called once for a run from disk, and after each checkpoint otherwise.
        """
        if not self.writes:
            return
        record, saved = self.record(), str(path.relative_to(self.folder)) if path else None
        if record["saved"] != saved:
            with disk_errors(self.folder):  # a power cut must not lose the saved file's folder and keep this record
                sync_path(self.folder)
            write_sealed(self.record_file, {**record, "saved": saved})

    def check_saved(self) -> None:
        """Check that the file to resume from exists; a run that lost it would look new."""
        saved = self.record()["saved"]
        # A commit always counts: it is removed only after its replacement was recorded.
        if saved and not (self.state / COMMIT).is_file() and not (self.folder / saved).is_file():
            raise DataError(
                f"{self.folder / saved} is missing, and this run resumes from it: restore it from a copy. Nothing was "
                f"changed. To resume from a checkpoint, or from step 0, add --from CHECKPOINT or --from {START}"
            )

    def check_recipe(self, recipe: Recipe) -> None:
        """Check that no option that decides numbers has changed since the run started."""
        start, now = self.record()["recipe"], deciding_options(recipe)
        for key in sorted(start.keys() | now.keys()):
            if start.get(key) != now.get(key):
                raise DataError(
                    f"{self.recipe_file}: {key} is {now.get(key)!r}, but the run started with {start.get(key)!r}: "
                    "restore that value, or start a new run"
                )

    def recipe(self) -> Recipe:
        """Return the recipe of the run. Every command that opens a run calls this first.

        Raises:
            UsageError: not a run folder.
            DataError: the folder contains a link to another place, a pipe or a device.
        """
        if not self.recipe_file.is_file():
            raise UsageError(f"{self.folder} is not a run folder: it has no recipe.yaml")
        require_plain(self.folder)
        return build({**OLD_VALUES, **load_options(self.recipe_file)})

    @property
    def states(self) -> list[Path]:
        """State folders, including those of killed replicas."""
        return [self.state, *self.folder.glob("replica-*")]

    def discard_state(self) -> None:
        """Remove the state of a finished run."""
        if self.writes:
            for folder in self.states:
                discard(folder)

    def log(self, line: str) -> None:
        """Append a line with the time to ``log.txt``."""
        if not self.writes:
            return
        path = self.folder / "log.txt"
        try:
            with appending(path) as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {one_line(line)}\n")
        except OSError as error:  # the command line has words for all others
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise disk_error(error, path, "make room, then repeat the command to continue") from error

    def append_metrics(self, values: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl`` durably."""
        if self.writes:
            JsonLines(self.metrics_file, is_sealed=True).append(values)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the undamaged lines of ``metrics.jsonl``."""
        return list(self.iter_metrics())

    def iter_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the undamaged lines of ``metrics.jsonl``."""
        return (line for _, line in self._metrics_lines() if line is not None)

    def metrics_problems(self, step: int = 0) -> list[str]:
        """Describe damaged lines of ``metrics.jsonl`` and steps without a line.

        Args:
            step: last committed step; its line was written before the commit.
        """
        lines = list(self._metrics_lines())
        steps = {int(line["step"]) for _, line in lines if line and "loss" in line}
        problems, before = [], 0
        for number, (_, line) in enumerate(lines, start=1):
            if line is None:
                problems.append(f"{self.metrics_file}:{number}: damaged line after step {before}")
            else:
                before = line["step"]
        # Gaps between steps, without listing them: a damaged step may be huge.
        ends = sorted({0, *steps, max([step, *steps]) + 1})
        gaps = [(last + 1, first - 1) for last, first in pairwise(ends) if first > last + 1]
        if gaps:
            named = ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in gaps[:MOST_GAPS])
            many, count = "" if gaps == [(gaps[0][0],) * 2] else "s", sum(last - first + 1 for first, last in gaps)
            total = f"{', ...' * (len(gaps) > MOST_GAPS)} ({count:,} of {ends[-1] - 1:,})"
            problems.append(f"{self.metrics_file}: no line for step{many} {named}{total}")
        return problems

    def _metrics_lines(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Yield each line and its values, ``None`` for a damaged line."""
        is_sealed = self.record_file.is_file()  # lines of earlier versions have no checksum
        for line, values in JsonLines(self.metrics_file, is_sealed).read():
            yield line, values if values and is_valid(MetricsLine, values) else None

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines that a run resumed after ``step`` will write again."""
        if not self.writes:
            return
        kept = [
            line
            for line, values in self._metrics_lines()
            # The validation at the last step is repeated too. Damaged lines stay: a person may still read them.
            if (step > 0 if values is None else values["step"] < step + ("loss" in values))
        ]
        JsonLines(self.metrics_file).replace(kept)


def steps_done(run: Run) -> int:
    """Return the number of saved optimizer steps."""
    last = run.last_commit()
    return int(last["step"]) if last else max(run.whole_checkpoints(), default=0)


def resume_command(run: Run) -> str:
    """Return the command that resumes a run."""
    return command_line("finetune", "--resume", run.folder)


def what_is_saved(run: Run, nothing: str = "nothing was saved yet") -> str:
    """Describe the saved progress of a run, and the command that resumes it.

    Args:
        run: the run; its folder may not exist yet.
        nothing: text if no step is saved.
    """
    if not run.recipe_file.is_file():
        return nothing
    if is_tuned(run.model):
        return f"all steps are done, and the tuned model is in {run.model}"
    try:
        steps = steps_done(run)
    except GptjFtError as error:
        return str(error)
    return f"{f'the run is saved at step {steps}' if steps else nothing}; resume with\n{resume_command(run)}"


def stopped(run: Run | None) -> str:
    """Describe a session that a signal stopped between steps; ``None``: its run has no folder yet."""
    nothing = "nothing was trained yet"
    return f"stopped; {what_is_saved(run, nothing) if run else nothing}"


def deciding_options(recipe: Recipe) -> dict[str, Any]:
    """Return the options that decide numbers, as JSON values; the model is checked by its own digests.

    An option of `YOUNGER` is left out if it has the value of runs before it existed.
    """
    options = {key: value for key, value in recipe.to_dict().items() if key not in FREE_ON_RESUME | {"model"}}
    for name in YOUNGER:
        group, _, own = name.rpartition(".")
        if attrgetter(name)(recipe) == OLD_VALUES.get(name, field_of(name).default):
            del (options[group] if group else options)[own]
            if group and not options[group]:  # the whole group is younger
                del options[group]
    return json.loads(json.dumps(options))  # type: ignore[no-any-return]


def recipe_digest(recipe: Recipe) -> str:
    """Return the digest of `deciding_options`; every commit and checkpoint contains it."""
    return digest_of(deciding_options(recipe))


def _read_saved(path: Path) -> dict[str, Any]:
    """Read a commit or the manifest of a checkpoint."""
    return checked(SavedState, read_sealed(path), path)


def choose_folder(recipe: Recipe) -> Path:
    """Return the folder of a new run."""
    if recipe.output is None:
        names = (RUNS / f"{recipe.recipe}-{number}" for number in range(1, sys.maxsize))
        return next(path for path in names if not path.exists() and holder(hidden_name(path, "starting")) is None)
    folder = Path(recipe.output).expanduser()
    if os.path.lexists(folder):
        run = Run(folder)
        other = f", or resume that run with `{resume_command(run)}`" if run.recipe_file.exists() else ""
        raise UsageError(f"{folder} exists: choose another --output{other}")
    return folder


def read_environment(run: Run) -> dict[str, Any]:
    """Read ``environment.json``; empty for a run without it."""
    path = run.folder / ENVIRONMENT_FILE
    return checked(Environment, read_json(path), path) if path.is_file() else {}


def environment_changes(run: Run, device: str, threads: int) -> str | None:
    """Describe changes of device, versions, threads or kernels since the run's last session, or return ``None``."""
    before = read_environment(run)
    if before and device == "cpu":
        before.setdefault("kernels", "products of MKL")  # before this was recorded
    now = _computing(device, threads)
    changes = [
        f"{key} {one_line(str(before[key]))}, now {now[key]}"
        for key in ("torch", "device", "threads", *(["kernels"] if device == "cpu" else []))
        if key in before and before[key] != now[key]
    ]
    if not changes:
        return None
    return f"environment changed; results may differ in their last bits: {'; '.join(changes)}"


def record_environment(run: Run, device: str, threads: int, chosen: Mapping[str, str]) -> None:
    """Write ``environment.json``: the facts that must be equal for a bit-identical repetition.

    Args:
        device: compute device.
        threads: number of CPU threads.
        chosen: values that the plan chose for ``auto`` options.
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
    path, before = run.folder / ENVIRONMENT_FILE, read_environment(run)
    if LAYERS in before and "processes" in chosen:
        facts[LAYERS] = before[LAYERS]  # until the layers have migrated to their new owners
    write_json(path, facts)


def _computing(device: str, threads: int) -> dict[str, Any]:
    """Return the facts that decide the last bits of a run."""
    import torch

    products = "oneDNN" if torch.backends.mkldnn.is_available() else "torch"  # type: ignore[no-untyped-call]
    kernels = f"{cpu_kernels()}, products of {products}"
    return {**_versions(), "device": device, "threads": threads, "kernels": kernels}


@cache
def _versions() -> dict[str, str]:
    """Look up the versions of the packages that compute, once per process: each takes 2 ms."""
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "tokenizers", "datasets")}


def note_layers(run: Run, owners: Mapping[str, Sequence[int]]) -> None:
    """Record the layers of each process of a shared run in ``environment.json``."""
    if run.writes and owners:
        path = run.folder / ENVIRONMENT_FILE
        texts = [f"{name}: {' '.join(map(str, layers))}" for name, layers in owners.items()]
        write_json(path, {**read_environment(run), LAYERS: "; ".join(texts)})


def owner_of(run: Run, layer: int) -> str:
    """Return the name of the process that last owned a layer, see `note_layers`; empty: unknown."""
    noted = read_environment(run).get(LAYERS, "")
    owners = (text.rpartition(": ") for text in str(noted).split("; "))
    return next((one_line(name) for name, _, layers in owners if str(layer) in layers.split()), "")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically and durably."""
    with disk_errors(path):
        replace_text(path, json.dumps(values, indent=2) + "\n")
