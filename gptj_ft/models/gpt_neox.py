"""GPT-NeoX (https://arxiv.org/abs/2204.06745), also the architecture of Pythia (https://arxiv.org/abs/2304.01373).

x <- x + attention(ln_1(x)) + mlp(ln_2(x)), or one after the other; rotary positions on the first part of each head;
biases everywhere except in the untied head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.attention import attend
from gptj_ft.models.batch import PackedBatch, Poll
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.embedding import Embedding
from gptj_ft.models.gguf_form import GgufForm, Metadata, rotary_config, rotary_metadata
from gptj_ft.models.heads import decoder_heads
from gptj_ft.models.linear import Linear, RowContext, TiedLinear, VocabularyHead
from gptj_ft.models.norm import LayerNorm
from gptj_ft.models.registry import Family, check_numbers
from gptj_ft.models.rotary import RotarySpec, rotary_spec, rotate_halves

# "gelu" is the exact form, by the error function (Pythia); the others are the tanh approximation (GPT-NeoX-20B).
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
         "max_position_embeddings")  # fmt: skip


@dataclass(frozen=True)
class GPTNeoXConfig:
    """Hugging Face's field names and defaults, so that ``config.json`` loads unchanged."""

    vocab_size: int = 50432
    hidden_size: int = 6144
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    intermediate_size: int = 24576
    hidden_act: str = "gelu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    classifier_dropout: float = 0.1  # before the labels of words
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | None = 2
    rotary: RotarySpec | None = None  # from several fields of config.json; set by `read_config`

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

    @property
    def layer_norm_epsilon(self) -> float:
        return self.layer_norm_eps


def read_config(raw: Mapping[str, Any]) -> GPTNeoXConfig:
    """Read ``config.json``; reject unsupported values."""
    names = {field.name for field in fields(GPTNeoXConfig)} - {"rotary"}
    config = GPTNeoXConfig(**{key: value for key, value in raw.items() if key in names})
    check_numbers(config, SIZES, "layer_norm_eps")
    if config.hidden_size % config.num_attention_heads:
        raise DataError(
            f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads {config.num_attention_heads}"
        )
    for name in ("use_parallel_residual", "attention_bias", "tie_word_embeddings"):
        if type(getattr(config, name)) is not bool:
            raise DataError(f"{name} must be true or false, not {getattr(config, name)!r}")
    if type(config.initializer_range) not in (int, float) or not 0 < config.initializer_range < 10:
        raise DataError(f"initializer_range must be a positive number, not {config.initializer_range!r}")
    if config.hidden_act not in ACTIVATIONS:
        raise DataError(f"hidden_act '{config.hidden_act}' is not supported; known are {', '.join(ACTIVATIONS)}")
    # `rope_parameters` since transformers 5, else the fields of released files.
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    released = {"rope_theta": raw.get("rotary_emb_base", 10_000), "partial_rotary_factor": raw.get("rotary_pct", 0.25)}
    parameters = {**released, **scaling} if isinstance(scaling, Mapping) else scaling
    width = config.hidden_size // config.num_attention_heads
    return replace(config, rotary=rotary_spec({"rope_parameters": parameters}, width, config.n_positions))


class Embed(nn.Module):
    """Token embedding; positions are in the attention."""

    def __init__(self, config: GPTNeoXConfig) -> None:
        super().__init__()
        self.embed_in = Embedding(config.vocab_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout, "embedding")

    def forward(self, tokens_T: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        out: Tensor = self.dropout(self.embed_in(tokens_T), batch.noise)
        return out


class Attention(nn.Module):
    """Causal attention with queries, keys and values from one matrix, and an output projection."""

    def __init__(self, config: GPTNeoXConfig, index: int) -> None:
        super().__init__()
        assert config.rotary is not None
        self.num_heads, self.rotary, self.index = config.num_attention_heads, config.rotary, index
        width = config.hidden_size
        self.query_key_value = Linear(width, 3 * width, bias=config.attention_bias)
        self.dense = Linear(width, width, bias=config.attention_bias)
        self.weight_dropout = Dropout(config.attention_dropout, index, "attention weights")
        self.dropout = Dropout(config.hidden_dropout, index, "attention")

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        # The matrix holds query, key and value of the first head, then of the second: [N, 3, H].
        q, k, v = self.query_key_value(x_TD, batch).unflatten(-1, (self.num_heads, 3, -1)).unbind(-2)
        poll()
        q, k = rotate_halves(q, batch, self.rotary), rotate_halves(k, batch, self.rotary)
        attended_TD = attend(q, k, v, batch, self.index, dropout=self.weight_dropout).flatten(-2)
        poll()
        out: Tensor = self.dropout(self.dense(attended_TD, batch), batch.noise)
        return out


class MLP(nn.Module):
    """Two linear layers with the config's activation between them."""

    def __init__(self, config: GPTNeoXConfig, index: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dense_h_to_4h = Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = Linear(config.intermediate_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout, index, "mlp")

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        inner_TI = self.activation(self.dense_h_to_4h(x_TD, batch))
        poll()
        out: Tensor = self.dropout(self.dense_4h_to_h(inner_TI, batch), batch.noise)
        return out


class Block(nn.Module):
    """Attention and MLP, each with its own layer norm: in parallel, or the MLP after the attention."""

    def __init__(self, config: GPTNeoXConfig, index: int) -> None:
        super().__init__()
        self.is_parallel = config.use_parallel_residual
        self.ln_1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attention = Attention(config, index)
        self.ln_2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config, index)

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        attended_TD = x_TD + self.attention(self.ln_1(x_TD), batch, poll)
        poll()
        out: Tensor = attended_TD + self.mlp(self.ln_2(x_TD if self.is_parallel else attended_TD), batch, poll)
        return out


class Head(VocabularyHead):
    """Final layer norm and output projection without bias, usually untied; logits in fp32."""

    def __init__(self, config: GPTNeoXConfig) -> None:
        super().__init__()
        self.ln_f = LayerNorm(config.hidden_size, config.layer_norm_eps)
        num_rows, width = config.vocab_size, config.hidden_size
        self.embed_out: nn.Module = (
            TiedLinear((num_rows, width), "embed_in.weight")
            if config.tie_word_embeddings
            else Linear(width, num_rows, bias=False)
        )

    def normed(self, x_SD: Tensor, rows: RowContext) -> Tensor:
        h_SD: Tensor = self.ln_f(x_SD)
        return h_SD

    def logits(self, h_SD: Tensor, rows: RowContext) -> Tensor:
        logits_SV: Tensor = self.embed_out(h_SD, rows).float()
        return logits_SV


def build_layers(config: GPTNeoXConfig) -> list[nn.Module]:
    """Return ``Embed``, the blocks, ``Head`` on the ``meta`` device: shapes without memory."""
    with torch.device("meta"):
        return [Embed(config), *(Block(config, index) for index in range(config.n_layer)), Head(config)]


def with_parts(names: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str] | None]:
    """Return the positions of each module's weight and bias, given those of the modules."""
    return {
        f"{theirs}.{part}": (layer, f"{ours}.{part}")
        for theirs, (layer, ours) in names.items()
        for part in ("weight", "bias")
    }


