"""Tiny configs of each family, as arguments of `transformers`' configs; the first of a family stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TINY: Mapping[str, Any] = {
    "vocab_size": 101, "max_position_embeddings": 64, "hidden_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 3, "intermediate_size": 80,
}  # fmt: skip
FAMILY_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gpt_neox": {**TINY, "model_type": "gpt_neox"},
    "gpt_neox, one after the other": {
        **TINY, "model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False,
        "hidden_act": "gelu_fast", "rotary_pct": 1.0, "rotary_emb_base": 500,
    },
    "gpt_neox, tied": {
        **TINY, "model_type": "gpt_neox", "vocab_size": 33, "num_attention_heads": 4, "tie_word_embeddings": True,
        "hidden_act": "gelu_new", "rotary_pct": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
}  # fmt: skip
FIRST_SHAPES = {str(shape["model_type"]): name for name, shape in reversed(FAMILY_SHAPES.items())}
"""Family -> its first shape."""
