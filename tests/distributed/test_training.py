"""Train one run on several ranks, as threads: any split gives the bits of a single process."""

from __future__ import annotations

import itertools
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.family_models import random_of_family
from support.family_shapes import FIRST_SHAPES
from support.small_run import assert_same_weights, weights_of
from support.thread_group import Member, together

from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import build
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Rows
from gptj_ft.distributed import migrate, mirror, training
from gptj_ft.distributed.control import PeerFailed
from gptj_ft.distributed.pipeline import assign_layers
from gptj_ft.distributed.row_shards import ShardSums, local_shards, shard_rows, tree_nodes, tree_sum
from gptj_ft.distributed.straggler import StragglerWatch
from gptj_ft.distributed.traffic import migrated_bytes
from gptj_ft.distributed.training import DistributedTraining, resolve_split
from gptj_ft.distributed.worker import worker_run
from gptj_ft.errors import DataError, GptjFtError, Interrupted, NotFinite, UsageError
from gptj_ft.models.layer_sampling import EVERY_LAYER
from gptj_ft.system.group import ALONE, Group
from gptj_ft.training import checkpoint, compute, loop
from gptj_ft.training.loop import Session, TrainResult, train
from gptj_ft.training.parallel import ResumePoint
from gptj_ft.training.setup import TrainSetup, make_setup

ON_DEVICE = {"weights": "device", "optimizer_state": "device"}
ON_DISK = {"weights": "disk", "optimizer_state": "disk", "boundaries": "disk"}
PLACES: dict[str, dict[str, str]] = {
    "device": ON_DEVICE,
    "host": {"weights": "host", "optimizer_state": "host", "boundaries": "host"},
    "disk": ON_DISK,
    "mixed": {"weights": "device", "optimizer_state": "disk", "boundaries": "host"},
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"method": "lora"},
    "dora": {"method": "lora", "lora": {"dora": True, "dropout": 0.1}},
    "part": {"train": ("h.[23].*", "h.1.mlp.*")},
    "tied": {},
}
STEPS = 3


def setup_of(model: Path, folder: Path, group: Group = ALONE, **options: Any) -> TrainSetup:
    """Set up a run on eight short random rows, and two validation rows."""
    generator = torch.Generator().manual_seed(0)
    lengths = (9, 5, 12, 7, 9, 3, 8, 11, 6, 9)
    documents = [torch.randint(1, 40, (length,), generator=generator).tolist() for length in lengths]
    base = {"batch_size": 5, "max_length": 32, "micro_batch_tokens": 14, "lr": 1e-2, "device": "cpu"}
    recipe = build({**base, "precision": "fp32", "max_steps": STEPS, "output": str(folder), **options})
    rows, validation = Rows(documents[:8], [2] * 8), Rows(documents[8:], [2] * 2)
    return make_setup(recipe, model, rows, validation, "", folder, parallel=DistributedTraining(group))


def train_alone(model: Path, folder: Path, **options: Any) -> TrainResult:
    setup = setup_of(model, folder, **options)
    return train(setup, started(Run(folder), setup))


def begun(model: Path, folder: Path, **options: Any) -> Run:
    """Make the run folder unless it exists."""
    run = Run(folder)
    return run if run.record_file.is_file() else started(run, setup_of(model, folder, **options))


def started(run: Run, setup: TrainSetup) -> Run:
    """Make the run folder with this setup's options unless it exists."""
    if not run.record_file.is_file():
        run.folder.mkdir()
        run.start_record(setup.recipe)
    return run


def train_together(size: int, model: Path, folder: Path, **options: Any) -> list[TrainResult]:
    """Train on several ranks, each a thread, with one run folder."""
    if options.get("share") == "rows":
        options = {"lanes": size, **options}
    run = begun(model, folder, **options)

    def work(member: Member) -> TrainResult:
        setup = setup_of(model, folder, member, **options)
        return train(setup, worker_run(folder, setup) if member.rank else run)

    return together(size, work)


def train_apart(size: int, model: Path, machines: Path, **options: Any) -> None:
    """Train on several ranks, each a thread with a run folder of its own: machines without a shared disk."""

    def work(member: Member) -> TrainResult:
        folder = machines / str(member.rank)
        begun(model, folder, **options)
        setup = setup_of(model, folder, member, share="layers", **options)
        return train(setup, worker_run(folder, setup, writes=True) if member.rank else Run(folder))

    together(size, work)


def losses_of(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "grad_norm", "validation_loss", "tokens", "target_tokens")
    return [tuple(line.get(name) for name in names) for line in Run(folder).metrics()]


def assert_same_run(folder: Path, other: Path, *context: object) -> None:
    assert losses_of(folder) == losses_of(other), context
    model, reference = (run / "model" for run in (folder, other))
    assert_same_weights(weights_of(model), weights_of(reference), *context)


CASES = list(itertools.product(METHODS, PLACES, ["keep", "recompute"], [1.0, None]))
ALWAYS = {  # each place, method, activations and clipping at least once
    ("full", "disk", "recompute", 1.0), ("full", "mixed", "keep", None), ("lora", "device", "keep", None),
    ("part", "host", "keep", 1.0), ("tied", "disk", "recompute", 1.0),
}  # fmt: skip
CASES_MARKED = [pytest.param(*case, marks=[] if case in ALWAYS else [pytest.mark.slow]) for case in CASES]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("method", "place", "activations", "clip"), CASES_MARKED)
def test_shared_layers_keep_bits(models, tmp_path, method, place, activations, clip) -> None:
    model = models["gpt2" if method == "tied" else "gptj"]
    options = {**METHODS[method], **PLACES[place], "activations": activations, "clip_norm": clip}
    if method in ("lora", "dora"):
        options["optimizer_state"] = options["optimizer_state"] if place != "mixed" else "disk"
    train_alone(model, tmp_path / "alone", **options)
    for size in (2, 4) if (method, place) == ("full", "disk") else (3,):
        folder = tmp_path / str(size)
        train_together(size, model, folder, share="layers", **options)
        assert_same_run(folder, tmp_path / "alone", size)
        assert not list(folder.glob("state*"))
    assert len(losses_of(tmp_path / "alone")) == STEPS + 2


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16"])
def test_shared_layers_keep_bf16_dropout_bits(models, tmp_path, precision) -> None:
    options = {**ON_DISK, "precision": precision, "dropout": 0.1, "moments": "bf16"}
    train_alone(models["gptj"], tmp_path / "alone", **options)
    train_together(2, models["gptj"], tmp_path / "two", share="layers", **options)
    assert_same_run(tmp_path / "two", tmp_path / "alone")


