"""Test `convert --check A B`: it finds and names every kind of planted error."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoint_files import make_state, write_source
from torch import Tensor

from gptj_ft.checkpoints.convert import Conversion, convert

WEIGHTS = "model.safetensors"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_source(tmp_path / "good", make_state()[1])


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return write_source(tmp_path / "bad", make_state()[1])


def plant(folder: Path, **changed: Tensor | None) -> None:
    """Change tensors of a folder, by names with two underscores for a dot; ``None`` removes one."""
    weights = load_file(folder / WEIGHTS)
    named = {name.replace("__", "."): tensor for name, tensor in changed.items()}
    save_file({k: v.clone() for k, v in {**weights, **named}.items() if v is not None}, folder / WEIGHTS)


def say(folder: Path, **fields: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **fields}))


def test_equal_models_in_all_formats_match(shell, good: Path, tmp_path: Path) -> None:
    convert(good, tmp_path / "folder")
    convert(good, tmp_path / "mesh", Conversion(to="mesh", mesh_shards=2))
    for one, other in ((good, "folder"), ("folder", "mesh"), ("mesh", good)):
        done = shell(f"convert --check {one} {other}")
        assert done.code == 0, done.err
        assert "tensors" in done.out
        assert "bit for bit: 25 tensors, 8,512 parameters in float32" in done.said


def test_runs_and_home_names_are_found(shell, good: Path, tmp_path: Path, own_home: Path) -> None:
    for folder in ("runs/mine/model", own_home / "models" / "known", "foreign/model"):
        convert(good, tmp_path / folder)
    convert(good, tmp_path / "mesh", Conversion(to="mesh", mesh_shards=2))
    (tmp_path / "mesh/step_0").rename(tmp_path / "foreign/step_0")
    for line in (
        "convert runs/mine out --to huggingface", "convert --check out runs/mine", "convert --check known known",
        "convert known mesh-of-known --to mesh --mesh-shards 2",
    ):  # fmt: skip
        done = shell(line)
        assert done.code == 0, (line, done.err)
    (tmp_path / "foreign/model/model-00004-of-00004.safetensors").unlink()
    # The checkpoint itself, not the model folder in it.
    assert shell(f"convert --check foreign out --config {good}/config.json").code == 0


def test_rounded_copy_matches(shell, good: Path, tmp_path: Path) -> None:
    convert(good, tmp_path / "half", Conversion(dtype="bf16"))
    assert (
        "bit for bit: 25 tensors, 8,512 parameters in float32 as bfloat16" in shell(f"convert --check {good} half").said
    )
    assert shell(f"convert --check half {good}").code == 3
    done = json.loads(shell(f"convert --check {good} half --json").out)
    assert done["types"] == ["float32", "bfloat16"]


def test_flipped_bit_is_located(shell, good: Path, bad: Path) -> None:
    weight = load_file(bad / WEIGHTS)["transformer.h.1.mlp.fc_in.weight"]
    weight.view(torch.int32)[3, 2] ^= 1
    plant(bad, transformer__h__1__mlp__fc_in__weight=weight)
    done = shell(f"convert --check {good} {bad}")
    assert done.code == 3
    assert "transformer.h.1.mlp.fc_in.weight differs: number 50 is" in done.err


def test_missing_extra_and_renamed_tensors_are_reported(shell, good: Path, bad: Path) -> None:
    weights = load_file(bad / WEIGHTS)
    plant(
        bad,
        lm_head__bias=None,
        transformer__h__0__ln_1__bias=None,
        transformer__h__0__ln_2__bias=weights["transformer.h.0.ln_1.bias"],
        transformer__h__0__other=torch.zeros(3),
    )
    done = shell(f"convert --check {good} {bad}")
    assert done.code == 3
    assert "lm_head.bias is missing\n" in done.err
    assert "ln_1.bias is missing; transformer.h.0.ln_2.bias holds the same numbers: renamed" in done.err
    assert "transformer.h.0.other is extra" in done.err


def test_swapped_tensors_are_reported(shell, good: Path, bad: Path) -> None:
    weights = load_file(bad / WEIGHTS)
    k, v = (f"transformer.h.0.attn.{which}_proj.weight" for which in "kv")
    plant(bad, **{k.replace(".", "__"): weights[v], v.replace(".", "__"): weights[k]})
    done = shell(f"convert --check {good} {bad}")
    assert done.code == 3
    assert f"{k} differs" in done.err
    assert f"{v} differs" in done.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vocab_size": 50}, "vocab_size"),
        ({"activation_function": "gelu"}, "gelu_new"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"n_layer": 1}, "n_layer"),
        ({"n_head": 4}, "n_head is 4, expected 2"),
        ({"rotary_dim": 8}, "rotary_dim is 8, expected 4"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ({"n_inner": 32}, "n_inner is 32, expected 64"),
    ],
)
def test_different_config_is_reported(shell, good: Path, bad: Path, fields: dict[str, object], reason: str) -> None:
    say(bad, **fields)
    done = shell(f"convert --check {good} {bad}")
    assert done.code == 3
    assert reason in done.err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"vocab_size": 50}, "has shape [64, 16], config.json says [50, 16]"),
        ({"n_layer": 1}, "is no tensor of this gptj"),
        ({"n_layer": 3}, "is missing"),
        ({"n_head": 3}, "n_head"),
        ({"rotary_dim": 32}, "rotary_dim"),
        ({"n_inner": 32}, "has shape [64, 16], config.json says [32, 16]"),
        ({"activation_function": "gelu"}, "gelu_new"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_config_contradicting_tensors_is_reported(shell, bad: Path, fields: dict[str, object], reason: str) -> None:
    say(bad, **fields)
    for command in (f"convert --check {bad} {bad}", f"convert {bad} out"):
        done = shell(command)
        assert done.code == 3
        assert reason in done.err
    assert not Path("out").exists()


def test_check_needs_two_checkpoints(shell, good: Path) -> None:
    assert shell(f"convert --check {good}").code == 2
    assert shell(f"convert --check {good} nowhere").code == 2
    assert "nowhere does not exist" in shell(f"convert --check {good} nowhere").err


def test_old_attention_masks_are_ignored(shell, good: Path, bad: Path) -> None:
    plant(bad, transformer__h__0__attn__masked_bias=torch.tensor(-1e9))
    assert shell(f"convert --check {good} {bad}").code == 0
    assert shell(f"convert --check {bad} {good}").code == 0
