"""Training, top to bottom: `train` is the loop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from gptj_ft import checkpoint
from gptj_ft.data.batches import Rows, rows_of_step
from gptj_ft.deadline import Deadline, coming, forecast_seconds
from gptj_ft.errors import GptjFtError, Interrupted, NotFinite, OutOfTime
from gptj_ft.guard import explain_gradient, explain_loss
from gptj_ft.home import remember_run
from gptj_ft.keeping import Keeper
from gptj_ft.layers import PackedBatch
from gptj_ft.likelihood import passes
from gptj_ft.lora import seed_of
from gptj_ft.meters import Meters, Stopwatch, Tally, count_flops, summarize
from gptj_ft.model import trained_parameters
from gptj_ft.optimizer import AdamW
from gptj_ft.outcome import write_outcome
from gptj_ft.progress import StepProgress, StepReport
from gptj_ft.recipe import Recipe
from gptj_ft.run import Run, record_environment
from gptj_ft.samples import Sample, Sampler
from gptj_ft.schedule import is_multiple
from gptj_ft.screen import clock, panel
from gptj_ft.session import Session
from gptj_ft.stack import PASS_TOKENS, LayerStack
from gptj_ft.state import open_state
from gptj_ft.streaming import StepLoss, evaluate_losses, train_step
from gptj_ft.trackers import tracking
from gptj_ft.tuned import Trained

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
        tally: all steps of the run together.
        meters: their rates.
    """

    run: str
    model: str
    steps: int
    exported_step: int
    loss_before: float | None
    loss_after: float | None
    best: dict[str, Any] | None
    seconds: float
    tally: Tally
    meters: Meters


