"""GPT-2 (https://openai.com/research/better-language-models), also the architecture of Cerebras-GPT (arXiv 2304.03208).

x <- x + attention(ln_1(x)); x <- x + mlp(ln_2(x)); learned positions; biases everywhere except in the head, whose
weight is the token embedding. Matrices are stored (in, out) in files, and kept so for training and export.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.attention import attend
from gptj_ft.models.batch import PackedBatch, Poll
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.embedding import Embedding
from gptj_ft.models.gguf_form import GgufForm
from gptj_ft.models.heads import DROPOUT, decoder_heads, words_dropout
from gptj_ft.models.linear import Conv1D, Linear, RowContext, TiedLinear, VocabularyHead
from gptj_ft.models.norm import LayerNorm
from gptj_ft.models.registry import Family, Leaf, check_numbers

# "gelu" is the exact form, by the error function; OpenAI's models use the approximation.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
COLUMNS: Literal["columns"] = "columns"
ROWS: Literal["rows"] = "rows"
# Config fields that change the computation -> supported values. ``reorder_and_upcast_attn`` has no effect: scores and
# softmax are in fp32 anyway.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "position_embedding_type": ("learned", "absolute"),
    "mup_width_scale": (1.0,),
    "mup_embeddings_scale": (1.0,),
    "mup_output_alpha": (1.0,),
    "mup_scale_qk_dot_by_d": (False,),
}

# Tensors in checkpoints of the Cerebras model zoo since 1.7, in the order of module creation: the optimizer numbers
# parameters by it. Matrices are (out, in); q, k and v are separate.
CEREBRAS: dict[str, str | Leaf | None] = {
    "embedding_layer.word_embeddings.weight": "transformer.wte.weight",
    "embedding_layer.position_embeddings.weight": "transformer.wpe.weight",
    "embedding_layer.position_embeddings.embed.weight": "transformer.wpe.weight",  # since 2.0
    **{f"transformer_decoder.norm.{part}": f"transformer.ln_f.{part}" for part in ("weight", "bias")},
    "ln_f.weight": None,  # a second copy of transformer_decoder.norm
    "ln_f.bias": None,
    **{
        f"transformer_decoder.layers.{{}}.{theirs}.{part}": Leaf(f"transformer.h.{{}}.{ours}.{part}", join, is_turned)
        for theirs, ours in {
            "self_attn.proj_q_dense_layer": "attn.c_attn",
            "self_attn.proj_k_dense_layer": "attn.c_attn",
            "self_attn.proj_v_dense_layer": "attn.c_attn",
            "self_attn.proj_output_dense_layer": "attn.c_proj",
        }.items()
        for part, join, is_turned in (("weight", COLUMNS, True), ("bias", ROWS, False))
    },
    **{
        f"transformer_decoder.layers.{{}}.{theirs}.{part}": f"transformer.h.{{}}.{ours}.{part}"
        for theirs, ours in {"norm1": "ln_1", "norm3": "ln_2"}.items()
        for part in ("weight", "bias")
    },
    **{
        f"transformer_decoder.layers.{{}}.ffn.ffn.{theirs}.linear_layer.{part}": Leaf(
            f"transformer.h.{{}}.mlp.{ours}.{part}", join, is_turned
        )
        for theirs, ours in enumerate(("c_fc", "c_proj"))
        for part, join, is_turned in (("weight", COLUMNS, True), ("bias", ROWS, False))
    },
    "lm_head.weight": "lm_head.weight",  # a copy of the embedding if tied
}


@dataclass(frozen=True)
class GPT2Config:
    """Hugging Face's field names and defaults, so that ``config.json`` loads unchanged."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    classifier_dropout: float = 0.1  # before the labels of words
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | None = 50256

    @property
    def d_inner(self) -> int:
        return self.n_inner or 4 * self.n_embd

    def attention_scale(self, index: int) -> float:
        """Return the scale of a block's attention scores."""
        scale = (self.n_embd // self.n_head) ** -0.5 if self.scale_attn_weights else 1.0
        return scale / (index + 1) if self.scale_attn_by_inverse_layer_idx else scale


def read_config(raw: Mapping[str, Any]) -> GPT2Config:
    """Read ``config.json``; reject unsupported values."""
    names = {field.name for field in fields(GPT2Config)}
    config = GPT2Config(**{key: value for key, value in raw.items() if key in names} | {DROPOUT: words_dropout(raw)})
    check_numbers(config)
    if config.n_embd % config.n_head:
        raise DataError(f"n_embd {config.n_embd} is not a multiple of n_head {config.n_head}")
    if config.activation_function not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise DataError(f"activation_function '{config.activation_function}' is not supported; known are {known}")
    for name, values in ONLY.items():
        if name in raw and raw[name] not in values:
            raise DataError(f"{name} {raw[name]!r} is not supported, only {values[0]!r}")
    return config


class Embed(nn.Module):
    """Token embedding plus a learned embedding of the position in the document."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.n_positions, config.n_embd, "positions_T")
        self.dropout = Dropout(config.embd_pdrop, "embedding")

    def forward(self, tokens_T: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        out: Tensor = self.dropout(self.wte(tokens_T) + self.wpe(batch.positions_T), batch.noise)
        return out


class Attention(nn.Module):
    """Causal attention with queries, keys and values from one matrix, and an output projection."""

    def __init__(self, config: GPT2Config, index: int) -> None:
        super().__init__()
        self.num_heads, self.scale, self.index = config.n_head, config.attention_scale(index), index
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.weight_dropout = Dropout(config.attn_pdrop, index, "attention weights")
        self.dropout = Dropout(config.resid_pdrop, index, "attention")

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in self.c_attn(x_TD, batch).chunk(3, dim=-1))
        poll()
        attended_TD = attend(q, k, v, batch, self.index, self.scale, self.weight_dropout).flatten(-2)
        poll()
        out: Tensor = self.dropout(self.c_proj(attended_TD, batch), batch.noise)
        return out


class MLP(nn.Module):
    """Two linear layers with the config's activation between them."""

    def __init__(self, config: GPT2Config, index: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation_function]
        self.c_fc = Conv1D(config.n_embd, config.d_inner)
        self.c_proj = Conv1D(config.d_inner, config.n_embd)
        self.dropout = Dropout(config.resid_pdrop, index, "mlp")

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        inner_TI = self.activation(self.c_fc(x_TD, batch))
        poll()
        out: Tensor = self.dropout(self.c_proj(inner_TI, batch), batch.noise)
        return out


class Block(nn.Module):
    """Attention, then MLP, each with a layer norm before it and a residual connection."""

    def __init__(self, config: GPT2Config, index: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, index)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config, index)

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        x_TD = x_TD + self.attn(self.ln_1(x_TD), batch, poll)
        poll()
        out: Tensor = x_TD + self.mlp(self.ln_2(x_TD), batch, poll)
        return out


