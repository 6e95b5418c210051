"""Gemma (https://arxiv.org/abs/2403.08295), Gemma 2 (https://arxiv.org/abs/2408.00118), text models of Gemma 3.

Like Llama, with norms that multiply by 1 + weight, embeddings scaled by sqrt(D), and a gate by GELU. Gemma 2 and 3 norm
the output of attention and MLP, too, and alternate between windows and full attention. Gemma 2 caps attention scores
and logits; Gemma 3 (https://arxiv.org/abs/2503.19786) norms queries and keys, and rotates windowed blocks faster.

Axis letters: T tokens, D width, N query heads, K key heads, H head width, I inner width, S target rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from gptj_ft.models.gguf_form import GgufForm, Metadata, rotary_config, rotary_metadata
from gptj_ft.models.heads import TEXTS, WORDS, generic_heads, rms_norm, words_dropout
from gptj_ft.models.linear import Linear, RowContext, TiedLinear, VocabularyHead, project_by_all
from gptj_ft.models.norm import RMSNorm
from gptj_ft.models.registry import Family, Home, check_numbers
from gptj_ft.models.rotary import RotarySpec, rotary_spec, rotate_halves

SIZES = (
    "vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size",
)  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
# Defaults of `transformers` for fields that a config.json leaves out.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "initializer_range": 0.02, "rms_norm_eps": 1e-6, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}  # fmt: skip
GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Form:
    """Differences between the families."""

    class_prefix: str  # of its classes in `transformers`
    defaults: Mapping[str, Any]  # of its fields, where they are not in `DEFAULTS`
    has_outer_norms: bool = True  # whether outputs of attention and MLP are normed
    has_qk_norm: bool = False
    full_every: int = 1  # by default each block of this number has full attention, the others a window
    head_prefix: str = ""  # of the classes with heads for labels, if not ``class_prefix``
    heads: tuple[str, ...] = (TEXTS, WORDS)  # ends of these classes


FORMS: Mapping[str, Form] = {
    "gemma": Form(
        "Gemma",
        {
            "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 16, "hidden_act": GELU_TANH,
        },
        has_outer_norms=False,
    ),
    "gemma2": Form(
        "Gemma2",
        {"hidden_activation": GELU_TANH, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        full_every=2,
    ),
    "gemma3_text": Form(
        "Gemma3",
        {
            "hidden_activation": GELU_TANH, "vocab_size": 262_208, "max_position_embeddings": 131_072,
            "final_logit_softcapping": None, "sliding_window_pattern": 6, "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        has_qk_norm=True,
        full_every=6,
        head_prefix="Gemma3Text",
        heads=(TEXTS,),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class GemmaConfig:
    """One model's computation; fields with a counterpart in ``config.json`` have its name."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int  # D
    num_hidden_layers: int
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # H
    intermediate_size: int  # I
    activation: str  # of the gate
    rms_norm_eps: float
    initializer_range: float
    rotaries: tuple[RotarySpec, ...]  # of each block
    windows: tuple[int | None, ...]  # tokens that a query of each block sees, itself included; None: all
    attention_scale: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    attention_bias: bool
    has_outer_norms: bool
    has_qk_norm: bool
    tie_word_embeddings: bool
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


