"""Test what is specific to GPT-2: checkpoint formats, the tied head, unsupported configs.

Behaviour shared with GPT-J is tested with GPT-J.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GPT2_SHAPES, random_gpt2
from safetensors.torch import save_file
from support.small_run import assert_same_weights, weights_of
from support.small_stack import next_token_logits
from transformers import AutoModelForCausalLM

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.convert import Conversion, convert
from gptj_ft.checkpoints.model_folder import check_tensors, open_checkpoint
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.batch import pack
from gptj_ft.models.gpt2 import FAMILY
from gptj_ft.models.layout import Layout
from gptj_ft.streaming.open import open_for_inference

CPU = torch.device("cpu")
State = dict[str, torch.Tensor]


@pytest.fixture
def model():
    return random_gpt2(**GPT2_SHAPES["gpt2"])


def write_source(folder: Path, model, state: State, form: str = "safetensors", **changes: Any) -> Path:
    """Write a checkpoint in another system's format."""
    model.config.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["GPT2LMHeadModel"], **changes}))
    if form == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(torch.arange(12)[None]).logits


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["bin", "safetensors"])
@pytest.mark.parametrize("prefix", ["transformer.", ""], ids=["whole", "without its head, like Cerebras-GPT 13B"])
def test_checkpoint_formats_convert_without_loss(tmp_path: Path, model, form: str, prefix: str) -> None:
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    own = {prefix + name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"{prefix}h.0.attn.bias": torch.ones(1, 1, 4, 4).bool(), f"{prefix}h.0.attn.masked_bias": torch.zeros(())}
    name = "GPT2LMHeadModel" if prefix else "GPT2Model"
    source = write_source(tmp_path / "source", model, {**own, **masks}, form, architectures=[name])
    report = convert(source, tmp_path / "model")
    assert sorted(report.dropped) == ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]
    assert_same_weights(weights_of(tmp_path / "model"), tensors)
    assert torch.equal(logits(tmp_path / "model"), model(torch.arange(12)[None]).logits)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    convert(tmp_path / "model", tmp_path / "back", Conversion(to="huggingface"))
    assert_same_weights(weights_of(tmp_path / "back"), tensors)
    with pytest.raises(UsageError, match="has no gpt2"):
        convert(tmp_path / "model", tmp_path / "mesh", Conversion(to="mesh"))


def test_a_tensor_under_two_names_is_refused(tmp_path: Path, model) -> None:
    state = {**model.state_dict(), "wte.weight": model.transformer.wte.weight}
    source = write_source(tmp_path / "source", model, state, "bin")
    with pytest.raises(DataError, match=r"wte\.weight twice, also as "):
        open_checkpoint(source)


def test_copied_head_is_dropped_others_rejected(tmp_path: Path, model) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert convert(write_source(tmp_path / "same", model, state), tmp_path / "model").dropped == ("lm_head.weight",)
    state["lm_head.weight"][3, 5] += 1
    source = write_source(tmp_path / "trained apart", model, state)
    with pytest.raises(
        DataError, match=r"lm_head\.weight in .* differs from transformer\.wte\.weight, but config\.json sets tie_word"
    ):
        convert(source, tmp_path / "other")
    (source / "config.json").write_text(
        json.dumps({**json.loads((source / "config.json").read_text()), "tie_word_embeddings": False})
    )
    convert(source, tmp_path / "other")
    assert torch.equal(weights_of(tmp_path / "other")["lm_head.weight"], state["lm_head.weight"])


@pytest.mark.parametrize(
    "field",
    [
        {"activation_function": "gelu_new"},
        {"activation_function": "relu"},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"n_inner": 40},
        {"reorder_and_upcast_attn": True},
        {"layer_norm_epsilon": 1e-3},
    ],
    ids=str,
)
def test_config_options_match_transformers(tmp_path: Path, field: dict[str, Any]) -> None:
    oracle = random_gpt2(**{**GPT2_SHAPES["gpt2"], **field})
    oracle.save_pretrained(tmp_path)
    tokens = list(range(20))
    with open_for_inference(tmp_path, CPU, torch.float32) as (_, stack), torch.no_grad():
        ours, theirs = next_token_logits(stack, pack([tokens])), oracle(torch.tensor([tokens])).logits[:, -1]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ({"activation_function": "swiglu"}, "activation_function 'swiglu' is not supported; known are gelu, gelu_new"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
        ({"mup_width_scale": 0.25}, "mup_width_scale 0.25"),
        ({"n_head": 5}, "not a multiple of n_head"),
        ({"n_positions": 0}, "n_positions must be a positive integer"),
    ],
)
def test_unsupported_config_is_rejected(field: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        FAMILY.read_config({**GPT2_SHAPES["gpt2"], **field})


def test_tied_head_is_stored_once(tmp_path: Path, model) -> None:
    model.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert check_tensors(architecture, checkpoint) == []
    layouts = [Layout.of(layer) for layer in architecture.layers()]
    assert sum(layout.num_parameters for layout in layouts) == sum(p.numel() for p in model.parameters())
    assert layouts[-1].num_used - layouts[-1].num_parameters == model.transformer.wte.weight.numel()
    assert architecture.ties() == {"lm_head.weight": "transformer.wte.weight"}
