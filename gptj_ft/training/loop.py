"""Training, top to bottom: `train` is the loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from gptj_ft.checkpoints.metadata import TunedModel
from gptj_ft.cli.terminal.progress import StepProgress, StepReport
from gptj_ft.cli.terminal.screen import panel
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run, record_environment, resume_command, what_is_saved
from gptj_ft.data.batches import Rows, rows_of_step
from gptj_ft.errors import GptjFtError, Interrupted, NotFinite, OutOfTime
from gptj_ft.evaluation.likelihood import passes
from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.lora import seed_of
from gptj_ft.planning.flops import count_flops
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.model import PASS_TOKENS, OffloadedModel
from gptj_ft.streaming.open import trained_parameters
from gptj_ft.streaming.step import StepLoss, evaluate_losses, train_step
from gptj_ft.system.paths import remember_run
from gptj_ft.system.signals import StopRequest
from gptj_ft.system.units import clock
from gptj_ft.training import checkpoint
from gptj_ft.training.deadline import Deadline, forecast_seconds, next_activities
from gptj_ft.training.export import write_outcome
from gptj_ft.training.nonfinite import LossWatch, explain_gradient, explain_loss
from gptj_ft.training.restore import open_state
from gptj_ft.training.retention import CheckpointRetention
from gptj_ft.training.schedule import is_multiple
from gptj_ft.training.setup import TrainSetup
from gptj_ft.training.throughput import StepCounts, Stopwatch, Throughput, summarize
from gptj_ft.training.trackers import tracking
from gptj_ft.training.validation_samples import ValidationSample, ValidationSamples

SAMPLE_CHARACTERS = 300


@dataclass(frozen=True)
class TrainResult:
    """What a finished run amounts to.

    Attributes:
        run: its folder.
        model: the tuned model's folder.
        steps: optimizer steps done.
        exported_step: of them, those that the tuned model has behind it.
        loss_before: validation loss per target token before training; ``None`` without validation rows.
        loss_after: the same of the tuned model.
        best: ``step`` with the lowest ``validation_loss``, and its ``checkpoint`` if the tuned model is another state
            and this one is kept; ``None`` without validation rows.
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
    best: dict[str, Any] | None
    seconds: float
    counts: StepCounts
    throughput: Throughput

    def to_dict(self) -> dict[str, Any]:
        """Return the fields under the names that ``--json`` has for them."""
        names = {"counts": "tally", "throughput": "meters"}
        return {names.get(name, name): value for name, value in asdict(self).items()}


