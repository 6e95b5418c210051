"""Training, top to bottom: what a run needs is gathered by `prepare_run`, and `train` is the loop."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from gptj_ft import checkpoint, machine
from gptj_ft.data.batches import Rows, rows_of_step, steps_per_epoch
from gptj_ft.errors import GptjFtError, Interrupted, UsageError
from gptj_ft.families import Architecture, read_architecture
from gptj_ft.formats.huggingface import check, open_checkpoint, write_model
from gptj_ft.home import remember_run
from gptj_ft.model import load_weights, training_stack
from gptj_ft.optimizer import AdamW, Schedule, Update
from gptj_ft.plan import Free, Load, Plan, choose, keeps_gradients
from gptj_ft.progress import StepProgress, StepReport
from gptj_ft.recipe import Recipe
from gptj_ft.run import Run, read_json, record_environment
from gptj_ft.stores import Layout
from gptj_ft.stores.placement import Placement
from gptj_ft.streaming import LayerStack, StepLoss, Visit, evaluate_losses, stream, train_step
from gptj_ft.tuning import Tuning, template_of

PASS_TOKENS = 32768  # of hidden states held at once when only a loss is wanted


@dataclass(frozen=True)
class Session:
    """All that `train` needs, resolved."""

    recipe: Recipe
    model: Path
    architecture: Architecture
    train: Rows
    validation: Rows
    data_sha256: str
    num_steps: int
    device: torch.device
    dtype: torch.dtype
    plan: Plan


@dataclass(frozen=True)
class TrainResult:
    """What a finished run amounts to.

    Attributes:
        run: its folder.
        model: the tuned model's folder.
        steps: optimizer steps done.
        loss_before: validation loss per target token before training; ``None`` without validation rows.
        loss_after: the same after training.
        seconds: wall time of this session's training.
        target_tokens_per_second: of this session's steps.
    """

    run: str
    model: str
    steps: int
    loss_before: float | None
    loss_after: float | None
    seconds: float
    target_tokens_per_second: float


def make_session(recipe: Recipe, model: Path, train: Rows, validation: Rows, data_sha256: str, folder: Path) -> Session:
    """Derive the steps of a run and plan where everything goes.

    Args:
        recipe: the whole run.
        model: folder of the model to start from.
        train: rows to train on.
        validation: rows to measure on; may be none.
        data_sha256: digest of the file the rows came from.
        folder: the run folder, for the free space of its disk.

    Raises:
        ResourceError: it cannot fit.
        UsageError, DataError: a model folder that cannot be used.
    """
    architecture = read_architecture(model)
    check_lengths(recipe, architecture)
    with open_checkpoint(model) as weights:
        check(architecture, weights)
    device = machine.choose_device(recipe.device)
    dtype = machine.choose_dtype(recipe.precision, device)
    per_epoch = steps_per_epoch(len(train), recipe.batch_size)
    num_steps = recipe.max_steps or max(1, round(recipe.epochs * per_epoch))
    lengths = [len(document) for document in train.documents]
    sizes = [
        sum(lengths[row] for row in rows_of_step(step, len(train), recipe.batch_size, recipe.seed))
        for step in range(min(num_steps, per_epoch))
    ]
    load = Load(
        layouts=[Layout.of(layer) for layer in architecture.layers()],
        width=architecture.config.n_embd,
        dtype=dtype,
        micro_batch_tokens=max(recipe.micro_batch_tokens, max(lengths)),
        step_tokens=max(sizes),
        mean_step_tokens=sum(sizes) / len(sizes),
        mean_step_targets=(sum(lengths) - sum(train.prompt_lengths)) / per_epoch,
        num_steps=num_steps,
    )
    plan = choose(recipe, load, free_resources(device, folder), machine.matmul_rate(device, dtype))
    return Session(recipe, model, architecture, train, validation, data_sha256, num_steps, device, dtype, plan)


def free_resources(device: torch.device, folder: Path) -> Free:
    """Return what this machine has left for a run."""
    host = machine.free_memory(torch.device("cpu"))
    is_shared = device.type == "cpu"
    return Free(host if is_shared else machine.free_memory(device), host, machine.free_disk(folder), is_shared)


def check_lengths(recipe: Recipe, architecture: Architecture) -> None:
    """Refuse rows longer than the model was made for.

    Raises:
        UsageError: ``max_length`` is above the model's context.
    """
    if recipe.max_length > architecture.config.n_positions:
        raise UsageError(
            f"max_length {recipe.max_length} is above the model's context of {architecture.config.n_positions} tokens: "
            f"type --max-length {architecture.config.n_positions}"
        )


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
    loss_before, loss_after = facts["loss_before"], facts["loss_after"]
    target_tokens, train_seconds, saved_at = 0, 0.0, time.monotonic()
    try:
        if optimizer.step == 0 and len(session.validation):
            loss_before = facts["loss_before"] = validate(stack, session.validation, budget).mean
            console.print(f"validation loss before training {loss_before:.4f}", highlight=False)
            run.append_metrics({"step": 0, "validation_loss": loss_before})
        with StepProgress(console, session.num_steps, optimizer.step, quiet) as progress, StopRequest() as stop:
            while optimizer.step < session.num_steps:
                step_started = time.monotonic()
                rows = rows_of_step(optimizer.step, len(session.train), recipe.batch_size, recipe.seed)
                batches = [batch.to(session.device) for batch in session.train.batches(rows, budget)]
                lr = schedule.lr(optimizer.step + 1)
                optimizer.begin(lr)
                loss = train_step(stack, optimizer, batches)
                grad_norm = optimizer.end()
                if is_durable:
                    stack.drain()
                    checkpoint.commit(run, optimizer.step, optimizer.pending, facts)
                seconds = time.monotonic() - step_started
                report = StepReport(
                    optimizer.step, loss.mean, lr, grad_norm, sum(len(batch.tokens_T) for batch in batches),
                    loss.num_targets, seconds, used_memory(session.device),
                )  # fmt: skip
                run.append_metrics(asdict(report))
                run.log(progress.show(report))
                target_tokens, train_seconds = target_tokens + loss.num_targets, train_seconds + seconds

                is_last = optimizer.step == session.num_steps
                if len(session.validation) and (is_last or is_multiple(optimizer.step, recipe.validate_every)):
                    optimizer.flush()
                    loss_after = facts["loss_after"] = validate(stack, session.validation, budget).mean
                    run.append_metrics({"step": optimizer.step, "validation_loss": loss_after})
                    console.print(f"validation loss at step {optimizer.step}: {loss_after:.4f}", highlight=False)
                is_due = time.monotonic() - saved_at > recipe.save_minutes * 60
                is_due = is_due or stop.requested or is_multiple(optimizer.step, recipe.save_every)
                if is_due and not is_last and not is_durable:
                    optimizer.flush()
                    checkpoint.save(run, stack, optimizer.step, facts)
                    saved_at = time.monotonic()
                if stop.requested and not is_last:
                    raise Interrupted(
                        f"stopped after step {optimizer.step} of {session.num_steps}, everything is saved; go on with\n"
                        f"gptj-ft finetune --resume {run.folder}"
                    )
        optimizer.flush()
        export(session, run, stack, optimizer.step, facts)
    finally:
        stack.close()
    shutil.rmtree(run.state, ignore_errors=True)
    shutil.rmtree(run.checkpoints, ignore_errors=True)  # the model holds the result
    remember_run(run.folder)
    return TrainResult(
        str(run.folder), str(run.model), optimizer.step, loss_before, loss_after, time.monotonic() - started,
        target_tokens / train_seconds if train_seconds else 0.0,
    )  # fmt: skip


def open_state(session: Session, run: Run) -> tuple[LayerStack, AdamW, dict[str, Any]]:
    """Open the stores of a run and fill them: from where it stopped, else from the model it starts from.

    Returns: the stack, the optimizer at the run's step, and the facts that go into every commit and checkpoint.
    """
    commit, is_durable = checkpoint.committed(run), session.plan.placement.is_durable
    if commit and not is_durable:  # the session before had the state on disk, this one has not
        settle(session, run, commit)
        commit = None
    if not commit:
        shutil.rmtree(run.state, ignore_errors=True)  # without a commit it is scratch, or half of a beginning
    facts: dict[str, Any] = {"loss_before": None, "loss_after": None}
    stack = open_stack(session, run, session.plan.placement)
    try:
        if commit:
            optimizer = resume_optimizer(session, run, stack, commit)
            facts |= commit["facts"]
        elif saved := checkpoint.checkpoints(run):
            manifest = read_json(saved[-1] / checkpoint.MANIFEST)
            checkpoint.restore(saved[-1], stack, manifest["step"])
            optimizer = AdamW(stack, session.recipe, manifest["step"])
            facts |= manifest["facts"]
        else:
            with open_checkpoint(session.model) as weights:
                load_weights(stack, session.architecture, weights)
            optimizer = AdamW(stack, session.recipe)
        if is_durable and not commit:
            checkpoint.commit(run, optimizer.step, None, facts)
            shutil.rmtree(run.checkpoints, ignore_errors=True)
        run.forget_metrics_after(optimizer.step or -1)
    except BaseException:
        stack.close()
        raise
    return stack, optimizer, facts


def open_stack(session: Session, run: Run, placement: Placement) -> LayerStack:
    """Open the stores of a run, filled or not."""
    keep_gradients = keeps_gradients(session.recipe, placement)
    return training_stack(
        session.architecture,
        placement,
        session.dtype,
        session.device,
        run.state,
        session.recipe.read_ahead,
        keep_gradients,
    )


def resume_optimizer(session: Session, run: Run, stack: LayerStack, commit: dict[str, Any]) -> AdamW:
    """Return the optimizer of a run on disk as of its last commit."""
    optimizer = AdamW(stack, session.recipe, commit["step"])
    if commit["update"]:
        behind = checkpoint.layers_behind(run, stack, commit["step"])
        optimizer.resume(Update(**commit["update"]), behind)
    return optimizer


def settle(session: Session, run: Run, commit: dict[str, Any]) -> None:
    """Bring every layer of a run on disk to its last commit, and make the folder a checkpoint."""
    stack = open_stack(session, run, Placement("disk", "disk"))
    try:
        resume_optimizer(session, run, stack, commit).flush()
    finally:
        stack.close()
    checkpoint.turn_into_checkpoint(run, commit["step"], commit["facts"])


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

    Raises:
        GptjFtError: it could not be written; the state of the run was saved.
    """
    data = {"file": session.recipe.data, "sha256": session.data_sha256, "rows": len(session.train)}
    metrics = {"validation_loss": facts["loss_after"], "baseline_validation_loss": facts["loss_before"], "steps": step}
    tuning = Tuning(str(session.model.resolve()), template_of(session.recipe), data, metrics)

    def layers() -> Iterator[dict[str, torch.Tensor]]:
        for loaded in stream(stack, [Visit(layer, (stack.parameter,)) for layer in range(len(stack.layers))]):
            yield {name: view.cpu() for name, view in loaded.layout.views(loaded.tensors[stack.parameter]).items()}

    shutil.rmtree(run.model, ignore_errors=True)
    try:
        write_model(run.model, session.architecture, layers(), dtype=None, source=session.model, extra=tuning.to_dict())
    except GptjFtError as error:
        if not session.plan.placement.is_durable:
            checkpoint.save(run, stack, step, facts)
        raise type(error)(
            f"{error}\ntraining is done and saved; `gptj-ft finetune --resume {run.folder}` exports it"
        ) from error


def is_multiple(step: int, every: int) -> bool:
    """Tell whether something done ``every`` so many steps is due; 0 is never."""
    return every > 0 and step % every == 0


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
