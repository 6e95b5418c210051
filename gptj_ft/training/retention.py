"""Make the checkpoints of a run, and remove those that the recipe does not keep."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import COMMIT, MANIFEST, STEP_FOLDER, Run
from gptj_ft.errors import DataError, UsageError, did_you_mean
from gptj_ft.evaluation.comparison import LOWER_IS_BETTER
from gptj_ft.evaluation.metrics import score_names
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.files import discard, remove_folder, sync_path
from gptj_ft.system.paths import is_tuned
from gptj_ft.training import checkpoint
from gptj_ft.training.parallel import Mirrors
from gptj_ft.training.run_state import LOSS, BestState, RunState
from gptj_ft.training.schedule import is_multiple
from gptj_ft.training.setup import TrainSetup


class CheckpointRetention:
    """Make checkpoints when they are due, and remove those that the recipe does not keep.

    During the run the newest checkpoint is always kept; a run on disk has it in its state folder. After the run, the
    tuned model is the last state.
    """

    def __init__(self, setup: TrainSetup, run: Run, offloaded: OffloadedModel, optimizer: AdamW) -> None:
        self._setup, self._recipe, self._num_steps = setup, setup.recipe, setup.num_steps
        self._parallel = setup.parallel
        self._is_durable = setup.plan.placement.is_durable
        self._run, self._offloaded, self._optimizer = run, offloaded, optimizer
        self._saved_at = time.monotonic()
        self._mirrors = Mirrors()
        self._regular: set[int] = set()  # steps of checkpoints made every `save_every` steps, by any session
        self._kept_best: BestState | None = None

    def begin(self, state: RunState) -> None:
        """Apply the recipe to the existing checkpoints.

        The recipe may have changed since, and a crash may have prevented a checkpoint or its mirrors.
        """
        self._regular = {step for step in self._run.whole_checkpoints() if _was_regular(self._run, step)}
        if self._recipe.keeps_best:
            self._kept_best = self._best_checkpoint(state)
        self._mirrors = self._parallel.open_mirrors(self._setup, self._run)
        if self._mirrors.is_active:
            self._mirrors.mirror_existing(self._kept_best.step if self._kept_best else None)
            if self._mirrors.newest is None and state.step:
                self._save(state)
        # A crash may have come after the commit of a step and before its checkpoint.
        if self._is_durable and state.step:
            self.save_if_due(state)
        self.prune(state)

    def _best_checkpoint(self, state: RunState) -> BestState | None:
        """Return the best state of the run, or the best one with a checkpoint if that was not kept."""
        own = None if self._parallel.is_replica else list(self._run.whole_checkpoints())
        messages = self._parallel.world.gather("checkpoints", {"steps": own})
        complete = set.intersection(*(set(each["steps"]) for each in messages if each["steps"] is not None))
        if state.best is None or state.best.step in complete:
            return state.best
        name, best = self._recipe.best_by, None
        for line in self._run.metrics():
            value = line.get(LOSS) if name == LOSS else line.get("scores", {}).get(name)
            if line["step"] in complete and value is not None and beats(name, value, best):
                best = BestState(line["step"], line[LOSS], name, value)
        # Each machine may have its own metrics: rank 0's decide.
        chosen = self._parallel.world.broadcast("best checkpoint", {"best": best.to_dict() if best else None})["best"]
        return BestState.of(chosen) if chosen else None

    def after_validation(self, state: RunState, loss: float, scores: Mapping[str, float]) -> RunState:
        """Return the state after a validation; make a checkpoint if it is the best by the recipe's score.

        Raises:
            UsageError: the validation rows have no such score.
        """
        name, measured = self._recipe.best_by, {LOSS: loss, **scores}
        if name not in measured:  # such as the area under the curve of more than two labels
            raise UsageError(f"best_by: these rows have no score '{name}'; choose from {', '.join(measured)}")
        value = measured[name]
        if state.step == 0 or not math.isfinite(value):
            return state
        found = BestState(state.step, loss, name, value)
        if beats(name, value, state.best):
            state = replace(state, best=found)
        if self._recipe.keeps_best and beats(name, value, self._kept_best):
            self._kept_best = found
            if state.step < self._num_steps:
                self._save(state)
        return state

    @property
    def kept_best(self) -> BestState | None:
        """The best state that has a checkpoint, or is the last one; ``None`` if the recipe keeps no best."""
        return self._kept_best

    def is_out_of_patience(self, state: RunState) -> bool:
        """Tell whether ``patience`` validations have passed since the best."""
        patience, best = self._recipe.patience, state.best
        if patience is None or best is None:
            return False
        # Count in the file: a resumed run must end at the same step as an uninterrupted one.
        since = [line for line in self._run.metrics() if LOSS in line and line["step"] > best.step]
        return len(since) >= patience

    @property
    def is_late(self) -> bool:
        """Whether ``save_minutes`` have passed since the last checkpoint."""
        return time.monotonic() - self._saved_at > self._recipe.save_minutes * 60

    def save_if_due(self, state: RunState, is_late: bool = False) -> bool:
        """Make a checkpoint if one is due by steps or, with ``is_late``, by time; return True if it was made."""
        recipe, step = self._recipe, state.step
        is_regular_step = is_multiple(step, recipe.save_every)
        if step == self._num_steps:
            return False  # the export follows
        is_kept = is_regular_step and recipe.num_newest_kept != 0
        # A run on disk is its own checkpoint, unless checkpoints are mirrored to other disks.
        is_due = is_kept if self._is_durable and not self._mirrors.is_active else is_regular_step or is_late
        if is_due:
            self._save(state, is_kept)
        return is_due

    def save_now(self, state: RunState) -> None:
        """Save the state after the last step, if there was one."""
        if self._is_durable:
            self._offloaded.drain()
        elif state.step:
            self._save(state)

    def prune(self, state: RunState, is_finished: bool = False) -> dict[int, Path]:
        """Remove the checkpoints that are not kept; return the kept ones, in the process that writes the run."""
        if not self._run.writes:
            return {}  # do not look: another process is removing them
        checkpoints = self._run.whole_checkpoints()
        # A resume may change `save_every`: checkpoints of earlier sessions stay regular.
        regular = [step for step in checkpoints if step in self._regular or is_multiple(step, self._recipe.save_every)]
        kept = kept_steps(self._recipe, regular, self._kept_best.step if self._kept_best else None)
        if checkpoints and not self._is_durable and not is_finished:
            kept.add(max(checkpoints))
        if self._mirrors.newest is not None and not is_finished:
            kept.add(self._mirrors.newest)
        for step, folder in checkpoints.items():
            if step not in kept:
                remove_folder(folder)
        if is_finished and not kept & checkpoints.keys():
            discard(self._run.checkpoints)
        return {step: folder for step, folder in checkpoints.items() if step in kept}

    def _save(self, state: RunState, is_kept: bool = False) -> None:
        group = self._parallel.pipeline
        # A checkpoint has no pending update: apply it to every layer first.
        self._optimizer.flush()
        if is_kept:
            self._regular.add(state.step)
        is_regular_step = state.step in self._regular
        if self._parallel.is_replica:
            pass  # the first replica saves
        elif self._is_durable:
            checkpoint.link(self._run, group, self._offloaded, state, is_regular_step)
            # Commit the name of this best checkpoint before `prune` removes the one before.
            checkpoint.commit_together(self._run, group, state, self._optimizer.pending)
        else:
            checkpoint.save_checkpoint(self._run, group, self._offloaded, state, is_regular_step)
        if self._mirrors.is_active:
            self._mirrors.mirror(state.step)
        self._saved_at = time.monotonic()
        self.prune(state)

    @property
    def note(self) -> str | None:
        """Reason why the mirrors that the recipe wants are not made."""
        return self._mirrors.note


def kept_steps(recipe: Recipe, regular: Iterable[int], best: int | None) -> set[int]:
    """Return the steps of the checkpoints that ``keep`` keeps.

    Args:
        regular: steps of the checkpoints made every ``save_every`` steps.
        best: step of the best checkpoint.
    """
    steps = sorted(regular)
    count = len(steps) if recipe.num_newest_kept is None else recipe.num_newest_kept
    kept = set(steps[max(0, len(steps) - count) :])
    if recipe.keeps_best and best is not None:
        kept.add(best)
    return kept


def is_better(name: str, value: float, other: float) -> bool:
    """Compare two values of a score; any value is better than NaN."""
    return math.isnan(other) or (value < other if name in (LOSS, *LOWER_IS_BETTER) else value > other)


def beats(name: str, value: float, best: BestState | None) -> bool:
    """Tell whether a value of a score is better than that of the best state, if there is one."""
    return best is None or is_better(name, value, best.score(name))


def check_keep(recipe: Recipe, num_validation_rows: int, has_begun: bool = False) -> None:
    """Raise `UsageError` if ``keep``, ``best_by`` or ``patience`` need validations or saves that never happen.

    Args:
        has_begun: whether the run resumes: its validations cannot change any more.
    """
    add = "this run has none, and they cannot be added now; start a new run with" if has_begun else "add"
    if recipe.patience and not (num_validation_rows and recipe.validate_every):
        raise UsageError(
            f"patience counts validations during the run: {add} --validate-every N, and rows to validate on"
        )
    if recipe.sample_rows and recipe.task == "language-model" and not (num_validation_rows and recipe.metrics):
        raise UsageError(
            "sample_rows are validation rows, scored by the recipe's metrics: this run lacks validation rows or metrics"
        )
    is_labelled = recipe.task != "language-model"
    names = score_names(recipe.metrics, recipe.task) if recipe.sample_rows or is_labelled else []
    if recipe.best_by != LOSS and recipe.best_by not in names:
        hint = did_you_mean(recipe.best_by, [LOSS, *names])
        more = "" if names else "; scores need --set sample_rows=N and a recipe with metrics"
        raise UsageError(
            f"best_by: '{recipe.best_by}' is not measured{hint}; choose from {', '.join([LOSS, *names])}{more}"
        )
    if recipe.keeps_best and not num_validation_rows:
        raise UsageError(
            f"the best state is the one with the lowest validation loss: {add} --val-data FILE, or a holdout"
        )
    if recipe.keeps_best and not recipe.validate_every:
        raise UsageError(f"the best state is found by validations during the run: {add} --validate-every N")
    if recipe.num_newest_kept != 0 and not recipe.save_every:
        raise UsageError(f"--keep {','.join(recipe.keep)} keeps what is saved every N steps: add --save-every N")


def find_checkpoint(run: Run, name: str) -> int:
    """Return the step of a checkpoint named ``best``, ``last``, ``step-000120`` or ``120``."""
    checkpoints = run.whole_checkpoints()
    number = STEP_FOLDER.fullmatch(f"step-{name.removeprefix('step-')}")
    if name == "last" and checkpoints:
        return max(checkpoints)
    if name == "best" and (best := _best_of(run, checkpoints)) is not None:
        return best
    if number and int(number[1]) in checkpoints:
        return int(number[1])
    names = ", ".join(folder.name for folder in checkpoints.values())
    existing = names or "none: --keep best,last or --save-every makes some"
    raise UsageError(f"no checkpoint '{name}' in {run.checkpoints}; it has {existing}")


def go_back(run: Run, step: int) -> None:
    """Return a run to a checkpoint: remove all later state. Step 0 removes everything."""
    # Order: note the checkpoint, remove later checkpoints from the newest down, remove the commit last. A kill at any
    # point leaves a state that the run can resume from.
    run.note_saved(run.checkpoint(step) / MANIFEST if step else None)
    for later, folder in reversed(run.whole_checkpoints().items()):
        if later > step:
            remove_folder(folder)
    if (run.state / COMMIT).is_file():  # without it, the next start rebuilds the state from the newest checkpoint
        (run.state / COMMIT).unlink()
        sync_path(run.state)


def _was_regular(run: Run, step: int) -> bool:
    """Tell whether a checkpoint was made every ``save_every`` steps; False for one of earlier versions, or damaged."""
    with suppress(DataError):
        return bool(run.manifest(step).get("is_regular"))
    return False


def _best_of(run: Run, checkpoints: dict[int, Path]) -> int | None:
    """Return the step of the best state, if it has a checkpoint.

    Raises:
        UsageError: it is the tuned model itself.
    """
    if is_tuned(run.model) and (metadata := read_metadata(run.model)):
        best = BestState.of(metadata.metrics["best"]) if metadata.metrics.get("best") else None
        if best and best.step not in checkpoints and best.step == metadata.metrics.get("steps"):
            raise UsageError(f"the best state, of step {best.step}, is the run's model: it is in {run.model}")
    else:
        newest = run.last_commit() or (run.manifest(max(checkpoints)) if checkpoints else None)
        best = RunState.of(newest).best if newest else None
    return best.step if best and best.step in checkpoints else None
