"""Compute one optimizer step of a run: choose its rows, pack them, train on them, and report the step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from gptj_ft.data.batches import rows_of_step
from gptj_ft.errors import GptjFtError, NotFinite
from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.dropout import seed_of
from gptj_ft.models.layer_sampling import layouts_of_step
from gptj_ft.planning.flops import count_flops
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.exchange import Exchange
from gptj_ft.streaming.objective import StepLoss
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.scoring import evaluate_losses
from gptj_ft.streaming.step import train_step
from gptj_ft.system.accelerator import empty_cache
from gptj_ft.training.nonfinite import explain_gradient, explain_loss
from gptj_ft.training.parallel import StepWork
from gptj_ft.training.reporter import StepReport
from gptj_ft.training.setup import TrainSetup
from gptj_ft.training.throughput import Stopwatch, Throughput

log = logging.getLogger(__name__)
NOT_DETERMINISTIC = "does not have a deterministic implementation"  # in torch's error


def compute_step(setup: TrainSetup, offloaded: OffloadedModel, optimizer: AdamW) -> tuple[StepReport, StepWork]:
    """Run the next optimizer step; return its report, and the work of this rank, which reveals stragglers."""
    recipe, stopwatch, waited = setup.recipe, Stopwatch(offloaded), setup.parallel.world.waited.seconds
    rows = rows_of_step(optimizer.step, len(setup.train), recipe.batch_size, recipe.seed)
    batches = batches_of_step(setup, offloaded.exchange, rows, optimizer.step)
    # As in the Trainer of `transformers`, a skipped step uses up its rows and its number, but no learning rate.
    lr, scale = setup.schedule.lr(optimizer.num_updates + 1), optimizer.loss_scale
    loss, grad_norm = guarded_step(setup, offloaded, optimizer, batches, lr)
    counts = stopwatch.read(sum(setup.train.lengths[row] for row in rows), loss.num_targets)
    trained, frozen = layouts_of_step(offloaded.choice, optimizer.step - 1, offloaded.layouts, offloaded.frozen)
    count = partial(count_flops, trained, kept=offloaded.budget.num_kept_layers, frozen=frozen)
    flops = count(counts.tokens, counts.target_tokens)
    own = count(sum(len(batch.tokens_T) for batch in batches), sum(batch.num_targets for batch in batches))
    waited = setup.parallel.world.waited.seconds - waited
    # A rank that waits for a slow one takes as long for its step: only its own work tells them apart.
    work = StepWork(max(0.0, counts.seconds - waited), own.hardware)
    throughput = Throughput.of(counts, flops, setup.plan.rates.compute.matmul(setup.dtype))
    report = StepReport(
        optimizer.step, loss.mean, loss.z_mean, lr, grad_norm, counts, throughput, scale.scale if scale else None
    )
    return report, work


def batches_of_step(setup: TrainSetup, exchange: Exchange, rows: Sequence[int], step: int) -> list[PackedBatch]:
    """Pack the rows of a step into micro-batches; return those of this rank.

    Args:
        step: optimizer steps done.
    """
    recipe, tokens = setup.recipe, setup.recipe.micro_batch_tokens
    # A document's number within the step seeds its dropout, so that packing does not change its masks.
    firsts = list(accumulate((len(setup.train.row(row)) for row in rows), initial=0)) if setup.drops else []

    def packed(places: Sequence[int]) -> list[PackedBatch]:
        chosen = [rows[place] for place in places]
        if not setup.drops:
            return setup.train.batches(chosen, tokens)
        numbers = [number for place in places for number in range(firsts[place], firsts[place + 1])]
        return setup.train.batches(chosen, tokens, lambda document: seed_of((recipe.seed, step, numbers[document])))

    shards = [packed(places) for places in exchange.shard_rows([setup.train.lengths[row] for row in rows])]
    return [batch.to(setup.device) for batch in exchange.begin_step(shards, setup.objective)]


def repeated_step(
    setup: TrainSetup, offloaded: OffloadedModel, optimizer: AdamW, batches: Sequence[PackedBatch], lr: float
) -> StepLoss:
    """Run `train_step`; if the device cannot do it as planned, change the plan and repeat it from its start.

    * Out of memory: one block less keeps its activations; the same bits.
    * No deterministic kernel for an operation: torch chooses the kernels.

    Raises:
        RuntimeError: neither helps, or the step has changed weights already.
    """
    while True:
        optimizer.begin_step(lr)
        try:
            return train_step(offloaded, optimizer, batches, setup.objective)
        except RuntimeError as error:
            is_full, is_refused = isinstance(error, torch.OutOfMemoryError), NOT_DETERMINISTIC in str(error)
            helps = (is_full and offloaded.budget.num_kept_layers) or (is_refused and offloaded.is_deterministic)
            # Without clipping, backward has begun to change weights.
            can_repeat = optimizer.updates.waits and setup.parallel.world.size == 1
            if not (helps and can_repeat and _complete_updates(offloaded)):
                raise
            reason = str(error).partition(NOT_DETERMINISTIC)[0].strip()
        # Outside the handler: its traceback holds the tensors of the step.
        if is_full:
            _keep_less(offloaded, optimizer.step + 1)
        else:
            offloaded.is_deterministic = False
            log.warning("%s has no deterministic kernel on this device: equal runs will differ by rounding", reason)


def _keep_less(offloaded: OffloadedModel, step: int) -> None:
    empty_cache(offloaded.device)
    kept = offloaded.budget.num_kept_layers - 1
    offloaded.budget = replace(offloaded.budget, num_kept_layers=kept)
    log.warning(
        "device memory ran out in step %d: repeating it with the activations of %d blocks kept instead of %d; no "
        "number changes",
        step, kept, kept + 1,
    )  # fmt: skip


def _complete_updates(offloaded: OffloadedModel) -> bool:
    """Complete the updates that the interrupted step has begun; tell whether that is possible."""
    active = offloaded.active
    return active is None or (isinstance(active, Prefetcher) and active.complete_updates())


def guarded_step(
    setup: TrainSetup,
    offloaded: OffloadedModel,
    optimizer: AdamW,
    batches: Sequence[PackedBatch],
    lr: float,
) -> tuple[StepLoss, float]:
    """Run one optimizer step; return its loss and gradient norm.

    Raises:
        NotFinite: the loss or a gradient; the message names the tensor, and the step changes no state.
        DataError: a weight of the model that training starts from is not finite.
    """
    try:
        loss = repeated_step(setup, offloaded, optimizer, batches, lr)
    except NotFinite:
        if setup.parallel.world.size > 1:
            raise  # locating the tensor takes forward passes that all processes would have to join
        # The failed forward pass was applying the pending update layer by layer. Complete it, so that the repeated pass
        # uses the same weights.
        optimizer.flush()
        again = partial(evaluate_losses, offloaded, batches, setup.objective)
        raise explain_loss("loss", optimizer.step, setup, offloaded, again) from None
    try:
        return loss, optimizer.finish_step()
    except GptjFtError as error:
        if setup.parallel.world.size > 1:
            raise
        if not math.isfinite(loss.mean):  # forward overflows fp16; a smaller loss scale would not help
            # `finish_step` has counted this step already; if all were skipped, nothing was trained.
            done = optimizer.step - 1 if optimizer.num_updates else 0
            again = partial(evaluate_losses, offloaded, batches, setup.objective)
            raise explain_loss("loss", done, setup, offloaded, again) from None
        raise explain_gradient(error, setup, offloaded, optimizer.step) from error
