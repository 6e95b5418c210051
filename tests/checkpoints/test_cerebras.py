"""Test reading Cerebras checkpoints; h5py writes them from the description of the format."""

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from support.cerebras_reference import GPT2, PARAMS, gpt2_state, gpt2_theirs, theirs
from support.checkpoint_files import State, make_state, write_source
from transformers import AutoModelForCausalLM

from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.errors import DataError, UsageError


def write_mdl(path: Path, state: State, prefix: str = "model.", **extra: object) -> Path:
    with h5py.File(path, "w") as file:
        file.attrs["__version__"] = 0.4
        file.attrs["__spec__"] = "80049523" * 9  # hex of a pickle
        for name, tensor in theirs(state, prefix).items():
            array = tensor.view(torch.int16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
            file[name] = array
            if tensor.dtype is torch.bfloat16:
                file[name].attrs["is_bfloat16"] = True
            file[f"optimizer.state.{name}.exp_avg"] = np.zeros(tensor.shape, np.float32)
        file["global_step"] = 250
        for name, value in extra.items():
            file[name] = value
    return path


@pytest.fixture
def state() -> State:
    return make_state()[1]


@pytest.fixture
def params(tmp_path: Path) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS)
    return path


def same(folder: Path, state: State) -> bool:
    with open_checkpoint(folder) as model:
        return set(model.names) == set(state) and all(
            model.dtype(name) == tensor.dtype and torch.equal(model.read(name), tensor)
            for name, tensor in state.items()
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("prefix", ["model.", "model.model."])
def test_mdl_converts_to_identical_bits(
    tmp_path: Path, state: State, params: Path, dtype: torch.dtype, prefix: str
) -> None:
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    convert(write_mdl(tmp_path / "checkpoint_250.mdl", state, prefix), tmp_path / "model", Conversion(config=params))
    assert same(tmp_path / "model", state)
    raw = json.loads((tmp_path / "model/config.json").read_text())
    assert (raw["n_inner"], raw["layer_norm_epsilon"], raw["activation_function"]) == (64, 1e-5, "gelu_new")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("positions", ["position_embeddings.weight", "position_embeddings.embed.weight"])
def test_gpt2_mdl_converts_to_identical_bits(tmp_path: Path, is_tied: bool, positions: str) -> None:
    state, params = gpt2_state(is_tied), tmp_path / "params.yaml"
    params.write_text(GPT2.replace("TIED", str(is_tied).lower()))
    named = gpt2_theirs(state, f"embedding_layer.{positions}")
    with h5py.File(tmp_path / "c.mdl", "w") as file:
        for name, tensor in named.items():
            file[name] = tensor.numpy()
    report = convert(tmp_path / "c.mdl", tmp_path / "model", Conversion(config=params))
    assert report.dropped == (("lm_head.weight",) if is_tied else ())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (model.config.n_inner, model.config.activation_function) == (80, "gelu")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    params.write_text(GPT2.replace("TIED", "true").replace("filter_size", "output_logits_scale: 0.5, filter_size"))
    with pytest.raises(DataError, match=r"output_logits_scale is 0\.5; GPT-2 has None"):
        convert(tmp_path / "c.mdl", tmp_path / "other", Conversion(config=params))
    params.write_text(GPT2.replace("TIED", str(is_tied).lower()))
    with h5py.File(tmp_path / "c.mdl", "r+") as file:
        del file["model.transformer_decoder.layers.1.self_attn.proj_k_dense_layer.bias"]
    with pytest.raises(DataError, match=r"h\.1\.attn\.c_attn\.bias consists of 3 tensors, but the file has 2"):
        convert(tmp_path / "c.mdl", tmp_path / "other", Conversion(config=params))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_bin_with_cerebras_names_converts(tmp_path: Path, state: State, params: Path, prefix: str) -> None:
    folder = write_source(tmp_path / "source", theirs(state, prefix), "bin in shards")
    convert(folder, tmp_path / "a")  # its config.json is Hugging Face's
    torch.save(theirs(state, prefix), tmp_path / "weights.bin")
    convert(tmp_path / "weights.bin", tmp_path / "b", Conversion(format="cerebras", config=params))
    assert same(tmp_path / "a", state)
    assert same(tmp_path / "b", state)


def test_mdl_pickle_is_ignored_step_is_read(tmp_path: Path, state: State, params: Path) -> None:
    source = write_mdl(tmp_path / "checkpoint.mdl", state)
    report = convert(source, tmp_path / "mesh", Conversion(config=params, to="mesh", mesh_shards=2))
    assert report.has_left_moments
    assert (tmp_path / "mesh/step_250/shard_1/15.npz").is_file()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("nonlinearity: gelu_new -> nonlinearity: gelu", "activation_function 'gelu'"),
        ("share_embedding_weights: false -> share_embedding_weights: true", "tie_word_embeddings"),
        ("vocab_size: 64 -> vocab_size: 50", r"\[64, 16\], config\.json says \[50, 16\]"),
        ("position_embedding_type: rotary -> position_embedding_type: learned", "position_embedding_type is 'learned'"),
        ("  rotary_dim: 4 -> ", "rotary_dim is missing"),
        ("num_hidden_layers: 2 -> num_hidden_layers: 3", "missing"),
    ],
)
def test_unsupported_or_wrong_config_is_rejected(
    tmp_path: Path, state: State, params: Path, change: str, reason: str
) -> None:
    old, _, new = change.partition(" -> ")
    params.write_text(PARAMS.replace(old, new))
    with pytest.raises(DataError, match=reason):
        convert(write_mdl(tmp_path / "c.mdl", state), tmp_path / "model", Conversion(config=params))
    assert not (tmp_path / "model").exists()


