"""Restore the state of a run from its base model, a checkpoint, or the last commit of a run on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.checkpoints.optimizer_state import open_moments
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import COMMIT, Run, recipe_digest
from gptj_ft.errors import DataError
from gptj_ft.models.batch import most_padded
from gptj_ft.models.products import Products, set_products
from gptj_ft.planning.memory import keeps_gradients, recipe_dtypes
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW, AdamWConfig, Update
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import load_weights, open_for_training, open_frozen
from gptj_ft.streaming.stores.placement import Placement
from gptj_ft.system.direct_io import takes_direct
from gptj_ft.system.files import discard
from gptj_ft.system.units import gigabytes
from gptj_ft.training import checkpoint
from gptj_ft.training.run_state import WRONG_UPDATES, RunState
from gptj_ft.training.setup import TrainSetup


def open_state(
    setup: TrainSetup, run: Run, warn: Callable[[str | None], None] = lambda _: None
) -> tuple[OffloadedModel, AdamW, RunState]:
    """Open the stores of a run and fill them from its newest saved state, else from its base model.

    Args:
        warn: receives the note that the run returns to a mirrored checkpoint.

    Returns: the model, the optimizer at the run's step, and the state to store in commits and checkpoints.

    Raises:
        DataError: the saved state is missing, damaged or belongs to another run; nothing was removed.
    """
    saved_as = setup.parallel.find_resume_point(setup, run)
    warn(saved_as.note)
    if saved_as.bytes_moved:
        run.log(f"{gigabytes(saved_as.bytes_moved)} of layers have come from other machines")
    # Fail before anything is removed if the recorded newest state is missing.
    run.check_saved()
    commit, saved, is_durable = saved_as.commit, saved_as.checkpoint, setup.plan.placement.is_durable
    # A commit, a checkpoint or neither is the newest state, and this session keeps its state on disk or in memory.
    # First bring the files into the form that this session needs; each branch is safe to repeat after a kill.
    if commit and not is_durable:  # the session before kept the state on disk
        settle(setup, run, commit)
        commit, saved = None, int(saved_as.commit["step"]) if saved_as.commit else None
    group = setup.parallel.pipeline
    if not commit and (run.writes or group.size == 1):
        discard(run.state)  # without a commit it is scratch, or a start that was killed
    group.barrier("state cleared")
    offloaded = open_offloaded(setup, run, setup.plan.placement)
    if run.state.is_dir() and not takes_direct(run.state):
        run.log(f"{run.state} is on a file system without direct I/O: transfers go through the page cache")
    try:
        if is_durable and not commit and saved is not None:
            # The session before kept its state in memory: its newest checkpoint becomes the state on disk.
            checkpoint.adopt(run, group, offloaded, saved)
            commit = run.last_commit()
        if commit:
            state = checked_state(setup, run, commit)
            optimizer = resume_optimizer(setup, run, offloaded, commit)
        elif saved is not None:
            state = checked_state(setup, run, run.manifest(saved))
            checkpoint.restore(run.checkpoint(saved), offloaded, saved)
            optimizer = make_optimizer(setup, offloaded, state)
        else:
            state = RunState(0, recipe_digest(setup.recipe), updates_before=load_start(setup, offloaded))
            optimizer = make_optimizer(setup, offloaded, state)
            state = replace(state, loss_scale=optimizer.loss_scale, layer_updates=optimizer.layer_updates)
            if is_durable:
                checkpoint.commit_together(run, group, state, None)
        if is_durable:
            run.note_saved(run.state / COMMIT)
        run.forget_metrics_after(optimizer.step)  # last: its fsync also covers the name of the state folder
    except BaseException:
        offloaded.close()
        raise
    return offloaded, optimizer, state


def checked_state(setup: TrainSetup, run: Run, saved: dict[str, Any]) -> RunState:
    """Return the state of a commit or a checkpoint; raise `DataError` if it was made with other options."""
    state = RunState.of(saved)
    if state.recipe_sha256 != recipe_digest(setup.recipe):
        raise DataError(
            f"step {state.step} of {run.folder} was trained with other options than those in {run.recipe_file}: put "
            "back the file that the run began with"
        )
    if not setup.choice.allows(state.layer_updates, state.step):
        raise DataError(f"{run.folder}, step {state.step}: {WRONG_UPDATES}")
    return state


def load_start(setup: TrainSetup, offloaded: OffloadedModel) -> int:
    """Fill the stores from the base model; return the number of updates in its moments."""
    recipe, architecture = setup.recipe, setup.architecture
    with open_checkpoint(setup.model) as weights:
        if setup.updates_before is None:
            load_weights(offloaded, architecture, weights, recipe.seed)
            return 0
        moments = open_moments(setup.model)
        load_weights(offloaded, architecture, weights, recipe.seed, moments.checkpoints)
        return moments.updates


def open_offloaded(setup: TrainSetup, run: Run, placement: Placement) -> OffloadedModel:
    """Open the stores of a run, without filling them."""
    keep_gradients = keeps_gradients(setup.recipe, placement, setup.dtype)
    recipe = setup.recipe
    dtypes = recipe_dtypes(recipe, setup.dtype)
    # The plan counts this process's blocks that keep activations, the engine counts all blocks of the model.
    planned, group = setup.plan.budget, setup.parallel.pipeline
    # All processes run the same passes, so the process with the least memory decides their size.
    pass_tokens = min(each["tokens"] for each in group.gather("pass", {"tokens": planned.pass_tokens}))
    budget = replace(planned, num_kept_layers=planned.num_kept_layers * group.size, pass_tokens=pass_tokens)
    most_tokens, width = most_padded(setup.most_step_tokens), setup.architecture.config.n_embd
    boundary = boundary_layout(most_tokens, width, recipe.batch_size)
    offloaded = open_for_training(
        setup.architecture,
        placement,
        dtypes,
        setup.device,
        run.state,
        budget,
        keep_gradients=keep_gradients,
        boundary=boundary,
        selection=setup.selection,
        exchange=setup.parallel.exchange(),
        lowest_trained=lowest_trained(setup),
        choice=setup.choice,
    )
    set_products(offloaded.layers, Products.parse(recipe.products))
    try:
        weights = open_checkpoint(setup.model)
        open_frozen(offloaded, setup.architecture, weights, placement)
    except BaseException:
        offloaded.close()
        raise
    return offloaded


def lowest_trained(setup: TrainSetup) -> int:
    """Return the lowest layer with trained parameters, local or not."""
    layouts = (setup.whole or setup.selection).trained
    return next((layer for layer, layout in enumerate(layouts) if layout.numel), len(layouts))


def make_optimizer(setup: TrainSetup, offloaded: OffloadedModel, state: RunState) -> AdamW:
    """Make the optimizer of a run at its step; the plan says for how many blocks it defers the update."""
    config, deferred = optimizer_config(setup.recipe), setup.plan.num_deferred
    optimizer = AdamW(offloaded, config, state.step, deferred, state.updates_before)
    optimizer.loss_scale = state.loss_scale or optimizer.loss_scale
    optimizer.layer_updates = state.layer_updates or optimizer.layer_updates
    return optimizer


def optimizer_config(recipe: Recipe) -> AdamWConfig:
    """Return the hyperparameters of a recipe's optimizer."""
    return AdamWConfig(
        recipe.betas, recipe.eps, recipe.weight_decay, recipe.clip_norm, recipe.seed,
        recipe.layer_decay, recipe.bias_correction,
    )  # fmt: skip


def resume_optimizer(setup: TrainSetup, run: Run, offloaded: OffloadedModel, commit: dict[str, Any]) -> AdamW:
    """Return the optimizer of a run on disk in the state of its last commit."""
    state = RunState.of(commit)
    optimizer = make_optimizer(setup, offloaded, state)
    behind = checkpoint.layers_behind(run, offloaded, state.step)
    optimizer.resume(Update(**commit["update"]) if commit["update"] else None, behind)
    return optimizer


def settle(setup: TrainSetup, run: Run, commit: dict[str, Any]) -> None:
    """Apply the committed update of a run on disk to every layer, and turn its state folder into a checkpoint."""
    offloaded = open_offloaded(setup, run, Placement("disk", "disk", frozen="disk"))
    try:
        state = checked_state(setup, run, commit)
        resume_optimizer(setup, run, offloaded, commit).flush()
    finally:
        offloaded.close()
    setup.parallel.pipeline.barrier("settled")
    checkpoint.turn_into_checkpoint(run, state)
