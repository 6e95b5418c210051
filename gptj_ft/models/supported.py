"""Name the supported model families and the default model, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gptj_ft.errors import UsageError
from gptj_ft.system.plain_text import one_line

MODEL_TYPES = (  # keys of `registry.families`
    "gptj", "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3", "gemma", "gemma2",
    "gemma3_text", "bert", "roberta", "xlm-roberta",
)  # fmt: skip
POSITIONS_BEHIND_PADDING = ("roberta", "xlm-roberta")  # families whose positions start behind the padding token's id
TINY_MODELS = {  # random models made from the rows of a run: name -> ``model_type``
    "tiny": "gptj", "tiny-gpt2": "gpt2", "tiny-gpt-neox": "gpt_neox",
    "tiny-llama": "llama", "tiny-mistral": "mistral", "tiny-qwen2": "qwen2",
    "tiny-qwen3": "qwen3", "tiny-smollm3": "smollm3", "tiny-granite": "granite", "tiny-phi3": "phi3",
    "tiny-gemma": "gemma", "tiny-gemma2": "gemma2", "tiny-gemma3": "gemma3_text",
    "tiny-bert": "bert", "tiny-roberta": "roberta",
    "tiny-xlm-roberta": "xlm-roberta",
}  # fmt: skip
MOST_LABELS = 100_000  # of a task
DEFAULT_REPOSITORY = "EleutherAI/gpt-j-6b"
DEFAULTS = (DEFAULT_REPOSITORY, f"{DEFAULT_REPOSITORY}-fp16")  # as `download --variant fp16` calls its folder


# ``model_type`` patterns of models that lack something here -> the model, and the missing part; the first match counts.
MISSING: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("*_moe", "*_moe_text", "*moe", "mixtral", "deepseek*", "gpt_oss", "llama4*", "dbrx", "jamba", "mistral4*"),
        "a mixture of experts", "its routers are not implemented",
    ),
    (
        ("qwen3_next", "qwen3_5*", "qwen4_exp", "kimi_linear"),
        "a model with linear attention", "its gated delta rule is not implemented",
    ),
    (
        ("mamba*", "falcon_mamba", "rwkv*", "bamba", "recurrent_gemma"),
        "a recurrent model", "its states are not implemented",
    ),
    (
        ("gemma3n*", "gemma4*"),
        "a model whose layers pass on more than one hidden state",
        "its embeddings and keys shared between layers are not implemented",
    ),
    (("olmo2", "olmo3"), "a model with norms behind attention and MLP only", "these blocks are not implemented"),
    (("ministral3",), "a model with queries scaled by position", "this scale is not implemented"),
)  # fmt: skip


def context_of(raw: Mapping[str, Any]) -> int | None:
    """Return the context of a model in tokens, without importing torch; ``None``: its ``config.json`` lacks it."""
    size, padding = raw.get("n_positions", raw.get("max_position_embeddings")), raw.get("pad_token_id", 1)
    if raw.get("model_type") in POSITIONS_BEHIND_PADDING and type(size) is int and type(padding) is int:
        size -= padding + 1
    return size if type(size) is int else None


def check_supported(config: Path, raw: Mapping[str, Any]) -> None:
    """Check that a model's family and files are supported, before reading family-specific fields.

    Args:
        config: ``config.json``, for messages.
        raw: its content.

    Raises:
        UsageError: another family, quantised weights, or a model that needs code from its repository.
    """
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UsageError(
            f"{config}: {_missing_part(raw)}; supported: {', '.join(MODEL_TYPES)}\n"
            "for other models there are TRL, LLaMA-Factory, Axolotl and, on a Mac, mlx-lm"
        )
    quantization = raw.get("quantization_config")
    if quantization and not is_read_quantization(quantization):
        method = (quantization.get("quant_method") if isinstance(quantization, dict) else None) or "quantization_config"
        raise UsageError(
            f"{config}: its weights are quantized ({one_line(str(method))}), which is not read; bitsandbytes' nf4, fp4 "
            "and int8 are: else name the model that it was made from, in fp32, bf16 or fp16"
        )
    if raw.get("auto_map"):
        raise UsageError(
            f"{config}: auto_map asks for code from the model's repository (trust_remote_code), which is never run; "
            f"if `transformers` opens the model without it, remove auto_map from the file"
        )


def is_read_quantization(quantization: object) -> bool:
    """Tell whether a ``quantization_config`` is read: bitsandbytes' with 4 or 8 bits, or of a GGUF file's codes."""
    if not isinstance(quantization, dict):
        return False
    if quantization.get("quant_method") == "ggml":  # of `convert --quantize keep`
        return True
    if quantization.get("quant_method") != "bitsandbytes":
        return False
    return bool(quantization.get("load_in_4bit")) != bool(quantization.get("load_in_8bit"))


def _missing_part(raw: Mapping[str, Any]) -> str:
    """Describe a model of an unsupported family by the part that is missing here."""
    model_type = one_line(str(raw.get("model_type")))
    for patterns, kind, missing in MISSING:
        if any(fnmatchcase(model_type, pattern) for pattern in patterns):
            return f"this is {kind} ({model_type}): {missing}"
    if isinstance(raw.get("text_config"), dict):
        return f"this is a model for images or sound ({model_type}): its text part, text_config, is not read from it"
    if raw.get("auto_map"):
        return f"this is a {model_type} model with code in its repository (trust_remote_code), which is never run"
    return f"this is a {model_type} model" if raw.get("model_type") else "it names no model_type"