def train(
    setup: TrainSetup, run: Run, console: Console, verbose: bool = False, began: float | None = None
) -> TrainResult:
    """Train a run, from its newest checkpoint if it has one, and export the model.

    Args:
        setup: what to train.
        run: its folder.
        console: for progress.
        verbose: whether to show what the engine does, too.
        began: when the session did, by `time.monotonic`; ``max_time`` counts from there. Default: now.

    Raises:
        Interrupted, OutOfTime: asked to stop; the state is saved and the message says how to go on.
        ResourceError: memory or disk ran out; what could be saved was, else the last checkpoint is intact.
        NotFinite: a loss or a gradient; the last commit or checkpoint is intact.
        DataError: a weight of the model.
    """
    recipe, started = setup.recipe, time.monotonic()
    chosen = {"placement": str(setup.plan.placement), "precision": setup.plan.precision}
    record_environment(run, str(setup.device), torch.get_num_threads(), chosen)
    stack, optimizer, facts = open_state(setup, run)
    loss_after: float | None = None
    deadline = Deadline(recipe.max_time, started if began is None else began, forecast_seconds(setup))
    try:
        retention = CheckpointRetention(setup, run, stack, optimizer, facts)
        samples = ValidationSamples(setup, run) if recipe.sample_rows else None
        warn, expected = partial(warn_of, run, console), setup.plan.costs.seconds_per_step
        with (
            StepProgress(console, setup.num_steps, optimizer.step, expected, verbose) as progress,
            tracking(run, recipe, warn) as record,
            StopRequest(progress.stopping, partial(what_is_saved, run)) as request,
            retention.rescuing(),
        ):
            earlier = [line["loss"] for line in run.metrics() if "loss" in line]
            watch = LossWatch(setup.architecture.config.vocab_size, earlier)
            stopper = Stopper(setup, run, request, deadline, retention, optimizer)
            retention.begin()
            while True:
                is_end = optimizer.step == setup.num_steps
                is_due = is_end or optimizer.step == 0 or is_multiple(optimizer.step, recipe.validate_every)
                if len(setup.validation) and is_due:
                    progress.doing(f"validating on {len(setup.validation):,} rows")
                    flush(optimizer, deadline)
                    with deadline.measure("validation"):
                        loss_after, sample = measure(setup, stack, optimizer.step, samples, stopper.stop_if_asked)
                    if optimizer.step == 0:
                        facts["loss_before"] = loss_after
                    scores = sample.scores if sample else {}
                    line = {"step": optimizer.step, "validation_loss": loss_after}
                    record({**line, "scores": scores} if scores else line)
                    show_validation(console, optimizer.step, loss_after, sample)
                    warn(watch.after_validation(loss_after, facts["loss_before"]))
                    retention.after_validation(loss_after, scores)
                    if not is_end and retention.is_out_of_patience():
                        end = f"ended after step {optimizer.step}: no better state in {recipe.patience} validations"
                        run.log(end)
                        console.print(end, highlight=False)
                        is_end = True
                stopper.stop_if_asked()
                if is_end:
                    break

                progress.doing(f"computing step {optimizer.step + 1}")
                report = compute_step(setup, stack, optimizer)
                warn_unmoved(setup, optimizer, warn)
                warn(watch.after_step(report.loss))
                # Before the commit: a line too many is dropped on resume, a line too few would be missing for good.
                record(report.to_dict())
                run.log(progress.show(report))
                if setup.plan.placement.is_durable:
                    # The next step may begin meanwhile: whatever it writes comes after this.
                    commit = partial(checkpoint.commit, run, optimizer.step, optimizer.pending, dict(facts))
                    stack.stores["grad"].then(commit)
                deadline.record("step", report.counts.seconds)
                progress.doing(f"saving after step {optimizer.step}")
                before = time.monotonic()
                if retention.after_step():
                    deadline.record("save", time.monotonic() - before)
                stopper.stop_if_late()

            console.print(f"all steps are done; writing {run.model}", highlight=False)
            progress.doing("writing the tuned model")
            flush(optimizer, deadline)
            warn_unmoved(setup, optimizer, warn)
            best: dict[str, Any] | None = facts["best"]
            last: dict[str, Any] = {"step": optimizer.step, "validation_loss": loss_after}
            exported = best if best and recipe.export == "best" else last
            export(setup, run, stack, optimizer.step, {**facts, "exported": exported})
    finally:
        stack.close()
    run.discard_state()
    kept = retention.prune(is_finished=True)
    remember_run(run.folder)
    if request.requested:  # while the model was being written, which is sooner done than a checkpoint
        raise Interrupted(f"stopped; {what_is_saved(run)}")
    counts, throughput = summarize([line for line in run.metrics() if "loss" in line])
    if best:
        is_apart = best["step"] in kept and best["step"] != exported["step"]
        best = {**best, "checkpoint": str(kept[best["step"]]) if is_apart else None}
    return TrainResult(
        str(run.folder), str(run.model), optimizer.step, exported["step"], facts["loss_before"],
        exported["validation_loss"], best, time.monotonic() - started,
        counts, throughput,
    )  # fmt: skip


