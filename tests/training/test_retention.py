"""Test which checkpoints of a run are made and kept, and returning to them."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from support.os_calls import wrap_calls
from support.small_run import assert_same_weights, new_run, small_session, train, weights_of, with_options
from support.steps import failing, scripted_losses

from gptj_ft.config.resolve import build
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Rows
from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.models.layout import Layout
from gptj_ft.streaming.open import open_for_inference
from gptj_ft.training import loop, retention, validation
from gptj_ft.training.checkpoint import turn_into_checkpoint
from gptj_ft.training.retention import find_checkpoint, go_back, kept_steps
from gptj_ft.training.run_state import BestState, RunState
from gptj_ft.training.setup import TrainSetup

PLACES = {"weights": "device", "optimizer_state": "device"}, {"weights": "disk", "optimizer_state": "disk"}
STEPS = 8


class Stopped(DataError):
    """End a run as a kill does: after an error of damaged data, nothing is saved."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = new_run(tmp_path_factory.mktemp("straight"))
    train(small_session(model, STEPS, validate_every=2), run)
    return run


@pytest.fixture(params=PLACES, ids=["device", "disk"])
def session(request: pytest.FixtureRequest, model: Path) -> TrainSetup:
    return small_session(model, STEPS, validate_every=2, **request.param)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def stop_run(session: TrainSetup, run: Run, step: int) -> None:
    """End a run as a kill does: nothing is saved on the way out."""
    with failing(step, Stopped()), pytest.raises(Stopped):
        train(session, run)


def losses_at(losses: dict[int, float]) -> AbstractContextManager[None]:
    """Let the retention see these validation losses."""
    return scripted_losses(lambda step, loss: losses.get(step, loss))


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [
        ("last", 50, set()),
        ("best", 50, {50}),
        ("best,last", None, set()),
        ("2", 50, {100, 120}),
        ("best,2", 50, {50, 100, 120}),
        ("9", 50, {20, 80, 100, 120}),
        ("all", 50, {20, 80, 100, 120}),
    ],
)
def test_kept_are_those_that_the_recipe_names(keep: str, best: int | None, kept: set[int]) -> None:
    assert kept_steps(build({"keep": keep, "save_every": 20}), [20, 80, 100, 120], best) == kept


def test_keep_needs_validations_and_save_every(model: Path) -> None:
    for options, hint in (
        ({"keep": "best"}, "--validate-every"),
        ({"export": "best"}, "--validate-every"),
        ({"keep": "best", "validate_every": 2, "holdout": 0}, "--val-data"),
        ({"keep": "all"}, "--save-every"),
        ({"keep": 3}, "--save-every"),
    ):
        with pytest.raises(UsageError, match=hint):
            retention.check_keep(build(options), num_validation_rows=0 if "holdout" in options else 3)
    retention.check_keep(build({}), 0)
    with pytest.raises(UsageError, match="cannot be added now; start a new run with --validate-every"):
        retention.check_keep(build({"keep": "best"}), 3, has_begun=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["device", "disk"])
def test_plan_counts_kept_checkpoints(place: str, model: Path) -> None:
    def disk_bytes(**options: object) -> int:
        return small_session(model, STEPS, weights=place, optimizer_state=place, **options).plan.disk_bytes

    state = 12 * sum(Layout.of(layer).numel for layer in small_session(model).architecture.layers())
    more = [
        disk_bytes(**options) - disk_bytes()
        for options in (
            {"keep": "best", "validate_every": 1}, {"export": "best", "validate_every": 1},
            {"keep": "all", "save_every": 2}, {"keep": "3,best", "save_every": 1}, {"save_every": 1},
        )
    ]  # fmt: skip
    assert [size / state for size in more] == [1, 1, 4, 4, 0]