@pytest.mark.thorough
@pytest.mark.parametrize("share", ["layers", "rows"])
def test_int8_moments_keep_bits_on_two_ranks(models, tmp_path, share) -> None:
    lanes = 2 if share == "rows" else None
    options = {**ON_DISK, "precision": "bf16", "moments": "int8", "lanes": lanes}
    train_alone(models["gptj"], tmp_path / "alone", **options)
    train_together(2, models["gptj"], tmp_path / "two", share=share, **options)
    assert_same_run(tmp_path / "two", tmp_path / "alone")


SAMPLED: dict[str, Any] = {"method": "sampled", "sampled": {"layers": 2, "period": 2, "vocabulary_every": 2}}


@pytest.mark.thorough
@pytest.mark.parametrize(("share", "place", "clip"), [("layers", "mixed", None), ("rows", "disk", 1.0)])
@pytest.mark.parametrize("name", ["gptj", "gpt2"])
def test_sampled_layers_keep_bits(models, tmp_path, name, share, place, clip) -> None:
    lanes = 3 if share == "rows" else None
    options = {**SAMPLED, **PLACES[place], "max_steps": 5, "clip_norm": clip, "lanes": lanes}
    train_alone(models[name], tmp_path / "1", **options)
    train_together(3, models[name], tmp_path / "3", share=share, **options)
    assert_same_run(tmp_path / "3", tmp_path / "1")


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("place", "mirror"), [("device", True), ("disk", False)])
def test_sampled_layers_migrate_between_disks(models, tmp_path, place, mirror) -> None:
    options = {**SAMPLED, **PLACES[place], "max_steps": 6, "save_every": 1}
    train_alone(models["gptj"], tmp_path / "alone", **options)
    for step, size in ((1, 2), (3, 3), (5, 3)):
        train_apart_until(step, size, models["gptj"], tmp_path, mirror=mirror, **options)
        if mirror and step == 5:
            lose_disk(tmp_path, 2)
    train_apart(3, models["gptj"], tmp_path, mirror=mirror, **options)
    assert_same_run(tmp_path / "0", tmp_path / "alone")


FOUR_LANES = [
    ("full", "device"), ("lora", "disk"), ("tied", "disk"), pytest.param("full", "disk", marks=pytest.mark.slow),
    pytest.param("lora", "device", marks=pytest.mark.slow), pytest.param("tied", "device", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "place"), FOUR_LANES)
def test_four_lanes_keep_bits(models, tmp_path, method, place) -> None:
    model = models["gpt2" if method == "tied" else "gptj"]
    options = {**METHODS[method], **PLACES[place], "lanes": 4, "dropout": 0.1}
    if method in ("lora", "dora"):
        options["weights"] = "device"
    train_alone(model, tmp_path / "1", **options)
    for size in (2, 3, 4) if method == "full" else (3,):
        train_together(size, model, tmp_path / str(size), share="rows", **options)
        assert_same_run(tmp_path / str(size), tmp_path / "1", size)
        assert not list((tmp_path / str(size)).glob("replica-*"))


@pytest.mark.slow
@pytest.mark.parametrize("share", ["layers", "rows"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", FIRST_SHAPES.values())
def test_two_ranks_keep_every_familys_bits(tmp_path, name, method, share) -> None:
    random_of_family(name, vocab_size=40).save_pretrained(tmp_path / "model")
    options = {**METHODS[method], **ON_DISK, "lanes": 2 if share == "rows" else None}
    train_alone(tmp_path / "model", tmp_path / "alone", **options)
    train_together(2, tmp_path / "model", tmp_path / "two", share=share, **options)
    assert_same_run(tmp_path / "two", tmp_path / "alone")


TWO_LANES = [
    pytest.param("full", "disk", 1.0, 5),
    pytest.param("lora", "device", None, 1),  # fewer rows than lanes: one replica has none
    *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(METHODS, PLACES, [1.0], [3])),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "place", "clip", "batch_size"), TWO_LANES)
def test_replicas_of_shared_layers_keep_bits(models, tmp_path, method, place, clip, batch_size) -> None:
    model = models["gpt2" if method == "tied" else "gptj"]
    options = {**METHODS[method], **PLACES[place], "clip_norm": clip, "batch_size": batch_size, "lanes": 2}
    if method in ("lora", "dora") and place == "mixed":
        options["optimizer_state"] = "disk"
    train_alone(model, tmp_path / "1", **options, dropout=0.1)
    for size in (4, 6) if place == "mixed" else (4,):
        train_together(size, model, tmp_path / str(size), share="layers", replicas=2, **options, dropout=0.1)
        assert_same_run(tmp_path / str(size), tmp_path / "1", size)
        assert not [*(tmp_path / str(size)).glob("replica-*"), *(tmp_path / str(size)).glob("state*")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("clip", "num_overlapping"), [(1.0, 7), (None, 0)])
