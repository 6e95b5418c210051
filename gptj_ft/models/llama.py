"""Llama (https://arxiv.org/abs/2302.13971) and families of its shape: Mistral, Qwen 2 and 3, SmolLM3, Granite, Phi-3.

x <- x + o(attention(norm(x))); x <- x + down(act(gate(norm(x))) * up(norm(x))); RMS norms; rotary positions in halves;
several query heads share a key head. The families differ in biases, norms of queries and keys, windows and multipliers.

Axis letters: T tokens, D width, N query heads, K key heads, H head width, I inner width, S target rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.attention import attend
from gptj_ft.models.batch import PackedBatch, Poll
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.embedding import Embedding
from gptj_ft.models.gated import ACTIVATIONS, gated
from gptj_ft.models.gguf_form import (
    TENSORS,
    GgufForm,
    Metadata,
    neighbours,
    rotary_config,
    rotary_factors,
    rotary_metadata,
    same_order,
)
from gptj_ft.models.heads import SPANS, TEXTS, WORDS, generic_heads, rms_norm, words_dropout
from gptj_ft.models.linear import Linear, RowContext, TiedLinear, VocabularyHead, project_by_all
from gptj_ft.models.norm import RMSNorm
from gptj_ft.models.registry import Family, Home, check_numbers
from gptj_ft.models.rotary import RotarySpec, rotary_spec, rotate_halves

SIZES = (
    "vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "intermediate_size",
)  # fmt: skip
MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
# Defaults of `transformers` for fields that a config.json leaves out.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "initializer_range": 0.02, "rms_norm_eps": 1e-6, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "rope_theta": 10_000.0, "attention_dropout": 0.0,
    "pad_token_id": None,
}  # fmt: skip
# Fields that only some families have -> the only value that others may have.
SPECIAL: Mapping[str, Any] = {
    "attention_bias": False, "mlp_bias": False, "sliding_window": None, "no_rope_layers": None,
    **dict.fromkeys(MULTIPLIERS, 1.0),
}  # fmt: skip
# Fields that would change the computation -> supported values.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": tuple(ACTIVATIONS),
    "rope_interleaved": (False,),
    "resid_pdrop": (0.0,),
    "embd_pdrop": (0.0,),
    "token_classification_bias": (True,),
}
FULL, SLIDING = "full_attention", "sliding_attention"
OLD_PREFIX = "transformer."  # of all tensors beside the older families' heads for spans in `transformers`


@dataclass(frozen=True)
class Form:
    """Differences of a family from Llama."""

    class_prefix: str  # of its classes in `transformers`
    defaults: Mapping[str, Any]  # of its fields, where they are not Llama's
    has_qkv_bias: bool = False  # whether q, k and v have biases, and the output has none
    has_qk_norm: bool = False
    is_fused: bool = False
    is_rotated_in_part: bool = False  # whether ``partial_rotary_factor`` is read
    heads: tuple[str, ...] = (TEXTS, SPANS, WORDS)  # ends of the classes with other heads
    spans_prefix: str | None = OLD_PREFIX


QWEN: Mapping[str, Any] = {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
SMOLLM3: Mapping[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "bos_token_id": 128000, "eos_token_id": 128001,
    "pad_token_id": 128004, "tie_word_embeddings": True, "rope_theta": 2_000_000.0, "use_sliding_window": False,
    "sliding_window": None, "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip
MISTRAL: Mapping[str, Any] = {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096,
}  # fmt: skip
PHI3: Mapping[str, Any] = {
    "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000, "pad_token_id": 32000,
    "sliding_window": None,
}  # fmt: skip
BIASES = {"attention_bias": False, "mlp_bias": False}
FORMS: Mapping[str, Form] = {
    "llama": Form("Llama", BIASES),
    "mistral": Form("Mistral", MISTRAL, spans_prefix=None),
    "qwen2": Form("Qwen2", QWEN, has_qkv_bias=True),
    "qwen3": Form("Qwen3", {**QWEN, "head_dim": 128, "attention_bias": False}, has_qk_norm=True),
    "smollm3": Form("SmolLM3", SMOLLM3),
    "granite": Form("Granite", {**BIASES, **dict.fromkeys(MULTIPLIERS, 1.0)}, heads=()),
    "phi3": Form("Phi3", PHI3, is_fused=True, is_rotated_in_part=True, heads=(TEXTS, WORDS)),
}


@dataclass(frozen=True)
class LlamaConfig:
    """One model's computation; fields with a counterpart in ``config.json`` have its name."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int  # D
    num_hidden_layers: int
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # H
    intermediate_size: int  # I
    hidden_act: str
    rms_norm_eps: float
    initializer_range: float
    rotary: RotarySpec
    rotates: tuple[bool, ...]  # whether each block has rotary positions
    windows: tuple[int | None, ...]  # tokens that a query of each block sees, itself included; None: all
    has_qkv_bias: bool
    has_output_bias: bool  # of the attention
    mlp_bias: bool
    has_qk_norm: bool  # whether queries and keys are normed per head
    is_fused: bool  # whether q, k and v share a matrix, and gate and up another
    tie_word_embeddings: bool
    embedding_multiplier: float
    logits_scaling: float  # divisor of the logits
    residual_multiplier: float  # of each branch
    attention_multiplier: float  # of the attention scores
    attention_dropout: float
    classifier_dropout: float  # before the labels of words
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None  # its row of the embedding has no gradient from the lookup, as in `transformers`

    @property
    def n_embd(self) -> int:
        return self.hidden_size

    @property
    def n_layer(self) -> int:
        return self.num_hidden_layers

    @property
    def n_head(self) -> int:
        return self.num_attention_heads

    @property
    def n_positions(self) -> int:
        return self.max_position_embeddings


