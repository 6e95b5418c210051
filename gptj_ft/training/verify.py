"""Verify a run: read every file and compare its checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.adapter import open_adapter, tuned_architecture
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.fingerprint import check_unchanged
from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.checkpoints.model_folder import check_tensors, open_checkpoint
from gptj_ft.checkpoints.weight_file import open_shard
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import COMMIT, MANIFEST, MERGED, Run, read_environment, steps_done
from gptj_ft.config.saved_values import BaseDigests, checked
from gptj_ft.data.dataset import load_dataset
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.layer_sampling import EVERY_LAYER, EveryLayer, layer_choice
from gptj_ft.models.layout import Layout
from gptj_ft.models.registry import Architecture
from gptj_ft.models.trainable import select
from gptj_ft.streaming.loss_scale import LossScale
from gptj_ft.streaming.split_master import LOW_BITS
from gptj_ft.streaming.stores.base import CHUNK_NUMEL
from gptj_ft.streaming.stores.state_file import StateFile, layer_path
from gptj_ft.system.digests import FOLDER_DIGESTS, damaged_files, read_sealed
from gptj_ft.system.lock import locked
from gptj_ft.system.paths import is_adapter, is_model, is_tuned
from gptj_ft.training import checkpoint
from gptj_ft.training.run_state import WRONG_UPDATES, RunState
from gptj_ft.training.setup import trained_architecture

STATE_KINDS = {"weight", "exp_avg", "exp_avg_sq"}
MASTER_KINDS = {"master", LOW_BITS}  # one of them, if the computation is not in fp32
_Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Verification:
    """Result of a verification."""

    run: str
    files: int  # checked
    bytes: int  # checked
    problems: list[str]  # one line per damaged file or tensor
    notes: list[str] = field(default_factory=list)  # files that could not be compared

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(run: Run, progress: _Progress | None = None) -> Verification:
    """Check format, size, step and checksums of every file of a run.

    Args:
        progress: called with (bytes checked, total bytes).

    Raises:
        UsageError: not a run, in use, or both its model and its base model are missing.
    """
    recipe = run.recipe()
    base = next((folder for folder in (Path(recipe.model or ""), run.model) if is_model(folder)), None)
    if base is None:
        raise UsageError(
            f"{run.folder} started from {recipe.model}, which is missing and needed to know the layers of the run; if "
            f"the model has moved, write its folder under `model:` in {run.recipe_file}"
        )
    with locked(run.folder, "verifying"):
        layouts = select(_architecture(run, recipe, base), recipe).trained
        checker = Checker(run, layouts, layer_choice(recipe, len(layouts)), progress)
        problems, notes = list(checker.problems()), list[str]()
        if is_tuned(run.model) and not run.record_file.is_file():
            notes.append(f"{run.folder} was trained by an earlier version of gptj-ft: model and rows have no digests")
        else:
            problems += _problems(lambda: run.check_recipe(recipe))
            problems += _problems(lambda: _check_base(run, Path(recipe.model or "")))
    return Verification(str(run.folder), checker.files, checker.bytes, list(dict.fromkeys(problems)), notes)


class Checker:
    """Check and count the files of a run; a file that several checkpoints share is read once."""

    def __init__(
        self, run: Run, layouts: Sequence[Layout], choice: EveryLayer = EVERY_LAYER, progress: _Progress | None = None
    ) -> None:
        self._run, self._choice = run, choice
        self._layouts = {layer: layout for layer, layout in enumerate(layouts) if layout.numel}  # frozen: no file
        self._progress = progress or (lambda done, total: None)
        self._damage: dict[tuple[int, int], list[str]] = {}  # by device and inode
        self._total = sum(path.stat().st_size for path in run.folder.rglob("*.safetensors"))
        self.files, self.bytes = 0, 0

    def problems(self) -> Iterator[str]:
        """Yield a line for each damaged file or tensor of the run."""
        run = self._run
        if not is_tuned(run.model):
            yield from _problems(run.check_saved)
        if (run.state / COMMIT).is_file():  # without a commit it is scratch
            yield from self.state()
        for step in run.whole_checkpoints():
            yield from self.checkpoint(step)
        for folder in (run.model, run.folder / MERGED):
            if folder.exists():
                yield from self.model(folder)
        for rows in (run.data / "train", run.data / "validation"):
            if rows.exists() and run.record_file.is_file():
                yield from _problems(lambda rows=rows: load_dataset(rows))  # type: ignore[misc]
        if (run.folder / "environment.json").is_file():
            yield from _problems(lambda: read_environment(run))
        try:
            yield from run.metrics_problems(0 if is_tuned(run.model) else steps_done(run))
        except DataError as error:
            yield str(error)

    def state(self) -> Iterator[str]:
        """Check the layers of a run on disk, and the gradients of layers that the last update has not reached."""
        try:
            commit = self._run.last_commit()
        except DataError as error:
            yield str(error)
            return
        step = commit["step"] if commit else 0
        # The loss scale decides the bits of later fp16 steps, so it must match the recorded steps.
        yield from self._facts(self._run.state / COMMIT, commit) if commit else ()
        for layer, layout in self._layouts.items():
            path = layer_path(self._run.state / "layer", layer)
            stamp, problems = self._file(path, layout, STATE_KINDS)
            yield from problems
            # The last update has not reached this layer: a resume needs its gradient.
            if self._choice.is_behind(layer, step, stamp):
                path = layer_path(self._run.state / "gradient", layer)
                stamp, problems = self._file(path, layout, {"grad"})
                yield from problems
            if stamp not in (None, self._choice.last_step(layer, step)):
                yield checkpoint.wrong_stamp(self._choice, path, layer, step, stamp)

    def checkpoint(self, step: int) -> Iterator[str]:
        folder = self._run.checkpoint(step)
        try:
            yield from self._facts(folder / MANIFEST, self._run.manifest(step))
        except DataError as error:
            yield str(error)
        for layer, layout in self._layouts.items():
            path = layer_path(folder / "layer", layer)
            stamp, problems = self._file(path, layout, STATE_KINDS)
            yield from problems
            if stamp not in (None, self._choice.last_step(layer, step)):
                yield f"{path} is of step {stamp}"

    def _facts(self, path: Path, saved: Mapping[str, Any]) -> Iterator[str]:
        """Check that the facts of a commit or checkpoint follow from the run's steps."""
        state = RunState.of(saved)
        step, scale = state.step, state.loss_scale
        if not self._choice.allows(state.layer_updates, step):
            yield f"{path}: {WRONG_UPDATES}"
        lines = [line for line in self._run.metrics() if "loss_scale" in line and line["step"] <= step]
        if len(lines) != step or any(line["step"] != at for at, line in enumerate(lines, 1)):
            return  # not fp16, or some lines are damaged
        if scale is None:
            yield f"{path} has no loss scale, which a run in fp16 needs to resume"
        elif scale != (expected := replay_loss_scale(lines, scale)):
            yield (
                f"{path} has a loss scale of {scale.scale:g} after {scale.num_skipped} skipped steps, not of "
                f"{expected.scale:g} after {expected.num_skipped}, which its steps lead to"
            )

    def model(self, folder: Path) -> Iterator[str]:
        """Check the files of a tuned model against their checksums, and its format."""
        problems = damaged_files(folder)
        if self._run.record_file.is_file() and not (folder / FOLDER_DIGESTS).is_file():
            problems.append(f"{folder / FOLDER_DIGESTS} is missing: the files of the model cannot be compared")
        for path in sorted(folder.glob("*.safetensors")):
            problems = problems or _problems(lambda path=path: open_shard(path))  # type: ignore[misc]
            self._count(path)
        yield from problems or [*_problems(lambda: _check_model(folder)), *_problems(lambda: read_metadata(folder))]

    def _file(self, path: Path, layout: Layout, kinds: set[str]) -> tuple[int | None, list[str]]:
        """Check a state file; return its step, if readable, and its problems."""
        try:
            form = stored_form(path, layout)
            if (found := form.kinds.keys() - MASTER_KINDS) != kinds:
                raise DataError(
                    f"{path} has the tensors {', '.join(sorted(found))}, but this run needs "
                    f"{', '.join(sorted(kinds))}: the file may be from another run"
                )
            stamp, _ = form.check(path)
            status = path.stat()
            # Hard-linked checkpoints share files: check each inode once.
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