def read_config(raw: Mapping[str, Any], model_type: str) -> GemmaConfig:
    """Read ``config.json``; reject unsupported values."""
    form = FORMS[model_type]
    values = {**DEFAULTS, **form.defaults, **raw}
    if values.get("use_bidirectional_attention"):
        raise DataError("use_bidirectional_attention is not supported: these models see tokens on both sides")
    if raw.get("token_classification_bias") is False:
        raise DataError("token_classification_bias false is not supported")
    # `transformers` ignores scores' caps where the family has none, although the field exists.
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if name not in form.defaults and raw.get(name) is not None:
            raise DataError(f"{name} is not supported for {model_type}")
        if values.get(name) is not None:
            _check_positive(name, values[name])
    check_numbers(SimpleNamespace(**values), SIZES, "rms_norm_eps")
    if values["num_attention_heads"] % values["num_key_value_heads"]:
        raise DataError(
            f"num_attention_heads {values['num_attention_heads']} is not a multiple of num_key_value_heads "
            f"{values['num_key_value_heads']}"
        )
    for name in ("initializer_range", "attention_dropout"):
        if type(values[name]) not in (int, float) or not 0 <= values[name] < 1e9:
            raise DataError(f"{name} must be a number from 0, not {values[name]!r:.100}")
    scalar = values["query_pre_attn_scalar"] if form.has_outer_norms else values["head_dim"]
    _check_positive("query_pre_attn_scalar", scalar)
    types = _layer_types(values, form)
    window = values["sliding_window"]
    if SLIDING in types and (type(window) is not int or window < 1):
        raise DataError(f"sliding_window must be a positive integer, not {window!r:.100}")
    rotaries = _rotaries(values, model_type)
    same: dict[str, Any] = {name: values[name] for name in (
        *SIZES, "rms_norm_eps", "initializer_range", "attention_dropout", "bos_token_id", "eos_token_id",
        "pad_token_id",
    )}  # fmt: skip
    return GemmaConfig(
        **same,
        classifier_dropout=words_dropout(raw),
        activation=_activation(values, form),
        rotaries=tuple(rotaries[each] for each in types),
        windows=tuple(window if each == SLIDING else None for each in types),
        attention_scale=scalar**-0.5,
        attn_logit_softcapping=values.get("attn_logit_softcapping"),
        final_logit_softcapping=values.get("final_logit_softcapping"),
        attention_bias=bool(values["attention_bias"]),
        has_outer_norms=form.has_outer_norms,
        has_qk_norm=form.has_qk_norm,
        tie_word_embeddings=bool(values["tie_word_embeddings"]),
    )


def _check_positive(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < 1e9:
        raise DataError(f"{name} must be a positive number, not {value!r:.100}")


def _activation(values: Mapping[str, Any], form: Form) -> str:
    """Return the activation of the gate."""
    name = "hidden_act" if "hidden_act" in form.defaults else "hidden_activation"
    activation = values[name]
    if activation not in ACTIVATIONS:
        raise DataError(f"{name} {activation!r:.100} is not supported; known: {', '.join(ACTIVATIONS)}")
    # Gemma's first files say "gelu", but the models were trained with the approximation by tanh.
    return GELU_TANH if (name, activation) == ("hidden_act", "gelu") else str(activation)


def _layer_types(values: Mapping[str, Any], form: Form) -> list[str]:
    """Return the kind of attention of each block."""
    num_layers, types = values["num_hidden_layers"], values.get("layer_types")
    if not form.has_outer_norms:
        return [FULL] * num_layers
    if types is None:
        every = values.get("sliding_window_pattern", form.full_every) if form.has_qk_norm else form.full_every
        if type(every) is not int or every < 1:
            raise DataError(f"sliding_window_pattern must be a positive integer, not {every!r:.100}")
        return [SLIDING if (index + 1) % every else FULL for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or not all(each in (FULL, SLIDING) for each in types):
        raise DataError(f"layer_types must name {FULL} or {SLIDING} for each of {num_layers} layers")
    return types


def _rotaries(values: Mapping[str, Any], model_type: str) -> dict[str, RotarySpec]:
    """Return the rotary embedding of each kind of attention."""
    width, context = values["head_dim"], values["max_position_embeddings"]
    if "rope_local_base_freq" not in FORMS[model_type].defaults:
        specs = dict.fromkeys((FULL, SLIDING), rotary_spec(values, width, context))
    else:
        given = values.get("rope_parameters") or {}
        if not isinstance(given, Mapping) or given.keys() - {FULL, SLIDING}:
            raise DataError(f"rope_parameters must be an object with {FULL} and {SLIDING}, not {given!r:.100}")
        # The scaling of old files extends the context of full attention only.
        full = {**(given.get(FULL) or {}), **(values.get("rope_scaling") or {})}
        specs = {
            FULL: rotary_spec({"rope_parameters": full}, width, context, values["rope_theta"]),
            SLIDING: rotary_spec(
                {"rope_parameters": given.get(SLIDING) or {}}, width, context, values["rope_local_base_freq"]
            ),
        }
    if any(spec.width != width for spec in specs.values()):
        raise DataError(f"partial_rotary_factor is not supported for {model_type}: its heads are rotated whole")
    return specs


class Embed(nn.Module):
    """Token embedding, scaled by sqrt(D)."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.scale = config.hidden_size**0.5
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, padding_row=config.pad_token_id)

    def forward(self, tokens_T: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        x_TD: Tensor = self.embed_tokens(tokens_T)
        # The models were trained with the scale rounded to the type of the weights: in bf16, 55.5 instead of 55.4.
        return x_TD * float(torch.tensor(self.scale).to(x_TD.dtype))


class Attention(nn.Module):
    """Causal attention with grouped heads."""

    def __init__(self, config: GemmaConfig, index: int) -> None:
        super().__init__()
        self.head_dim, self.index, self.scale = config.head_dim, index, config.attention_scale
        self.rotary, self.window = config.rotaries[index], config.windows[index]
        self.cap = config.attn_logit_softcapping
        width, has_bias = config.hidden_size, config.attention_bias
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(width, queries, bias=has_bias)
        self.k_proj = Linear(width, keys, bias=has_bias)
        self.v_proj = Linear(width, keys, bias=has_bias)
        self.o_proj = Linear(queries, width, bias=has_bias)
        self.has_qk_norm = config.has_qk_norm
        if config.has_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, offset=1.0)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, offset=1.0)
        self.weight_dropout = Dropout(config.attention_dropout, index, "attention weights")

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        projected = project_by_all(x_TD, (self.q_proj, self.k_proj, self.v_proj), batch)
        q, k, v = (x.view(x.shape[0], -1, self.head_dim) for x in projected)
        poll()
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate_halves(q, batch, self.rotary), rotate_halves(k, batch, self.rotary)
        attended_TNH = attend(
            q, k, v, batch, self.index, self.scale, self.weight_dropout, window=self.window, cap=self.cap
        )
        poll()
        out: Tensor = self.o_proj(attended_TNH.flatten(-2), batch)
        return out


class MLP(nn.Module):
    """Two linear layers for the inner width, one gated by the other, and a third back."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        gate_TI, up_TI = project_by_all(x_TD, (self.gate_proj, self.up_proj), batch)
        poll()
        out: Tensor = self.down_proj(gated(gate_TI, up_TI, self.activation), batch)
        return out


class Block(nn.Module):
    """Attention, then MLP, each with a norm before it, in Gemma 2 and 3 a norm behind it, and a residual connection."""

    # Weights with the same input, stored side by side for `project_by_all`.
    adjacent = (
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
    )  # fmt: skip

    def __init__(self, config: GemmaConfig, index: int) -> None:
        super().__init__()
        self.has_outer_norms = config.has_outer_norms
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, offset=1.0)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        if config.has_outer_norms:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        attended_TD = self.self_attn(self.input_layernorm(x_TD), batch, poll)
        poll()
        if not self.has_outer_norms:  # "post_attention" is Llama's name of the norm before the MLP
            x_TD = x_TD + attended_TD
            out: Tensor = x_TD + self.mlp(self.post_attention_layernorm(x_TD), batch, poll)
            return out
        x_TD = x_TD + self.post_attention_layernorm(attended_TD)
        out = x_TD + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_TD), batch, poll))
        return out


