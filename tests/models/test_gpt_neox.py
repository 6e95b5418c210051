"""Test what is specific to GPT-NeoX: released files and rejected configs. `test_families` compares the computation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.family_models import random_of_family
from support.family_shapes import FAMILY_SHAPES
from support.small_run import weights_of

from gptj_ft.checkpoints.convert import convert
from gptj_ft.errors import DataError
from gptj_ft.models.registry import architecture_of

SHAPE = FAMILY_SHAPES["gpt_neox"]


def test_released_files_convert_without_loss(tmp_path: Path) -> None:
    """Pythia's files have the fields of transformers 4, and buffers of masks and frequencies."""
    model, source = random_of_family("gpt_neox"), tmp_path / "source"
    model.save_pretrained(source)
    tensors = weights_of(source)
    prefix = "gpt_neox.layers.0.attention."
    buffers = {
        f"{prefix}bias": torch.ones(1, 1, 4, 4), f"{prefix}masked_bias": torch.zeros(()),
        f"{prefix}rotary_emb.inv_freq": torch.ones(2),
    }  # fmt: skip
    save_file({**tensors, **buffers}, source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    del raw["rope_parameters"]
    (source / "config.json").write_text(json.dumps({**raw, "rotary_pct": 0.5, "rotary_emb_base": 900}))
    report = convert(source, tmp_path / "model")
    assert sorted(report.dropped) == sorted(buffers)
    assert weights_of(tmp_path / "model").keys() == tensors.keys()
    rotary = architecture_of(json.loads((tmp_path / "model" / "config.json").read_text()), tmp_path).config.rotary
    assert (rotary.width, rotary.theta) == (8, 900.0)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"hidden_act": "swiglu"}, "hidden_act 'swiglu' is not supported; known are gelu, gelu_new"),
        ({"num_attention_heads": 5}, "not a multiple of num_attention_heads 5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"rotary_pct": 1.5}, "rotary width 24 of heads of 16"),
        ({"rope_scaling": {"rope_type": "magic"}}, "rope_type 'magic' is not supported"),
        ({"use_parallel_residual": "maybe"}, "use_parallel_residual must be true or false"),
        ({"hidden_dropout": 1}, "hidden_dropout must be a number from 0 to below 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them"),
    ],
    ids=str,
)
def test_unsupported_config_is_rejected(field: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        architecture_of({**SHAPE, **field}, Path("config.json"))
