"""Test both layouts of a run's master weights through the command line: stop, resume, verify, export."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support.cli_runner import Shell
from support.small_run import assert_same_weights, losses_of, weights_of
from support.stopped_runs import make_runs

from gptj_ft.checkpoints.weight_file import open_shard
from gptj_ft.config.run_folder import Run
from gptj_ft.streaming.stores.state_file import layer_path

OPTIONS = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 2 --max-length 64 "
    "--set holdout=0.1 --precision bf16 --max-steps 4 --save-every 2 --keep all"
)
PLACES = {
    "disk": "--weights disk --optimizer-state disk",
    "host": "--weights host --optimizer-state host",
    "lora": "--weights host --optimizer-state disk --method lora",
}
LAYOUTS = {"split": "", "fp32": "--set master=fp32"}
Copier = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a run of a place and layout, stopped after 3 of 4 steps, and the same completed."""
    folder = tmp_path_factory.mktemp("made")

    @cache
    def make(name: str) -> Path:
        place, _, layout = name.partition("-")
        make_runs(folder, {name: f"{OPTIONS} {PLACES[place]} {LAYOUTS[layout]}"}, steps=3)
        return folder

    return make


@pytest.fixture
def copied(made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copier:
    """Return a function that copies such runs to the working folder."""

    def copy(*names: str) -> Path:
        for name in names:
            monkeypatch.setenv("GPTJ_FT_HOME", str(made(name) / "home"))
            subprocess.run(f"cp -a {made(name)}/{name}* {made(name)}/rows.jsonl {tmp_path}", shell=True, check=True)
        return tmp_path

    return copy


def state_file(run: Run, layer: int = 1) -> Path:
    """Return a layer's file in the newest state of a run."""
    newest = run.state if run.state.is_dir() else run.checkpoint(max(run.whole_checkpoints()))
    return layer_path(newest / "layer", layer)


@pytest.mark.thorough
@pytest.mark.parametrize("place", PLACES)
def test_both_layouts_end_with_the_same_bits(place: str, copied: Copier) -> None:
    names = [f"{place}-{layout}" for layout in LAYOUTS]
    split, fp32 = (Run(copied(*names) / f"{name}-done") for name in names)
    assert_same_weights(weights_of(split.model), weights_of(fp32.model))
    assert losses_of(split) == losses_of(fp32)


@pytest.mark.thorough
@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", PLACES)
def test_stopped_run_resumes_in_its_layout(place: str, layout: str, copied: Copier, shell: Shell) -> None:
    folder = copied(f"{place}-{layout}", f"{place}-split")
    run = Run(folder / f"{place}-{layout}")
    if layout == "fp32":  # as written before the option existed
        text = run.recipe_file.read_text(encoding="utf-8")
        run.recipe_file.write_text(re.sub(r"^master: fp32.*\n", "", text, flags=re.MULTILINE), encoding="utf-8")
        assert text != run.recipe_file.read_text(encoding="utf-8")
        assert "master" not in run.record()["recipe"], "as in runs that started before"
    kinds = open_shard(state_file(run)).entries.keys()
    assert kinds >= ({"weight", "low_bits"} if layout == "split" else {"weight", "master"})
    assert shell(f"runs verify {run.folder}").code == 0
    done = shell(f"finetune --resume {run.folder}")
    assert done.code == 0, done.said
    assert_same_weights(weights_of(run.model), weights_of(folder / f"{place}-split-done" / "model"))
    assert losses_of(run) == losses_of(Run(folder / f"{place}-split-done"))
    assert shell(f"runs verify {run.folder}").code == 0


@pytest.mark.thorough
def test_run_continues_elsewhere_with_a_split_master(copied: Copier, shell: Shell) -> None:
    folder = copied("disk-split", "host-split")
    for name, place in (("disk-split", "host"), ("host-split", "disk")):
        done = shell(f"finetune --resume {name} --weights {place} --optimizer-state {place}")
        assert done.code == 0, done.said
        assert_same_weights(weights_of(folder / name / "model"), weights_of(folder / f"{name}-done" / "model"))


@pytest.mark.thorough
def test_checkpoints_of_both_layouts_export_the_same_model(copied: Copier, shell: Shell) -> None:
    folder, models = copied("disk-split", "disk-fp32"), []
    for layout in LAYOUTS:
        done = shell(f"runs export disk-{layout}-done exported-{layout} --from step-000002")
        assert done.code == 0, done.said
        models.append(weights_of(folder / f"exported-{layout}"))
    assert_same_weights(*models)
    assert all(tensor.dtype.itemsize == 4 for tensor in models[0].values())


@pytest.mark.parametrize("place", ["disk", "host"])
def test_damaged_low_bits_are_named(place: str, copied: Copier, shell: Shell) -> None:
    run = Run(copied(f"{place}-split") / f"{place}-split")
    path = state_file(run)
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    start = 8 + length + json.loads(data[8 : 8 + length])["low_bits"]["data_offsets"][0]
    data[start + 14] ^= 1
    path.unlink()  # the same file may have other names
    path.write_bytes(data)
    for command in (f"finetune --resume {run.folder}", f"runs verify {run.folder}"):
        done = shell(command)
        assert done.code == 3, done.said
        assert str(path) in done.said, done.said
        assert "low_bits" in done.said, done.said
