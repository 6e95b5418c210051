"""The worker ranks of a run: every rank but rank 0.

Rank 0 reads the rows, plans, makes the run folder and prints. It sends its plan to the workers, which check that they
can follow it, open the same folder and train their share.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.fingerprint import check_unchanged
from gptj_ft.config.resolve import build
from gptj_ft.config.run_folder import Run
from gptj_ft.data.dataset import load_dataset
from gptj_ft.distributed.environment import check_same_environment, local_environment
from gptj_ft.distributed.files import share_folder
from gptj_ft.distributed.network import measure_network
from gptj_ft.distributed.training import DistributedTraining
from gptj_ft.errors import UsageError
from gptj_ft.system.group import Group
from gptj_ft.system.lock import locked
from gptj_ft.system.paths import is_model
from gptj_ft.training.finetune import make_run_setup, use_threads, warn_of_changes
from gptj_ft.training.loop import Session, train
from gptj_ft.training.reporter import Reporter
from gptj_ft.training.retention import go_back
from gptj_ft.training.setup import TrainSetup


def follow_run(group: Group, session: Session | None = None) -> None:
    """Train this worker's share of the run that rank 0 announces, without output."""
    measure_network(group)
    plan = receive_plan(group)
    if plan is None:
        return
    folder, recipe = Path(plan["folder"]), build(plan["recipe"])
    parallel = DistributedTraining(group)
    use_threads(recipe, parallel, Reporter())
    writes = share_folder(group, Run(folder))
    data = Run(folder).data
    rows = (load_dataset(data / "train"), load_dataset(data / "validation") if (data / "validation").exists() else None)
    setup = make_run_setup(recipe, Path(recipe.model or ""), rows, folder, parallel=parallel, done=plan["start"])
    run = worker_run(folder, setup, writes)
    # One rank locks the folder of its machine: ranks that share it must not exclude each other.
    with locked(folder, "training") if run.writes else nullcontext():
        if run.writes:
            warn_of_changes(run, setup, Reporter())
        if run.writes and plan["start"] is not None:
            go_back(run, plan["start"])
        train(setup, run, Reporter(), session)


def dismiss(group: Group) -> None:
    """Tell the workers that rank 0 trains nothing."""
    group.gather("plan", {"facts": local_environment(), "plan": None})


def receive_plan(group: Group) -> Mapping[str, Any] | None:
    """Receive the plan of rank 0 and check it against this machine; None if there is nothing to train."""
    messages = group.gather("plan", {"facts": local_environment(), "plan": None})
    plan: dict[str, Any] | None = messages[0]["plan"]
    if plan is None:
        return None
    recipe = build(plan["recipe"])
    check_same_environment(messages, recipe.threads)
    model = Path(recipe.model or "")
    if not is_model(model):
        raise UsageError(f"the model is not in {model} on {platform.node()}: every machine needs it at the same place")
    check_unchanged(model, plan["base"])
    group.barrier("agreed")
    return plan


def worker_run(folder: Path, setup: TrainSetup, writes: bool = False) -> Run:
    """Return a worker's view of the run folder; a replica's copy of the state has a folder of its own in it.

    Args:
        writes: whether it is the first rank on its machine, which writes the files that a folder has once.
    """
    parallel = setup.parallel
    run = Run(folder, writes=writes and not parallel.is_replica)
    if parallel.is_replica:
        run.state = folder / f"replica-{parallel.world.rank}"
    return run
