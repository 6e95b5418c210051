"""Test the messages for models that are not supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.family_shapes import FAMILY_SHAPES

from gptj_ft.checkpoints.tiny import FAMILIES
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import architecture_of, families
from gptj_ft.models.supported import MODEL_TYPES, TINY_MODELS, check_supported, context_of

CONFIG = Path("config.json")


def test_tables_name_the_same_families() -> None:
    assert set(MODEL_TYPES) == set(families())
    assert set(TINY_MODELS.values()) <= set(MODEL_TYPES)


def test_context_is_that_of_family() -> None:
    named = [{**raw, "model_type": name, "vocab_size": 99} for name, raw in FAMILIES.items()]
    for raw in (*FAMILY_SHAPES.values(), *named):
        assert context_of(raw) == families()[raw["model_type"]].read_config(raw).n_positions
    assert context_of({"model_type": "gpt2"}) is None


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"model_type": "qwen3_moe"}, r"this is a mixture of experts \(qwen3_moe\): its routers are not implemented"),
        ({"model_type": "mixtral"}, "a mixture of experts"),
        ({"model_type": "gpt_oss"}, "a mixture of experts"),
        ({"model_type": "llama4", "text_config": {}}, "a mixture of experts"),
        ({"model_type": "qwen3_5_moe"}, "a mixture of experts"),
        ({"model_type": "qwen3_5_text"}, "gated delta rule"),
        ({"model_type": "qwen3_next"}, "gated delta rule"),
        ({"model_type": "gemma3n_text"}, "more than one hidden state"),
        ({"model_type": "gemma4"}, "more than one hidden state"),
        ({"model_type": "olmo2"}, "norms behind attention and MLP"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, r"images or sound \(llava\)"),
        ({"model_type": "other", "auto_map": {"AutoModel": "m.M"}}, "other model with code in its repository"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "m.M"}}, "auto_map asks for code"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, r"quantized \(gptq\)"),
        ({"model_type": "llama", "quantization_config": {"load_in_4bit": True}}, r"quantized \(quantization_config\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejection_names_the_missing_part(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_supported(CONFIG, raw)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "mistral"])
def test_bidirectional_decoders_are_rejected(name: str) -> None:
    raw = {**FAMILIES[name], "model_type": name, "vocab_size": 99}
    assert architecture_of({**raw, "is_causal": True}, CONFIG).family.model_type == name
    with pytest.raises(DataError, match=r"config\.json: is_causal False is not supported"):
        architecture_of({**raw, "is_causal": False}, CONFIG)
