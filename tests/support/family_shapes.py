"""Tiny configs of each family, as arguments of `transformers`' configs; the first of a family stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TINY: Mapping[str, Any] = {
    "vocab_size": 101, "max_position_embeddings": 64, "hidden_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 3, "intermediate_size": 80,
}  # fmt: skip
LLAMA: Mapping[str, Any] = {**TINY, "num_attention_heads": 6, "num_key_value_heads": 2}
ODD: Mapping[str, Any] = {"vocab_size": 33, "head_dim": 10, "num_hidden_layers": 3, "num_key_value_heads": 2}
GEMMA: Mapping[str, Any] = {
    **TINY,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
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
    "llama": {**LLAMA, "model_type": "llama"},
    "llama, biased": {
        **LLAMA, **ODD, "model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama, yarn": {
        **LLAMA, "model_type": "llama", "pad_token_id": 3, "rms_norm_eps": 1e-2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 8},
    "mistral, one key head": {**LLAMA, "model_type": "mistral", "num_key_value_heads": 1, "sliding_window": 2},
    "mistral, odd": {
        **LLAMA, **ODD, "model_type": "mistral", "sliding_window": None, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0},
    },
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen2, odd": {
        **LLAMA, **ODD, "model_type": "qwen2", "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16.0, "beta_slow": 0.5,
                            "truncate": False, "original_max_position_embeddings": 16},
    },
    "qwen2, windows": {
        **LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2,
    },
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 24},
    "qwen3, layer types": {
        **LLAMA, "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3, biased": {
        **LLAMA, **ODD, "model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    },
    "smollm3": {
        **LLAMA, "model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": None, "pretraining_tp": 2,
    },
    "smollm3, odd": {
        **LLAMA, **ODD, "model_type": "smollm3", "no_rope_layers": [0, 1, 1], "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": False, "pad_token_id": None,
    },
    "smollm3, windows": {
        **LLAMA, "model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": None,
        "use_sliding_window": True, "sliding_window": 8,
    },
    "granite": {
        **LLAMA, "model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.22,
        "attention_multiplier": 0.4, "logits_scaling": 0.5,
    },
    "granite, biased": {
        **LLAMA, "model_type": "granite", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
        "vocab_size": 33, "num_key_value_heads": 1, "residual_multiplier": 1.5,
    },
    "granite, wide heads": {
        **LLAMA, **ODD, "model_type": "granite", "attention_multiplier": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "phi3": {**LLAMA, "model_type": "phi3", "pad_token_id": None},
    "phi3, window": {**LLAMA, "model_type": "phi3", "pad_token_id": None, "sliding_window": 8},
    "phi3, in part": {
        **LLAMA, "model_type": "phi3", "pad_token_id": None, "tie_word_embeddings": True,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5], "long_factor": [2.0, 8.0],
        },
    },
    "gemma": {**GEMMA, "model_type": "gemma"},
    "gemma, odd": {
        **GEMMA, "model_type": "gemma", "head_dim": 20, "attention_bias": True, "hidden_act": "gelu",
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "gemma, one key head": {**GEMMA, "model_type": "gemma", "num_key_value_heads": 1, "pad_token_id": None},
    "gemma2": {**GEMMA, "model_type": "gemma2", "sliding_window": 8, "query_pre_attn_scalar": 24},
    "gemma2, low caps": {
        **GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5,
        "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "attention_bias": True,
    },
    "gemma2, without caps": {
        **GEMMA, "model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "tie_word_embeddings": False, "num_key_value_heads": 1, "hidden_activation": "silu",
    },
    "gemma3_text": {**GEMMA, "model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 3},
    "gemma3_text, scaled": {
        **GEMMA, "model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 24, "head_dim": 20,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma3_text, untied": {
        **GEMMA, "model_type": "gemma3_text", "tie_word_embeddings": False, "attention_bias": True,
        "sliding_window_pattern": 2, "sliding_window": 100,
    },
}  # fmt: skip
FIRST_SHAPES = {str(shape["model_type"]): name for name, shape in reversed(FAMILY_SHAPES.items())}
"""Family -> its first shape."""