def train(
    session: Session, run: Run, console: Console, verbose: bool = False, began: float | None = None
) -> TrainResult:
    """Train a run, from its newest checkpoint if it has one, and export the model.

    Args:
        session: what to train.
        run: its folder.
        console: for progress.
        verbose: whether to show what the engine does, too.
        began: when the session did, by `time.monotonic`; ``max_time`` counts from there. Default: now.

    Raises:
        Interrupted, OutOfTime: asked to stop; the state is saved and the message says how to go on.
        ResourceError: memory or disk ran out; the last checkpoint is intact.
        NotFinite: a loss or a gradient; the last commit or checkpoint is intact.
        DataError: a weight of the model.
    """
    recipe, started = session.recipe, time.monotonic()
    chosen = {"placement": str(session.plan.placement), "precision": session.plan.precision}
    record_environment(run, str(session.device), torch.get_num_threads(), chosen)
    stack, optimizer, facts = open_state(session, run)
    is_durable = session.plan.placement.is_durable
    budget = recipe.micro_batch_tokens
    loss_after: float | None = None
    deadline = Deadline(recipe.max_time, started if began is None else began, forecast_seconds(session))
    try:
        keeper = Keeper(session, run, stack, optimizer, facts)
        keeper.begin()
        sampler = Sampler(session, run) if recipe.sample_rows else None
        warn, expected = partial(warn_of, run, console), session.plan.costs.seconds_per_step
        with (
            StepProgress(console, session.num_steps, optimizer.step, expected, verbose) as progress,
            tracking(run, recipe, warn) as record,
            StopRequest(progress.stopping) as stop,
        ):
            while True:
                is_end = optimizer.step == session.num_steps
                is_due = is_end or optimizer.step == 0 or is_multiple(optimizer.step, recipe.validate_every)
                if len(session.validation) and is_due:
                    progress.doing(f"validating on {len(session.validation):,} rows")
                    flush(optimizer, deadline)
                    with deadline.measure("validation"):
                        loss_after = validate(stack, session.validation, budget).mean
                        sample = sampler.take(stack, optimizer.step) if sampler and math.isfinite(loss_after) else None
                    if not math.isfinite(loss_after):
                        again = partial(validate, stack, session.validation, budget)
                        raise explain_loss("validation loss", optimizer.step, session, stack, again)
                    if optimizer.step == 0:
                        facts["loss_before"] = loss_after
                    scores = sample.scores if sample else {}
                    line = {"step": optimizer.step, "validation_loss": loss_after}
                    record({**line, "scores": scores} if scores else line)
                    show_validation(console, optimizer.step, loss_after, sample)
                    keeper.after_validation(loss_after, scores)
                    if not is_end and keeper.is_out_of_patience():
                        end = f"ended after step {optimizer.step}: no better state in {recipe.patience} validations"
                        run.log(end)
                        console.print(end, highlight=False)
                        is_end = True
                if is_end:
                    break

                progress.doing(f"computing step {optimizer.step + 1}")
                stopwatch = Stopwatch(stack)
                rows = rows_of_step(optimizer.step, len(session.train), recipe.batch_size, recipe.seed)
                batches = with_noise(recipe, optimizer.step, session.train.batches(rows, budget), session.device)
                lr = session.schedule.lr(optimizer.step + 1)
                optimizer.begin(lr)
                loss, grad_norm = guarded_step(session, stack, optimizer, batches)
                warn_unmoved(session, optimizer, warn)
                tally = stopwatch.read(sum(len(batch.tokens_T) for batch in batches), loss.num_targets)
                flops = count_flops(stack.layouts, tally.tokens, tally.target_tokens, stack.room.kept, stack.frozen)
                meters = Meters.of(tally, flops, session.plan.rates.compute.matmul(session.dtype))
                report = StepReport(optimizer.step, loss.mean, loss.z_mean, lr, grad_norm, tally, meters)
                # Before the commit: a line too many is dropped on resume, a line too few would be missing for good.
                record(report.to_dict())
                run.log(progress.show(report))
                if is_durable:
                    # The next step may begin meanwhile: whatever it writes comes after this.
                    commit = partial(checkpoint.commit, run, optimizer.step, optimizer.pending, dict(facts))
                    stack.stores["grad"].then(commit)

                deadline.record("step", tally.seconds)
                if optimizer.step == session.num_steps:
                    continue
                is_late = not deadline.allows(*coming(session, optimizer.step))
                before = time.monotonic()
                if keeper.after_step(is_stopping=stop.requested or is_late):
                    deadline.record("save", time.monotonic() - before)
                if stop.requested or is_late:
                    stack.drain()
                    step = f"stopped after step {optimizer.step} of {session.num_steps}"
                    command = f"gptj-ft finetune --resume {run.folder}"
                    if stop.requested:
                        raise Interrupted(f"{step}, everything is saved; go on with\n{command}")
                    limit = clock(recipe.max_time or 0.0)
                    raise OutOfTime(
                        f"{step}: another might not end within {limit}; everything is saved, go on with\n{command}"
                    )
        console.print(f"all steps are done; writing {run.model}", highlight=False)
        flush(optimizer, deadline)
        warn_unmoved(session, optimizer, warn)
        best: dict[str, Any] | None = facts["best"]
        last: dict[str, Any] = {"step": optimizer.step, "validation_loss": loss_after}
        exported = best if best and recipe.export == "best" else last
        export(session, run, stack, optimizer.step, {**facts, "exported": exported})
    finally:
        stack.close()
    run.discard_state()
    kept = keeper.prune(is_finished=True)
    remember_run(run.folder)
    tally, meters = summarize([line for line in run.metrics() if "loss" in line])
    if best:
        is_apart = best["step"] in kept and best["step"] != exported["step"]
        best = {**best, "checkpoint": str(kept[best["step"]]) if is_apart else None}
    return TrainResult(
        str(run.folder), str(run.model), optimizer.step, exported["step"], facts["loss_before"],
        exported["validation_loss"], best, time.monotonic() - started,
        tally, meters,
    )  # fmt: skip


def with_noise(recipe: Recipe, step: int, batches: Sequence[PackedBatch], device: torch.device) -> list[PackedBatch]:
    """Return the micro-batches of a step on the device, with the seeds of their dropout if there is any."""
    if recipe.method != "lora" or not recipe.lora.dropout:
        return [batch.to(device) for batch in batches]
    seeds = (seed_of((recipe.seed, step, number)) for number in range(len(batches)))
    return [replace(batch.to(device), noise=seed) for batch, seed in zip(batches, seeds, strict=True)]


def guarded_step(
    session: Session, stack: LayerStack, optimizer: AdamW, batches: Sequence[PackedBatch]
) -> tuple[StepLoss, float]:
    """Take one optimizer step; return its loss and gradient norm.

    Raises:
        NotFinite: one of them; says where it appeared. Nothing of this step is kept.
        DataError: a weight of the model that training starts from.
    """
    try:
        loss = train_step(stack, optimizer, batches, session.recipe.z_loss)
    except NotFinite:
        optimizer.flush()
        again = partial(evaluate_losses, stack, batches)
        raise explain_loss("loss", optimizer.step, session, stack, again) from None
    try:
        return loss, optimizer.end()
    except GptjFtError as error:
        raise explain_gradient(error, session, stack) from error


