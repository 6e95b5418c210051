"""Compare the forecast bytes of a step with the bytes that ranks send."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.steps import around_steps
from support.thread_group import Hub, Member, together

from gptj_ft.config.resolve import build
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Rows
from gptj_ft.distributed.network import Network
from gptj_ft.distributed.scale_out import Job, forecast_share
from gptj_ft.distributed.training import DistributedTraining
from gptj_ft.distributed.worker import worker_run
from gptj_ft.system.group import ALONE, Group
from gptj_ft.training import loop
from gptj_ft.training.setup import TrainSetup, make_setup

STEPS = 2  # of four rows each: both epochs' halves
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"method": "lora"},
    "part": {"train": ("h.[23].*", "h.1.mlp.*")},
    "tied": {},
}


def setup_of(model: Path, folder: Path, group: Group = ALONE, **options: Any) -> TrainSetup:
    """Set up one epoch of eight random rows, in micro-batches with filler tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = (29, 25, 31, 27, 30, 23, 28, 21)
    documents = [torch.randint(1, 40, (length,), generator=generator).tolist() for length in lengths]
    base = {"batch_size": 4, "max_length": 32, "micro_batch_tokens": 90, "device": "cpu", "precision": "fp32"}
    places = {"weights": "device", "optimizer_state": "device", "activations": "recompute"}
    recipe = build({**base, **places, "max_steps": STEPS, "output": str(folder), **options})
    return make_setup(
        recipe, model, Rows(documents, [2] * 8), Rows([], []), "", folder, parallel=DistributedTraining(group)
    )


def sent_by_rank(size: int, model: Path, folder: Path, options: dict[str, Any]) -> dict[int, int]:
    """Train on several ranks, each a thread; return the bytes that each sends in its steps."""
    sent = dict.fromkeys(range(size), 0)
    run = Run(folder)
    folder.mkdir()
    run.start_record(setup_of(model, folder, **options).recipe)

    members = dict[int, Member]()

    def work(member: Member) -> None:
        members[threading.get_ident()] = member
        setup = setup_of(model, folder, member, **options)
        loop.train(setup, worker_run(folder, setup) if member.rank else run)

    def counted(train_step, *args):
        member = members[threading.get_ident()]
        before = member.bytes_sent
        found = train_step(*args)
        sent[member.rank] += member.bytes_sent - before
        return found

    with around_steps(counted):
        together(size, work)
    return sent


# Stages and replicas.
SPLITS = [
    ("full", ((3, 1), (1, 3), (2, 2))), ("lora", ((1, 2),)), ("part", ((2, 1),)), ("tied", ((3, 1), (1, 2))),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "splits"), SPLITS)
def test_ranks_send_forecast_bytes(models, tmp_path, method, splits) -> None:
    model, options = models["gpt2" if method == "tied" else "gptj"], METHODS[method]
    setup = setup_of(model, tmp_path / "alone", **options)
    job = Job(setup.recipe, setup.plan.workload, setup.plan.have, setup.plan.rates, Network(1e9))
    for stages, replicas in splits:
        size = stages * replicas
        share = {"share": "layers", "replicas": replicas} if stages > 1 else {"share": "rows"}
        shared = {**options, **share, "lanes": replicas}
        sent = sent_by_rank(size, model, tmp_path / f"{stages}x{replicas}", shared)
        nodes = forecast_share(job, stages, replicas).nodes
        said = {rank: node.sent for node in nodes for rank in range(size) if rank % stages in node.ranks}
        assert sum(sent.values()) / STEPS == pytest.approx(sum(said.values()), rel=0.01), size
        if stages == 1 or replicas == 1:  # else a replica may have more tokens than the other
            assert {rank: number / STEPS for rank, number in sent.items()} == pytest.approx(said, rel=0.01), size
        setup = setup_of(model, tmp_path / "x", Member(Hub(size), 0), **shared)
        most = max(forecast_share(job, stages, replicas).most(way) for way in ("sent", "received"))
        assert max(setup.parallel.step_bytes) == pytest.approx(most)