class Head(VocabularyHead):
    """Final norm and output projection without bias, usually tied to the token embedding; logits in fp32, capped."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.cap = config.final_logit_softcapping
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
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
        return logits_SV if self.cap is None else capped(logits_SV, self.cap)


def capped(x: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(x / cap)``; backward needs only the result."""
    out: Tensor = _Capped.apply(x, cap)  # type: ignore[no-untyped-call]
    return out


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        out = (x / cap).tanh_().mul_(cap)
        # In training the loss may overwrite the output, see `VocabularyHead.logits`.
        ctx.save_for_backward(out.clone() if ctx.needs_input_grad[0] else out)
        ctx.cap = cap
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return (out / ctx.cap).square_().neg_().add_(1.0).mul_(gradients[0]), None


def build_layers(config: GemmaConfig) -> list[nn.Module]:
    """Return ``Embed``, the blocks, ``Head`` on the ``meta`` device: shapes without memory."""
    with torch.device("meta"):
        return [Embed(config), *(Block(config, index) for index in range(config.num_hidden_layers)), Head(config)]


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
INNER = ("gate_proj", "up_proj", "down_proj")


def _keys(form: Form) -> dict[str, Home | None]:
    """Return the tensor names of a family."""
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if form.has_outer_norms else []
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if form.has_qk_norm else []
    parts = [f"self_attn.{name}.{part}" for name in ATTENTION for part in ("weight", "bias")]
    parts += [f"mlp.{name}.weight" for name in INNER]
    parts += [f"{norm}.weight" for norm in norms]
    return {
        "model.embed_tokens.weight": ("embed", "embed_tokens.weight"),
        **{f"model.layers.{{}}.{part}": ("block", part) for part in parts},
        "model.layers.{}.self_attn.rotary_emb.inv_freq": None,  # constants in old files
        "model.norm.weight": ("head", "norm.weight"),
        "lm_head.weight": ("head", "lm_head.weight"),  # in files only if not tied
        **{f"score.{part}": ("head", f"score.{part}") for part in ("weight", "bias")},
    }