def read_config(raw: Mapping[str, Any], model_type: str) -> LlamaConfig:
    """Read ``config.json``; reject unsupported values."""
    form = FORMS[model_type]
    for name, neutral in SPECIAL.items():
        if name not in form.defaults and raw.get(name) not in (None, neutral):
            raise DataError(f"{name} {raw[name]!r:.100} is not supported for {model_type}")
    values = {**DEFAULTS, **form.defaults, **raw}
    for name, supported in ONLY.items():
        if values.get(name) is not None and values[name] not in supported:
            raise DataError(f"{name} {values[name]!r:.100} is not supported; known: {', '.join(map(str, supported))}")
    for name in ("initializer_range", "attention_dropout", *MULTIPLIERS):
        if name in values and (type(values[name]) not in (int, float) or not 0 <= values[name] < 1e9):
            raise DataError(f"{name} must be a number from 0, not {values[name]!r:.100}")
    _set_sizes(values)
    rotary = rotary_spec(_rotary_fields(values, form), values["head_dim"], values["max_position_embeddings"])
    if rotary.width != values["head_dim"] and not form.is_rotated_in_part:
        raise DataError(f"partial_rotary_factor is not supported for {model_type}: its heads are rotated whole")
    has_bias, is_scaled = bool(values.get("attention_bias")), MULTIPLIERS[0] in form.defaults
    multipliers = {name: float(values[name]) if is_scaled else 1.0 for name in MULTIPLIERS}
    if not is_scaled:
        multipliers["attention_multiplier"] = values["head_dim"] ** -0.5
    same: dict[str, Any] = {name: values[name] for name in (
        *SIZES, "head_dim", "hidden_act", "rms_norm_eps", "initializer_range", "attention_dropout", "bos_token_id",
        "eos_token_id", "pad_token_id",
    )}  # fmt: skip
    return LlamaConfig(
        **{**same, **multipliers},
        classifier_dropout=words_dropout(raw),
        rotary=rotary,
        rotates=_rotates(values),
        windows=_windows(values, form),
        has_qkv_bias=form.has_qkv_bias or has_bias,
        has_output_bias=has_bias,
        mlp_bias=bool(values.get("mlp_bias")),
        has_qk_norm=form.has_qk_norm,
        is_fused=form.is_fused,
        tie_word_embeddings=bool(values["tie_word_embeddings"]),
    )


