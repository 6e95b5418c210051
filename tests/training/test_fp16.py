"""Test runs in fp16: skipped steps, resume, verification and reports.

A large z-loss makes gradients overflow at the first loss scales.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import random_gptj
from support.small_run import (
    Power,
    PowerCut,
    assert_same_weights,
    new_run,
    small_session,
    train,
    weights_of,
)
from support.steps import failing, infinite_gradient

from gptj_ft.config.run_folder import COMMIT, Run
from gptj_ft.data.batches import Rows
from gptj_ft.errors import DataError, NotFinite
from gptj_ft.system.digests import read_sealed, write_sealed
from gptj_ft.training.setup import TrainSetup
from gptj_ft.training.verify import Checker

STEPS = 5
FULL = {"precision": "fp16", "z_loss": 3.0}
METHODS = {
    "full": FULL,
    "adapters": {"precision": "fp16", "z_loss": 30.0, "method": "lora", "lora": {"rank": 2, "alpha": 8}},
    "a part": {**FULL, "train": ["h.1.*", "lm_head.*"]},
}
DEVICE = {"weights": "device", "optimizer_state": "device"}


def folder_in(folder: Path, name: object) -> Path:
    (made := folder / str(name)).mkdir()
    return made


def steps_of(run: Run) -> list[tuple[object, ...]]:
    names = ("step", "loss", "lr", "grad_norm", "loss_scale", "skipped")
    return [tuple(line[name] for name in names) for line in run.metrics() if "loss" in line]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> TrainSetup:
    return small_session(tmp_path_factory.mktemp("model"), STEPS, **FULL)


@pytest.fixture(scope="module")
def straight(session: TrainSetup, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = new_run(tmp_path_factory.mktemp("straight"))
    train(session, run)
    return run


def test_skipped_step_uses_no_learning_rate(session: TrainSetup, straight: Run) -> None:
    steps = steps_of(straight)
    assert [line[4:] for line in steps] == [(65536.0, True), *[(32768.0, False)] * 2, (32768.0, True), (16384.0, False)]
    assert [line[2] for line in steps] == [session.schedule.lr(number) for number in (1, 1, 2, 3, 3)]
    assert [line[3] is None for line in steps] == [True, False, False, True, False]
    assert steps[0][1] != steps[1][1], "of the same rows, with the same weights"


@pytest.mark.thorough
@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_around_skipped_steps_resumes_bit_equal(
    stride: int, session: TrainSetup, straight: Run, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        power = Power(patch)
        train(session, new_run(tmp_path))
    num_cut = 0
    for last in range(7, power.count, stride):
        shutil.rmtree(tmp_path / "run")
        run = new_run(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            Power(patch, last)
            with suppress(PowerCut):  # near the end there may be fewer operations: it depends on which threads wait
                train(session, run)
        num_cut += not run.model.exists()
        assert run.last_commit() is None or not scale_problems(run), last
        if not run.model.exists():
            train(session, run)
        assert_same_weights(weights_of(run.model), weights_of(straight.model), last)
        assert steps_of(run) == steps_of(straight), last
    assert num_cut > power.count // stride // 2, "most runs were cut before their model was there"


def scale_problems(run: Run) -> list[str]:
    """Return what is wrong with the loss scale of a run on disk."""
    return [line for line in Checker(run, []).problems() if "loss scale" in line]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("steps_before", [1, 2, 3])
def test_loss_scale_resumes_from_checkpoint(steps_before: int, straight: Run, tmp_path: Path) -> None:
    session, run = small_session(tmp_path, STEPS, **FULL, **DEVICE, save_every=1), new_run(tmp_path)
    with failing(steps_before + 1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        train(session, run)
    assert sorted(run.whole_checkpoints()) == [steps_before]
    train(session, run)
    assert_same_weights(weights_of(run.model), weights_of(straight.model))
    assert steps_of(run) == steps_of(straight)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["adapters", "a part"])
def test_fp16_memory_and_disk_are_bit_equal(method: str, tmp_path: Path) -> None:
    runs = []
    for places in ({}, DEVICE):
        session = small_session(tmp_path, STEPS, **{**METHODS[method], **places})
        runs.append(new_run(folder_in(tmp_path, len(runs))))
        train(session, runs[-1])
    assert steps_of(runs[0]) == steps_of(runs[1])
    assert_same_weights(*(weights_of(run.model) for run in runs))
    assert {line[5] for line in steps_of(runs[0])} == {True, False}


def test_fp16_stores_gradients_without_clipping(tmp_path: Path) -> None:
    sessions = [
        small_session(tmp_path, STEPS, **FULL, **DEVICE, clip_norm=clip, activations="recompute")
        for clip in (1e9, None)
    ]
    assert "gradients are stored" not in sessions[0].plan.reason
    assert "gradients are stored though none is clipped" in sessions[1].plan.reason
    assert sessions[0].plan.device_bytes == sessions[1].plan.device_bytes
    runs = [new_run(folder_in(tmp_path, number)) for number in range(2)]
    for session, run in zip(sessions, runs, strict=True):
        train(session, run)
    assert steps_of(runs[0]) == steps_of(runs[1])
    assert_same_weights(*(weights_of(run.model) for run in runs))


def test_fp16_plan_moves_bytes_of_fp32_master(tmp_path: Path) -> None:
    half, other = (small_session(tmp_path, precision=precision, master="fp32").plan for precision in ("fp16", "bf16"))
    assert (half.placement, half.host_bytes, half.disk_bytes) == (other.placement, other.host_bytes, other.disk_bytes)
    for ours, theirs in ((half.costs.forward, other.costs.forward), (half.costs.backward, other.costs.backward)):
        # Weights in bf16 are rounded in more passes over memory, see `split_master`.
        assert replace(ours, updated=theirs.updated) == theirs


def test_overflow_at_any_scale_ends_run(session: TrainSetup, tmp_path: Path) -> None:
    session = small_session(tmp_path, 30, precision="fp16")
    run = new_run(tmp_path)
    with infinite_gradient(layer=2, steps=range(2, 31)), pytest.raises(NotFinite) as caught:
        train(session, run)
    said = str(caught.value)
    assert "the gradient of step 18 is not finite in fp16 with any loss scale down to 1, " in said
    assert "in transformer.h.1.mlp.fc_in.bias" in said
    assert said.endswith("start a new one with a lower --lr or --precision fp32")
    assert [line[5] for line in steps_of(run)] == [False, *[True] * 16]
    assert "NaN" not in run.metrics_file.read_text(encoding="utf-8")
    assert "Infinity" not in run.metrics_file.read_text(encoding="utf-8")


def test_forward_overflow_differs_from_gradient_overflow(tmp_path: Path) -> None:
    spoil(tmp_path, "h.1.mlp.fc_out.weight", 1.5e5)
    session = small_session(tmp_path, 30, precision="fp16")
    with pytest.raises(NotFinite, match="the validation loss before anything was trained is not finite"):
        train(session, new_run(folder_in(tmp_path, "validating")))
    run = new_run(folder_in(tmp_path, "not"))
    with pytest.raises(NotFinite) as caught:
        train(replace(session, validation=Rows([], [])), run)
    assert "the loss before anything was trained is not finite, first in layer 2" in str(caught.value)
    assert "the output of transformer.h.1.mlp.fc_out" in str(caught.value)
    assert "--precision fp32" in str(caught.value)
    assert [line[1] for line in steps_of(run)] == [None] * 16


def test_weight_beyond_fp16_range_is_named(tmp_path: Path) -> None:
    spoil(tmp_path, "h.1.mlp.fc_out.weight", 1e7)
    with pytest.raises(DataError, match=r"transformer.h.1.mlp.fc_out.weight has values beyond the range of fp16"):
        train(small_session(tmp_path, precision="fp16"), new_run(tmp_path))


def spoil(folder: Path, name: str, factor: float) -> None:
    """Write the model of `small_session`, one tensor multiplied."""
    model = random_gptj(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, rotary_dim=4)
    model.get_parameter(f"transformer.{name}").data.mul_(factor)
    model.save_pretrained(folder)


def test_verify_recomputes_the_loss_scale(session: TrainSetup, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        Power(patch, 140)
        with pytest.raises(PowerCut):
            train(session, run)
    assert run.last_commit() is not None
    assert scale_problems(run) == []
    commit = read_sealed(run.state / COMMIT)
    for wrong in ({"num_skipped": 0}, {"scale": 65536.0}, {"growth_tracker": 99}):
        facts = {**commit["facts"], "loss_scale": {**commit["facts"]["loss_scale"], **wrong}}
        write_sealed(run.state / COMMIT, {**commit, "facts": facts})
        assert len(scale_problems(run)) == 1, wrong
    write_sealed(run.state / COMMIT, {**commit, "facts": {**commit["facts"], "loss_scale": None}})
    assert "has no loss scale" in scale_problems(run)[0]


@pytest.mark.thorough
def test_report_shows_scale_and_skipped_steps(shell, rows_file: Path) -> None:
    line = (
        "finetune --recipe summarization --data rows.jsonl --model tiny --precision fp16 --max-steps 3 --batch-size 2"
    )
    done = shell(f"{line} --set z_loss=100 --max-length 80 --output run")
    assert done.code == 0, done.said
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "(gradients overflowed fp16)" in page
    assert "Loss scale" in page
    assert "overflow: skipped, and the scale halved" in Path("run/log.txt").read_text(encoding="utf-8")
    losses = {}
    for precision in ("fp16", "fp32"):
        words = (
            f"evaluate run --data rows.jsonl --limit 4 --set generation.max_new_tokens=4 --precision {precision} --json"
        )
        found = shell(words)
        assert found.code == 0, found.said
        losses[precision] = found.json["model"]["loss"]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=1e-3)
    assert losses["fp16"] != losses["fp32"]
    assert shell("generate --model run --max-new-tokens 4 --precision fp16 --json Cough.").json["text"]