# llama.cpp's name of a family; every this-many-th block has full attention there.
GGUF: Mapping[str, tuple[str, int]] = {"gemma": ("gemma", 1), "gemma2": ("gemma2", 2), "gemma3_text": ("gemma3", 6)}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
LARGEST = {"gemma2": 46, "gemma3": 62}  # blocks of the 27B models, which scale scores by the width of a usual head


def _to_gguf(config: GemmaConfig, model_type: str) -> dict[str, Any]:
    """Return the metadata beyond `GgufForm.fields`."""
    architecture, every = GGUF[model_type]
    window = next((window for window in config.windows if window is not None), None)
    pattern = tuple(window if (index + 1) % every else None for index in range(config.num_hidden_layers))
    if config.windows != pattern:
        raise UsageError(f"layer_types: llama.cpp knows only full attention in every block number {every} here")
    is_largest = LARGEST.get(architecture) == config.num_hidden_layers
    usual = config.hidden_size // config.num_attention_heads if is_largest else config.head_dim
    if abs(config.attention_scale - usual**-0.5) > 1e-9:
        raise UsageError(f"query_pre_attn_scalar: llama.cpp has {usual} here")
    if config.attention_bias or not config.tie_word_embeddings or config.activation != GELU_TANH:
        raise UsageError(
            f"attention_bias, untied embeddings or an activation other than {GELU_TANH}: llama.cpp has none"
        )
    if architecture == "gemma2" and config.attn_logit_softcapping is None:
        raise UsageError("attn_logit_softcapping null: llama.cpp always caps scores of Gemma 2")
    full = config.rotaries[every - 1 if config.num_hidden_layers >= every else -1]
    own = {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        **rotary_metadata(full, ("default", "linear") if architecture == "gemma3" else ("default",)),
        **{name: getattr(config, name) for name in CAPS if getattr(config, name) is not None},
    }
    if window is not None:
        own["attention.sliding_window"] = window
        windowed = config.rotaries[0]
        if windowed.kind != "default":
            raise UsageError("rope_parameters of sliding_attention are scaled: llama.cpp has no such scaling")
        if windowed.theta != full.theta:
            own["rope.freq_base_swa"] = windowed.theta
    return own


def _from_gguf(metadata: Metadata, model_type: str) -> dict[str, Any]:
    """Return the fields of ``config.json`` beyond `GgufForm.fields`."""
    architecture, every = GGUF[model_type]
    num_heads, width = metadata["attention.head_count"], metadata["embedding_length"]
    head_dim = metadata.get("attention.key_length") or width // num_heads
    rotary = rotary_config(metadata)
    raw: dict[str, Any] = {
        "num_key_value_heads": metadata.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
    }
    if architecture == "gemma":
        return {**raw, **rotary, "hidden_act": GELU_TANH}
    is_largest = LARGEST[architecture] == metadata["block_count"]
    raw |= {
        "hidden_activation": GELU_TANH,
        "query_pre_attn_scalar": width // num_heads if is_largest else head_dim,
        "layer_types": [SLIDING if (index + 1) % every else FULL for index in range(metadata["block_count"])],
        **{name: metadata.get(name, FORMS[model_type].defaults.get(name)) for name in CAPS},
    }
    if "attention.sliding_window" in metadata:
        raw["sliding_window"] = metadata["attention.sliding_window"]
    if architecture == "gemma2":
        return raw | rotary
    theta = metadata.get("rope.freq_base_swa", FORMS[model_type].defaults["rope_local_base_freq"])
    return raw | {"rope_parameters": {
        FULL: rotary["rope_parameters"], SLIDING: {"rope_type": "default", "rope_theta": theta},
    }}  # fmt: skip


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
        norm_offset=1.0,
    )


def _family(model_type: str, form: Form) -> Family:
    return Family(
        model_type=model_type,
        class_name=f"{form.class_prefix}ForCausalLM",
        read_config=partial(read_config, model_type=model_type),
        build_layers=build_layers,
        keys=_keys(form),
        prefix="model.",
        trunk=frozenset({"embed_tokens", "layers", "norm"}),
        dropouts=((), ("attention_dropout",)),
        gguf=_gguf_form(model_type),
        heads=generic_heads(form.head_prefix or form.class_prefix, rms_norm(1.0), form.heads),
    )


FAMILIES = tuple(_family(model_type, form) for model_type, form in FORMS.items())
