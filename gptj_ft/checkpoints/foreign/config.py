"""Translate the model configs of mesh-transformer-jax, Cerebras and Google into Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.model_folder import Checkpoint, check_tensors
from gptj_ft.checkpoints.published_configs import GPT2, GPTJ_6B
from gptj_ft.config.yaml import parse
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import Architecture, architecture_of

CONFIG, GOOGLE_CONFIG = "config.json", "bert_config.json"
# Fields of Google's bert_config.json that do not apply to BERT with a pooler of the first token.
BERT_UNUSED = (
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)
_NAMES = {"gptj": "GPT-J", "gpt2": "GPT-2"}
# *_FIELDS: their name -> Hugging Face's. *_FORCED: fields with a single supported value; they may be missing.
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
    # The muP variants of Cerebras-GPT set these three; they are not supported.
    "embeddings_scale": 1.0,
    "output_logits_scale": None,
    "scale_qk_dot_by_d": False,
}


def find_config(folders: Sequence[Path], name: str = CONFIG) -> Path | None:
    """Return the first config of this name in the folders."""
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def architecture_from(config: Path | None, checkpoint: Checkpoint) -> Architecture:
    """Return the architecture in a config. Without one, return GPT-J 6B's if every tensor has its shape."""
    if config is not None:
        return architecture_of(read_foreign_config(config), config)
    architecture = architecture_of(GPTJ_6B, checkpoint.folder)
    try:
        check_tensors(architecture, checkpoint)
    except DataError as error:
        raise UsageError(
            f"{checkpoint.folder} has no config of its model's shape, and the shape is not GPT-J 6B's; name the JSON "
            f"of its shape with --config ({str(error).partition('config.json: ')[2].partition(';')[0]})"
        ) from error
    return architecture


def read_foreign_config(path: Path) -> dict[str, Any]:
    """Read a model's shape from a JSON or YAML file of any of these systems, as Hugging Face's ``config.json``.

    Raises:
        DataError: neither JSON nor YAML, or the model is neither GPT-J, GPT-2 nor BERT.
    """
    try:
        loaded = parse(path.read_text(encoding="utf-8"), str(path))  # JSON is YAML
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: neither JSON nor YAML") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: expected an object, found {type(loaded).__name__}")
    if "intermediate_size" in loaded and "num_attention_heads" in loaded:  # Google's BERT, or transformers' copy of it
        return {"model_type": "bert", **{key: value for key, value in loaded.items() if key not in BERT_UNUSED}}
    if "n_embd" in loaded:
        return {"model_type": GPTJ_6B["model_type"], **loaded}
    if "d_model" in loaded:
        loaded.setdefault("pe_rotary_dims", loaded["d_model"] // max(1, loaded.get("n_heads", 1)))
        return _translate(path, loaded, MESH_FIELDS, MESH_FORCED, ("layers", "d_model", "n_heads", "n_vocab", "pe"))
    model = loaded.get("model", loaded)
    if isinstance(model, dict) and "hidden_size" in model:
        required: tuple[str, ...] = ("hidden_size", "num_heads", "num_hidden_layers", "vocab_size", "nonlinearity")
        if "rotary_dim" in model or model.get("position_embedding_type") == "rotary":
            return _translate(path, model, CEREBRAS_FIELDS, CEREBRAS_FORCED, (*required, "rotary_dim"))
        required = (*required, "max_position_embeddings")
        return _translate(path, model, CEREBRAS_FIELDS, CEREBRAS_GPT2_FORCED, required, GPT2)
    raise UsageError(
        f"{path} does not give the shape of a model: it has neither n_embd or intermediate_size (Hugging Face), "
        "d_model (mesh-transformer-jax) nor hidden_size (Cerebras)"
    )


def _translate(
    path: Path,
    theirs: Mapping[str, Any],
    names: Mapping[str, str],
    forced: Mapping[str, Any],
    required: tuple[str, ...],
    defaults: Mapping[str, Any] = GPTJ_6B,
) -> dict[str, Any]:
    for name in required:
        if name not in theirs:
            raise DataError(f"{path}: {name} is missing")
    for name, value in forced.items():
        if theirs.get(name, value) != value:
            raise DataError(f"{path}: {name} is {theirs[name]!r}; {_NAMES[defaults['model_type']]} has {value!r}")
    return {**defaults, **{ours: theirs[name] for name, ours in names.items() if name in theirs}}