def test_all_reduce_overlaps_next_layer(models, tmp_path, monkeypatch, clip, num_overlapping) -> None:
    """Seven layers overlap: head and six blocks. Without clipping, updates in backward prevent it."""
    begin, exchange, changed = ShardSums.begin, ShardSums.all_reduce, threading.Condition()
    begun, exchanged, overlapping = Counter[int](), Counter[int](), Counter[int]()

    def count(self: ShardSums, sums: Any) -> None:
        with changed:
            begun[self.group.rank] += 1
            changed.notify_all()
        begin(self, sums)

    def wait_for_next(self: ShardSums, parts: Any) -> torch.Tensor:
        rank = self.group.rank
        with changed:
            exchanged[rank] += 1
            seconds = 5.0 if exchanged[rank] <= num_overlapping else 0.0
            overlapping[rank] += changed.wait_for(lambda: begun[rank] > exchanged[rank], seconds)
        return exchange(self, parts)

    monkeypatch.setattr(ShardSums, "begin", count)
    monkeypatch.setattr(ShardSums, "all_reduce", wait_for_next)
    options = {**ON_DEVICE, "clip_norm": clip, "max_steps": 1, "activations": "recompute"}
    train_together(2, models["gptj"], tmp_path / "run", share="rows", **options)
    assert exchanged == {0: 8, 1: 8}
    assert {overlapping[0], overlapping[1]} == {num_overlapping}


@pytest.mark.thorough
def test_lanes_differ_only_by_rounding(models, tmp_path) -> None:
    train_alone(models["gptj"], tmp_path / "one", **ON_DEVICE)
    train_alone(models["gptj"], tmp_path / "three", **ON_DEVICE, lanes=3)
    for ours, theirs in zip(losses_of(tmp_path / "three"), losses_of(tmp_path / "one"), strict=True):
        assert ours[0] == theirs[0]
        assert [value for value in ours if value] == pytest.approx([value for value in theirs if value], rel=1e-5)


@pytest.mark.thorough
def test_fewer_rows_than_lanes_keep_bits(models, tmp_path) -> None:
    train_alone(models["gptj"], tmp_path / "1", **ON_DISK, lanes=4, batch_size=3)
    train_together(4, models["gptj"], tmp_path / "4", share="rows", **ON_DISK, lanes=4, batch_size=3)
    assert_same_run(tmp_path / "4", tmp_path / "1")


def after_each_step(patch: pytest.MonkeyPatch, call: Callable[[loop.Training], object]) -> None:
    """Call a function on every rank after each step, before anything is saved."""
    take = loop.Training.take_step

    def take_then_call(self: loop.Training) -> None:
        take(self)
        call(self)

    patch.setattr(loop.Training, "take_step", take_then_call)


def die_at_commit(patch: pytest.MonkeyPatch, step: int, rank: int, when: str) -> None:
    """Kill the rank, which has a folder of its own, at its commit of a step."""
    commit = checkpoint.commit_together

    def die(run: Run, group: Group, state: Any, update: Any) -> None:
        if state.step != step or run.folder.name != str(rank):
            return commit(run, group, state, update)
        if when == "before it is prepared":
            raise Killed
        group.gather("prepared", {"step": state.step})
        if when == "behind the commit":
            checkpoint.commit(run, state, update)
        raise Killed

    patch.setattr(checkpoint, "commit_together", die)


def stop_all_after(patch: pytest.MonkeyPatch, step: int, kind: type[BaseException]) -> None:
    """Kill every rank after a step: nothing is saved on the way out."""

    def die(training: loop.Training) -> None:
        if training.state.step == step:
            training.offloaded.drain()
            raise kind

    after_each_step(patch, die)


class Killed(BaseException):
    pass


RESUMES = [
    ("disk", "layers", "fp32"), ("device", "rows", "fp32"), ("device", "rows", "bf16"),
    pytest.param("device", "layers", "bf16", marks=pytest.mark.slow),
    pytest.param("disk", "rows", "bf16", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "share", "precision"), RESUMES)
