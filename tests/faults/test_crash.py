"""Cut a run off at its n-th disk operation; after a resume it must end with the same bits.

Two kinds of cut: a killed process keeps everything it has written; a power cut keeps only what was flushed.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from conftest import random_gpt2
from support.lossy_disk import LossyDisk
from support.os_calls import wrap_calls
from support.small_run import (
    Power,
    PowerCut,
    assert_same_weights,
    cut_and_resume,
    new_run,
    small_session,
    train,
    weights_of,
)

from gptj_ft.config.run_folder import Run
from gptj_ft.errors import GptjFtError, ResourceError
from gptj_ft.models.layout import Layout
from gptj_ft.planning.plan import Plan
from gptj_ft.training import checkpoint
from gptj_ft.training.run_state import RunState
from gptj_ft.training.setup import TrainSetup, make_setup
from gptj_ft.training.verify import Checker


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> TrainSetup:
    return small_session(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def straight(session: TrainSetup, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    run = new_run(tmp_path_factory.mktemp("straight"))
    train(session, run)
    return weights_of(run.model)


def count_operations(session: TrainSetup, folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        power = Power(patch)
        train(session, new_run(folder))
        return power.count


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", [0, 11])
def test_power_cut_costs_only_the_current_step(part: int, session: TrainSetup, straight, tmp_path: Path) -> None:
    total = count_operations(session, tmp_path)
    shutil.rmtree(tmp_path / "run")
    assert total > 100
    # Each part takes every eleventh operation; the slow test takes all.
    for last in range(part, total, 22):
        check(session, straight, tmp_path, [last])


@dataclass(frozen=True)
class LatePlan(Plan):
    @property
    def num_deferred(self) -> int:
        return 99


@pytest.mark.thorough
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_power_cut_with_deferred_updates(stride: int, session: TrainSetup, straight, tmp_path: Path) -> None:
    plan = replace(session.plan, budget=replace(session.plan.budget, num_kept_layers=1))
    late = replace(session, plan=LatePlan(**{each.name: getattr(plan, each.name) for each in fields(plan)}))
    total = count_operations(late, tmp_path)
    shutil.rmtree(tmp_path / "run")
    for last in range(3, total, stride):
        check(late, straight, tmp_path, [last])


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_power_cut_with_tied_weights(stride: int, precision: str, tmp_path: Path) -> None:
    random_gpt2(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2).save_pretrained(tmp_path)
    session = small_session(tmp_path, precision=precision)
    train(session, run := new_run(tmp_path))
    straight = weights_of(run.model)
    shutil.rmtree(run.folder)
    total = count_operations(session, tmp_path)
    shutil.rmtree(run.folder)
    for last in range(5, total, stride):
        check(session, straight, tmp_path, [last])


@pytest.mark.slow
def test_power_cut_at_every_disk_operation(session: TrainSetup, straight, tmp_path: Path) -> None:
    total = count_operations(session, tmp_path)
    shutil.rmtree(tmp_path / "run")
    for last in range(total):
        check(session, straight, tmp_path, [last])


@pytest.mark.thorough
def test_repeated_power_cuts_during_resume(session: TrainSetup, straight, tmp_path: Path) -> None:
    for cuts in ([70, 1], [70, 9, 9], [90, 30, 2, 50], [100, 25, 25, 25]):
        check(session, straight, tmp_path, cuts)


def check(session: TrainSetup, straight, folder: Path, cuts: list[int]) -> None:
    run = new_run(folder)
    cut_and_resume(session, run, cuts)
    assert_same_weights(weights_of(run.model), straight, cuts)
    shutil.rmtree(run.folder)


TYPES: dict[str, dict[str, str]] = {
    "": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "int8": {"precision": "bf16", "moments": "int8", "gradients": "bf16"},
}


@pytest.fixture(scope="module", params=["disk", "host", "device", "split", "disk bf16", "host bf16", "disk int8"])
def keeping_session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainSetup:
    """Return a run that validates and keeps checkpoints; without all state on disk it checkpoints after each step."""
    place, _, types = request.param.partition(" ")
    weights, state = ("device", "disk") if place == "split" else (place, place)
    session = small_session(
        tmp_path_factory.mktemp("model"),
        num_steps=4,
        keep="best,1",
        validate_every=1,
        save_every=2 if place == "disk" else 1,
        weights=weights,
        optimizer_state=state,
        **TYPES[types],
    )
    if place != "split":
        return session
    placement = replace(session.plan.placement, in_memory=(1,), memory="device")
    return replace(session, plan=replace(session.plan, placement=placement))


@pytest.fixture(scope="module")
def kept(keeping_session: TrainSetup, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = new_run(tmp_path_factory.mktemp("kept"))
    train(keeping_session, run)
    return run


def losses_of(run: Run) -> list[tuple[object, ...]]:
    return [(line["step"], line.get("loss"), line.get("validation_loss")) for line in run.metrics()]


def lose_power(session: TrainSetup, run: Run, last: int, seed: int | None) -> None:
    """Cut the power at the n-th operation; everything reported as saved must survive."""
    said = [0]
    with pytest.MonkeyPatch.context() as patch:
        disk = LossyDisk(patch, run.folder)
        Power(patch, last)
        for name in ("commit", "save_checkpoint", "link"):
            original = getattr(checkpoint, name)

            def noting(*arguments, original=original):
                original(*arguments)
                said.extend(argument.step for argument in arguments if isinstance(argument, RunState))

            patch.setattr(checkpoint, name, noting)
        with suppress(PowerCut):
            train(session, run)
    disk.crash(seed)
    commit = run.last_commit()
    saved = [*run.whole_checkpoints(), commit["step"] if commit else 0]
    assert run.model.exists() or max(saved) >= max(said), (last, seed)


def lose_power_and_resume(session: TrainSetup, kept: Run, folder: Path, cuts: list[int], seed: int | None) -> None:
    run = new_run(folder)
    for last in cuts:
        if not run.model.exists():
            lose_power(session, run, last, seed)
    if not run.model.exists():
        train(session, run)
    assert_same_weights(weights_of(run.model), weights_of(kept.model), cuts, seed)
    assert losses_of(run) == losses_of(kept), (cuts, seed)
    assert run.whole_checkpoints().keys() >= kept.whole_checkpoints().keys(), (cuts, seed)
    checker = Checker(run, [Layout.of(layer) for layer in session.architecture.layers()])
    assert not [problem for step in run.whole_checkpoints() for problem in checker.checkpoint(step)], (cuts, seed)
    shutil.rmtree(run.folder)


def count_lossy_operations(session: TrainSetup, folder: Path) -> int:
    run = new_run(folder)
    with pytest.MonkeyPatch.context() as patch:
        disk = LossyDisk(patch, run.folder)
        power = Power(patch)
        train(session, run)
    disk.crash()
    assert run.model.exists(), "the model is on the disk when the run says that it is"
    shutil.rmtree(run.folder)
    return power.count


@pytest.mark.thorough
@pytest.mark.sampled(7)
def test_lost_unflushed_writes_cost_no_commit(keeping_session: TrainSetup, kept: Run, tmp_path: Path) -> None:
    total = count_lossy_operations(keeping_session, tmp_path)
    for last in range(1, total, 86):
        lose_power_and_resume(keeping_session, kept, tmp_path, [last], seed=None)
        lose_power_and_resume(keeping_session, kept, tmp_path, [last + 6], seed=last)


@pytest.mark.thorough
def test_second_power_loss_during_resume(keeping_session: TrainSetup, kept: Run, tmp_path: Path) -> None:
    total = count_lossy_operations(keeping_session, tmp_path)
    for seed in (None, 1, 2):
        cuts = [total * 3 // 4, 2, 9, total // 3]
        lose_power_and_resume(keeping_session, kept, tmp_path, cuts, seed)


@pytest.mark.sampled(3)
def test_commit_name_is_durable_before_resume_message(
    keeping_session: TrainSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flushed = new_run(tmp_path), list[str]()
    train(keeping_session, run)
    wrap_calls(monkeypatch, ["fsync"], lambda _: lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}")))
    run.note_saved(run.state / "another.json")
    assert flushed[0] == str(run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_every_operation_as_last_durable_one(
    seed: int | None, keeping_session: TrainSetup, kept: Run, tmp_path: Path
) -> None:
    for last in range(count_lossy_operations(keeping_session, tmp_path)):
        lose_power_and_resume(keeping_session, kept, tmp_path, [last], seed)


class OneFault:
    """Fail the n-th write or fsync only, like a briefly full disk or one bad block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
        self.count = 0
        wrap_calls(monkeypatch, ["pwritev", "fsync"], lambda operation: self._guard(operation, number, code))

    def _guard(self, operation, number: int, code: int):
        def guarded(*arguments, **settings):
            self.count += 1
            if self.count == number:
                raise OSError(code, os.strerror(code))
            return operation(*arguments, **settings)

        return guarded


