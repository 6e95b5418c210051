"""Train a run, top to bottom: `train` is the loop, `Training` has its verbs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from gptj_ft.config.run_folder import Run, record_environment, resume_command, what_is_saved
from gptj_ft.errors import DataError, Interrupted, NotFinite, OutOfTime
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
from gptj_ft.training.nonfinite import LossWatch, explain_loss
from gptj_ft.training.parallel import NO_WORK, StepWork, Validated
from gptj_ft.training.reporter import RecentSteps, Reporter, reporting, step_log_line
from gptj_ft.training.restore import open_state
from gptj_ft.training.retention import CheckpointRetention
from gptj_ft.training.run_state import LOSS, BestState, RunState
from gptj_ft.training.schedule import is_multiple
from gptj_ft.training.setup import TrainSetup
from gptj_ft.training.throughput import StepCounts, Throughput, summarize
from gptj_ft.training.trackers import tracking
from gptj_ft.training.validation import (
    LabelledValidation,
    ValidationSample,
    ValidationSamples,
    validate,
    validation_samples,
)


@dataclass(frozen=True)
class Session:
    """The process that trains.

    Attributes:
        started: beginning by `time.monotonic`, from which ``max_time`` counts; default: when training is called.
        owns_process: whether signals may end the process; else only a first Ctrl-C is taken, see `StopRequest`.
    """

    started: float | None = None
    owns_process: bool = False


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Attributes:
        run: run folder.
        model: folder of the tuned model.
        steps: optimizer steps done.
        exported_step: optimizer steps behind the tuned model.
        loss_before: validation loss before training, nats per target token; ``None`` without validation rows.
        loss_after: the same of the tuned model.
        best: best validated state; ``None`` without validation rows.
        best_checkpoint: checkpoint of that state; ``None`` if it is not kept, or was exported.
        seconds: wall time of this session's training.
        counts: all steps of the run together.
        throughput: their mean rates.
    """

    run: str
    model: str
    steps: int
    exported_step: int
    loss_before: float | None
    loss_after: float | None
    best: BestState | None
    best_checkpoint: str | None
    seconds: float
    counts: StepCounts
    throughput: Throughput

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        best = {**self.best.to_dict(), "checkpoint": self.best_checkpoint} if self.best else None
        own = {**vars(self), "best": best, "tally": asdict(self.counts), "meters": asdict(self.throughput)}
        return {key: value for key, value in own.items() if key not in ("best_checkpoint", "counts", "throughput")}


def train(setup: TrainSetup, run: Run, reporter: Reporter | None = None, session: Session | None = None) -> TrainResult:
    """Train a run, from its newest checkpoint if it has one, and export the model.

    Args:
        setup: recipe, model, rows and plan.
        run: run folder.
        reporter: receiver of events; default: none.
        session: process that trains; default: one that is not ours, and begins now.

    Raises:
        Interrupted, OutOfTime: asked to stop; the state is saved and the message says how to go on.
        ResourceError: memory or disk ran out; what could be saved was, else the last checkpoint is intact.
        NotFinite: a loss or a gradient; the last commit or checkpoint is intact.
        DataError: a weight of the model.
    """
    began, session = time.monotonic(), session or Session()
    with open_session(setup, run, reporter or Reporter(), session) as training:
        while True:
            training.validate_if_due()
            training.stop_if_asked()
            if training.is_done:
                break
            training.take_step()
            training.save_if_due()
            training.stop_if_late()
        training.export()
    return training.finish(began)


@contextmanager
def open_session(setup: TrainSetup, run: Run, reporter: Reporter, session: Session) -> Iterator[Training]:
    """Open the stores of a run, restore its state, and take signals while it trains."""
    started = time.monotonic() if session.started is None else session.started
    deadline = Deadline(setup.recipe.max_time, started, forecast_seconds(setup))
    chosen = {"placement": str(setup.plan.placement), "precision": setup.plan.precision}
    chosen |= setup.parallel.describe(setup.recipe)
    record_environment(run, str(setup.device), torch.get_num_threads(), chosen)
    limit_memory(setup.device, allocator_limit(setup.plan.have.device))
    open_saved = partial(open_state, setup, run, partial(warn, run, reporter))
    with setup.parallel.opened(setup, run, open_saved) as (offloaded, optimizer, state):
        return_freed_memory()  # what loading took; steps take buffers of other sizes
        recent = RecentSteps(setup.num_steps, state.step, setup.plan.costs.seconds_per_step)
        retention = CheckpointRetention(setup, run, offloaded, optimizer)
        samples = validation_samples(setup, run)
        tracked = (
            setup.recipe if setup.parallel.world.rank == 0 else setup.recipe.model_copy(update={"report_to": "none"})
        )
        with (
            reporting(reporter, recent.progress),
            tracking(run, tracked, partial(warn, run, reporter)) as record,
            StopRequest(reporter.on_stop_request, partial(what_is_saved, run), session.owns_process) as stop,
        ):
            losses = [line["loss"] for line in step_lines(run) if line["loss"] is not None]
            watch = LossWatch(setup.num_classes, losses)
            training = Training(
                setup, run, reporter, offloaded, optimizer, state, retention, samples, deadline, stop, record, watch,
                recent,
            )  # fmt: skip
            with training.rescuing():
                training.state = retention.begin(state)
                training.warn(retention.note)
                yield training