def test_resume_with_other_size_keeps_bits(models, tmp_path, place, share, precision) -> None:
    lanes = 3 if share == "rows" else None
    options = {**PLACES[place], "max_steps": 6, "save_every": 1, "lanes": lanes, "precision": precision}
    train_alone(models["gptj"], tmp_path / "alone", **options)
    folder = tmp_path / "moving"
    for step, size in ((1, 2), (3, 3), (4, 1), (5, 2)):
        with pytest.MonkeyPatch.context() as patch:
            stop_all_after(patch, step, Killed)
            with pytest.raises(Killed):
                train_together(size, models["gptj"], folder, **{**options, "share": share})
    train_together(3, models["gptj"], folder, **{**options, "share": share})
    assert_same_run(folder, tmp_path / "alone")


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["disk", pytest.param("device", marks=pytest.mark.slow)])
def test_resume_with_other_split_keeps_bits(models, tmp_path, place) -> None:
    options = {**PLACES[place], "max_steps": 6, "save_every": 1, "lanes": 2}
    train_alone(models["gptj"], tmp_path / "alone", **options)
    ways: list[tuple[int, dict[str, Any]]] = [
        (4, {"share": "layers", "replicas": 2}), (1, {}), (2, {"share": "layers"}), (2, {"share": "rows"}),
        (6, {"share": "layers", "replicas": 2}),
    ]  # fmt: skip
    for step, (size, how) in enumerate(ways, start=1):
        with pytest.MonkeyPatch.context() as patch:
            stop_all_after(patch, step, Killed)
            with pytest.raises(Killed):
                train_together(size, models["gptj"], tmp_path / "moving", **options, **how)
    train_together(4, models["gptj"], tmp_path / "moving", **options, share="layers", replicas=2)
    assert_same_run(tmp_path / "moving", tmp_path / "alone")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "rank", [0, pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_dead_replica_rank_loses_no_step(models, tmp_path, monkeypatch, rank) -> None:
    """Rank 0 dies between its commit and that of rank 1; rank 2, of the second replica, between steps."""
    options = {**ON_DISK, "max_steps": 4, "lanes": 2, "replicas": 2}
    train_alone(models["gptj"], tmp_path / "alone", **options)

    def die_after(self: loop.Training) -> None:
        if self.setup.parallel.world.rank == rank > 1 and self.state.step == 2:
            raise Killed

    if rank < 2:
        die_at_commit(monkeypatch, 2, rank, "before the commit" if rank else "behind the commit")
    after_each_step(monkeypatch, die_after)
    with pytest.raises(BaseException):  # noqa: B017, PT011
        train_apart(4, models["gptj"], tmp_path, **options)
    monkeypatch.undo()
    assert {Run(tmp_path / name).last_commit()["step"] for name in "01"} <= {1, 2, 3}
    assert not [path for name in "23" for path in (tmp_path / name).glob("*/commit.json")]
    train_apart(4, models["gptj"], tmp_path, **options)
    assert_same_run(tmp_path / "0", tmp_path / "alone")
    assert losses_of(tmp_path / "1") == losses_of(tmp_path / "0")


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["device", "disk"])
def test_layers_migrate_between_disks(models, tmp_path, place) -> None:
    options = {**PLACES[place], "max_steps": 6, "save_every": 1}
    train_alone(models["gptj"], tmp_path / "alone", **options)
    for step, size in ((1, 2), (3, 3), (4, 3)):
        with pytest.MonkeyPatch.context() as patch:
            stop_all_after(patch, step, Killed)
            with pytest.raises(Killed):
                train_apart(size, models["gptj"], tmp_path, **options)
    train_apart(3, models["gptj"], tmp_path, **options)
    assert_same_run(tmp_path / "0", tmp_path / "alone")
    assert losses_of(tmp_path / "1") == losses_of(tmp_path / "0")
    assert not (tmp_path / "1" / "model").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "place", "clip"),
    [
        ("full", "disk", 1.0),
        ("part", "mixed", None),
        pytest.param("full", "device", 1.0, marks=pytest.mark.slow),
        pytest.param("lora", "disk", None, marks=pytest.mark.slow),
    ],
)
def test_migrated_bytes_match_forecast(models, tmp_path, method, place, clip) -> None:
    sizes, options = (1, 2, 3, 4), {**PLACES[place], **METHODS[method], "clip_norm": clip, "save_every": 1}
    moved = moved_while(sizes, lambda size: train_apart(size, models["gptj"], tmp_path, max_steps=6, **options))
    setup = setup_of(models["gptj"], tmp_path / "alone", max_steps=6, **options)
    owners = [assign_layers(setup.plan.workload.layouts, size) for size in sizes]
    assert moved[0] == {0: 0}
    for at, (before, after) in enumerate(itertools.pairwise(owners), start=1):
        said = migrated_bytes(setup.plan, setup.recipe, setup.plan.workload, before, after)
        assert moved[at] == said, sizes[at]
        assert sum(said.values()) > 0
    train_apart(4, models["gptj"], tmp_path, max_steps=6, **options)
    train_alone(models["gptj"], tmp_path / "alone", max_steps=6, **options)
    assert_same_run(tmp_path / "0", tmp_path / "alone")


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["device", "disk"])
def test_nothing_migrates_on_shared_disk(models, tmp_path, place) -> None:
    options = {**PLACES[place], "share": "layers", "save_every": 1, "max_steps": 6}
    folder = tmp_path / "run"
    moved = moved_while((2, 3, 1, 2), lambda size: train_together(size, models["gptj"], folder, **options))
    assert moved == [dict.fromkeys(range(size), 0) for size in (2, 3, 1, 2)]


def moved_while(sizes: Sequence[int], go_on: Callable[[int], object]) -> list[dict[int, int]]:
    """Train one step with each number of ranks, then kill them; return the bytes that each rank has received."""
    find, moved = DistributedTraining.find_resume_point, list[dict[int, int]]()

    def counted(self: DistributedTraining, setup: TrainSetup, run: Run) -> ResumePoint:
        saved = find(self, setup, run)
        moved[-1][self.world.rank] = saved.bytes_moved
        return saved

    for step, size in enumerate(sizes, start=1):
        moved.append({})
        with pytest.MonkeyPatch.context() as patch:
            stop_all_after(patch, step, Killed)
            patch.setattr(DistributedTraining, "find_resume_point", counted)
            with pytest.raises(Killed):
                go_on(size)
    return moved


@pytest.mark.thorough
def test_failed_migration_keeps_old_files(models, tmp_path, monkeypatch) -> None:
    options = {**ON_DISK, "max_steps": 4}
    with pytest.MonkeyPatch.context() as patch:
        stop_all_after(patch, 2, Killed)
        with pytest.raises(Killed):
            train_apart(2, models["gptj"], tmp_path, **options)
    layers = {path.name for name in "01" for path in (tmp_path / name / "state").glob("*-0*")}

    def break_off(*arguments: Any) -> int:
        raise GptjFtError("the cable is out")

    monkeypatch.setattr(migrate, "recv_file", break_off)
    with pytest.raises(GptjFtError, match="the cable is out"):
        train_apart(3, models["gptj"], tmp_path, **options)
    assert {path.name for name in "01" for path in (tmp_path / name / "state").glob("*-0*")} == layers
    monkeypatch.undo()
    train_apart(3, models["gptj"], tmp_path, **options)
    train_alone(models["gptj"], tmp_path / "alone", **options)
    assert_same_run(tmp_path / "0", tmp_path / "alone")