@pytest.mark.sampled(2)
def test_finished_run_leaves_only_kept_checkpoints(session: TrainSetup, straight: Run, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with losses_at({2: float("nan"), 4: 1.0, 6: float("nan"), 8: 3.0}):
        result = train(with_options(session, keep=("best", "2"), save_every=3), run)
    assert list(run.whole_checkpoints()) == [3, 4, 6]
    assert {path.name for path in run.checkpoints.iterdir()} == {"step-000003", "step-000004", "step-000006"}
    assert not run.state.exists()
    assert result.best == BestState(4, 1.0, "validation_loss", 1.0)
    assert result.best_checkpoint == str(run.checkpoint(4))
    assert result.exported_step == 8
    assert_same_weights(weights_of(run.model), weights_of(straight.model))


@pytest.mark.sampled(2)
def test_keep_nothing_leaves_no_checkpoints(session: TrainSetup, straight: Run, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    result = train(with_options(session, save_every=1), run)
    assert not run.checkpoints.exists()
    assert result.best is not None
    assert result.best_checkpoint is None
    assert_same_weights(weights_of(run.model), weights_of(straight.model))


def test_newest_checkpoint_exists_during_the_run(model: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    stop_run(small_session(model, STEPS, save_every=3, **PLACES[0]), run, 8)
    assert list(run.whole_checkpoints()) == [6]


def test_disk_checkpoints_are_hard_links(model: Path, tmp_path: Path) -> None:
    session = small_session(model, STEPS, save_every=3, keep="all")
    run = new_run(tmp_path)
    stop_run(session, run, 7)
    for name in ("layer-000.safetensors", "layer-003.safetensors"):
        assert (run.checkpoint(6) / name).samefile(run.state / name)
        assert not (run.checkpoint(3) / name).samefile(run.state / name)
    assert "hard links" not in (run.folder / "log.txt").read_text()


def test_checkpoints_are_copied_without_hard_links(
    model: Path, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    wrap_calls(monkeypatch, ["link"], lambda _: refuse)
    session = small_session(model, STEPS, save_every=3, keep="all", validate_every=2)
    run = new_run(tmp_path)
    stop_run(session, run, 7)
    assert not (run.checkpoint(6) / "layer-001.safetensors").samefile(run.state / "layer-001.safetensors")
    assert "without hard links: its checkpoints are copies" in (run.folder / "log.txt").read_text()
    go_back(run, 3)
    train(session, run)
    assert_same_weights(weights_of(run.model), weights_of(straight.model))


def test_full_disk_during_checkpoint_exits_4(model: Path, straight: Run, tmp_path: Path) -> None:
    session = small_session(model, STEPS, save_every=3, keep="all", validate_every=2)
    run, link = new_run(tmp_path), os.link
    links = []

    def fill(source: Path, target: Path) -> None:
        if "checkpoints" in target.parts:  # not the store's own
            links.append(target)
        if len(links) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        link(source, target)

    with pytest.MonkeyPatch.context() as patch:
        wrap_calls(patch, ["link"], lambda _: fill)
        with pytest.raises(ResourceError, match="no space left on the disk while writing checkpoint"):
            train(session, run)
    assert not list(run.checkpoints.iterdir())
    train(session, run)
    assert list(run.whole_checkpoints()) == [3, 6]
    assert_same_weights(weights_of(run.model), weights_of(straight.model))


def test_resume_in_memory_removes_checkpointed_state(model: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    stop_run(small_session(model, STEPS, save_every=2, keep="all", **PLACES[1]), run, 5)
    commit = run.last_commit()
    assert commit is not None
    assert max(run.whole_checkpoints()) == commit["step"]
    turn_into_checkpoint(run, RunState.of(commit))
    assert not run.state.exists()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("step", [2, 4, 6])
def test_return_to_checkpoint_ends_equal(step: int, session: TrainSetup, straight: Run, tmp_path: Path) -> None:
    session = with_options(session, keep=("all",), save_every=2)
    run = new_run(tmp_path)
    stop_run(session, run, 8)
    go_back(run, step)
    assert max(run.whole_checkpoints()) == step
    result = train(session, run)
    assert list(run.whole_checkpoints()) == [2, 4, 6]
    assert_same_weights(weights_of(run.model), weights_of(straight.model))
    losses = [(line["step"], line.get("loss"), line.get("validation_loss")) for line in run.metrics()]
    assert losses == [(line["step"], line.get("loss"), line.get("validation_loss")) for line in straight.metrics()]
    assert result.best is not None
    assert result.best.validation_loss == min(loss for step, _, loss in losses if step and loss)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("first", "then"), [(0, 1), (1, 0)], ids=["memory to disk", "disk to memory"])
def test_kept_checkpoints_survive_a_change_of_place(
    first: int, then: int, model: Path, straight: Run, tmp_path: Path
) -> None:
    options = {"keep": "all", "save_every": 2, "validate_every": 2}
    run = new_run(tmp_path)
    stop_run(small_session(model, STEPS, **options, **PLACES[first]), run, 4)
    stop_run(small_session(model, STEPS, **options, **PLACES[then]), run, 7)
    assert list(run.whole_checkpoints()) == [2, 4, 6]
    go_back(run, 2)
    train(small_session(model, STEPS, **options, **PLACES[first]), run)
    assert list(run.whole_checkpoints()) == [2, 4, 6]
    assert_same_weights(weights_of(run.model), weights_of(straight.model))


def test_resume_on_disk_commits_before_stepping(model: Path, straight: Run, tmp_path: Path) -> None:
    run, on_disk = new_run(tmp_path), small_session(model, STEPS, validate_every=2, **PLACES[1])
    stop_run(small_session(model, STEPS, validate_every=2, save_every=2, keep="all", **PLACES[0]), run, 5)
    stop_run(on_disk, run, 5)
    commit = run.last_commit()
    assert commit is not None
    assert commit["step"] == 4
    train(on_disk, run)
    assert_same_weights(weights_of(run.model), weights_of(straight.model))


def test_lost_checkpoint_prevents_resume(model: Path, tmp_path: Path) -> None:
    session, run = small_session(model, STEPS, save_every=2, keep="all", **PLACES[0]), new_run(tmp_path)
    stop_run(session, run, 5)
    shutil.rmtree(run.checkpoint(4))
    with pytest.raises(DataError, match=r"step-000004/manifest\.json is missing, and this run resumes from it"):
        train(session, run)


def test_run_without_validation_exports_last_update(model: Path, straight: Run, tmp_path: Path) -> None:
    session, run = small_session(model, STEPS, **PLACES[0]), new_run(tmp_path)
    train(replace(session, validation=Rows([], [])), run)
    assert_same_weights(weights_of(run.model), weights_of(straight.model))


@pytest.mark.sampled(2)
def test_export_best_writes_best_state(session: TrainSetup, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with losses_at({2: 5.0, 4: 1.0, 6: 4.0, 8: 3.0}):
        result = train(with_options(session, export="best"), run)
    assert (result.steps, result.exported_step, result.loss_after) == (8, 4, 1.0)
    assert result.best is not None
    assert result.best_checkpoint is None, "the model is that state"
    loss = {line["step"]: line["validation_loss"] for line in run.metrics() if "validation_loss" in line}
    with open_for_inference(run.model, session.device, session.dtype) as (_, stack):
        assert validation.validate(stack, session.validation, 2048).mean == pytest.approx(loss[4], abs=1e-6)
    assert abs(loss[8] - loss[4]) > 1e-3


@pytest.mark.sampled(2)
def test_export_first_frees_step_buffers(session: TrainSetup, tmp_path: Path) -> None:
    left, export = list[int](), loop.export_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop, "export_model", lambda setup, run, offloaded, *rest:
            (left.append(len(offloaded.pools.allocated)), export(setup, run, offloaded, *rest)),
        )  # fmt: skip
        train(session, new_run(tmp_path))
    assert left == [0]


@pytest.mark.sampled(2)
def test_checkpoints_have_step_best_last_names(session: TrainSetup, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with pytest.raises(UsageError, match="it has none: --keep"):
        find_checkpoint(run, "best")
    with losses_at({2: 5.0, 4: 1.0, 6: 4.0}):
        stop_run(with_options(session, keep=("best", "all"), save_every=3), run, 8)
    names = {"best": 4, "last": 6, "3": 3, "step-000003": 3}
    assert {name: find_checkpoint(run, name) for name in names} == names
    with pytest.raises(UsageError, match=r"no checkpoint '5' .* it has step-000003, step-000004, step-000006"):
        find_checkpoint(run, "5")


@pytest.mark.sampled(2)
def test_resume_with_another_interval_keeps_what_was_kept(session: TrainSetup, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    stop_run(with_options(session, keep=("all",), save_every=2), run, 6)
    train(with_options(session, keep=("all",), save_every=3), run)
    assert list(run.whole_checkpoints()) == [2, 4, 6]


@pytest.mark.sampled(2)
def test_keeping_the_best_later_changes_no_end(session: TrainSetup, model: Path, tmp_path: Path) -> None:
    losses, run = {0: 9.0, 2: 1.0, 4: 3.0, 6: 2.0, 8: 0.5}, new_run(tmp_path)
    session = with_options(session, patience=2, save_every=4)
    with losses_at(losses):
        straight = train(session, new_run(made(tmp_path / "straight")))
        stop_run(session, run, 5)
        result = train(with_options(session, keep=("best",), export="best"), run)
    assert (result.steps, result.best) == (straight.steps, straight.best)
    assert result.steps == 6, "two validations without a better state have passed"
    assert "of step 2, has no checkpoint" in (run.folder / "log.txt").read_text()
    assert (result.exported_step, result.loss_after, result.best_checkpoint) == (6, 2.0, None)


@pytest.mark.sampled(2)
def test_best_of_a_finished_run_is_the_run_s_best(session: TrainSetup, tmp_path: Path) -> None:
    session = with_options(session, keep=("best", "all"), save_every=4)
    with losses_at({2: 2.0, 4: 3.0, 6: 4.0, 8: 1.0}):
        train(session, run := new_run(made(tmp_path / "last")))
        assert list(run.whole_checkpoints()) == [4]
        with pytest.raises(UsageError, match=f"of step 8, is the run's model: it is in {run.model}"):
            find_checkpoint(run, "best")
    with losses_at({2: 2.0, 4: 3.0, 6: 1.5, 8: 4.0}):
        train(session, run := new_run(made(tmp_path / "earlier")))
        assert find_checkpoint(run, "best") == 6


@pytest.mark.sampled(2)
def test_best_is_kept_again_after_return(session: TrainSetup, tmp_path: Path) -> None:
    session = with_options(session, keep=("best", "all"), save_every=4)
    run = new_run(tmp_path)
    with losses_at({2: 2.0, 4: 3.0, 6: 1.0}):
        stop_run(session, run, 8)
        assert list(run.whole_checkpoints()) == [4, 6]
        go_back(run, 4)  # it knows 2 as the best so far, which is not kept any more
        result = train(session, run)
    assert list(run.whole_checkpoints()) == [4, 6]
    assert result.best is not None
    assert result.best.step == 6