FAILED_WRITES = [
    ("", errno.ENOSPC, 19), ("", errno.EIO, 41), ("int8", errno.ENOSPC, 17),
    *(pytest.param("", code, 3, marks=pytest.mark.slow) for code in (errno.ENOSPC, errno.EIO)),
    pytest.param("int8", errno.EIO, 3, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("types", "code", "stride"), FAILED_WRITES)
def test_failed_write_exits_4_and_resumes(types: str, code: int, stride: int, tmp_path: Path) -> None:
    session = small_session(tmp_path / "model", **TYPES[types])
    train(session, run := new_run(tmp_path))
    straight = weights_of(run.model)
    shutil.rmtree(run.folder)
    with pytest.MonkeyPatch.context() as patch:
        total = count_faultable(patch, session, tmp_path)
    for number in range(1, total, stride):
        run = new_run(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            OneFault(patch, number, code)
            with pytest.raises(GptjFtError) as stopped:
                train(session, run)
        assert stopped.value.exit_code == 4 or "cannot write" in str(stopped.value), (number, stopped.value)
        assert not list(run.state.glob("*-*.new")), (number, "half-written files take the space that is lacking")
        cut_and_resume(session, run, [])
        assert_same_weights(weights_of(run.model), straight, number)
        shutil.rmtree(run.folder)


def count_faultable(patch: pytest.MonkeyPatch, session: TrainSetup, folder: Path) -> int:
    fault = OneFault(patch, 0, 0)
    train(session, new_run(folder))
    shutil.rmtree(folder / "run")
    return fault.count


def test_unreadable_state_exits_4(session: TrainSetup, tmp_path: Path, monkeypatch) -> None:
    run = new_run(tmp_path)

    def with_bad_block(read):
        def bad_block(descriptor: int, *arguments: object) -> int:
            if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(run.state):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(descriptor, *arguments)

        return bad_block

    wrap_calls(monkeypatch, ["preadv"], with_bad_block)
    with pytest.raises(ResourceError, match="cannot read the state of the run"):
        train(session, run)


def test_resume_requires_no_space_twice(session: TrainSetup, tmp_path: Path, set_free_space) -> None:
    run = new_run(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        Power(patch, 120)
        with pytest.raises(PowerCut):
            train(session, run)
    assert sum(path.stat().st_size for path in run.state.iterdir()) > 0.6 * session.plan.disk_bytes
    set_free_space(session.plan.disk_bytes // 2)
    rows = session.train, session.validation
    with pytest.raises(ResourceError, match="of disk"):
        make_setup(session.recipe, session.model, *rows, "", tmp_path / "another")
    make_setup(session.recipe, session.model, *rows, "", run.folder)