@pytest.mark.thorough
def test_smallest_memory_sets_validation_passes(models, tmp_path) -> None:
    folder = tmp_path / "run"
    run = begun(models["gptj"], folder, **ON_DEVICE)

    def work(member: Member) -> TrainResult:
        setup = setup_of(models["gptj"], folder, member, share="layers", **ON_DEVICE)
        budget = replace(setup.plan.budget, pass_tokens=1 if member.rank else 1000)
        setup = replace(setup, plan=replace(setup.plan, budget=budget))
        return train(setup, worker_run(folder, setup) if member.rank else run)

    together(2, work)
    train_alone(models["gptj"], tmp_path / "alone", **ON_DEVICE)
    assert_same_run(folder, tmp_path / "alone")


@pytest.mark.thorough
def test_missing_layer_is_named(models, tmp_path) -> None:
    options = {**ON_DISK, "max_steps": 4}
    with pytest.MonkeyPatch.context() as patch:
        stop_all_after(patch, 2, Killed)
        with pytest.raises(Killed):
            train_apart(2, models["gptj"], tmp_path, **options)
    for path in [*(tmp_path / "1" / "state").glob("layer-002*"), *(tmp_path / "1" / "state").glob("layer-004*")]:
        path.unlink()
    lost = r"on none of these machines at step 2: layers 2, 4 of process 2\. Start .*\(state/\*-002\.\*, state/\*-004"
    for size in (2, 3):  # whoever has them now
        with pytest.raises(DataError, match=lost):
            train_apart(size, models["gptj"], tmp_path, **options)


def test_lost_checkpoint_disk_is_error(models, tmp_path) -> None:
    options = {**ON_DEVICE, "max_steps": 4, "save_every": 2}
    with pytest.MonkeyPatch.context() as patch:
        stop_all_after(patch, 3, Killed)
        with pytest.raises(Killed):
            train_apart(2, models["gptj"], tmp_path, **options)
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(DataError, match=r"at step 2: layers 0, 2, 4, 6 of process 2\. Start .*step-000002/.*-000"):
        train_apart(2, models["gptj"], tmp_path, **options)


MIRRORED: dict[str, Any] = {"max_steps": 6, "save_every": 2, "mirror": True}


def train_apart_until(step: int, size: int, model: Path, machines: Path, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_all_after(patch, step, Killed)
        with pytest.raises(Killed):
            train_apart(size, model, machines, **options)


def lose_disk(machines: Path, rank: int) -> None:
    """Delete a machine's folder; machine 1 takes the place of machine 0."""
    shutil.rmtree(machines / str(rank))
    if rank == 0:
        (machines / "1").rename(machines / "0")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("place", "rank"),
    [
        ("disk", 0),
        pytest.param("disk", 1, marks=pytest.mark.slow),
        ("device", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("disk", 2), ("device", 0), ("device", 1))),
    ],
)
def test_mirrors_replace_lost_disk(models, tmp_path, place, rank) -> None:
    options = {**PLACES[place], **MIRRORED, "export": "best", "validate_every": 1, "lr": 0.1}
    train_alone(models["gptj"], tmp_path / "alone", **options)
    train_apart_until(5, 3, models["gptj"], tmp_path, **options)
    lose_disk(tmp_path, rank)
    train_apart(3, models["gptj"], tmp_path, **options)
    assert_same_run(tmp_path / "0", tmp_path / "alone")
    lines = (tmp_path / "0" / "log.txt").read_text(encoding="utf-8")
    assert ("goes back from step 5 to 4" in lines) == (place == "disk")  # in memory, step 4 is what there was anyway


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "device"])
def test_disks_may_be_lost_one_after_another(models, tmp_path, place) -> None:
    options = {**PLACES[place], **MIRRORED, "max_steps": 8, "export": "best", "validate_every": 1, "lr": 0.1}
    train_alone(models["gptj"], tmp_path / "alone", **options)
    for step, rank in ((3, 1), (5, 2), (5, 0), (5, 1), (7, 0)):
        train_apart_until(step, 3, models["gptj"], tmp_path, **options)
        lose_disk(tmp_path, rank)
    train_apart(3, models["gptj"], tmp_path, **options)
    assert_same_weights(*(weights_of(tmp_path / name / "model") for name in ("0", "alone")))


@pytest.mark.thorough
def test_single_machine_resumes_from_mirrors(models, tmp_path) -> None:
    options = {**ON_DISK, **MIRRORED}
    train_apart_until(5, 2, models["gptj"], tmp_path, **options)
    lose_disk(tmp_path, 0)
    train_alone(models["gptj"], tmp_path / "0", **options)
    train_alone(models["gptj"], tmp_path / "alone", **options)
    assert_same_run(tmp_path / "0", tmp_path / "alone")
    lines = (tmp_path / "0" / "log.txt").read_text(encoding="utf-8")
    assert "lost: layers 1, 3, 5, 7 of a machine that is not known; the run goes back from step 5 to 4" in lines


@pytest.mark.thorough
def test_resume_completes_missing_mirrors(models, tmp_path) -> None:
    options = {**ON_DISK, **MIRRORED, "save_every": 0}
    train_apart_until(2, 2, models["gptj"], tmp_path, **options)
    assert not Run(tmp_path / "0").whole_checkpoints()
    train_apart_until(3, 3, models["gptj"], tmp_path, **options)
    lose_disk(tmp_path, 1)
    train_apart(3, models["gptj"], tmp_path, **options)
    assert "goes back from step 3 to 2" in (tmp_path / "0" / "log.txt").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_killed_mirroring_keeps_older_mirrors(models, tmp_path, monkeypatch) -> None:
    options, receive = {**ON_DISK, **MIRRORED}, mirror._recv_files

    def die(group: Group, ways: Any, paths: dict[int, Path], digests: Any) -> Iterator[Any]:
        for handover in receive(group, ways, paths, digests):
            yield handover
            if group.rank == 0 and paths[0].parent.name == "step-000004":
                raise Killed

    monkeypatch.setattr(mirror, "_recv_files", die)
    with pytest.raises(Killed):
        train_apart(2, models["gptj"], tmp_path, **options)
    monkeypatch.undo()
    assert [list(Run(tmp_path / name).whole_checkpoints()) for name in "01"] == [[2, 4], [2, 4]]
    shutil.copytree(tmp_path, tmp_path / "whole")
    lose_disk(tmp_path, 1)
    train_apart(2, models["gptj"], tmp_path, **options)
    train_alone(models["gptj"], tmp_path / "alone", **options)
    assert_same_run(tmp_path / "0", tmp_path / "alone")
    assert "goes back from step 4 to 2" in (tmp_path / "0" / "log.txt").read_text(encoding="utf-8")
    # Without a loss, nothing goes back, and the mirrors are made before anything else.
    train_apart_until(5, 2, models["gptj"], tmp_path / "whole", **options)
    assert [len(list((tmp_path / "whole" / name).glob("checkpoints/*/layer-*"))) for name in "01"] == [8, 8]
    assert "goes back" not in (tmp_path / "whole" / "0" / "log.txt").read_text(encoding="utf-8")
    train_apart_until(6, 2, models["gptj"], tmp_path / "whole", **options)
    assert list(Run(tmp_path / "whole" / "0").whole_checkpoints()) == [4], "that one will do"


