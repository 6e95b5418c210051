"""Where the state of a run comes from: the model it starts from, a checkpoint, or the last commit of a run on disk."""

from __future__ import annotations

import shutil
from typing import Any

from gptj_ft import checkpoint
from gptj_ft.boundaries import boundary_layout
from gptj_ft.formats.huggingface import open_checkpoint
from gptj_ft.model import load_weights, open_frozen, training_stack
from gptj_ft.optimizer import AdamW, Update
from gptj_ft.plan import keeps_gradients
from gptj_ft.rates import PRECISIONS
from gptj_ft.run import MANIFEST, Run, read_json
from gptj_ft.session import Session
from gptj_ft.stack import LayerStack
from gptj_ft.stores.blockio import takes_direct
from gptj_ft.stores.placement import Placement, training_dtypes


def open_state(session: Session, run: Run) -> tuple[LayerStack, AdamW, dict[str, Any]]:
    """Open the stores of a run and fill them: from where it stopped, else from the model it starts from.

    Returns: the stack, the optimizer at the run's step, and the facts that go into every commit and checkpoint.
    """
    commit, is_durable = run.last_commit(), session.plan.placement.is_durable
    if commit and not is_durable:  # the session before had the state on disk, this one has not
        settle(session, run, commit)
        commit = None
    if not commit:
        shutil.rmtree(run.state, ignore_errors=True)  # without a commit it is scratch, or half of a beginning
    facts: dict[str, Any] = {"loss_before": None}
    stack = open_stack(session, run, session.plan.placement)
    if run.state.is_dir() and not takes_direct(run.state):
        run.log(f"{run.state} is on a file system without direct I/O: transfers go through the page cache")
    try:
        saved = max(run.whole_checkpoints(), default=None)
        if is_durable and not commit and saved is not None:
            checkpoint.adopt(run, stack, saved)
            commit = run.last_commit()
        if commit:
            optimizer = resume_optimizer(session, run, stack, commit)
            facts |= commit["facts"]
        elif saved is not None:
            folder = run.checkpoint(saved)
            facts |= read_json(folder / MANIFEST)["facts"]
            checkpoint.restore(folder, stack, saved)
            optimizer = AdamW(stack, session.recipe, saved, late_blocks(session))
        else:
            with open_checkpoint(session.model) as weights:
                load_weights(stack, session.architecture, weights, session.recipe.seed)
            optimizer = AdamW(stack, session.recipe, late=late_blocks(session))
            if is_durable:
                checkpoint.commit(run, optimizer.step, None, facts)
        # This has the name of the state folder on the disk, too.
        run.forget_metrics_after(optimizer.step)
    except BaseException:
        stack.close()
        raise
    return stack, optimizer, facts


def open_stack(session: Session, run: Run, placement: Placement) -> LayerStack:
    """Open the stores of a run, filled or not."""
    keep_gradients = keeps_gradients(session.recipe, placement)
    recipe = session.recipe
    dtypes = training_dtypes(session.dtype, PRECISIONS[recipe.moments], PRECISIONS[recipe.gradients])
    boundary = boundary_layout(session.most_step_tokens, session.architecture.config.n_embd, recipe.batch_size)
    stack = training_stack(
        session.architecture, placement, dtypes, session.device, run.state, session.plan.room, keep_gradients, boundary,
        session.selection,
    )  # fmt: skip
    try:
        weights = open_checkpoint(session.model)
        open_frozen(stack, session.architecture, weights, placement.of("frozen"))
    except BaseException:
        stack.close()
        raise
    return stack


def late_blocks(session: Session) -> int:
    """Return how many blocks are updated in forward and again in backward."""
    return len(session.architecture.layers()) - 2 if session.plan.costs.is_late else 0


def resume_optimizer(session: Session, run: Run, stack: LayerStack, commit: dict[str, Any]) -> AdamW:
    """Return the optimizer of a run on disk as of its last commit."""
    optimizer = AdamW(stack, session.recipe, commit["step"], late_blocks(session))
    behind = checkpoint.layers_behind(run, stack, commit["step"])
    optimizer.resume(Update(**commit["update"]) if commit["update"] else None, behind)
    return optimizer


def settle(session: Session, run: Run, commit: dict[str, Any]) -> None:
    """Bring every layer of a run on disk to its last commit, and make the folder a checkpoint."""
    stack = open_stack(session, run, Placement("disk", "disk", frozen="disk"))
    try:
        resume_optimizer(session, run, stack, commit).flush()
    finally:
        stack.close()
    checkpoint.turn_into_checkpoint(run, commit["step"], commit["facts"])
