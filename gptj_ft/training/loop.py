"""Train a run. Read `train` and its loop, `train_until`, first; `Training` has the state and the body of each line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from gptj_ft.config.run_folder import Run, record_environment, resume_command, what_is_saved
from gptj_ft.errors import DataError, Interrupted, NotFinite, OutOfTime
from gptj_ft.evaluation.comparison import finite
from gptj_ft.planning.memory import allocator_limit
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.accelerator import limit_memory
from gptj_ft.system.memory import return_freed_memory
from gptj_ft.system.paths import remember_run
from gptj_ft.system.signals import StopRequest
from gptj_ft.system.units import clock
from gptj_ft.training import checkpoint
from gptj_ft.training.compute import compute_step
from gptj_ft.training.deadline import Deadline, forecast_seconds, next_activities
from gptj_ft.training.export import ExportedState, export_model
from gptj_ft.training.nonfinite import LossWatch
from gptj_ft.training.parallel import NO_WORK, StepWork, Validated
from gptj_ft.training.reporter import RecentSteps, Reporter, reporting, step_log_line
from gptj_ft.training.restore import open_state
from gptj_ft.training.retention import CheckpointRetention
from gptj_ft.training.run_state import LOSS, BestState, RunState
from gptj_ft.training.schedule import is_multiple
from gptj_ft.training.setup import TrainSetup
from gptj_ft.training.throughput import StepCounts, Throughput, summarize
from gptj_ft.training.trackers import tracking
from gptj_ft.training.validation import Validator


@dataclass(frozen=True)
class Session:
    """The process that trains."""

    started: float | None = None
    """Value of `time.monotonic` from which ``max_time`` counts; default: the call of `train`."""
    owns_process: bool = False
    """Whether signals may end the process; else only the first Ctrl-C is handled, see `StopRequest`."""
    start_validation: Validated | None = None
    """Validation before the first step, if another run has measured the same model on the same rows."""
    scores_rows: bool = False
    """Whether validation leaves `Validator.row_scores` of a language model, too."""


@dataclass(frozen=True)
class TrainResult:
    """A finished run."""

    run: str  # run folder
    model: str  # folder of the tuned model
    steps: int  # optimizer steps
    exported_step: int  # step of the tuned model
    loss_before: float | None  # validation loss before training, nats per target token; None without validation rows
    loss_after: float | None  # validation loss of the tuned model
    best: BestState | None  # None without validation rows
    best_checkpoint: str | None  # checkpoint of the best state; None if not kept, or exported
    seconds: float  # wall time of this session
    counts: StepCounts  # totals of all steps of the run
    throughput: Throughput  # mean rates of all steps

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        best = {**self.best.to_dict(), "checkpoint": self.best_checkpoint} if self.best else None
        own = {**vars(self), "best": best, "tally": asdict(self.counts), "meters": asdict(self.throughput)}
        return {key: value for key, value in own.items() if key not in ("best_checkpoint", "counts", "throughput")}


def train(setup: TrainSetup, run: Run, reporter: Reporter | None = None, session: Session | None = None) -> TrainResult:
    """Train a run from its newest saved state, and export the model.

    Raises:
        Interrupted, OutOfTime: the run was stopped; its state is saved and the message says how to resume.
        ResourceError: memory or disk ran out; the state is saved if possible, and the last checkpoint is intact.
        NotFinite: a loss or gradient; the last commit or checkpoint is intact.
    """
    start, session = time.monotonic(), session or Session()
    with open_session(setup, run, reporter or Reporter(), session) as training:
        train_until(training)
        training.export()
    return training.finish(start)


def train_until(training: Training, pause: int | None = None) -> None:
    """Train to the end of the run, or to the step ``pause``; errors are those of `train`."""
    # A validation that is due at the pause belongs to the session that resumes the run.
    while training.state.step != pause or pause == training.setup.num_steps:
        training.validate_if_due()
        training.stop_if_asked()
        if training.is_done:
            break
        training.take_step()
        training.save_if_due()
        training.stop_if_late()


@contextmanager
def open_session(setup: TrainSetup, run: Run, reporter: Reporter, session: Session) -> Iterator[Training]:
    """Open the stores of a run, restore its state, and handle signals while it trains."""
    started = time.monotonic() if session.started is None else session.started
    deadline = Deadline(setup.recipe.max_time, started, forecast_seconds(setup))
    chosen = {"placement": str(setup.plan.placement), "precision": setup.plan.precision}
    chosen |= setup.parallel.describe(setup.recipe)
    record_environment(run, str(setup.device), torch.get_num_threads(), chosen)
    limit_memory(setup.device, allocator_limit(setup.plan.have.device))
    open_saved = partial(open_state, setup, run, partial(warn, run, reporter))
    with setup.parallel.opened(setup, run, open_saved) as (offloaded, optimizer, state):
        return_freed_memory()  # loading and training use buffers of different sizes
        recent = RecentSteps(setup.num_steps, state.step, setup.plan.costs.seconds_per_step)
        retention = CheckpointRetention(setup, run, offloaded, optimizer)
        validator = Validator(setup, run, session.start_validation, session.scores_rows)
        is_first = setup.parallel.world.rank == 0
        tracked = setup.recipe if is_first else setup.recipe.model_copy(update={"report_to": "none"})
        with (
            reporting(reporter, recent.progress),
            tracking(run, tracked, partial(warn, run, reporter)) as record,
            StopRequest(reporter.on_stop_request, partial(what_is_saved, run), session.owns_process) as stop,
        ):
            losses = [line["loss"] for line in step_lines(run) if line["loss"] is not None]
            validations = [line[LOSS] for line in run.metrics() if LOSS in line]
            training = Training(
                setup, run, reporter, offloaded, optimizer, state, retention, validator, deadline, stop, record,
                LossWatch(setup.num_classes, losses, validations, state.loss_before), recent,
            )  # fmt: skip
            with training.rescuing():
                retention.begin(state)
                training.warn_of_lost_best()
                training.warn(retention.note)
                yield training


@dataclass
class Training:
    """State of a run in progress, and the actions of its loop."""

    setup: TrainSetup
    run: Run
    reporter: Reporter
    offloaded: OffloadedModel
    optimizer: AdamW
    state: RunState  # step, losses and best, as the next commit or checkpoint will contain them
    retention: CheckpointRetention
    validator: Validator
    deadline: Deadline
    stop: StopRequest
    record: Callable[[Mapping[str, Any]], None]  # writes a line of ``metrics.jsonl``
    loss_watch: LossWatch
    recent: RecentSteps
    validation_loss: float | None = None  # latest
    work: StepWork = NO_WORK  # of this rank in the latest step
    is_done: bool = False

    def validate_if_due(self) -> None:
        """Validate before the first step, after the last, and every ``validate_every`` steps.

        Keep the best state, and set `is_done` after the last step or when `patience` is used up.
        """
        step, recipe = self.state.step, self.setup.recipe
        self.is_done = step == self.setup.num_steps
        is_due = self.is_done or step == 0 or is_multiple(step, recipe.validate_every)
        if not len(self.setup.validation) or not is_due:
            return
        self.reporter.on_activity(f"validating on {len(self.setup.validation):,} rows")
        # Passes without training apply no updates, so apply the pending one before.
        self.flush()
        with self.deadline.measure("validation"):
            loss, sample = self.validator.validate(self.offloaded, step, self.stop_if_asked)
        self.validation_loss = loss
        if step == 0:
            self.state = replace(self.state, loss_before=loss)
        scores = sample.scores if sample else {}
        self.record({"step": step, LOSS: loss, **({"scores": finite(scores)} if scores else {})})
        self.reporter.on_validation(step, loss, sample)
        self.warn(self.loss_watch.after_validation(loss, self.state.loss_before))
        self.state = self.retention.after_validation(self.state, loss, scores)
        patience = {"is_out": self.retention.is_out_of_patience(self.state)}
        if not self.is_done and self.setup.parallel.world.broadcast("patience", patience)["is_out"]:
            message = f"ended after step {step}: no better state in {recipe.patience} validations"
            self.run.log(message)
            self.reporter.on_message(message)
            self.is_done = True

    def take_step(self) -> None:
        """Compute one optimizer step and record it; commit it if the state is on disk."""
        self.reporter.on_activity(f"computing step {self.state.step + 1}")
        report, self.work = compute_step(self.setup, self.offloaded, self.optimizer)
        self.state = self._state_now
        self.warn_unmoved()
        self.warn(self.loss_watch.after_step(report.loss))
        # Record before the commit: a resume drops a metrics line too many, but cannot recreate a missing one.
        self.record(report.to_dict())
        progress = self.recent.add(report)
        self.run.log(step_log_line(report, progress))
        self.reporter.on_step(report, progress)
        if self.setup.plan.placement.is_durable:
            # The store commits when all gradients of this step are on disk, before any write of the next step.
            commit, group = checkpoint.commit_together, self.setup.parallel.pipeline
            self.offloaded.stores["grad"].then(partial(commit, self.run, group, self.state, self.optimizer.pending))
        self.deadline.record("step", report.counts.seconds)

    def save_if_due(self) -> None:
        """Make a checkpoint every ``save_every`` steps or ``save_minutes`` minutes."""
        self.reporter.on_activity(f"saving after step {self.state.step}")
        start = time.monotonic()
        # Clocks differ, and all ranks must save the same step: rank 0's clock decides.
        is_late = bool(self.setup.parallel.world.broadcast("late", {"is": self.retention.is_late})["is"])
        if self.retention.save_if_due(self.state, is_late):
            self.deadline.record("save", time.monotonic() - start)

    def export(self) -> None:
        """Write the tuned model: the last state, or the best."""
        self.reporter.on_message(f"all steps are done; writing {self.run.model}")
        self.reporter.on_activity("writing the tuned model")
        self.flush()
        self.warn_unmoved()
        self.offloaded.free_pools()
        return_freed_memory()
        export_model(self.setup, self.run, self.offloaded, self.state, self.exported)
        self.setup.parallel.world.barrier("exported")

    @property
    def exported(self) -> ExportedState:
        best = self.retention.kept_best
        if best and self.setup.recipe.export == "best":
            return ExportedState(best.step, best.validation_loss)
        return ExportedState(self.state.step, self.validation_loss)

    def finish(self, start: float) -> TrainResult:
        """Remove the files that only an unfinished run needs, and sum up the session since ``start``.

        Raises:
            Interrupted: a signal came while the model was written; writing it is faster than making a checkpoint.
        """
        run, state, exported = self.run, self.state, self.exported
        self.setup.parallel.world.barrier("finished")  # no process has a file of the state open any more
        run.discard_state()
        kept = self.retention.prune(state, is_finished=True)
        if run.writes:
            remember_run(run.folder)
        if self.stop.requested:
            raise Interrupted(f"stopped; {what_is_saved(run)}")
        counts, throughput = summarize(step_lines(run))
        is_apart = state.best is not None and state.best.step in kept and state.best.step != exported.step
        return TrainResult(
            run=str(run.folder),
            model=str(run.model),
            steps=state.step,
            exported_step=exported.step,
            loss_before=state.loss_before,
            loss_after=exported.validation_loss,
            best=state.best,
            best_checkpoint=str(kept[state.best.step]) if state.best and is_apart else None,
            seconds=time.monotonic() - start,
            counts=counts,
            throughput=throughput,
        )

    def stop_if_asked(self) -> None:
        """Save and raise `Interrupted` if a signal has asked to stop.

        Call it only between passes over the weights, where the model is in the state after a whole step.
        """
        # A signal may reach one rank only, but all must stop after the same step.
        if self.setup.parallel.world.any("stop", self.stop.requested):
            self._stop(Interrupted, "")

    def stop_if_late(self) -> None:
        """Save and raise `OutOfTime` if the next step might exceed ``max_time``; warn of slow processes.

        After the last step the run continues: only validation and export are left.
        """
        step, limit = self.state.step, self.setup.recipe.max_time
        allows = self.deadline.allows(*next_activities(self.setup, step)) if step < self.setup.num_steps else True
        may_continue, warning = self.setup.parallel.agree_on_time(step, allows, self.work)
        self.warn(warning)
        if not may_continue:
            reason = f": another might not end within {clock(limit or 0.0)}"
            self._stop(Interrupted if self.setup.parallel.world.any("stop", self.stop.requested) else OutOfTime, reason)

    def _stop(self, kind: type[Interrupted], reason: str) -> None:
        step = self.state.step
        self.retention.save_now(self.state)
        where = f"after step {step} of {self.setup.num_steps}{reason}" if step else "before the first step"
        self.run.log(f"stopped {where}")
        saved = "everything is saved" if step else "nothing was trained yet"
        raise kind(f"stopped {where}; {saved}; resume with\n{resume_command(self.run)}")

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """Save the state in memory before an error ends the run, if the state is whole."""
        try:
            yield
        except (Interrupted, NotFinite, DataError):  # saved already; or a resumed run would fail here again
            raise
        except BaseException:
            if self.setup.parallel.pipeline.size > 1 or not self.run.writes:
                raise  # other processes have parts of the state, or this one has only a copy
            with suppress(BaseException):  # report the first error, not a second one from saving
                is_durable = self.setup.plan.placement.is_durable
                if not is_durable and self.optimizer.is_whole and self._is_recorded():
                    self.retention.save_now(self._state_now)
            raise

    @property
    def _state_now(self) -> RunState:
        """The state after the optimizer's last step."""
        own = self.optimizer
        return replace(self.state, step=own.step, loss_scale=own.loss_scale, layer_updates=own.layer_updates)

    def _is_recorded(self) -> bool:
        """Tell whether the last step has its line in the metrics; a resume after it would never write one."""
        return any(line["step"] == self.optimizer.step for line in step_lines(self.run))

    def flush(self) -> None:
        """Apply the pending update to every layer."""
        if self.optimizer.pending is None:  # do not measure: a flush without an update takes no time
            self.optimizer.flush()
            return
        with self.deadline.measure("flush"):
            self.optimizer.flush()

    def warn_of_lost_best(self) -> None:
        """Warn if the best state so far was not kept, which the recipe wants now."""
        best, kept = self.state.best, self.retention.kept_best
        if self.setup.recipe.keeps_best and best and best != kept:
            instead = f"step {kept.step}" if kept else "the next validated one"
            self.warn(f"the best state so far, of step {best.step}, has no checkpoint; kept as best: {instead}")

    def warn_unmoved(self) -> None:
        """Warn of tensors that the first update has not changed, once it has reached every layer."""
        movement, lr = self.optimizer.take_unchanged(), self.setup.schedule.lr(1)
        self.warn(movement.warning(self.setup.architecture.family, lr) if movement and lr > 0 else None)

    def warn(self, warning: str | None) -> None:
        warn(self.run, self.reporter, warning)


def step_lines(run: Run) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` that record optimizer steps."""
    return [line for line in run.metrics() if "loss" in line]


def warn(run: Run, reporter: Reporter, warning: str | None) -> None:
    """Log and report a warning, unless it is None."""
    if warning:
        run.log(warning)
        reporter.on_warning(warning)
