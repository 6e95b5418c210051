"""GPT-J (https://github.com/kingoflolz/mesh-transformer-jax): attention beside MLP, rotary on part of each head.

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
from gptj_ft.models.gptj_names import CEREBRAS, MESH
from gptj_ft.models.layers import Embedding, PackedBatch, attend, rotate, turns
from gptj_ft.models.linear import Linear, project_by_all
from gptj_ft.models.registry import Family, check_numbers


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
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | None = 50256

    @property
    def d_inner(self) -> int:
        return self.n_inner or 4 * self.n_embd


def read_config(raw: Mapping[str, Any]) -> GPTJConfig:
    """Read ``config.json``.

    Raises:
        DataError: a value this architecture does not have: it would silently compute something else.
    """
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

    def forward(self, tokens_T: Tensor, batch: PackedBatch) -> Tensor:
        out: Tensor = self.wte(tokens_T)
        return out


class Attention(nn.Module):
    """Ragged causal attention, and the projections without bias around it; takes what those before it give."""

    def __init__(self, config: GPTJConfig, index: int) -> None:
        super().__init__()
        self.num_heads, self.rotary_dim, self.index = config.n_head, config.rotary_dim, index
        self.q_proj = Linear(config.n_embd, config.n_embd, bias=False)
        self.k_proj = Linear(config.n_embd, config.n_embd, bias=False)
        self.v_proj = Linear(config.n_embd, config.n_embd, bias=False)
        self.out_proj = Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, projected: Iterator[Tensor], batch: PackedBatch) -> Tensor:
        q, k, v = (x_TD.view(x_TD.shape[0], self.num_heads, -1) for x_TD in islice(projected, 3))
        turn = turns(batch, self.rotary_dim)
        q, k = rotate(q, turn), rotate(k, turn)
        out: Tensor = self.out_proj(attend(q, k, v, batch, self.index).flatten(-2))
        return out


class MLP(nn.Module):
    """Two linear layers; takes what the first one gives, and goes on with the tanh form of GELU."""

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__()
        self.fc_in = Linear(config.n_embd, config.d_inner)
        self.fc_out = Linear(config.d_inner, config.n_embd)

    def forward(self, inner_TI: Tensor) -> Tensor:
        out: Tensor = self.fc_out(F.gelu(inner_TI, approximate="tanh"))
        return out


class Block(nn.Module):
    """One layer norm feeding attention and MLP side by side.

    Attributes:
        adjacent: the weights that take its output, which are to lie side by side.
    """

    adjacent = ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight", "mlp.fc_in.weight")

    def __init__(self, config: GPTJConfig, index: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, index)
        self.mlp = MLP(config)

    def forward(self, x_TD: Tensor, batch: PackedBatch) -> Tensor:
        attn, mlp = self.attn, self.mlp
        projected = project_by_all(self.ln_1(x_TD), (attn.q_proj, attn.k_proj, attn.v_proj, mlp.fc_in))
        out: Tensor = x_TD + attn(projected, batch) + mlp(next(projected))
        return out


class Head(nn.Module):
    """Final layer norm and the untied output projection with bias; logits in fp32."""

    def __init__(self, config: GPTJConfig) -> None:
        super().__init__()
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.lm_head = Linear(config.n_embd, config.vocab_size)

    def forward(self, x_SD: Tensor) -> Tensor:
        logits_SV: Tensor = self.lm_head(self.ln_f(x_SD)).float()
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
    },
    mesh=MESH,
    cerebras=CEREBRAS,
    lora_targets=("q_proj", "v_proj"),  # https://arxiv.org/abs/2106.09685, section 7.1; PEFT's for GPT-J, too
)