def replay_loss_scale(lines: Sequence[Mapping[str, Any]], last: LossScale) -> LossScale:
    """Recompute the loss scale from the steps of ``metrics.jsonl``; ``last`` gives the growth interval."""
    # A line has the scale that its step used, so the first line has the initial one.
    scale = LossScale(lines[0]["loss_scale"] if lines else last.scale, growth_interval=last.growth_interval)
    for line in lines:
        scale = scale.after_step(line["skipped"])
    return scale


def stored_form(path: Path, layout: Layout) -> StateFile:
    """Read the format of a state file; raise `DataError` if it is missing, truncated or another kind of file."""
    kinds = {kind: entry.dtype for kind, entry in open_shard(path).entries.items()}
    return StateFile(layout, kinds, CHUNK_NUMEL)  # type: ignore[arg-type]


def _check_base(run: Run, model: Path) -> None:
    """Check the recorded fingerprint of the base model, and the model itself if it exists."""
    fingerprint = checked(BaseDigests, read_sealed(run.base_file), run.base_file)
    if is_model(model):
        check_unchanged(model, fingerprint)


def _check_model(folder: Path) -> None:
    if is_adapter(folder):
        open_adapter(folder, tuned_architecture(folder))
        return
    with open_checkpoint(folder) as checkpoint:
        check_tensors(read_architecture(folder), checkpoint)


def _architecture(run: Run, recipe: Recipe, base: Path) -> Architecture:
    """Return the architecture of a run, from its base model or its tuned model."""
    if recipe.task == "language-model" or base == run.model:
        return read_architecture(base)
    return trained_architecture(recipe, base, load_dataset(run.data / "train").report.labels)


def _problems(check: Callable[[], object]) -> list[str]:
    """Run a check; return its error as a list of problems."""
    try:
        check()
    except (DataError, UsageError) as error:
        return [str(error)]
    return []
