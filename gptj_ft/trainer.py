"""Training, top to bottom: `train` is the loop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from gptj_ft import checkpoint, machine
from gptj_ft.data.batches import Rows, rows_of_step
from gptj_ft.errors import GptjFtError, Interrupted
from gptj_ft.formats.huggingface import write_model
from gptj_ft.home import remember_run
from gptj_ft.keeping import Keeper, is_multiple
from gptj_ft.optimizer import Schedule
from gptj_ft.progress import StepProgress, StepReport
from gptj_ft.run import Run, record_environment
from gptj_ft.session import Session
from gptj_ft.stack import LayerStack, Visit
from gptj_ft.state import open_state
from gptj_ft.streaming import StepLoss, evaluate_losses, stream, train_step
from gptj_ft.tuning import Tuning, template_of

PASS_TOKENS = 32768  # of hidden states held at once when only a loss is wanted


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
        target_tokens_per_second: of this session's steps.
    """

    run: str
    model: str
    steps: int
    exported_step: int
    loss_before: float | None
    loss_after: float | None
    best: dict[str, Any] | None
    seconds: float
    target_tokens_per_second: float


def train(session: Session, run: Run, console: Console, quiet: bool = False) -> TrainResult:
    """Train a run, from its newest checkpoint if it has one, and export the model.

    Raises:
        Interrupted: asked to stop; the state is saved and the message says how to go on.
        ResourceError: memory or disk ran out; the last checkpoint is intact.
        GptjFtError: a gradient was not finite.
    """
    recipe, started = session.recipe, time.monotonic()
    record_environment(run, str(session.device), torch.get_num_threads())
    stack, optimizer, facts = open_state(session, run)
    is_durable = session.plan.placement.is_durable
    schedule = Schedule.of(recipe, session.num_steps)
    budget = recipe.micro_batch_tokens
    loss_after: float | None = None
    target_tokens, train_seconds = 0, 0.0
    try:
        keeper = Keeper(session, run, stack, optimizer, facts)
        keeper.begin()
        with StepProgress(console, session.num_steps, optimizer.step, quiet) as progress, StopRequest() as stop:
            while True:
                is_end = optimizer.step == session.num_steps
                is_due = is_end or optimizer.step == 0 or is_multiple(optimizer.step, recipe.validate_every)
                if len(session.validation) and is_due:
                    optimizer.flush()
                    loss_after = validate(stack, session.validation, budget).mean
                    if optimizer.step == 0:
                        facts["loss_before"] = loss_after
                    run.append_metrics({"step": optimizer.step, "validation_loss": loss_after})
                    console.print(f"validation loss after {optimizer.step} steps: {loss_after:.4f}", highlight=False)
                    keeper.after_validation(loss_after)
                if is_end:
                    break

                step_started, waited = time.monotonic(), stack.waited_seconds
                rows = rows_of_step(optimizer.step, len(session.train), recipe.batch_size, recipe.seed)
                batches = [batch.to(session.device) for batch in session.train.batches(rows, budget)]
                lr = schedule.lr(optimizer.step + 1)
                optimizer.begin(lr)
                loss = train_step(stack, optimizer, batches)
                grad_norm = optimizer.end()
                if is_durable:
                    stack.drain()
                seconds = time.monotonic() - step_started
                report = StepReport(
                    optimizer.step, loss.mean, lr, grad_norm, sum(len(batch.tokens_T) for batch in batches),
                    loss.num_targets, seconds, stack.waited_seconds - waited, used_memory(session.device),
                )  # fmt: skip
                # Before the commit: a line too many is dropped on resume, a line too few would be missing for good.
                run.append_metrics(asdict(report))
                run.log(progress.show(report))
                if is_durable:
                    checkpoint.commit(run, optimizer.step, optimizer.pending, facts)
                target_tokens, train_seconds = target_tokens + loss.num_targets, train_seconds + seconds

                if optimizer.step == session.num_steps:
                    continue
                keeper.after_step(stop.requested)
                if stop.requested:
                    raise Interrupted(
                        f"stopped after step {optimizer.step} of {session.num_steps}, everything is saved; go on with\n"
                        f"gptj-ft finetune --resume {run.folder}"
                    )
        optimizer.flush()
        best: dict[str, Any] | None = facts["best"]
        last: dict[str, Any] = {"step": optimizer.step, "validation_loss": loss_after}
        exported = best if best and recipe.export == "best" else last
        export(session, run, stack, optimizer.step, {**facts, "exported": exported})
    finally:
        stack.close()
    run.discard_state()
    kept = keeper.prune(is_finished=True)
    remember_run(run.folder)
    if best:
        is_apart = best["step"] in kept and best["step"] != exported["step"]
        best = {**best, "checkpoint": str(kept[best["step"]]) if is_apart else None}
    return TrainResult(
        str(run.folder), str(run.model), optimizer.step, exported["step"], facts["loss_before"],
        exported["validation_loss"], best, time.monotonic() - started,
        target_tokens / train_seconds if train_seconds else 0.0,
    )  # fmt: skip


def validate(stack: LayerStack, rows: Rows, budget_tokens: int) -> StepLoss:
    """Return the loss over rows; nothing is trained.

    As many micro-batches as `PASS_TOKENS` allows share a pass over the weights.
    """
    batches = [batch.to(stack.device) for batch in rows.batches(range(len(rows)), budget_tokens)]
    losses: list[StepLoss] = []
    while batches:
        count = max(1, sum(total <= PASS_TOKENS for total in accumulate(len(batch.tokens_T) for batch in batches)))
        losses += evaluate_losses(stack, batches[:count])
        batches = batches[count:]
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
    data = {"file": session.recipe.data, "sha256": session.data_sha256, "rows": len(session.train)}
    metrics = {
        "validation_loss": exported["validation_loss"], "baseline_validation_loss": facts["loss_before"],
        "steps": exported["step"], "best": facts["best"],
    }  # fmt: skip
    tuning = Tuning(str(session.model.resolve()), template_of(session.recipe), data, metrics)

    def layers() -> Iterator[dict[str, torch.Tensor]]:
        for loaded in stream(stack, [Visit(layer, (stack.parameter,)) for layer in range(len(stack.layers))]):
            yield {name: view.cpu() for name, view in loaded.layout.views(loaded.tensors[stack.parameter]).items()}

    chosen = (
        layers() if exported["step"] == step else checkpoint.parameters(run.checkpoint(exported["step"]), stack.layouts)
    )
    try:
        write_model(run.model, session.architecture, chosen, dtype=None, source=session.model, extra=tuning.to_dict())
    except GptjFtError as error:
        if not session.plan.placement.is_durable:
            checkpoint.save(run, stack, step, facts)
        raise type(error)(
            f"{error}\ntraining is done and saved; `gptj-ft finetune --resume {run.folder}` exports it"
        ) from error


def used_memory(device: torch.device) -> int:
    """Return the memory a run takes: the process's, or on CUDA the device's peak."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else machine.used_memory()


class StopRequest:
    """Ctrl-C and SIGTERM: the first asks to stop after the step, the second stops at once."""

    def __init__(self) -> None:
        self.requested = False
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
