"""Test runs of layer-sampled training: kills, resumes, stamps of files, skipped steps, bytes of the plan."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.small_run import (
    Power,
    assert_same_weights,
    cut_and_resume,
    losses_of,
    new_run,
    small_session,
    train,
    weights_of,
    with_options,
)
from support.steps import infinite_gradient, interrupting

from gptj_ft.config.run_folder import COMMIT, Run
from gptj_ft.errors import DataError, Interrupted, UsageError
from gptj_ft.planning.kernel_times import with_kernel_times
from gptj_ft.planning.workload import ModelTimes
from gptj_ft.streaming.stores.state_file import layer_path, stamp_of
from gptj_ft.system.digests import read_sealed
from gptj_ft.training.run_state import RunState
from gptj_ft.training.setup import TrainSetup
from gptj_ft.training.verify import Checker

STEPS = 7
# The first two periods train block 2, the others block 1; the first and the third train embedding and head.
SAMPLED = {"method": "sampled", "sampled": {"layers": 1, "period": 2, "vocabulary_every": 2}, "seed": 21}
PLACES = {
    "disk": {"weights": "disk", "optimizer_state": "disk"},
    "host": {"weights": "host", "optimizer_state": "host"},
    "device": {"weights": "device", "optimizer_state": "device"},
    "mixed": {"weights": "device", "optimizer_state": "disk"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def session(folder: Path) -> TrainSetup:
    return small_session(folder, STEPS, **SAMPLED)


@pytest.fixture(scope="module")
def straight(session: TrainSetup, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = new_run(tmp_path_factory.mktemp("straight"))
    train(session, run)
    return run


def layers_of(session: TrainSetup, step: int) -> list[int]:
    return [layer for layer in range(4) if session.choice.trains(layer, step)]


def assert_same_run(run: Run, straight: Run, *context: object) -> None:
    assert losses_of(run) == losses_of(straight), context
    assert_same_weights(weights_of(run.model), weights_of(straight.model), *context)


def problems_of(session: TrainSetup, run: Run) -> list[str]:
    return list(Checker(run, session.selection.trained, session.choice).problems())


def test_layers_of_the_session_change(session: TrainSetup) -> None:
    assert [layers_of(session, step) for step in range(STEPS)] == [
        [0, 2, 3], [0, 2, 3], [2], [2], [0, 1, 3], [0, 1, 3], [1],
    ]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("stride", [47, pytest.param(1, marks=pytest.mark.slow)])
def test_power_cuts_resume_bit_equal(stride: int, session: TrainSetup, straight: Run, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        power = Power(patch)
        train(session, new_run(tmp_path))
    assert power.count > 100
    for last in range(5, power.count, stride):
        shutil.rmtree(tmp_path / "run")
        cut_and_resume(session, run := new_run(tmp_path), [last])
        assert_same_run(run, straight, last)


@pytest.mark.thorough
def test_repeated_power_cuts_resume_bit_equal(session: TrainSetup, straight: Run, tmp_path: Path) -> None:
    cut_and_resume(session, run := new_run(tmp_path), [90, 30, 2, 50, 9])
    assert_same_run(run, straight)


@pytest.mark.thorough
@pytest.mark.sampled(4)
@pytest.mark.parametrize("start", PLACES)
def test_resume_in_other_places_keeps_bits(start: str, folder: Path, straight: Run, tmp_path: Path) -> None:
    sessions = {name: small_session(folder, STEPS, **{**SAMPLED, **places}) for name, places in PLACES.items()}
    others = [name for name in PLACES if name != start]
    # Stopped in a period, at its end and after its first step, each time in another place.
    for turn, stops in enumerate(((1, 4), (2, 5), (3, 6))):
        run = new_run(tmp_path / str(turn)) if (tmp_path / str(turn)).mkdir() is None else None
        assert run is not None
        order = [start, others[turn], start]
        for name, stop in zip(order, (*stops, None), strict=True):
            if stop is None:
                train(sessions[name], run)
                continue
            with interrupting(stop), pytest.raises(Interrupted):
                train(sessions[name], run)
            assert not problems_of(sessions[name], run), (name, stop)
        assert_same_run(run, straight, order, stops)


def stopped_after(session: TrainSetup, run: Run, step: int) -> Path:
    """Train up to a step; return the folder with the layers' files."""
    with interrupting(step), pytest.raises(Interrupted):
        train(session, run)
    return run.state


def test_stamp_is_last_training_step(session: TrainSetup, tmp_path: Path) -> None:
    state = stopped_after(session, run := new_run(tmp_path), 4)
    # The update of step 4, of block 2 only, is pending.
    assert [stamp_of(layer_path(state / "layer", layer)) for layer in range(4)] == [2, 0, 3, 2]
    assert stamp_of(layer_path(state / "gradient", 2)) == 4
    assert not layer_path(state / "gradient", 1).exists()
    assert not problems_of(session, run)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_file_of_wrong_step_is_refused(layer: int, session: TrainSetup, straight: Run, tmp_path: Path) -> None:
    state = stopped_after(session, run := new_run(tmp_path), 1)
    path = layer_path(state / "layer", layer)
    older = path.read_bytes()  # of step 0
    stopped_after(session, run, 6)
    newer = path.read_bytes()
    assert stamp_of(path) == {0: 5, 1: 5, 2: 4}[layer]
    path.write_bytes(older)
    message = rf"layer-00{layer}\.safetensors is of step 0, the run is at step 6"
    with pytest.raises(DataError, match=message + (", which last trained this layer in step 4" if layer == 2 else "")):
        train(session, run)
    assert [line for line in problems_of(session, run) if "is of step 0" in line]
    path.write_bytes(newer)
    train(session, run)
    assert_same_run(run, straight)


