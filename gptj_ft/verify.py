"""Every file of a run, read and compared with what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptj_ft.data.prepare import load
from gptj_ft.errors import DataError, UsageError
from gptj_ft.families import read_architecture
from gptj_ft.formats.adapters import base_folder, open_adapter
from gptj_ft.formats.huggingface import check, open_checkpoint
from gptj_ft.formats.shards import open_shard
from gptj_ft.home import is_adapter, is_model
from gptj_ft.lock import locked
from gptj_ft.run import COMMIT, MANIFEST, Run, read_json
from gptj_ft.selection import select
from gptj_ft.stores import PART_NUMEL, Layout
from gptj_ft.stores.statefile import StateFile, layer_path
from gptj_ft.tuning import read_tuning
from gptj_ft.unchanged import check_unchanged

STATE_KINDS = {"weight", "exp_avg", "exp_avg_sq"}  # and ``master``, where the computation is not in fp32
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Verification:
    """What a check has found: a line for each damaged file or tensor."""

    run: str
    files: int
    bytes: int
    problems: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)


def verify(run: Run, progress: Progress | None = None) -> Verification:
    """Check every file that a run holds: form, size, step and digests.

    Args:
        run: which nobody is working on.
        progress: called with (bytes checked, bytes to check).

    Raises:
        UsageError: not a run, in use, or neither its model nor the one it started from is there to tell its form.
    """
    recipe = run.recipe()
    base = next((folder for folder in (Path(recipe.model or ""), run.model) if is_model(folder)), None)
    if base is None:
        raise UsageError(
            f"{run.folder} started from {recipe.model}, which is not there to tell what belongs into the run; if it is "
            f"elsewhere now, write so in {run.recipe_file}"
        )
    with locked(run.folder, "verifying"):
        checker = Checker(run, select(read_architecture(base), recipe).trained, progress)
        problems = list(checker.problems())
        if run.base_file.is_file() and is_model(model := Path(recipe.model or "")):
            problems += _said(lambda: check_unchanged(model, read_json(run.base_file)))
    return Verification(str(run.folder), checker.files, checker.bytes, problems)


class Checker:
    """Goes through a run's files, and counts them; one that several checkpoints share is read once."""

    def __init__(self, run: Run, layouts: Sequence[Layout], progress: Progress | None = None) -> None:
        self._run = run
        self._layouts = {layer: layout for layer, layout in enumerate(layouts) if layout.numel}  # others have no file
        self._progress = progress or (lambda done, total: None)
        self._damage: dict[tuple[int, int], list[str]] = {}  # by device and inode
        self._total = sum(path.stat().st_size for path in run.folder.rglob("*.safetensors"))
        self.files, self.bytes = 0, 0

    def problems(self) -> Iterator[str]:
        """Yield a line for each damaged file or tensor of state, checkpoints, model, rows and metrics."""
        run = self._run
        if (run.state / COMMIT).is_file():  # without a commit it is scratch
            yield from self.state()
        for step in run.whole_checkpoints():
            yield from self.checkpoint(step)
        if run.model.exists():
            yield from self.model()
        for rows in (run.data / "train", run.data / "validation"):
            if rows.exists():
                yield from _said(lambda rows=rows: load(rows))  # type: ignore[misc]
        if run.metrics_file.is_file():
            # The last line may have been cut short by a crash; it is written anew.
            num_lines = run.metrics_file.read_bytes().count(b"\n")
            if (good := len(run.metrics())) < num_lines:
                yield f"{run.metrics_file}:{good + 1}: not a line of metrics"

    def state(self) -> Iterator[str]:
        """Check the layers of a run on disk, and the gradients of those that its last update has not reached."""
        try:
            step = int((self._run.last_commit() or {})["step"])
        except (DataError, KeyError, TypeError, ValueError) as error:
            yield f"{self._run.state / COMMIT} is damaged: {error}"
            return
        for layer, layout in self._layouts.items():
            stamp, problems = self._file(layer_path(self._run.state / "layer", layer), layout, STATE_KINDS)
            yield from problems
            if stamp == step - 1:
                path = layer_path(self._run.state / "gradient", layer)
                stamp, problems = self._file(path, layout, {"grad"})
                yield from problems
            else:
                path = layer_path(self._run.state / "layer", layer)
            if stamp not in (None, step):
                yield f"{path} is of step {stamp}, the run is at step {step}"

    def checkpoint(self, step: int) -> Iterator[str]:
        """Check a checkpoint."""
        folder = self._run.checkpoint(step)
        yield from _said(lambda: read_json(folder / MANIFEST))
        for layer, layout in self._layouts.items():
            path = layer_path(folder / "layer", layer)
            stamp, problems = self._file(path, layout, STATE_KINDS)
            yield from problems
            if stamp not in (None, step):
                yield f"{path} is of step {stamp}"

    def model(self) -> Iterator[str]:
        """Check the form of the tuned model; its files have no digests."""
        folder, problems = self._run.model, []
        for path in sorted(folder.glob("*.safetensors")):
            problems += _said(lambda path=path: open_shard(path))  # type: ignore[misc]
            self._count(path)
        problems = problems or [*_said(lambda: _check_model(folder)), *_said(lambda: read_tuning(folder))]
        yield from problems

    def _file(self, path: Path, layout: Layout, kinds: set[str]) -> tuple[int | None, list[str]]:
        """Check a state file; return its step, ``None`` if that is not to be had, and its problems."""
        try:
            form = stored_form(path, layout)
            if form.kinds.keys() - {"master"} != kinds:
                raise DataError(f"{path} holds {', '.join(form.kinds)}, not {', '.join(sorted(kinds))}")
            stamp, _ = form.check(path)
            status = path.stat()
            key = status.st_dev, status.st_ino
            if key not in self._damage:
                self._damage[key] = form.damage(path)
        except DataError as error:
            return None, [str(error)]
        self._count(path)
        return stamp, [f"{path} is damaged: {tensor}" for tensor in self._damage[key]]

    def _count(self, path: Path) -> None:
        self.files, self.bytes = self.files + 1, self.bytes + path.stat().st_size
        self._progress(self.bytes, self._total)


def stored_form(path: Path, layout: Layout) -> StateFile:
    """Return the form that a state file says it has.

    Raises:
        DataError: it is missing, cut short, or no such file.
    """
    kinds = {kind: entry.dtype for kind, entry in open_shard(path).entries.items()}
    return StateFile(layout, kinds, PART_NUMEL)  # type: ignore[arg-type]


def _check_model(folder: Path) -> None:
    if is_adapter(folder):
        open_adapter(folder, read_architecture(base_folder(folder)))
        return
    with open_checkpoint(folder) as checkpoint:
        check(read_architecture(folder), checkpoint)


def _said(check: Callable[[], object]) -> list[str]:
    """Return what a check complains of."""
    try:
        check()
    except (DataError, UsageError) as error:
        return [str(error)]
    return []
