"""Translate the config of mesh-transformer-jax or Cerebras into Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptj_ft.config.yaml import parse
from gptj_ft.errors import DataError, UsageError

# EleutherAI/gpt-j-6b's config.json. What the other systems do not say is taken from here.
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
# Of Google's bert_config.json, the fields that mean nothing to a model of the first token.
BERT_UNUSED = (
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)
_NAMES = {"gptj": "GPT-J", "gpt2": "GPT-2"}
MESH_FIELDS = {"layers": "n_layer", "d_model": "n_embd", "n_heads": "n_head", "n_vocab": "vocab_size"}
MESH_FIELDS |= {"seq": "n_positions", "pe_rotary_dims": "rotary_dim"}
MESH_FORCED = {"norm": "layernorm", "pe": "rotary"}
CEREBRAS_FIELDS = {
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "filter_size": "n_inner",
    "nonlinearity": "activation_function",
    "share_embedding_weights": "tie_word_embeddings",
}
CEREBRAS_FIELDS |= {name: name for name in ("vocab_size", "rotary_dim", "layer_norm_epsilon", "initializer_range")}
CEREBRAS_FORCED = {"position_embedding_type": "rotary", "use_untied_layer_norm": False, "use_bias_in_output": True}
# Cerebras-GPT's; the scales are those of its muP variants, which compute something else.
GPT2: Mapping[str, Any] = {
    **{key: value for key, value in GPTJ_6B.items() if not key.startswith(("n_", "rotary", "vocab", "activation"))},
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_inner": None,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
}
CEREBRAS_GPT2_FORCED = {
    "position_embedding_type": "learned",
    "use_position_embedding": True,
    "attention_type": "scaled_dot_product",
    "norm_type": "layernorm",
    "use_projection_bias_in_attention": True,
    "use_ffn_bias_in_attention": True,
    "use_ffn_bias": True,
    "use_bias_in_output": False,
    "use_untied_layer_norm": False,
    "embedding_layer_norm": False,
    "embeddings_scale": 1.0,
    "output_logits_scale": None,
    "scale_qk_dot_by_d": False,
}


def read_foreign_config(path: Path) -> dict[str, Any]:
    """Read the shape of a model from a JSON or YAML file of any of the three systems.

    Returns: what Hugging Face would have in ``config.json``.

    Raises:
        UsageError: no such file, neither JSON nor YAML, or it does not say a shape.
        DataError: a model that is neither GPT-J, GPT-2 nor BERT.
    """
    try:
        loaded = parse(path.read_text(encoding="utf-8"), str(path))  # JSON is YAML
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: neither JSON nor YAML") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: expected an object, found {type(loaded).__name__}")
    if "intermediate_size" in loaded and "num_attention_heads" in loaded:  # Google's, or what `transformers` has of it
        return {"model_type": "bert", **{key: value for key, value in loaded.items() if key not in BERT_UNUSED}}
    if "n_embd" in loaded:
        return {"model_type": GPTJ_6B["model_type"], **loaded}
    if "d_model" in loaded:
        loaded.setdefault("pe_rotary_dims", loaded["d_model"] // max(1, loaded.get("n_heads", 1)))
        return _translated(path, loaded, MESH_FIELDS, MESH_FORCED, ("layers", "d_model", "n_heads", "n_vocab", "pe"))
    model = loaded.get("model", loaded)
    if isinstance(model, dict) and "hidden_size" in model:
        needed: tuple[str, ...] = ("hidden_size", "num_heads", "num_hidden_layers", "vocab_size", "nonlinearity")
        if "rotary_dim" in model or model.get("position_embedding_type") == "rotary":
            return _translated(path, model, CEREBRAS_FIELDS, CEREBRAS_FORCED, (*needed, "rotary_dim"))
        needed = (*needed, "max_position_embeddings")
        return _translated(path, model, CEREBRAS_FIELDS, CEREBRAS_GPT2_FORCED, needed, GPT2)
    raise UsageError(
        f"{path} does not say the shape of a model: neither n_embd or intermediate_size (Hugging Face), d_model "
        "(mesh-transformer-jax) nor hidden_size (Cerebras) is in it"
    )


def _translated(
    path: Path,
    theirs: Mapping[str, Any],
    names: Mapping[str, str],
    forced: Mapping[str, Any],
    needed: tuple[str, ...],
    unsaid: Mapping[str, Any] = GPTJ_6B,
) -> dict[str, Any]:
    for name in needed:
        if name not in theirs:
            raise DataError(f"{path}: does not say {name}")
    for name, value in forced.items():
        if theirs.get(name, value) != value:
            raise DataError(f"{path}: {name} is {theirs[name]!r}; {_NAMES[unsaid['model_type']]} has {value!r}")
    said = {ours: theirs[name] for name, ours in names.items() if name in theirs}
    return {**unsaid, **said}
