"""Fields of ``config.json`` of published models, for checkpoints that leave them out and for tiny test models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# config.json of EleutherAI/gpt-j-6b.
GPTJ_6B: Mapping[str, Any] = {
    "architectures": ["GPTJForCausalLM"],
    "model_type": "gptj",
    "vocab_size": 50400,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "n_inner": None,
    "rotary_dim": 64,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "use_cache": True,
}
# Cerebras-GPT, without the sizes, which differ between its models.
GPT2: Mapping[str, Any] = {
    **{key: value for key, value in GPTJ_6B.items() if not key.startswith(("n_", "rotary", "vocab", "activation"))},
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_inner": None,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
}