@pytest.mark.thorough
def test_damaged_mirror_is_rejected(models, tmp_path) -> None:
    options = {**ON_DISK, **MIRRORED}
    train_apart_until(5, 2, models["gptj"], tmp_path, **options)
    lose_disk(tmp_path, 1)
    path = tmp_path / "0" / "checkpoints" / "step-000004" / "layer-004.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        DataError, match=r"layer-004\.safetensors on .* is damaged: exp_avg_sq .*; the run would go back"
    ):
        train_apart(2, models["gptj"], tmp_path, **options)
    assert Run(tmp_path / "0").last_commit()["step"] == 5
    path.write_bytes(content)
    train_apart(2, models["gptj"], tmp_path, **options)


def test_mirror_goes_to_other_disk() -> None:
    everywhere = [{"0": 8, "2": 8}, {"0": 8, "2": 8}, {"1": 8, "2": 8}, {"1": 8, "2": 8}]
    ways = mirror.plan_copies(everywhere, [1, 3, 0, 2], [0, 0, 2, 2])
    assert [(way.source, way.target, way.layer) for way in ways] == [(1, 2, 0), (3, 0, 1)]


@pytest.mark.thorough
def test_shared_disk_is_not_mirrored(models, tmp_path) -> None:
    train_together(2, models["gptj"], tmp_path / "run", share="layers", **ON_DISK, **MIRRORED)
    train_alone(models["gptj"], tmp_path / "alone", **ON_DISK, **MIRRORED)
    assert_same_run(tmp_path / "run", tmp_path / "alone")
    assert "nothing is mirrored: all processes" in (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "mirrored" not in (tmp_path / "alone" / "log.txt").read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("when", "rank"),
    [
        ("before it is prepared", 1),
        ("before the commit", 0),
        ("behind the commit", 0),
        ("behind the commit", 1),
        pytest.param("before it is prepared", 0, marks=pytest.mark.slow),
        pytest.param("before the commit", 1, marks=pytest.mark.slow),
    ],
)
def test_death_around_commit_loses_no_step(models, tmp_path, monkeypatch, rank, when) -> None:
    """Without a shared disk, one rank may have a commit that the other lacks. Both have the gradients."""
    options = {**ON_DISK, "max_steps": 5}
    train_alone(models["gptj"], tmp_path / "alone", **options)
    die_at_commit(monkeypatch, 3, rank, when)
    with pytest.raises(BaseException):  # noqa: B017, PT011
        train_apart(2, models["gptj"], tmp_path, **options)
    monkeypatch.undo()
    steps = [Run(tmp_path / name).last_commit()["step"] for name in "01"]
    assert set(steps) <= {2, 3}
    train_apart(2, models["gptj"], tmp_path, **options)
    assert_same_run(tmp_path / "0", tmp_path / "alone")


def test_stop_request_stops_all_ranks(models, tmp_path, monkeypatch) -> None:
    def wish(self: loop.Training) -> None:
        if self.setup.parallel.world.rank == 1 and self.state.step == 2:
            self.stop._first = (2, 0.0)

    after_each_step(monkeypatch, wish)
    with pytest.raises(Interrupted, match="stopped after step 2 of 6; everything is saved"):
        train_together(3, models["gptj"], tmp_path / "run", share="layers", **ON_DEVICE, max_steps=6)
    monkeypatch.undo()
    train_together(2, models["gptj"], tmp_path / "run", share="layers", **ON_DEVICE, max_steps=6)
    train_alone(models["gptj"], tmp_path / "alone", **ON_DEVICE, max_steps=6)
    assert_same_run(tmp_path / "run", tmp_path / "alone")


def test_rank_stores_only_local_layers(models, tmp_path, monkeypatch) -> None:
    opened = {}

    def look(self: loop.Training) -> None:
        opened[self.setup.parallel.world.rank] = (
            sum(layout.numel for layout in self.offloaded.layouts),
            self.offloaded.trained,
        )

    after_each_step(monkeypatch, look)
    train_together(3, models["gptj"], tmp_path / "run", share="layers", **ON_DISK)
    whole = setup_of(models["gptj"], tmp_path / "x").selection.trained
    assert sum(numel for numel, _ in opened.values()) == sum(layout.numel for layout in whole)
    assert sorted(layer for _, layers in opened.values() for layer in layers) == list(range(8))
    assert max(len(layers) for _, layers in opened.values()) == 3