def test_missing_shape_is_rejected(tmp_path: Path, state: State) -> None:
    with pytest.raises(UsageError, match="--config"):
        convert(write_mdl(tmp_path / "c.mdl", state), tmp_path / "model")


@pytest.mark.parametrize(
    "what", ["truncated", "a link", "another copy", "another tensor", "a wrong type", "a bomb", "no weights"]
)
def test_damage_error_names_file_and_tensor(tmp_path: Path, state: State, params: Path, what: str) -> None:
    path = write_mdl(tmp_path / "c.mdl", state)
    name = "model.transformer_decoder.layers.1.norm1.bias"
    with h5py.File(path, "r+") as file:
        if what == "a link":
            del file[name]
            file[name] = h5py.ExternalLink("/etc/passwd", "/x")
        if what == "another copy":
            file["model.ln_f.bias"][3] += 1
        if what == "another tensor":
            file["model.transformer_decoder.layers.1.norm3.bias"] = np.zeros(16)
        if what == "a wrong type":
            del file[name]
            file[name] = np.zeros(16, "S4")
        if what == "a bomb":
            del file[name]
            file.create_dataset(name, (3 * 10**8,), "f4", chunks=(3 * 10**8,), compression="gzip")  # of nothing
        if what == "no weights":
            for key in list(file):
                del file[key]
    if what == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    reasons = {
        "truncated": "truncated or corrupt",
        "a link": r"layers\.1\.norm1\.bias is a link",
        "another copy": r"transformer_decoder\.norm\.bias and model\.ln_f\.bias are copies of one tensor",
        "another tensor": r"layers\.1\.norm3\.bias in c\.mdl is no tensor",
        "a wrong type": r"norm1\.bias has type \|S4",
        "a bomb": r"layers\.1\.norm1\.bias unpacks to more than 1 GiB at once",
        "no weights": "holds no weights",
    }
    with pytest.raises(DataError, match=rf"c\.mdl.*{reasons[what]}"):
        convert(path, tmp_path / "out" / "model", Conversion(config=params))
    assert not list(tmp_path.glob("out/*"))