def test_checkpoint_with_wrong_stamp_is_refused(folder: Path, tmp_path: Path) -> None:
    session = small_session(folder, STEPS, **{**SAMPLED, **PLACES["device"]}, save_every=2, keep="all")
    stopped_after(session, run := new_run(tmp_path), 6)
    first, last = run.checkpoint(2), run.checkpoint(6)
    assert [stamp_of(layer_path(last / "layer", layer)) for layer in range(4)] == [6, 6, 4, 6]
    shutil.copy(layer_path(first / "layer", 2), layer_path(last / "layer", 2))
    assert any("layer-002.safetensors is of step 2" in line for line in problems_of(session, run))
    with pytest.raises(DataError, match=r"layer-002\.safetensors is not of step 4"):
        train(session, run)


def test_inactive_layers_share_files_of_checkpoints(folder: Path, tmp_path: Path) -> None:
    session = small_session(folder, STEPS, **SAMPLED, save_every=2, keep="all")
    train(session, run := new_run(tmp_path))
    inodes = {
        step: [layer_path(run.checkpoint(step) / "layer", layer).stat().st_ino for layer in range(4)]
        for step in (2, 4, 6)
    }
    same = lambda a, b: [x == y for x, y in zip(inodes[a], inodes[b], strict=True)]  # noqa: E731
    assert same(2, 4) == [True, True, False, True]
    assert same(4, 6) == [False, False, True, False]
    assert not problems_of(session, run)


def test_skipped_steps_count_for_no_layer(folder: Path, tmp_path: Path) -> None:
    session = small_session(folder, STEPS, **SAMPLED, precision="fp16", z_loss=0.0)
    (tmp_path / "straight").mkdir()
    with infinite_gradient(2, (2, 3)):
        state = stopped_after(session, run := new_run(tmp_path), 5)
        commit = read_sealed(state / COMMIT)
        skipped = [line["step"] for line in run.metrics() if line.get("skipped")]
        assert {2, 3} <= set(skipped)
        counts = [
            sum(session.choice.trains(layer, step - 1) for step in range(1, 6) if step not in skipped)
            for layer in range(4)
        ]
        assert RunState.of(commit).layer_updates == tuple(counts)
        assert len(set(counts)) > 1
        train(session, run)
        train(session, whole := new_run(tmp_path / "straight"))
    assert_same_run(run, whole)


def test_planned_bytes_are_moved(folder: Path, tmp_path: Path) -> None:
    always = {**SAMPLED, "sampled": {"layers": 1, "period": 2}}
    session = small_session(folder, STEPS, **always)
    train(session, run := new_run(tmp_path))
    steps = [line for line in run.metrics() if "bytes_written" in line]
    plan, costs = session.plan, session.plan.costs
    assert [line["bytes_written"] for line in steps[1:]] == [costs.bytes_written_per_step] * (STEPS - 1)
    full = small_session(folder, STEPS, seed=21).plan
    assert costs.bytes_written_per_step < full.costs.bytes_written_per_step
    assert costs.bytes_read_per_step < full.costs.bytes_read_per_step
    few, all_of_them = (
        with_kernel_times(replace(each.workload, times=ModelTimes()), each.rates.compute) for each in (plan, full)
    )
    assert few.backward_seconds(0) < all_of_them.backward_seconds(0), "no gradients of frozen weights"


def test_planned_bytes_are_a_mean_of_draws(folder: Path, tmp_path: Path) -> None:
    session = small_session(folder, 9, **SAMPLED)
    train(session, run := new_run(tmp_path))
    written = [line["bytes_written"] for line in run.metrics() if "bytes_written" in line][1:]
    assert len(set(written)) > 2, "of periods with and without the vocabulary, and of changes"
    costs, always = session.plan.costs, small_session(folder, 9, method="sampled", sampled={"layers": 1}).plan.costs
    assert sum(written) == pytest.approx(len(written) * costs.bytes_written_per_step, abs=len(written))
    assert costs.bytes_read_per_step < always.bytes_read_per_step
    assert costs.seconds_per_step < always.seconds_per_step
    assert sum(share for share, _ in session.choice.typical) == 1.0


def test_parameters_cannot_be_selected_too(folder: Path) -> None:
    with pytest.raises(UsageError, match="train selects parameters for --method full; --method sampled trains all"):
        small_session(folder, STEPS, **SAMPLED, train=["h.1.*"])


def test_resume_with_other_draw_is_refused(session: TrainSetup, folder: Path, tmp_path: Path) -> None:
    stopped_after(session, run := new_run(tmp_path), 3)
    other = with_options(session, sampled=session.recipe.sampled.model_copy(update={"period": 3}))
    with pytest.raises(DataError, match="was trained with other options"):
        train(other, run)


def test_commit_names_the_updates_of_each_layer(session: TrainSetup, tmp_path: Path) -> None:
    state = stopped_after(session, new_run(tmp_path), 6)
    assert json.loads((state / COMMIT).read_text())["facts"]["layer_updates"] == [4, 2, 4, 4]