@pytest.mark.thorough
def test_sent_activations_are_freed(models, tmp_path) -> None:
    folder = tmp_path / "run"
    run = begun(models["gptj"], folder, **ON_DEVICE)
    most, rows = dict[int, int](), list[int]()

    def work(member: Member) -> None:
        setup = setup_of(models["gptj"], folder, member, share="layers", **ON_DEVICE, micro_batch_tokens=1)
        train(setup, worker_run(folder, setup) if member.rank else run)
        most[member.rank] = member.most_unwaited
        rows.append(setup.recipe.batch_size)

    together(2, work)
    assert max(most.values()) <= 2 * rows[0]  # micro-batches of one row, up and down; three blocks in each process


@pytest.mark.thorough
def test_single_process_gathers_rarely(models, tmp_path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        type(ALONE), "gather", lambda self, topic, facts, among=(): asked.append(topic) or [dict(facts)]
    )
    train_alone(models["gptj"], tmp_path / "run", **ON_DISK)
    assert set(asked) >= {"prepared", "committed"}
    assert "norms" not in asked
    assert len(asked) <= 12 * STEPS + 12


def test_infinite_loss_ends_all_ranks(models, tmp_path) -> None:
    with pytest.raises(NotFinite):
        train_together(2, models["gptj"], tmp_path / "run", share="layers", **ON_DEVICE, lr=1e30, max_steps=6)


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (3, {"share": "rows", "lanes": 2}, "3 processes cannot share the rows of 2 lanes"),
        (7, {"share": "layers"}, "7 processes cannot share 6 blocks"),
        (14, {"share": "layers", "replicas": 2}, "7 processes cannot share 6 blocks"),
        (6, {"share": "layers", "replicas": 4}, r"6 processes are not 4 replicas .* one of 1, 2, 3, 6"),
        (4, {"share": "rows", "replicas": 2}, "makes 4 processes 4 replicas, and replicas says 2"),
        (4, {"share": "layers", "replicas": 2, "lanes": 1}, "2 replicas cannot share the rows of 1 lane: use 1"),
        (4, {"replicas": 2, "sample_rows": 1}, "does not go together with sample_rows"),
        (2, {"share": "layers", "sample_rows": 1}, "does not go together with sample_rows"),
        (2, {"share": "rows", "mirror": True}, "mirror: true is for processes that share the layers"),
    ],
)
def test_impossible_split_is_rejected(models, tmp_path, size, options, message) -> None:
    with pytest.raises(UsageError, match=message):
        setup_of(models["gptj"], tmp_path, Member(hub_of(size), 0), **options)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("size", "options", "ways"),
    [
        (3, {}, (3, 1)),
        (4, {}, (2, 2)),  # two blocks at least for each that share the layers
        (4, {"lanes": 1}, (4, 1)),
        (4, {"method": "lora"}, (1, 4)),
        (4, {"method": "lora", "replicas": 2}, (2, 2)),
        (4, {"replicas": 4}, (1, 4)),
        (5, {}, (1, 5)),
        (1, {"share": "layers", "replicas": 2}, (1, 1)),
    ],
)
def test_auto_split_follows_blocks_and_method(models, tmp_path, size, options, ways) -> None:
    for rank in range(size):
        group = Member(hub_of(size), rank) if size > 1 else ALONE
        setup = setup_of(models["gptj"], tmp_path, group, **options)
        again = resolve_split(setup.recipe, size, 6)
        assert (setup.parallel.pipeline.size, setup.parallel.replicas.size) == ways
        assert again == setup.recipe  # as the other processes have it
        stages = ways[0]
        assert (setup.parallel.pipeline.rank, setup.parallel.replicas.rank) == (rank % stages, rank // stages)


def test_resumed_run_keeps_lanes() -> None:
    began = build({"share": "auto"})
    assert resolve_split(began, 4, 6, is_resumed=True).replicas is None
    with pytest.raises(UsageError, match="4 processes cannot share the rows of 1 lane: use 1"):
        resolve_split(build({"share": "rows"}), 4, 6, is_resumed=True)


def hub_of(size: int) -> Any:
    from support.thread_group import Hub

    return Hub(size)


def test_rank_error_ends_others(models, tmp_path, monkeypatch) -> None:
    def fail(self: loop.Training) -> None:
        if self.setup.parallel.world.rank == 1 and self.state.step == 1:
            raise GptjFtError("the disk of this one is full")

    after_each_step(monkeypatch, fail)
    with pytest.raises(GptjFtError, match="the disk of this one is full") as caught:
        train_together(2, models["gptj"], tmp_path / "run", share="layers", **ON_DISK)
    assert not isinstance(caught.value, PeerFailed)
    monkeypatch.undo()
    train_together(2, models["gptj"], tmp_path / "run", share="layers", **ON_DISK)
    train_alone(models["gptj"], tmp_path / "alone", **ON_DISK)
    assert_same_run(tmp_path / "run", tmp_path / "alone")


@pytest.mark.thorough
def test_errors_on_two_ranks_end_both(models, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(training, "COMMIT_SECONDS", 0.2)
    commit, gather, waits = checkpoint.commit_together, Member.gather, []

    def commit_together(run: Run, group: Group, state: Any, update: Any) -> None:
        if group.rank == 1 and state.step == 2:  # rank 0 waits for this commit, rank 1 for rank 0's next step
            raise GptjFtError("the disk of rank 1 is full")
        commit(run, group, state, update)

    def fail(self: loop.Training) -> None:
        if self.setup.parallel.world.rank == 0 and self.state.step == 2:
            raise GptjFtError("the disk of rank 0 is full")

    def noted(self: Member, *given: Any) -> list[dict[str, Any]]:
        try:
            return gather(self, *given)
        except PeerFailed as error:
            waits.append(str(error))
            raise

    monkeypatch.setattr(checkpoint, "commit_together", commit_together)
    monkeypatch.setattr(Member, "gather", noted)
    after_each_step(monkeypatch, fail)
    with pytest.raises(GptjFtError, match="the disk of rank 0 is full"):
        train_together(2, models["gptj"], tmp_path / "run", share="layers", **ON_DISK)
    assert len(waits) == 2
    assert all(wait.endswith("the disk of rank 0 is full") for wait in waits)


def test_row_shards_balance_tokens() -> None:
    lanes = shard_rows([9, 1, 4, 8, 3, 7], 3)
    assert sorted(row for lane in lanes for row in lane) == list(range(6))
    assert sorted(sum([9, 1, 4, 8, 3, 7][row] for row in lane) for lane in lanes) == [10, 11, 11]
    assert shard_rows([5], 3) == [[0], [], []]


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 4, 5, 7, 8])
def test_tree_sum_is_independent_of_ranks(num_lanes) -> None:
    generator = torch.Generator().manual_seed(num_lanes)
    leaves = [torch.randn(64, generator=generator) * 10**lane for lane in range(num_lanes)]
    results = []
    for size in range(1, num_lanes + 1):
        parts = {}
        for rank in range(size):
            own = {(lane, 1): leaves[lane].clone() for lane in local_shards(rank, size, num_lanes)}
            for node in tree_nodes(local_shards(rank, size, num_lanes)):
                parts[node] = tree_sum(own, node)
        results.append(tree_sum(parts, (0, num_lanes)))
    assert all(torch.equal(each, results[0]) for each in results)