class Head(VocabularyHead):
    """Final layer norm and output projection without bias, usually tied to the token embedding; logits in fp32."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        num_rows, width = config.vocab_size, config.n_embd
        self.lm_head: nn.Module = (
            TiedLinear((num_rows, width), "wte.weight")
            if config.tie_word_embeddings
            else Linear(width, num_rows, bias=False)
        )

    def normed(self, x_SD: Tensor, rows: RowContext) -> Tensor:
        h_SD: Tensor = self.ln_f(x_SD)
        return h_SD

    def logits(self, h_SD: Tensor, rows: RowContext) -> Tensor:
        logits_SV: Tensor = self.lm_head(h_SD, rows).float()
        return logits_SV


def build_layers(config: GPT2Config) -> list[nn.Module]:
    """Return ``Embed``, the blocks, ``Head`` on the ``meta`` device: shapes without memory."""
    with torch.device("meta"):
        return [Embed(config), *(Block(config, index) for index in range(config.n_layer)), Head(config)]


def _to_gguf(config: GPT2Config) -> dict[str, Any]:
    """Return what llama.cpp needs beyond `GgufForm.fields`; its activation is the tanh form of GELU, from a table."""
    if config.activation_function == "relu":
        raise UsageError("activation_function 'relu': llama.cpp computes GPT-2 with GELU only")
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        raise UsageError("scale_attn_by_inverse_layer_idx or no scale_attn_weights: llama.cpp has no such scale")
    return {"feed_forward_length": config.d_inner}


def _from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"activation_function": "gelu_new", "n_inner": metadata.get("feed_forward_length")}


GGUF = GgufForm(
    architecture="gpt2",
    fields={
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "block_count": "n_layer",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    to_metadata=_to_gguf,
    to_config=_from_gguf,
)

FAMILY = Family(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    read_config=read_config,
    build_layers=build_layers,
    keys={
        "transformer.wte.weight": ("embed", "wte.weight"),
        "transformer.wpe.weight": ("embed", "wpe.weight"),
        "transformer.h.{}.ln_1.weight": ("block", "ln_1.weight"),
        "transformer.h.{}.ln_1.bias": ("block", "ln_1.bias"),
        "transformer.h.{}.attn.c_attn.weight": ("block", "attn.c_attn.weight"),
        "transformer.h.{}.attn.c_attn.bias": ("block", "attn.c_attn.bias"),
        "transformer.h.{}.attn.c_proj.weight": ("block", "attn.c_proj.weight"),
        "transformer.h.{}.attn.c_proj.bias": ("block", "attn.c_proj.bias"),
        "transformer.h.{}.ln_2.weight": ("block", "ln_2.weight"),
        "transformer.h.{}.ln_2.bias": ("block", "ln_2.bias"),
        "transformer.h.{}.mlp.c_fc.weight": ("block", "mlp.c_fc.weight"),
        "transformer.h.{}.mlp.c_fc.bias": ("block", "mlp.c_fc.bias"),
        "transformer.h.{}.mlp.c_proj.weight": ("block", "mlp.c_proj.weight"),
        "transformer.h.{}.mlp.c_proj.bias": ("block", "mlp.c_proj.bias"),
        "transformer.h.{}.attn.bias": None,  # causal mask buffer of old files
        "transformer.h.{}.attn.masked_bias": None,
        "transformer.ln_f.weight": ("head", "ln_f.weight"),
        "transformer.ln_f.bias": ("head", "ln_f.bias"),
        "lm_head.weight": ("head", "lm_head.weight"),  # in files only if not tied
        "score.weight": ("head", "score.weight"),
        "qa_outputs.weight": ("head", "qa_outputs.weight"),
        "qa_outputs.bias": ("head", "qa_outputs.bias"),
        "classifier.weight": ("head", "classifier.weight"),
        "classifier.bias": ("head", "classifier.bias"),
    },
    cerebras=CEREBRAS,
    residual_outputs=("c_proj.weight",),  # GPT-2 paper, section 2.3
    gguf=GGUF,
    heads=decoder_heads("GPT2", has_token_labels=True),
)
