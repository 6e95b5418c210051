"""Checkpoints of the Cerebras model zoo: made here by h5py from the description of the format."""

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from test_formats import make_state, write_source
from torch import Tensor

from gptj_ft.convert import Conversion, convert
from gptj_ft.errors import DataError, UsageError
from gptj_ft.formats.huggingface import open_checkpoint

State = dict[str, Tensor]
NAMES = {"attn.q_proj": "self_attn.proj_q_dense_layer", "attn.k_proj": "self_attn.proj_k_dense_layer"}
NAMES |= {"attn.v_proj": "self_attn.proj_v_dense_layer", "attn.out_proj": "self_attn.proj_output_dense_layer"}
NAMES |= {"mlp.fc_in": "ffn.ffn.0.linear_layer", "mlp.fc_out": "ffn.ffn.1.linear_layer", "ln_1": "norm1"}
PARAMS = """
train_input: {batch_size: 65}
model:
  hidden_size: 16
  num_heads: 2
  num_hidden_layers: 2
  vocab_size: 64
  rotary_dim: 4
  filter_size: 64
  max_position_embeddings: 32
  nonlinearity: gelu_new
  layer_norm_epsilon: 1e-5
  position_embedding_type: rotary
  share_embedding_weights: false
optimizer: {weight_decay_rate: 0.1}
"""


def theirs(state: State, prefix: str = "model.") -> State:
    """Name a model's tensors as Cerebras does, by the table in the description."""
    named = {}
    for name, tensor in state.items():
        own = name.removeprefix("transformer.")
        if own.startswith("h."):
            _, number, rest = own.split(".", 2)
            module, _, part = rest.rpartition(".")
            own = f"transformer_decoder.layers.{number}.{NAMES[module]}.{part}"
        elif own == "wte.weight":
            own = "embedding_layer.word_embeddings.weight"
        elif own.startswith("ln_f"):
            named[prefix + own] = tensor
            own = own.replace("ln_f", "transformer_decoder.norm")
        named[prefix + own] = tensor
    return named


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("prefix", ["model.", "model.model."])
def test_a_checkpoint_of_theirs_gives_every_bit_of_the_model(
    tmp_path: Path, state: State, params: Path, dtype: torch.dtype, prefix: str
) -> None:
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    convert(write_mdl(tmp_path / "checkpoint_250.mdl", state, prefix), tmp_path / "model", Conversion(config=params))
    assert same(tmp_path / "model", state)
    raw = json.loads((tmp_path / "model/config.json").read_text())
    assert (raw["n_inner"], raw["layer_norm_epsilon"], raw["activation_function"]) == (64, 1e-5, "gelu_new")


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_bin_with_their_names_is_read_too(tmp_path: Path, state: State, params: Path, prefix: str) -> None:
    folder = write_source(tmp_path / "source", theirs(state, prefix), "bin in shards")
    convert(folder, tmp_path / "a")  # its config.json is Hugging Face's
    torch.save(theirs(state, prefix), tmp_path / "weights.bin")
    convert(tmp_path / "weights.bin", tmp_path / "b", Conversion(form="cerebras", config=params))
    assert same(tmp_path / "a", state)
    assert same(tmp_path / "b", state)


def test_the_pickle_in_it_is_never_read_and_the_step_is(tmp_path: Path, state: State, params: Path) -> None:
    source = write_mdl(tmp_path / "checkpoint.mdl", state)
    convert(source, tmp_path / "mesh", Conversion(config=params, to="mesh", mesh_shards=2))
    assert (tmp_path / "mesh/step_250/shard_1/15.npz").is_file()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("nonlinearity: gelu_new -> nonlinearity: gelu", "activation_function 'gelu'"),
        ("share_embedding_weights: false -> share_embedding_weights: true", "tie_word_embeddings"),
        ("vocab_size: 64 -> vocab_size: 50", r"\[64, 16\], config\.json says \[50, 16\]"),
        ("position_embedding_type: rotary -> position_embedding_type: learned", "position_embedding_type is 'learned'"),
        ("  rotary_dim: 4 -> ", "does not say rotary_dim"),
        ("num_hidden_layers: 2 -> num_hidden_layers: 3", "missing"),
    ],
)
def test_parameters_that_would_compute_something_else_are_refused(
    tmp_path: Path, state: State, params: Path, change: str, reason: str
) -> None:
    old, _, new = change.partition(" -> ")
    params.write_text(PARAMS.replace(old, new))
    with pytest.raises(DataError, match=reason):
        convert(write_mdl(tmp_path / "c.mdl", state), tmp_path / "model", Conversion(config=params))
    assert not (tmp_path / "model").exists()


def test_without_its_shape_it_is_refused(tmp_path: Path, state: State) -> None:
    with pytest.raises(UsageError, match="--config"):
        convert(write_mdl(tmp_path / "c.mdl", state), tmp_path / "model")


@pytest.mark.parametrize(
    "what", ["truncated", "a link", "another copy", "another tensor", "a wrong type", "no weights"]
)
def test_damage_is_said_with_file_and_tensor(tmp_path: Path, state: State, params: Path, what: str) -> None:
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
        if what == "no weights":
            for key in list(file):
                del file[key]
    if what == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    reasons = {
        "truncated": "truncated or corrupt",
        "a link": r"layers\.1\.norm1\.bias is a link",
        "another copy": r"transformer_decoder\.norm\.bias and model\.ln_f\.bias should be the same",
        "another tensor": r"layers\.1\.norm3\.bias in c\.mdl is no tensor",
        "a wrong type": r"norm1\.bias is of type \|S4",
        "no weights": "holds no weights",
    }
    with pytest.raises(DataError, match=rf"c\.mdl.*{reasons[what]}"):
        convert(path, tmp_path / "out" / "model", Conversion(config=params))
    assert not list(tmp_path.glob("out/*"))
