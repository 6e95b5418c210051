"""Work on a run that another process leads: with the layers and the rows that are for this one.

Process 0 reads the rows, plans, makes the run folder and speaks. It says what it has planned; the others check that
they can do it, open the same folder and train. What of the folder is there once, process 0 writes.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptj_ft.checkpoints.fingerprint import check_unchanged, fingerprint
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import build
from gptj_ft.config.run_folder import Run
from gptj_ft.distributed.environment import check_alike, facts_here
from gptj_ft.errors import UsageError
from gptj_ft.models.layout import MOMENTS
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.files import discard
from gptj_ft.system.group import Group, from_first
from gptj_ft.system.paths import is_model
from gptj_ft.training.restore import load_start, make_optimizer, open_offloaded
from gptj_ft.training.run_state import RunState
from gptj_ft.training.setup import TrainSetup


def announce(setup: TrainSetup, run: Run, start: int | None = None) -> None:
    """Tell the other processes what is planned, and hear that they can do it; nothing has been written yet.

    Args:
        setup: planned run.
        run: run folder.
        start: step of the checkpoint that the run goes back to first.

    Raises:
        UsageError: one of them is of another version, or has other threads, or another command.
        PeerFailed: one cannot do it; says why.
    """
    group = setup.group
    if group.size == 1:
        return
    plan = {
        "folder": str(run.folder.resolve()),
        "recipe": placed(setup).model_dump(mode="json"),
        "base": fingerprint(setup.model),
        "start": start,
    }
    check_alike(group.gather("plan", {"facts": facts_here(), "plan": plan}), setup.recipe.threads)
    group.gather("agreed", {})


def dismiss(group: Group) -> None:
    """Tell the other processes that there is nothing to do for them."""
    group.gather("plan", {"facts": facts_here(), "plan": None})


def placed(setup: TrainSetup) -> Recipe:
    """Return the recipe of a run with the places that process 0 has planned."""
    place, lora = setup.plan.placement, setup.recipe.method == "lora"
    chosen = {
        "weights": place.of("frozen") if lora else place.weights,
        "optimizer_state": place.optimizer_state,
        "boundaries": place.boundaries,
        "activations": setup.plan.budget.num_kept_layers,
    }
    return setup.recipe.model_copy(update=chosen)


def hear_plan(group: Group) -> Mapping[str, Any] | None:
    """Return the plan of process 0, checked against this machine; ``None`` if there is nothing to do.

    Raises:
        UsageError, DataError: this process cannot do it.
    """
    said = group.gather("plan", {"facts": facts_here(), "plan": None})
    plan = said[0]["plan"]
    if plan is None:
        return None
    recipe = build(plan["recipe"])
    check_alike(said, recipe.threads)
    model = Path(recipe.model or "")
    if not is_model(model):
        raise UsageError(f"the model is not in {model} on {platform.node()}: every machine needs it at the same place")
    check_unchanged(model, plan["base"])
    group.gather("agreed", {})
    return dict(plan)


def own_run(folder: Path, setup: TrainSetup, is_first_here: bool = False) -> Run:
    """Return the run folder, as a process other than the first of the run sees it.

    The state of a replica but the first is a copy, in a place of its own for as long as it trains.

    Args:
        folder: the run folder.
        setup: plan of the run.
        is_first_here: whether it is the first on this machine, and thus writes what that folder has once.
    """
    run = Run(folder, writes=is_first_here and not setup.is_replica)
    if setup.is_replica:
        run.state = folder / f"replica-{setup.group.rank}"
    return run


def open_replica(setup: TrainSetup, run: Run) -> tuple[OffloadedModel, AdamW, RunState]:
    """Open the stores of a process of another replica than the first, and fill them as the first's are.

    Raises:
        PeerFailed: the first has failed.
    """
    state = RunState.of(from_first(setup.peers, "state", {}))
    discard(run.state)  # left by one that was killed
    offloaded = open_offloaded(setup, run, setup.plan.placement)
    try:
        if state.step == 0:
            load_start(setup, offloaded)
        else:
            receive_state(setup.peers, offloaded, state.step)
        return offloaded, make_optimizer(setup, offloaded, state), state
    except BaseException:
        offloaded.close()
        raise


def send_state(setup: TrainSetup, offloaded: OffloadedModel, optimizer: AdamW, state: RunState) -> None:
    """Give the processes of other replicas that have the same layers the state that this one has restored."""
    group = setup.peers
    if group.size == 1:
        return
    if state.step:
        optimizer.flush()
    group.gather("state", state.to_dict())
    if state.step == 0:
        return
    for layer in offloaded.trained:
        for kind in (kind for kind in offloaded.dtypes if kind != "grad"):
            for _, part in offloaded.read_chunks(kind, layer):
                values = part.to("cpu").contiguous()
                for each in [group.send(rank, values) for rank in range(1, group.size)]:
                    each.wait()


def receive_state(group: Group, offloaded: OffloadedModel, step: int) -> None:
    """Fill the stores with what the process of the first replica has."""
    kinds = tuple(kind for kind in offloaded.dtypes if kind != "grad")
    assert set(MOMENTS) < set(kinds)

    def fill(start: int, part: torch.Tensor) -> None:
        values = part if part.device.type == "cpu" else torch.empty(len(part), dtype=part.dtype)
        group.receive(0, values).wait()
        if values is not part:
            part.copy_(values)

    for layer in offloaded.trained:
        for kind in kinds:
            offloaded.write_chunks(kind, layer, partial(fill))
        offloaded.transfers.commit(kinds, layer, step)
    offloaded.drain()
    offloaded.free_filling_pools()