def measure(
    setup: TrainSetup,
    stack: OffloadedModel,
    step: int,
    samples: ValidationSamples | None,
    before_pass: Callable[[], None],
) -> tuple[float, ValidationSample | None]:
    """Return the validation loss after a step, and sampled answers if the recipe asks for some.

    Raises:
        NotFinite: the loss; says where it appeared.
        DataError: a weight of the model that training starts from.
    """
    rows, budget = setup.validation, setup.recipe.micro_batch_tokens
    loss = validate(stack, rows, budget, before_pass).mean
    if not math.isfinite(loss):
        raise explain_loss("validation loss", step, setup, stack, partial(validate, stack, rows, budget))
    return loss, samples.take(stack, step) if samples else None


def compute_step(setup: TrainSetup, stack: OffloadedModel, optimizer: AdamW) -> StepReport:
    """Take the next optimizer step; return its figures.

    Raises:
        NotFinite, DataError: as `guarded_step`.
    """
    recipe, stopwatch = setup.recipe, Stopwatch(stack)
    rows = rows_of_step(optimizer.step, len(setup.train), recipe.batch_size, recipe.seed)
    batches = setup.train.batches(rows, recipe.micro_batch_tokens)
    batches = with_dropout_seeds(recipe, optimizer.step, batches, setup.device)
    lr = setup.schedule.lr(optimizer.step + 1)
    optimizer.begin_step(lr)
    loss, grad_norm = guarded_step(setup, stack, optimizer, batches)
    counts = stopwatch.read(sum(len(batch.tokens_T) for batch in batches), loss.num_targets)
    flops = count_flops(stack.layouts, counts.tokens, counts.target_tokens, stack.budget.num_kept_layers, stack.frozen)
    throughput = Throughput.of(counts, flops, setup.plan.rates.compute.matmul(setup.dtype))
    return StepReport(optimizer.step, loss.mean, loss.z_mean, lr, grad_norm, counts, throughput)


def with_dropout_seeds(
    recipe: Recipe, step: int, batches: Sequence[PackedBatch], device: torch.device
) -> list[PackedBatch]:
    """Return the micro-batches of a step on the device, with the seeds of their dropout if there is any."""
    if recipe.method != "lora" or not recipe.lora.dropout:
        return [batch.to(device) for batch in batches]
    seeds = (seed_of((recipe.seed, step, number)) for number in range(len(batches)))
    return [replace(batch.to(device), dropout_seed=seed) for batch, seed in zip(batches, seeds, strict=True)]


def guarded_step(
    setup: TrainSetup, stack: OffloadedModel, optimizer: AdamW, batches: Sequence[PackedBatch]
) -> tuple[StepLoss, float]:
    """Take one optimizer step; return its loss and gradient norm.

    Raises:
        NotFinite: one of them; says where it appeared. Nothing of this step is kept.
        DataError: a weight of the model that training starts from.
    """
    try:
        loss = train_step(stack, optimizer, batches, setup.recipe.z_loss)
    except NotFinite:
        optimizer.flush()
        again = partial(evaluate_losses, stack, batches)
        raise explain_loss("loss", optimizer.step, setup, stack, again) from None
    try:
        return loss, optimizer.finish_step()
    except GptjFtError as error:
        raise explain_gradient(error, setup, stack) from error


def show_validation(console: Console, step: int, loss: float, sample: ValidationSample | None) -> None:
    """Show loss and scores, and on a terminal one answer: a log gets no text of the user's."""
    console.print(f"validation loss after {step} steps: {loss:.4f}", highlight=False)
    if sample is not None:
        rows = [("scores", "  ".join(f"{name} {value:.2f}" for name, value in sample.scores.items()))]
        if console.is_terminal:
            texts = {"expected": sample.expected, "answer": sample.answer}
            rows += [(name, text[:SAMPLE_CHARACTERS]) for name, text in texts.items()]
        panel(console, "", rows)


def warn_of(run: Run, console: Console, warning: str | None) -> None:
    """Say on the terminal and in the log what a user should know, if there is anything."""
    if warning:
        run.log(warning)
        console.print(f"warning: {warning}", highlight=False, markup=False)


def warn_unmoved(setup: TrainSetup, optimizer: AdamW, warn: Callable[[str | None], None]) -> None:
    """Say which tensors the first step has left as they were, as soon as its update has reached every layer."""
    movement, lr = optimizer.take_unchanged(), setup.schedule.lr(1)
    warning = movement.warning(setup.architecture.family, lr) if movement and lr > 0 else None
    warn(warning)