@dataclass
class Training:
    """A run in progress, and what is done between its steps.

    Attributes:
        setup: recipe, model, rows and plan.
        run: run folder.
        reporter: receiver of events.
        offloaded: model with its optimizer state.
        optimizer: optimizer with its pending update.
        state: step, losses and best, as the next commit or checkpoint will hold them.
        retention: checkpoints made and kept.
        samples: validation rows that are answered, all of them where they are labelled; ``None``: none.
        deadline: time of the session.
        stop: whether a signal has asked to stop.
        record: writer of a line of ``metrics.jsonl``.
        watch: detector of exploding losses.
        recent: means over the latest steps.
        validation_loss: loss of the latest validation; ``None`` before the first.
        work: seconds and FLOPs of this rank in the latest step.
        is_done: whether no step is to follow.
    """

    setup: TrainSetup
    run: Run
    reporter: Reporter
    offloaded: OffloadedModel
    optimizer: AdamW
    state: RunState
    retention: CheckpointRetention
    samples: LabelledValidation | ValidationSamples | None
    deadline: Deadline
    stop: StopRequest
    record: Callable[[Mapping[str, Any]], None]
    watch: LossWatch
    recent: RecentSteps
    validation_loss: float | None = None
    work: StepWork = NO_WORK
    is_done: bool = False

    def validate_if_due(self) -> None:
        """Validate before the first step, after the last, and as often as the recipe says; end a run out of patience.

        Raises:
            NotFinite: the loss; says where it appeared.
            DataError: a weight of the model that training starts from.
        """
        step, rows, recipe = self.state.step, self.setup.validation, self.setup.recipe
        self.is_done = step == self.setup.num_steps
        if not len(rows) or not (self.is_done or step == 0 or is_multiple(step, recipe.validate_every)):
            return
        self.reporter.on_activity(f"validating on {len(rows):,} rows")
        self.flush()
        with self.deadline.measure("validation"):
            loss, sample = self.setup.parallel.validate(self.setup, self.offloaded, self._compute_validation)
        self._after_validation(loss, sample)

    def _compute_validation(self) -> Validated:
        """Validate the model of this rank.

        Raises:
            NotFinite: the loss.
        """
        setup, step, rows, parallel = self.setup, self.state.step, self.setup.validation, self.setup.parallel
        # Other replicas wait for the loss: before it, they cannot agree to stop.
        before_pass = self.stop_if_asked if parallel.replicas.size == 1 else lambda: None
        tokens = setup.recipe.micro_batch_tokens
        measure = partial(validate, self.offloaded, rows, tokens, objective=setup.objective)
        if isinstance(self.samples, LabelledValidation):
            losses, sample = self.samples.measure(self.offloaded, before_pass)
            loss = losses.mean
        else:
            loss, sample = measure(before_pass).mean, None
        if not math.isfinite(loss):
            if parallel.world.size > 1:  # all ranks would have to take part in the passes that find the place
                raise NotFinite(f"the validation loss after step {step} is not finite")
            raise explain_loss("validation loss", step, setup, self.offloaded, measure)
        if self.samples and not isinstance(self.samples, LabelledValidation):
            sample = self.samples.take(self.offloaded, step)
        return loss, sample

    def _after_validation(self, loss: float, sample: ValidationSample | None) -> None:
        """Record a validation, and keep the state if it is the best."""
        step, recipe = self.state.step, self.setup.recipe
        self.validation_loss = loss
        if step == 0:
            self.state = replace(self.state, loss_before=loss)
        scores = sample.scores if sample else {}
        self.record({"step": step, LOSS: loss, **({"scores": scores} if scores else {})})
        self.reporter.on_validation(step, loss, sample)
        self.warn(self.watch.after_validation(loss, self.state.loss_before))
        self.state = self.retention.after_validation(self.state, loss, scores)
        patience = {"is_out": self.retention.is_out_of_patience(self.state)}
        if not self.is_done and self.setup.parallel.world.broadcast("patience", patience)["is_out"]:
            end = f"ended after step {step}: no better state in {recipe.patience} validations"
            self.run.log(end)
            self.reporter.on_message(end)
            self.is_done = True

    def take_step(self) -> None:
        """Compute an optimizer step and record it; of a run on disk, commit it when its gradients are there.

        Raises:
            NotFinite, DataError: as `guarded_step`.
        """
        self.reporter.on_activity(f"computing step {self.state.step + 1}")
        report, self.work = compute_step(self.setup, self.offloaded, self.optimizer)
        self.state = replace(self.state, step=report.step, loss_scale=self.optimizer.loss_scale)
        self.warn_unmoved()
        self.warn(self.watch.after_step(report.loss))
        # Before the commit: a line too many is dropped on resume, a line too few would be missing for good.
        self.record(report.to_dict())
        progress = self.recent.add(report)
        self.run.log(step_log_line(report, progress))
        self.reporter.on_step(report, progress)
        if self.setup.plan.placement.is_durable:
            # The next step may begin meanwhile: whatever it writes comes after this.
            commit, group = checkpoint.commit_together, self.setup.parallel.pipeline
            self.offloaded.stores["grad"].then(partial(commit, self.run, group, self.state, self.optimizer.pending))
        self.deadline.record("step", report.counts.seconds)

    def save_if_due(self) -> None:
        """Make a checkpoint if one is due."""
        self.reporter.on_activity(f"saving after step {self.state.step}")
        before = time.monotonic()
        is_late = bool(self.setup.parallel.world.broadcast("late", {"is": self.retention.is_late})["is"])
        if self.retention.save_if_due(self.state, is_late):
            self.deadline.record("save", time.monotonic() - before)

    def export(self) -> None:
        """Write the tuned model: the last state, or the best.

        Raises:
            GptjFtError: it could not be written.
        """
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
        """The state that the tuned model has."""
        best = self.state.best
        if best and self.setup.recipe.export == "best":
            return ExportedState(best.step, best.validation_loss)
        return ExportedState(self.state.step, self.validation_loss)

    def finish(self, began: float) -> TrainResult:
        """Remove what only an unfinished run needs, and sum up what was done since `time.monotonic` was ``began``.

        Raises:
            Interrupted: a signal came while the model was being written, which is sooner done than a checkpoint.
        """
        run, state, exported = self.run, self.state, self.exported
        self.setup.parallel.world.barrier("finished")  # nobody has files of it open any more
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
            seconds=time.monotonic() - began,
            counts=counts,
            throughput=throughput,
        )

    def stop_if_asked(self) -> None:
        """Stop if a signal has asked; called where the state is that after a step, between passes over the weights.

        Raises:
            Interrupted: it has.
        """
        if self.setup.parallel.world.any("stop", self.stop.requested):
            self._stop(Interrupted, "")

    def stop_if_late(self) -> None:
        """Stop if what comes next might not end in time, unless that is only the end of the run; warn of slow machines.

        Raises:
            OutOfTime, Interrupted: it might not; or a signal has asked, too.
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
        end = (
            f"stopped after step {step} of {self.setup.num_steps}{reason}" if step else "stopped before the first step"
        )
        self.run.log(end)
        saved = "everything is saved" if step else "nothing was trained yet"
        raise kind(f"{end}; {saved}; resume with\n{resume_command(self.run)}")

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """Save before an error ends the run, where that can be done: what is in memory would be lost."""
        try:
            yield
        except (Interrupted, NotFinite, DataError):  # saved; or resumed, the run would get here again
            raise
        except BaseException:
            if self.setup.parallel.pipeline.size > 1 or not self.run.writes:
                raise  # the state is in several processes, or a copy
            with suppress(BaseException):  # what ended the run is what is to be told
                is_durable = self.setup.plan.placement.is_durable
                if not is_durable and self.optimizer.is_whole and self._is_recorded():
                    now = replace(self.state, step=self.optimizer.step, loss_scale=self.optimizer.loss_scale)
                    self.retention.save_now(now)
            raise

    def _is_recorded(self) -> bool:
        """Tell whether the last step has its line in the metrics: resumed after it, the run would never write that."""
        return any(line["step"] == self.optimizer.step for line in step_lines(self.run))

    def flush(self) -> None:
        """Apply the pending update to every layer."""
        if self.optimizer.pending is None:  # it takes no time, and the next one would be expected to take none either
            self.optimizer.flush()
            return
        with self.deadline.measure("flush"):
            self.optimizer.flush()

    def warn_unmoved(self) -> None:
        """Warn of tensors that the first step has left as they were, once its update has reached every layer."""
        movement, lr = self.optimizer.take_unchanged(), self.setup.schedule.lr(1)
        self.warn(movement.warning(self.setup.architecture.family, lr) if movement and lr > 0 else None)

    def warn(self, warning: str | None) -> None:
        """Log and report a warning, if there is one."""
        warn(self.run, self.reporter, warning)


def step_lines(run: Run) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` that are optimizer steps, not validations."""
    return [line for line in run.metrics() if "loss" in line]


def warn(run: Run, reporter: Reporter, warning: str | None) -> None:
    """Log and report a warning, if there is one."""
    if warning:
        run.log(warning)
        reporter.on_warning(warning)
