"""Test listing and removing the models in the home folder."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from gptj_ft.checkpoints.base_model import find_model
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.download import Origin
from gptj_ft.checkpoints.metadata import ModelMetadata
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.resolve import build, dump_recipe
from gptj_ft.errors import UsageError
from gptj_ft.system import paths
from gptj_ft.system.hub_download import HubFile

ORIGIN = Origin("EleutherAI/gpt-j-6b", "c" * 40, "apache-2.0", files=(HubFile("config.json", 2, ""),))


@pytest.fixture
def models(own_home: Path) -> Path:
    """A download, what was converted from it, a tuned model, and half a download."""
    folder = own_home / "models"
    download = make_tiny(folder / "EleutherAI--gpt-j-6b", ["some text"], seed=0)
    (download / "source.json").write_text(ORIGIN.to_text())
    convert(download, folder / "gpt-j-6b", Conversion(dtype="bf16"))
    tuned = make_tiny(folder / "mine", ["some text"], seed=0)
    (tuned / "gptj_ft.json").write_text(json.dumps(ModelMetadata("gpt-j-6b", {}, {}, {}).to_dict()))
    half = folder / "cerebras--Cerebras-GPT-111M"
    half.mkdir()
    (half / "source.json").write_text(Origin("cerebras/Cerebras-GPT-111M", "d" * 40, "", files=ORIGIN.files).to_text())
    (folder / ".gpt-j.partial-1").mkdir()
    (folder / "notes").mkdir()
    return folder


def run_from(model: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump_recipe(build({"model": str(model)}), {}))
    return folder


def test_models_are_listed_with_family_and_origin(models: Path, shell) -> None:
    listed = {entry["name"]: entry for entry in shell("models --json").json["models"]}
    assert list(listed) == ["EleutherAI--gpt-j-6b", "cerebras--Cerebras-GPT-111M", "gpt-j-6b", "mine"]
    download, half, converted, tuned = listed.values()
    shards = [load_file(path) for path in (models / "gpt-j-6b").glob("*.safetensors")]
    parameters = sum(tensor.numel() for shard in shards for tensor in shard.values())
    assert download["parameters"] == converted["parameters"] == parameters
    assert (download["family"], download["dtype"], converted["dtype"]) == ("gptj", "float32", "bfloat16")
    assert 2 * parameters <= converted["bytes"] < download["bytes"]
    assert [entry["origin"] for entry in (download, converted, tuned)] == [
        "downloaded from EleutherAI/gpt-j-6b@cccccccccccc",
        "converted from EleutherAI/gpt-j-6b@cccccccccccc",
        "tuned from gpt-j-6b",
    ]
    assert "gptj-ft download cerebras/Cerebras-GPT-111M" in half["problem"]
    lines = shell("models").out.splitlines()
    assert len(lines) == 5
    assert f"{parameters:,}" in lines[1]


def test_damaged_model_is_listed_with_problem(models: Path, shell) -> None:
    (models / "mine" / "model-00002-of-00004.safetensors").write_bytes(b"short")
    mine = shell("models --json").json["models"][-1]
    assert "model-00002-of-00004.safetensors" in mine["problem"]
    assert mine["parameters"] is None


def test_empty_list_explains_how_to_download(shell) -> None:
    assert "gptj-ft download" in shell("models").out


def test_a_model_is_removed_and_nothing_else(models: Path, shell) -> None:
    before = {path.name for path in models.iterdir()}
    assert shell("models remove mine --dry-run --json").json["bytes"] > 0
    assert {path.name for path in models.iterdir()} == before
    assert "is freed" in shell("models remove mine").out
    assert shell("models remove cerebras--Cerebras-GPT-111M").code == 0
    assert {path.name for path in models.iterdir()} == before - {"mine", "cerebras--Cerebras-GPT-111M"}


def test_removing_a_link_keeps_its_model(models: Path, tmp_path: Path, shell) -> None:
    shutil.move(models / "mine", tmp_path / "elsewhere")
    (models / "linked").symlink_to(tmp_path / "elsewhere")
    assert shell("models remove linked").code == 0
    assert paths.is_model(tmp_path / "elsewhere")
    assert not (models / "linked").is_symlink()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["notes", "..", ".", "../models/mine", "mien", ".gpt-j.partial-1", "/etc"])
def test_models_outside_home_are_not_removed(models: Path, shell, name: str) -> None:
    done = shell(f"models remove {name} --force")
    assert done.code == 2
    assert f"no model '{name}'" in done.err
    assert ("did you mean 'mine'" in done.err) == (name == "mien")
    assert (models / "mine").is_dir()
    assert (models / "notes").is_dir()


def test_needed_base_model_is_removed_only_forced(models: Path, shell) -> None:
    run = run_from(models / "gpt-j-6b", Path("runs/one"))
    assert shell("models remove gpt-j-6b --dry-run --json").json["needed_by"] == [str(run.resolve())]
    done = shell("models remove gpt-j-6b")
    assert done.code == 2
    assert "runs/one was started from gpt-j-6b" in done.err
    assert paths.is_model(models / "gpt-j-6b")
    assert shell("models remove gpt-j-6b --force").code == 0


def test_names_stand_only_for_their_model(models: Path) -> None:
    assert find_model("gpt-j-6b") == find_model("EleutherAI/gpt-j-6b") == models / "gpt-j-6b"
    for name in ("someone/gpt-j-6b", "/disk/gpt-j-6b", "./it/gpt-j-6b", "~/gpt-j-6b", "a/b/gpt-j-6b", "any/mine", ".."):
        with pytest.raises(UsageError, match=re.escape(name)):
            find_model(name)
    shutil.rmtree(models / "gpt-j-6b")
    assert find_model("EleutherAI/gpt-j-6b") == models / "EleutherAI--gpt-j-6b"


def test_finished_run_needs_no_base_model(models: Path, tmp_path: Path, shell) -> None:
    run = run_from(models / "gpt-j-6b", tmp_path / "far" / "run")
    shutil.copytree(models / "mine", run / "model")
    paths.remember_run(run)
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    (run / "checkpoints" / "step-000001" / "manifest.json").write_text("{}")
    assert shell("models remove gpt-j-6b").code == 2
    shutil.rmtree(run / "checkpoints")
    assert shell("models remove gpt-j-6b").code == 0