def validate(
    stack: OffloadedModel, rows: Rows, budget_tokens: int, before_pass: Callable[[], None] = lambda: None
) -> StepLoss:
    """Return the loss over rows; nothing is trained.

    Rows are read and put on the device as they are needed. Which of them share a micro-batch depends on the rows alone;
    how many micro-batches share a pass over the weights depends on `BufferBudget.pass_tokens`, and changes no number.
    ``before_pass`` is called before each pass.
    """
    losses: list[StepLoss] = []
    for span in passes(rows.lengths, PASS_TOKENS):
        batches = rows.batches(span, budget_tokens)
        for some in passes([len(batch.tokens_T) for batch in batches], stack.budget.pass_tokens):
            before_pass()
            losses += evaluate_losses(stack, [batches[number].to(stack.device) for number in some])
    return StepLoss(sum(loss.total for loss in losses), sum(loss.num_targets for loss in losses))


def export(setup: TrainSetup, run: Run, stack: OffloadedModel, step: int, facts: dict[str, Any]) -> None:
    """Write the tuned model.

    Args:
        setup: of the run.
        run: where the model goes, and where the checkpoint is whose state it has if that is not the last.
        stack: the last state.
        step: of the last state.
        facts: ``exported`` in them says which state the model has.

    Raises:
        GptjFtError: it could not be written.
    """
    exported = facts["exported"]
    data = {"sha256": setup.data_sha256, "rows": len(setup.train), "validation_rows": len(setup.validation)}
    metrics = {
        "validation_loss": exported["validation_loss"], "baseline_validation_loss": facts["loss_before"],
        "steps": exported["step"], "best": facts["best"], "updates_before": facts.get("updates_before", 0),
    }  # fmt: skip
    trained = TunedModel(setup.recipe, setup.model, setup.architecture, data, metrics)

    chosen = (
        trained_parameters(stack)
        if exported["step"] == step
        else checkpoint.parameters(run.checkpoint(exported["step"]), stack.layouts)
    )
    write_outcome(run.model, trained, setup.selection, chosen)


def flush(optimizer: AdamW, deadline: Deadline) -> None:
    """Apply what is pending to every layer."""
    if optimizer.pending is None:  # then it takes no time, and the next one would be thought to take none either
        optimizer.flush()
        return
    with deadline.measure("flush"):
        optimizer.flush()


@dataclass(frozen=True)
class Stopper:
    """Ends a run early, with everything saved: because a signal asks for it, or because its time is over."""

    setup: TrainSetup
    run: Run
    request: StopRequest
    deadline: Deadline
    retention: CheckpointRetention
    optimizer: AdamW

    def stop_if_asked(self) -> None:
        """Stop if a signal has asked; called where the state is that after a step, between passes over the weights.

        Raises:
            Interrupted: it has.
        """
        if self.request.requested:
            self._stop(Interrupted, "")

    def stop_if_late(self) -> None:
        """Stop if what comes next might not end in time, unless that is only the end of the run.

        Raises:
            OutOfTime, Interrupted: it might not; or a signal has asked, too.
        """
        step, recipe = self.optimizer.step, self.setup.recipe
        if step < self.setup.num_steps and not self.deadline.allows(*next_activities(self.setup, step)):
            limit = clock(recipe.max_time or 0.0)
            self._stop(Interrupted if self.request.requested else OutOfTime, f": another might not end within {limit}")

    def _stop(self, kind: type[Interrupted], reason: str) -> None:
        self.retention.save_now()
        step = self.optimizer.step
        end = (
            f"stopped after step {step} of {self.setup.num_steps}{reason}" if step else "stopped before the first step"
        )
        self.run.log(end)
        saved = "everything is saved" if step else "nothing was trained yet"
        raise kind(f"{end}; {saved}, go on with\n{resume_command(self.run)}")
