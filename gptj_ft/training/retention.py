"""Make the checkpoints of a run, and remove those that the recipe does not keep."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import COMMIT, MANIFEST, STEP_FOLDER, Run
from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.evaluation.comparison import LOWER_IS_BETTER
from gptj_ft.evaluation.metrics import score_names
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.files import discard, remove_folder, sync_path
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

    def begin(self, state: RunState) -> RunState:
        """Apply the recipe to the existing checkpoints; return the state, without a best whose checkpoint is missing.

        The recipe may have changed since, and a crash may have prevented a checkpoint or its mirrors.
        """
        if state.best and self._recipe.keeps_best:
            exists = self._parallel.is_replica or state.best.step in self._run.whole_checkpoints()
            if not all(each["is_there"] for each in self._parallel.world.gather("best", {"is_there": exists})):
                state = replace(state, best=None)  # not kept at the time, or the run returned to an earlier step
        self._mirrors = self._parallel.open_mirrors(self._setup, self._run)
        if self._mirrors.is_active:
            self._mirrors.mirror_existing(state.best.step if state.best and self._recipe.keeps_best else None)
            if self._mirrors.newest is None and state.step:
                self._save(state)
        # A crash may have come after the commit of a step and before its checkpoint.
        if self._is_durable and state.step:
            self.save_if_due(state)
        self.prune(state)
        return state

    def after_validation(self, state: RunState, loss: float, scores: Mapping[str, float]) -> RunState:
        """Return the state after a validation; make a checkpoint if it is the best by the recipe's score.

        Raises:
            UsageError: the validation rows have no such score.
        """
        name, best, measured = self._recipe.best_by, state.best, {LOSS: loss, **scores}
        if name not in measured:  # such as the area under the curve of more than two labels
            raise UsageError(f"best_by: these rows have no score '{name}'; choose from {', '.join(measured)}")
        value = measured[name]
        is_best = math.isfinite(value) and (best is None or is_better(name, value, best.score(name)))
        if state.step == 0 or not is_best:
            return state
        state = replace(state, best=BestState(state.step, loss, name, value))
        if self._recipe.keeps_best and state.step < self._num_steps:
            self._save(state)
        return state

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
        is_regular = is_multiple(step, recipe.save_every)
        if step == self._num_steps:
            return False  # the export follows
        is_kept = is_regular and recipe.num_newest_kept != 0
        # A run on disk is its own checkpoint, unless checkpoints are mirrored to other disks.
        is_due = is_kept if self._is_durable and not self._mirrors.is_active else is_regular or is_late
        if is_due:
            self._save(state)
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
        kept = kept_steps(self._recipe, checkpoints, state.best.step if state.best else None)
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

    def _save(self, state: RunState) -> None:
        group = self._parallel.pipeline
        # A checkpoint has no pending update: apply it to every layer first.
        self._optimizer.flush()
        if self._parallel.is_replica:
            pass  # the first replica saves
        elif self._is_durable:
            checkpoint.link(self._run, group, self._offloaded, state)
            # Commit the name of this best checkpoint before `prune` removes the one before.
            checkpoint.commit_together(self._run, group, state, self._optimizer.pending)
        else:
            checkpoint.save_checkpoint(self._run, group, self._offloaded, state)
        if self._mirrors.is_active:
            self._mirrors.mirror(state.step)
        self._saved_at = time.monotonic()
        self.prune(state)

    @property
    def note(self) -> str | None:
        """Reason why the mirrors that the recipe wants are not made."""
        return self._mirrors.note


def kept_steps(recipe: Recipe, steps: Iterable[int], best: int | None) -> set[int]:
    """Return the steps of the checkpoints that ``keep`` and ``save_every`` keep."""
    regular = sorted(step for step in steps if is_multiple(step, recipe.save_every))
    count = len(regular) if recipe.num_newest_kept is None else recipe.num_newest_kept
    kept = set(regular[max(0, len(regular) - count) :])
    if recipe.keeps_best and best is not None:
        kept.add(best)
    return kept


def is_better(name: str, value: float, other: float) -> bool:
    """Compare two values of a score; any value is better than NaN."""
    return math.isnan(other) or (value < other if name in (LOSS, *LOWER_IS_BETTER) else value > other)


def check_keep(recipe: Recipe, num_validation_rows: int) -> None:
    """Raise `UsageError` if ``keep``, ``best_by`` or ``patience`` need validations or saves that never happen."""
    if recipe.patience and not (num_validation_rows and recipe.validate_every):
        raise UsageError("patience counts validations during the run: add --validate-every N, and rows to validate on")
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
        raise UsageError("the best state is the one with the lowest validation loss: add --val-data FILE, or a holdout")
    if recipe.keeps_best and not recipe.validate_every:
        raise UsageError("the best state is found by validations during the run: add --validate-every N")
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


def _best_of(run: Run, checkpoints: dict[int, Path]) -> int | None:
    """Return the step of the best state, if it has a checkpoint."""
    newest = run.last_commit() or (run.manifest(max(checkpoints)) if checkpoints else None)
    best = RunState.of(newest).best if newest else None
    return best.step if best and best.step in checkpoints else None