def _set_sizes(values: dict[str, Any]) -> None:
    """Check the sizes; set those that follow from others."""
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    check_numbers(SimpleNamespace(**values), SIZES, "rms_norm_eps")
    width, num_heads, num_key_heads = (
        values[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if num_heads % num_key_heads:
        raise DataError(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_key_heads}")
    if values["head_dim"] is None:
        if width % num_heads:
            raise DataError(f"hidden_size {width} is not a multiple of num_attention_heads {num_heads}")
        values["head_dim"] = width // num_heads
    check_numbers(SimpleNamespace(**values), ("head_dim",), "rms_norm_eps")


def _rotary_fields(values: Mapping[str, Any], form: Form) -> Mapping[str, Any]:
    """Return the fields of the rotary embedding, under the names of today's files."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if form.is_fused and isinstance(given, Mapping) and given.get("rope_type", given.get("type")) == "yarn":
        return {**values, "rope_scaling": {**given, "rope_type": "longrope"}}  # its name in the first files of Phi-3
    return values


def _rotates(values: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return whether each block has rotary positions."""
    num_layers: int = values["num_hidden_layers"]
    interval = values.get("no_rope_layer_interval")
    if interval is None:
        return (True,) * num_layers
    layers = values["no_rope_layers"]
    if layers is None:  # every fourth has none
        if type(interval) is not int or interval < 1:
            raise DataError(f"no_rope_layer_interval must be a positive integer, not {interval!r:.100}")
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    # 1 means that a block has them, in spite of the name.
    if not isinstance(layers, list) or len(layers) < num_layers or not all(each in (0, 1) for each in layers):
        raise DataError(f"no_rope_layers must have 0 or 1 for each of {num_layers} layers")
    return tuple(bool(each) for each in layers[:num_layers])


def _windows(values: Mapping[str, Any], form: Form) -> tuple[int | None, ...]:
    """Return the window of each block."""
    num_layers = values["num_hidden_layers"]
    has_choice = "use_sliding_window" in form.defaults  # `transformers` does not read it in other families
    window = values.get("sliding_window") if not has_choice or values["use_sliding_window"] else None
    if window is not None and (type(window) is not int or window < 1):
        raise DataError(f"sliding_window must be a positive integer, not {window!r:.100}")
    if "max_window_layers" in form.defaults:
        first = values["max_window_layers"]
        default = [SLIDING if window is not None and index >= first else FULL for index in range(num_layers)]
    elif "no_rope_layers" in form.defaults:
        default = [FULL if window is None or rotates else SLIDING for rotates in _rotates(values)]
    else:
        default = [FULL if window is None else SLIDING] * num_layers
    types = values.get("layer_types")
    types = default if types is None else types
    if not isinstance(types, list) or len(types) != num_layers or (types != default and not has_choice):
        raise DataError(f"layer_types {types!r:.100} does not fit {num_layers} layers with sliding_window {window}")
    if unknown := set(types) - ({FULL} if window is None else {FULL, SLIDING}):
        raise DataError(f"layer_types: {sorted(map(str, unknown))[0]} is not supported with sliding_window {window}")
    return tuple(window if each == SLIDING else None for each in types)


class Embed(nn.Module):
    """Token embedding, multiplied by a constant in Granite."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.multiplier = config.embedding_multiplier
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, padding_row=config.pad_token_id)

    def forward(self, tokens_T: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        x_TD: Tensor = self.embed_tokens(tokens_T)
        return x_TD if self.multiplier == 1.0 else x_TD * self.multiplier


class Attention(nn.Module):
    """Causal attention with grouped heads."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        self.index, self.scale = index, config.attention_multiplier
        self.rotary = config.rotary if config.rotates[index] else None
        self.window = config.windows[index]
        self.add_projections(config)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.has_output_bias)
        self.has_qk_norm = config.has_qk_norm
        if config.has_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.weight_dropout = Dropout(config.attention_dropout, index, "attention weights")

    def add_projections(self, config: LlamaConfig) -> None:
        width, has_bias = config.hidden_size, config.has_qkv_bias
        self.q_proj = Linear(width, self.num_heads * self.head_dim, bias=has_bias)
        self.k_proj = Linear(width, self.num_key_heads * self.head_dim, bias=has_bias)
        self.v_proj = Linear(width, self.num_key_heads * self.head_dim, bias=has_bias)

    def project(self, x_TD: Tensor, batch: PackedBatch) -> Sequence[Tensor]:
        """Return flat queries, keys and values."""
        return tuple(project_by_all(x_TD, (self.q_proj, self.k_proj, self.v_proj), batch))

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        q, k, v = (x.view(x.shape[0], -1, self.head_dim) for x in self.project(x_TD, batch))
        poll()
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = rotate_halves(q, batch, self.rotary), rotate_halves(k, batch, self.rotary)
        attended_TNH = attend(q, k, v, batch, self.index, self.scale, self.weight_dropout, self.window)
        poll()
        out: Tensor = self.o_proj(attended_TNH.flatten(-2), batch)
        return out


class FusedAttention(Attention):
    """Attention whose queries, keys and values come from one matrix."""

    def add_projections(self, config: LlamaConfig) -> None:
        num_heads = self.num_heads + 2 * self.num_key_heads
        self.qkv_proj = Linear(config.hidden_size, num_heads * self.head_dim, bias=config.has_qkv_bias)

    def project(self, x_TD: Tensor, batch: PackedBatch) -> Sequence[Tensor]:
        widths = [count * self.head_dim for count in (self.num_heads, self.num_key_heads, self.num_key_heads)]
        parts: Sequence[Tensor] = self.qkv_proj(x_TD, batch).split_with_sizes(widths, dim=-1)
        return parts


class MLP(nn.Module):
    """Two linear layers for the inner width, one gated by the other, and a third back."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.activation = config.hidden_act
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        gate_TI, up_TI = project_by_all(x_TD, (self.gate_proj, self.up_proj), batch)
        poll()
        out: Tensor = self.down_proj(gated(gate_TI, up_TI, self.activation), batch)
        return out


class FusedMLP(nn.Module):
    """`MLP` with one matrix for both inner layers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.activation = config.hidden_act
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        gate_TI, up_TI = self.gate_up_proj(x_TD, batch).chunk(2, dim=-1)
        poll()
        out: Tensor = self.down_proj(gated(gate_TI, up_TI, self.activation), batch)
        return out


class Block(nn.Module):
    """Attention, then MLP, each with a norm before it and a residual connection."""

    # Weights with the same input, stored side by side for `project_by_all`.
    adjacent = (
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    )  # fmt: skip

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.multiplier = config.residual_multiplier
        self.self_attn = FusedAttention(config, index) if config.is_fused else Attention(config, index)
        self.mlp = FusedMLP(config) if config.is_fused else MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        x_TD = self.add(x_TD, self.self_attn(self.input_layernorm(x_TD), batch, poll))
        poll()
        return self.add(x_TD, self.mlp(self.post_attention_layernorm(x_TD), batch, poll))

    def add(self, x_TD: Tensor, branch_TD: Tensor) -> Tensor:
        return x_TD + (branch_TD if self.multiplier == 1.0 else branch_TD * self.multiplier)


class Head(VocabularyHead):
    """Final norm and output projection without bias, tied to the token embedding or not; logits in fp32."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.scaling = config.logits_scaling
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        num_rows, width = config.vocab_size, config.hidden_size
        self.lm_head: nn.Module = (
            TiedLinear((num_rows, width), "embed_tokens.weight")
            if config.tie_word_embeddings
            else Linear(width, num_rows, bias=False)
        )

    def normed(self, x_SD: Tensor, rows: RowContext) -> Tensor:
        h_SD: Tensor = self.norm(x_SD)
        return h_SD

    def logits(self, h_SD: Tensor, rows: RowContext) -> Tensor:
        logits_SV: Tensor = self.lm_head(h_SD, rows).float()
        return logits_SV if self.scaling == 1.0 else logits_SV / self.scaling


def build_layers(config: LlamaConfig) -> list[nn.Module]:
    """Return ``Embed``, the blocks, ``Head`` on the ``meta`` device: shapes without memory."""
    with torch.device("meta"):
        return [Embed(config), *(Block(config, index) for index in range(config.num_hidden_layers)), Head(config)]


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
INNER = ("gate_proj", "up_proj", "down_proj")


def _keys(form: Form) -> dict[str, Home | None]:
    """Return the tensor names of a family."""
    linears = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if form.is_fused else (*ATTENTION, *INNER)
    paths = {name: f"self_attn.{name}" if name in (*ATTENTION, "qkv_proj") else f"mlp.{name}" for name in linears}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if form.has_qk_norm else []
    parts = [f"{path}.{part}" for path in paths.values() for part in ("weight", "bias")]
    parts += [f"{norm}.weight" for norm in norms]
    return {
        "model.embed_tokens.weight": ("embed", "embed_tokens.weight"),
        **{f"model.layers.{{}}.{part}": ("block", part) for part in parts},
        "model.layers.{}.self_attn.rotary_emb.inv_freq": None,  # constants in old files
        "model.norm.weight": ("head", "norm.weight"),
        "lm_head.weight": ("head", "lm_head.weight"),  # in files only if not tied
        **{
            f"{head}.{part}": ("head", f"{head}.{part}")
            for head in ("score", "qa_outputs")
            for part in ("weight", "bias")
        },
    }


# llama.cpp's name of a family, and the rotary types that it computes there.
GGUF: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("llama", ("default", "linear", "yarn", "llama3")),
    "mistral": ("llama", ("default", "linear", "yarn", "llama3")),
    "qwen2": ("qwen2", ("default", "linear", "yarn")),
    "qwen3": ("qwen3", ("default", "linear", "yarn")),
    "smollm3": ("smollm3", ("default", "linear", "yarn")),
    "granite": ("granite", ("default", "linear", "yarn", "llama3")),
    "phi3": ("phi3", ("default", "longrope")),
}
# Its rotary embedding turns pairs of neighbours in these: so queries and keys are stored in another order.
TURNS_NEIGHBOURS = ("llama", "smollm3", "granite")
GGUF_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
}
NO_ROPE_EVERY = 4  # block of SmolLM3 without rotary positions, in llama.cpp


def _to_gguf(config: LlamaConfig, model_type: str) -> dict[str, Any]:
    """Return the metadata beyond `GgufForm.fields`."""
    architecture, kinds = GGUF[model_type]
    if config.hidden_act not in ("silu", "swish"):
        raise UsageError(f"hidden_act {config.hidden_act!r}: llama.cpp computes this family with silu only")
    step = NO_ROPE_EVERY if architecture == "smollm3" else config.num_hidden_layers + 1
    if config.rotates != tuple((index + 1) % step != 0 for index in range(config.num_hidden_layers)):
        raise UsageError(f"no_rope_layers: llama.cpp leaves out every {NO_ROPE_EVERY}th layer's, no others")
    # It knows no windows in these families: a context of one window computes the same.
    context = min([config.max_position_embeddings, *(window for window in config.windows if window is not None)])
    return {
        "context_length": context,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        **rotary_metadata(config.rotary, kinds),
        **({key: getattr(config, field) for key, field in GGUF_SCALES.items()} if architecture == "granite" else {}),
    }


def _from_gguf(metadata: Metadata, model_type: str) -> dict[str, Any]:
    """Return the fields of ``config.json`` beyond `GgufForm.fields`."""
    form, num_heads = FORMS[model_type], metadata["attention.head_count"]
    head_dim = metadata.get("attention.key_length") or metadata["embedding_length"] // num_heads
    raw = {
        "num_key_value_heads": metadata.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        **rotary_config(metadata),
    }
    if "attention_bias" in form.defaults:
        raw["attention_bias"] = "blk.0.attn_q.bias" in metadata[TENSORS]
    if "mlp_bias" in form.defaults:
        raw["mlp_bias"] = "blk.0.ffn_up.bias" in metadata[TENSORS]
    if form.is_rotated_in_part:
        raw["partial_rotary_factor"] = metadata.get("rope.dimension_count", head_dim) / head_dim
    if "sliding_window" in form.defaults:
        raw["sliding_window"] = metadata.get("attention.sliding_window") or None
    if MULTIPLIERS[0] in form.defaults:
        raw |= {field: metadata[key] for key, field in GGUF_SCALES.items() if key in metadata}
    return raw


def _row_order(config: LlamaConfig, name: str) -> Tensor | None:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    return None if count is None else neighbours(count, config.head_dim)


def _gguf_form(model_type: str) -> GgufForm:
    return GgufForm(
        architecture=GGUF[model_type][0],
        fields={
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "feed_forward_length": "intermediate_size",
            "attention.head_count": "num_attention_heads",
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        },
        to_metadata=partial(_to_gguf, model_type=model_type),
        to_config=partial(_from_gguf, model_type=model_type),
        row_order=_row_order if GGUF[model_type][0] in TURNS_NEIGHBOURS else same_order,
        rope_factors=lambda config: rotary_factors(config.rotary),
    )


def _family(model_type: str, form: Form) -> Family:
    return Family(
        model_type=model_type,
        class_name=f"{form.class_prefix}ForCausalLM",
        read_config=partial(read_config, model_type=model_type),
        build_layers=build_layers,
        keys=_keys(form),
        heads=generic_heads(form.class_prefix, rms_norm(), form.heads, form.spans_prefix),
        prefix="model.",
        trunk=frozenset({"embed_tokens", "layers", "norm"}),
        dropouts=((), ("attention_dropout",)),
        gguf=_gguf_form(model_type),
    )


FAMILIES = tuple(_family(model_type, form) for model_type, form in FORMS.items())
