"""GPT-J (https://github.com/kingoflolz/mesh-transformer-jax): attention parallel to MLP, rotary on part of each head.

x <- x + attention(ln_1(x)) + mlp(ln_1(x)); one layer norm per block; biases in the MLP, the norms and the head only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.errors import DataError
from gptj_ft.models.attention import attend
from gptj_ft.models.batch import HeadRows, PackedBatch, Poll
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.embedding import Embedding
from gptj_ft.models.heads import decoder_heads
from gptj_ft.models.linear import Linear, project_by_all
from gptj_ft.models.norm import LayerNorm
from gptj_ft.models.registry import Family, Leaf, check_numbers
from gptj_ft.models.rotary import apply_rotary, rotary_freqs

# https://github.com/kingoflolz/mesh-transformer-jax, version 1 of its checkpoints, module names after
# "causal_transformer_shard/~/". The linear layers of a block are numbered in order of creation: q, v, k.
MESH = {
    ("embedding_shard/~/linear", "b"): Leaf("transformer.wte.weight", "added"),
    ("embedding_shard/~/linear", "w"): Leaf("transformer.wte.weight", "rows"),
    ("layer_{}/~/linear", "w"): Leaf("transformer.h.{}.attn.q_proj.weight", "rows", is_transposed=True),
    ("layer_{}/~/linear_1", "w"): Leaf("transformer.h.{}.attn.v_proj.weight", "rows", is_transposed=True),
    ("layer_{}/~/linear_2", "w"): Leaf("transformer.h.{}.attn.k_proj.weight", "rows", is_transposed=True),
    ("layer_{}/~/linear_3", "w"): Leaf("transformer.h.{}.attn.out_proj.weight", "columns", is_transposed=True),
    ("layer_{}/~/linear_4", "b"): Leaf("transformer.h.{}.mlp.fc_in.bias", "rows"),
    ("layer_{}/~/linear_4", "w"): Leaf("transformer.h.{}.mlp.fc_in.weight", "rows", is_transposed=True),
    ("layer_{}/~/linear_5", "b"): Leaf("transformer.h.{}.mlp.fc_out.bias", "sum"),
    ("layer_{}/~/linear_5", "w"): Leaf("transformer.h.{}.mlp.fc_out.weight", "columns", is_transposed=True),
    ("layer_{}/~/replicated_layer_norm", "offset"): Leaf("transformer.h.{}.ln_1.bias", "first"),
    ("layer_{}/~/replicated_layer_norm", "scale"): Leaf("transformer.h.{}.ln_1.weight", "first"),
    ("projection_shard/~/linear", "b"): Leaf("lm_head.bias", "rows"),
    ("projection_shard/~/linear", "w"): Leaf("lm_head.weight", "rows", is_transposed=True),
    ("projection_shard/~/replicated_layer_norm", "offset"): Leaf("transformer.ln_f.bias", "first"),
    ("projection_shard/~/replicated_layer_norm", "scale"): Leaf("transformer.ln_f.weight", "first"),
}

# Checkpoints of the Cerebras model zoo since 1.9 (before, "model." may precede every name), in the order of module
# creation: the optimizer numbers parameters by it.
CEREBRAS: dict[str, str | Leaf | None] = {
    "embedding_layer.word_embeddings.weight": "transformer.wte.weight",
    **{f"transformer_decoder.norm.{part}": f"transformer.ln_f.{part}" for part in ("weight", "bias")},
    "ln_f.weight": None,  # a second copy of transformer_decoder.norm
    "ln_f.bias": None,
    **{
        f"transformer_decoder.layers.{{}}.self_attn.proj_{theirs}_dense_layer.weight": (
            f"transformer.h.{{}}.attn.{ours}_proj.weight"
        )
        for theirs, ours in {"q": "q", "k": "k", "v": "v", "output": "out"}.items()
    },
    **{
        f"transformer_decoder.layers.{{}}.norm1.{part}": f"transformer.h.{{}}.ln_1.{part}"
        for part in ("weight", "bias")
    },
    **{
        f"transformer_decoder.layers.{{}}.ffn.ffn.{theirs}.linear_layer.{part}": f"transformer.h.{{}}.mlp.{ours}.{part}"
        for theirs, ours in enumerate(("fc_in", "fc_out"))
        for part in ("weight", "bias")
    },
    "lm_head.weight": "lm_head.weight",
    "lm_head.bias": "lm_head.bias",
}


@dataclass(frozen=True)
class GPTJConfig:
    """Hugging Face's field names and GPT-J 6B's values, so that ``config.json`` loads unchanged."""

    vocab_size: int = 50400
    n_positions: int = 2048
    n_embd: int = 4096
    n_layer: int = 28
    n_head: int = 16
    n_inner: int | None = None
    rotary_dim: int = 64
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | None = 50256

    @property
    def d_inner(self) -> int:
        return self.n_inner or 4 * self.n_embd


def read_config(raw: Mapping[str, Any]) -> GPTJConfig:
    """Read ``config.json``; reject values that GPT-J does not have."""
    names = {field.name for field in fields(GPTJConfig)}
    config = GPTJConfig(**{key: value for key, value in raw.items() if key in names})
    check_numbers(config)
    if type(config.rotary_dim) is not int or config.rotary_dim < 1:
        raise DataError(f"rotary_dim must be a positive integer, not {config.rotary_dim!r}")
    if config.n_embd % config.n_head:
        raise DataError(f"n_embd {config.n_embd} is not a multiple of n_head {config.n_head}")
    if config.rotary_dim % 2 or config.rotary_dim > config.n_embd // config.n_head:
        raise DataError(f"rotary_dim {config.rotary_dim} must be even and at most n_embd / n_head")
    if config.activation_function != "gelu_new":
        raise DataError(f"activation_function '{config.activation_function}': GPT-J was trained with 'gelu_new' (tanh)")
    if config.tie_word_embeddings:
        raise DataError("tie_word_embeddings is true: GPT-J's trained head is not its embedding")
    return config


class Embed(nn.Module):
    """Token embedding; GPT-J adds no position embedding and no scale."""

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__()
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.dropout = Dropout(config.embd_pdrop, "embedding")

    def forward(self, tokens_T: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        out: Tensor = self.dropout(self.wte(tokens_T), batch.noise)
        return out


class Attention(nn.Module):
    """Causal attention and its output projection; receives the projected queries, keys and values."""

    def __init__(self, config: GPTJConfig, index: int) -> None:
        super().__init__()
        self.num_heads, self.rotary_dim, self.index = config.n_head, config.rotary_dim, index
        self.q_proj = Linear(config.n_embd, config.n_embd, bias=False)
        self.k_proj = Linear(config.n_embd, config.n_embd, bias=False)
        self.v_proj = Linear(config.n_embd, config.n_embd, bias=False)
        self.out_proj = Linear(config.n_embd, config.n_embd, bias=False)
        self.weight_dropout = Dropout(config.attn_pdrop, index, "attention weights")
        self.dropout = Dropout(config.resid_pdrop, index, "attention")

    def forward(self, projected: Iterator[Tensor], batch: PackedBatch, poll: Poll) -> Tensor:
        # The fourth output stays in the iterator: it is computed only when the MLP needs it.
        q, k, v = (x_TD.view(x_TD.shape[0], self.num_heads, -1) for x_TD in islice(projected, 3))
        poll()
        # In place only where there is no backward pass.
        freqs, in_place = rotary_freqs(batch, self.rotary_dim), batch.kernel == "decoding"
        q, k = apply_rotary(q, freqs, in_place), apply_rotary(k, freqs, in_place)
        attended = attend(q, k, v, batch, self.index, dropout=self.weight_dropout).flatten(-2)
        poll()
        out: Tensor = self.dropout(self.out_proj(attended, batch), batch.noise)
        return out


class MLP(nn.Module):
    """Two linear layers with tanh-approximated GELU; receives the output of the first."""

    def __init__(self, config: GPTJConfig, index: int) -> None:
        super().__init__()
        self.fc_in = Linear(config.n_embd, config.d_inner)
        self.fc_out = Linear(config.d_inner, config.n_embd)
        self.dropout = Dropout(config.resid_pdrop, index, "mlp")

    def forward(self, inner_TI: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        inner_TI = F.gelu(inner_TI, approximate="tanh")
        poll()
        out: Tensor = self.dropout(self.fc_out(inner_TI, batch), batch.noise)
        return out


class Block(nn.Module):
    """One layer norm feeding attention and MLP in parallel."""

    # Weights with the same input, stored side by side for `project_by_all`.
    adjacent = ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight", "mlp.fc_in.weight")

    def __init__(self, config: GPTJConfig, index: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, index)
        self.mlp = MLP(config, index)

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        attn, mlp = self.attn, self.mlp
        projected = project_by_all(self.ln_1(x_TD), (attn.q_proj, attn.k_proj, attn.v_proj, mlp.fc_in), batch)
        attended_TD = attn(projected, batch, poll)
        poll()
        out: Tensor = x_TD + attended_TD + mlp(next(projected), batch, poll)
        return out


class Head(nn.Module):
    """Final layer norm and untied output projection with bias; logits in fp32."""

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__()
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.lm_head = Linear(config.n_embd, config.vocab_size)

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        logits_SV: Tensor = self.lm_head(self.ln_f(x_SD), rows).float()
        return logits_SV


def build_layers(config: GPTJConfig) -> list[nn.Module]:
    """Return ``Embed``, the blocks, ``Head`` on the ``meta`` device: shapes without memory."""
    with torch.device("meta"):
        return [Embed(config), *(Block(config, index) for index in range(config.n_layer)), Head(config)]


FAMILY = Family(
    model_type="gptj",
    class_name="GPTJForCausalLM",
    read_config=read_config,
    build_layers=build_layers,
    keys={
        "transformer.wte.weight": ("embed", "wte.weight"),
        "transformer.h.{}.ln_1.weight": ("block", "ln_1.weight"),
        "transformer.h.{}.ln_1.bias": ("block", "ln_1.bias"),
        "transformer.h.{}.attn.q_proj.weight": ("block", "attn.q_proj.weight"),
        "transformer.h.{}.attn.k_proj.weight": ("block", "attn.k_proj.weight"),
        "transformer.h.{}.attn.v_proj.weight": ("block", "attn.v_proj.weight"),
        "transformer.h.{}.attn.out_proj.weight": ("block", "attn.out_proj.weight"),
        "transformer.h.{}.mlp.fc_in.weight": ("block", "mlp.fc_in.weight"),
        "transformer.h.{}.mlp.fc_in.bias": ("block", "mlp.fc_in.bias"),
        "transformer.h.{}.mlp.fc_out.weight": ("block", "mlp.fc_out.weight"),
        "transformer.h.{}.mlp.fc_out.bias": ("block", "mlp.fc_out.bias"),
        "transformer.h.{}.attn.bias": None,  # causal mask buffer of old files
        "transformer.h.{}.attn.masked_bias": None,
        "transformer.ln_f.weight": ("head", "ln_f.weight"),
        "transformer.ln_f.bias": ("head", "ln_f.bias"),
        "lm_head.weight": ("head", "lm_head.weight"),
        "lm_head.bias": ("head", "lm_head.bias"),
        "score.weight": ("head", "score.weight"),
        "qa_outputs.weight": ("head", "qa_outputs.weight"),
        "qa_outputs.bias": ("head", "qa_outputs.bias"),
    },
    mesh=MESH,
    cerebras=CEREBRAS,
    heads=decoder_heads("GPTJ", has_token_labels=False),
)