def _to_gguf(config: GPTNeoXConfig) -> dict[str, Any]:
    """Return the metadata beyond `GgufForm.fields`; llama.cpp's activation is the tanh form of GELU, from a table."""
    assert config.rotary is not None
    if config.hidden_act == "relu":
        raise UsageError("hidden_act 'relu': llama.cpp computes GPT-NeoX with GELU only")
    if not config.attention_bias or config.tie_word_embeddings:
        raise UsageError("attention_bias false or tie_word_embeddings: llama.cpp has no GPT-NeoX of this form")
    return rotary_metadata(config.rotary, ("default", "linear", "yarn"))


def _from_gguf(metadata: Metadata) -> dict[str, Any]:
    width = metadata["embedding_length"] // metadata["attention.head_count"]
    rotary = rotary_config(metadata)
    rotary["rope_parameters"]["partial_rotary_factor"] = metadata.get("rope.dimension_count", width) / width
    return {**rotary, "hidden_act": "gelu"}


def _row_order(config: GPTNeoXConfig, name: str) -> Tensor | None:
    """Order rows by query, key and value first, then by head."""
    if ".query_key_value." not in name:
        return None
    rows = torch.arange(3 * config.hidden_size).view(config.num_attention_heads, 3, -1)
    return rows.transpose(0, 1).reshape(-1)


GGUF = GgufForm(
    architecture="gptneox",
    fields={
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
    },
    to_metadata=_to_gguf,
    to_config=_from_gguf,
    row_order=_row_order,
)

FAMILY = Family(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    read_config=read_config,
    build_layers=build_layers,
    keys={
        "gpt_neox.embed_in.weight": ("embed", "embed_in.weight"),
        **with_parts({
            "gpt_neox.layers.{}.input_layernorm": ("block", "ln_1"),
            "gpt_neox.layers.{}.attention.query_key_value": ("block", "attention.query_key_value"),
            "gpt_neox.layers.{}.attention.dense": ("block", "attention.dense"),
            "gpt_neox.layers.{}.post_attention_layernorm": ("block", "ln_2"),
            "gpt_neox.layers.{}.mlp.dense_h_to_4h": ("block", "mlp.dense_h_to_4h"),
            "gpt_neox.layers.{}.mlp.dense_4h_to_h": ("block", "mlp.dense_4h_to_h"),
            "gpt_neox.final_layer_norm": ("head", "ln_f"),
            "qa_outputs": ("head", "qa_outputs"),
            "classifier": ("head", "classifier"),
        }),
        "gpt_neox.layers.{}.attention.bias": None,  # buffers of old files: the causal mask, rotary frequencies
        "gpt_neox.layers.{}.attention.masked_bias": None,
        "gpt_neox.layers.{}.attention.rotary_emb.inv_freq": None,
        "embed_out.weight": ("head", "embed_out.weight"),
        "score.weight": ("head", "score.weight"),
    },
    heads=decoder_heads("GPTNeoX", has_token_labels=True),
    prefix="gpt_neox.",
    trunk=frozenset({"embed_in", "layers", "final_layer_norm"}),
    dropouts=(("hidden_dropout",), ("attention_dropout",)),
    gguf=GGUF,
)  # fmt: skip