def test_layers_are_assigned_evenly(models) -> None:
    layouts = setup_of(models["gptj"], Path("x")).selection.trained
    for size in (2, 3, 4, 6):
        owners = assign_layers(layouts, size)
        counts = [owners[1:-1].count(rank) for rank in range(size)]
        assert max(counts) - min(counts) <= 1
        assert all(a != b for a, b in itertools.pairwise(owners[1:-1]))
        assert owners[-1] != owners[-2]
    tied = setup_of(models["gpt2"], Path("x")).selection.trained
    assert assign_layers(tied, 3)[0] == assign_layers(tied, 3)[-1]


@pytest.mark.thorough
@pytest.mark.parametrize("share", ["layers", pytest.param("rows", marks=pytest.mark.slow)])
def test_straggler_is_named_once(models, tmp_path, monkeypatch, share) -> None:
    guarded_step = compute.guarded_step

    def linger(setup: TrainSetup, *arguments: Any) -> Any:
        time.sleep(0.5 if setup.parallel.world.rank == 1 else 0.0)
        return guarded_step(setup, *arguments)

    monkeypatch.setattr(compute, "guarded_step", linger)
    train_together(3, models["gptj"], tmp_path / "run", share=share, **ON_DEVICE, max_steps=7)
    lines = (tmp_path / "run" / "log.txt").read_text().splitlines()
    (warning,) = [line for line in lines if "as the others for the same work" in line]
    assert re.search(r"process 2 takes \d+\.\d times as long .* up to step \d+: all wait for it", warning)


def test_straggler_needs_several_slow_steps() -> None:
    watch = StragglerWatch(["a", "b", "c"])
    even, late = [(1.0, 1.0), (2.0, 2.0), (1.0, 1.0)], [(1.0, 1.0), (1.0, 1.0), (1.6, 1.0)]
    paces = [even, late, late, late, late, even, *[late] * 5, *[late] * 9]
    said = [watch.after_step(step, each) for step, each in enumerate(paces, start=1)]
    assert [step for step, text in enumerate(said, start=1) if text] == [11]
    assert said[10] == "c takes 1.6 times as long as the others for the same work, up to step 11: all wait for it"
    short = [(0.01, 1.0), (0.09, 1.0), (0.0, 0.0)]
    assert not any(StragglerWatch(["a", "b", "c"]).after_step(step, short) for step in range(9))
    # One that has more to do, and one that is slow at little, make nobody wait.
    assert not any(watch.after_step(step, [(3.0, 3.0), (1.0, 1.0), (0.5, 0.1)]) for step in range(9))
    assert StragglerWatch(["a"]).after_step(1, [(9.0, 1.0)]) is None


@pytest.mark.thorough
def test_shared_session_works_like_command(models, tmp_path) -> None:
    folder = tmp_path / "run"
    run = begun(models["gptj"], folder, **ON_DISK)

    def work(member: Member) -> TrainResult:
        setup = setup_of(models["gptj"], folder, member, share="layers", **ON_DISK)
        return train(setup, worker_run(folder, setup) if member.rank else run, session=Session(owns_process=False))

    results = together(2, work)
    assert results[0].loss_after == results[1].loss_after
    assert results[0].steps == STEPS


STATE = {"step": 3, "facts": {}}
SOUND = {"commit": None, "manifests": {}, "noted": None}


@pytest.mark.parametrize(
    ("topic", "message", "where"),
    [
        ("saved", {**SOUND, "commit": {"step": 10**12, "facts": {}}}, "commit.step"),
        ("saved", {**SOUND, "commit": {**STATE, "facts": {"updates_before": "x"}}}, "commit.facts.updates_before"),
        ("saved", {**SOUND, "manifests": {"../3": STATE}}, "manifests.../3.[key]"),
        ("saved", {**SOUND, "noted": "../../run"}, "noted"),
        ("saved", {"commit": None}, "manifests"),
        ("layers of a step", {"has": ["x"]}, "has.0"),
    ],
)
def test_hostile_state_of_peer_is_named(topic: str, message: Any, where: str, tmp_path: Path) -> None:
    def gather(name: str, facts: Any) -> list[Any]:
        others = {"saved": {**SOUND, "commit": STATE}}.get(name, facts)
        return [facts, message if name == topic else others]

    partition = SimpleNamespace(group=SimpleNamespace(gather=gather))
    setup = SimpleNamespace(whole=SimpleNamespace(trained=[]), recipe=Recipe(), choice=EVERY_LAYER)
    migration: Any = migrate.Migration(setup, Run(tmp_path), partition)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=re.escape(f"the message '{topic}' of rank 1 is damaged: {where}: ")):
        migration.find_resume_point()
