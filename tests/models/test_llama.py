"""Test the configs of Llama's families; `test_families` compares their numbers with `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.family_models import random_of_family
from support.family_shapes import LLAMA

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import check_tensors, open_checkpoint
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.gguf_form import TENSORS
from gptj_ft.models.registry import Architecture, families

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("llama", {"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported; known: silu, swish"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved True"),
        ("llama", {"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads must be a positive integer"),
        ("llama", {"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size 48 is not a multiple"),
        ("llama", {"head_dim": 5}, "rotary width 5 of heads of 5 must be even"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported for llama"),
        ("llama", {"sliding_window": 8}, "sliding_window 8 is not supported for llama"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling 8.0 is not supported for llama"),
        ("llama", {"initializer_range": "big"}, "initializer_range must be a number"),
        ("llama", {"rms_norm_eps": 2}, "rms_norm_eps must be a number from 0 to 1"),
        ("llama", {"layer_types": [SLIDING] * 3}, "layer_types .* does not fit 3 layers"),
        ("mistral", {"attention_bias": True}, "attention_bias True is not supported for mistral"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive integer"),
        ("mistral", {"layer_types": [SLIDING, FULL, FULL]}, "layer_types .* does not fit 3 layers"),
        (
            "qwen2",
            {"layer_types": [SLIDING, FULL, FULL]},
            "sliding_attention is not supported with sliding_window None",
        ),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["chunked"] * 3}, "layer_types: chunked"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have 0 or 1 for each of 3 layers"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop 0.1 is not supported"),
        ("llama", {"token_classification_bias": False}, "token_classification_bias False is not supported"),
    ],
)
def test_unsupported_config_is_rejected(model_type: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        families()[model_type].read_config({**LLAMA, **fields})


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("mistral", {}, (4096,) * 3),
        ("mistral", {"sliding_window": None}, (None,) * 3),
        ("qwen2", {"sliding_window": 8}, (None,) * 3),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL, FULL]},
            (8, None, None),
        ),
        ("phi3", {"sliding_window": 8}, (8, 8, 8)),
        ("phi3", {"sliding_window": 8, "use_sliding_window": False}, (8, 8, 8)),  # as in `transformers`
    ],
)
def test_windows_follow_the_config(model_type: str, fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert families()[model_type].read_config({**LLAMA, **fields}).windows == windows


@pytest.mark.parametrize("model_type", ["mistral", "phi3"])
def test_gguf_windows_are_those_of_the_file(model_type: str) -> None:
    metadata = {"attention.head_count": 6, "embedding_length": 48, TENSORS: ()}
    form = families()[model_type].gguf
    assert form is not None
    for stored, window in (({"attention.sliding_window": 8}, 8), ({"attention.sliding_window": 0}, None), ({}, None)):
        assert form.to_config({**metadata, **stored})["sliding_window"] == window


def test_old_files_of_phi3_mean_longrope() -> None:
    scaling = {"type": "yarn", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = families()["phi3"].read_config({**LLAMA, "rope_scaling": scaling})
    assert config.rotary.kind == "longrope"
    assert config.rotary.trained_length == 4096


def test_qwen3_heads_have_128_dimensions_by_default() -> None:
    assert families()["qwen3"].read_config({**LLAMA}).head_dim == 128


def test_config_that_ties_another_head_is_rejected(tmp_path: Path) -> None:
    random_of_family("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    architecture = read_architecture(tmp_path)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(
            DataError, match=r"lm_head\.weight .* differs from model\.embed_tokens.*sets tie_word_embeddings"
        ),
    ):
        check_tensors(architecture, checkpoint)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"].clone()  # of old files
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert sorted(check_tensors(architecture, checkpoint)) == [
            "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq",
        ]  # fmt: skip


def test_dropout_of_hidden_states_is_rejected() -> None:
    family, raw = families()["llama"], {**LLAMA, "attention_dropout": 0.1}
    architecture = Architecture(family, family.read_config(raw), raw)
    with pytest.raises(UsageError, match="a llama model drops no hidden states"):
        architecture.with_dropout(0.1, None)
    assert architecture.dropout == {"attention_dropout": 0.1}
    assert not architecture.with_dropout(0.0, None).dropout