def show_validation(console: Console, step: int, loss: float, sample: Sample | None) -> None:
    """Show loss and scores, and on a terminal one answer: a log gets no text of the user's."""
    console.print(f"validation loss after {step} steps: {loss:.4f}", highlight=False)
    if sample is not None:
        rows = [("scores", "  ".join(f"{name} {value:.2f}" for name, value in sample.scores.items()))]
        if console.is_terminal:
            texts = {"expected": sample.expected, "answer": sample.answer}
            rows += [(name, text[:SAMPLE_CHARACTERS]) for name, text in texts.items()]
        panel(console, "", rows)


def warn_of(run: Run, console: Console, warning: str) -> None:
    """Say on the terminal and in the log what a user should know."""
    run.log(warning)
    console.print(f"warning: {warning}", highlight=False, markup=False)


def warn_unmoved(session: Session, optimizer: AdamW, warn: Callable[[str], None]) -> None:
    """Say which tensors the first step has left as they were, as soon as its update has reached every layer."""
    movement, lr = optimizer.first_movement(), session.schedule.lr(1)
    warning = movement.warning(session.architecture.family, lr) if movement and lr > 0 else None
    if warning:
        warn(warning)


def validate(stack: LayerStack, rows: Rows, budget_tokens: int) -> StepLoss:
    """Return the loss over rows; nothing is trained.

    Rows are read and put on the device as they are needed. Which of them share a micro-batch depends on the rows alone;
    how many micro-batches share a pass over the weights depends on `Room.pass_tokens`, and changes no number.
    """
    losses: list[StepLoss] = []
    for span in passes(rows.lengths, PASS_TOKENS):
        batches = rows.batches(span, budget_tokens)
        for some in passes([len(batch.tokens_T) for batch in batches], stack.room.pass_tokens):
            losses += evaluate_losses(stack, [batches[number].to(stack.device) for number in some])
    return StepLoss(sum(loss.total for loss in losses), sum(loss.num_targets for loss in losses))


def export(session: Session, run: Run, stack: LayerStack, step: int, facts: dict[str, Any]) -> None:
    """Write the tuned model; if that fails, a checkpoint where the state is in memory, so that nothing is lost.

    Args:
        session: of the run.
        run: where the model goes, and where the checkpoint is whose state it has if that is not the last.
        stack: the last state.
        step: of the last state.
        facts: ``exported`` in them says which state the model has.

    Raises:
        GptjFtError: it could not be written; the state of the run was saved.
    """
    exported = facts["exported"]
    data = {"sha256": session.data_sha256, "rows": len(session.train), "validation_rows": len(session.validation)}
    metrics = {
        "validation_loss": exported["validation_loss"], "baseline_validation_loss": facts["loss_before"],
        "steps": exported["step"], "best": facts["best"], "updates_before": facts.get("updates_before", 0),
    }  # fmt: skip
    trained = Trained(session.recipe, session.model, session.architecture, data, metrics)

    chosen = (
        trained_parameters(stack)
        if exported["step"] == step
        else checkpoint.parameters(run.checkpoint(exported["step"]), stack.layouts)
    )
    try:
        write_outcome(run.model, trained, session.selection, chosen)
    except GptjFtError as error:
        if not session.plan.placement.is_durable:
            checkpoint.save(run, stack, step, facts)
        raise type(error)(
            f"{error}\ntraining is done and saved; `gptj-ft finetune --resume {run.folder}` exports it"
        ) from error


def flush(optimizer: AdamW, deadline: Deadline) -> None:
    """Apply what is pending to every layer."""
    if optimizer.pending is None:  # then it takes no time, and the next one would be thought to take none either
        optimizer.flush()
        return
    with deadline.measure("flush"):
        optimizer.flush()


class StopRequest:
    """Ctrl-C and SIGTERM: the first asks to stop after the step, the second stops at once."""

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self.requested, self._on_first = False, on_first
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise Interrupted("stopped at once; the last checkpoint, if there is one, is intact")
        self.requested = True
        self._on_first()
