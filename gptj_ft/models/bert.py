"""BERT (https://arxiv.org/abs/1810.04805): an encoder, in which each token sees all tokens of its document.

x <- LN(x + attention(x)); x <- LN(x + mlp(x)); embeddings of word, position and type are added and normalised; biases
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.errors import DataError
from gptj_ft.models import bertsum
from gptj_ft.models.attention import attend_both_ways
from gptj_ft.models.batch import HeadRows, PackedBatch, Poll
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.embedding import Embedding
from gptj_ft.models.linear import Linear
from gptj_ft.models.norm import LayerNorm
from gptj_ft.models.registry import Family, HeadForm, Home, check_numbers

# "gelu" is the exact form, by the error function; "gelu_new" and "gelu_pytorch_tanh" are the same approximation.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
ONLY: Mapping[str, tuple[Any, ...]] = {  # config fields that change the computation -> supported values
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
}
ENCODER_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                 "max_position_embeddings", "type_vocab_size")  # fmt: skip


@dataclass(frozen=True)
class BertConfig:
    """Hugging Face's field names and defaults, so that ``config.json`` loads unchanged."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0

    @property
    def first_position(self) -> int:
        """Position embedding row of the first token."""
        return 0

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
        """Most tokens of a document."""
        return self.max_position_embeddings - self.first_position

    @property
    def head_dropout(self) -> float:
        """Dropout rate before the classifier."""
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout


def read_config(raw: Mapping[str, Any], kind: type[BertConfig] = BertConfig) -> BertConfig:
    """Read ``config.json``, or Google's ``bert_config.json``; reject unsupported values."""
    names = {field.name for field in fields(kind)}
    config = kind(**{key: value for key, value in raw.items() if key in names})
    check_numbers(config, ENCODER_SIZES, "layer_norm_eps")
    if config.hidden_size % config.num_attention_heads:
        raise DataError(
            f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads {config.num_attention_heads}"
        )
    if config.n_positions < 1:
        raise DataError(f"max_position_embeddings {config.max_position_embeddings} leaves no position for a token")
    if config.hidden_act not in ACTIVATIONS:
        raise DataError(f"hidden_act '{config.hidden_act}' is not supported; known are {', '.join(ACTIVATIONS)}")
    for name, values in ONLY.items():
        if raw.get(name) not in (*values, None):
            raise DataError(f"{name} {raw[name]!r} is not supported, only {values[0]!r}")
    return config


class Embed(nn.Module):
    """Sum of the embeddings of token, position and type, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.first_position = config.first_position
        self.word = Embedding(config.vocab_size, width, padding_row=config.pad_token_id)
        # The row before the first position is that of padding, if there is one.
        padding = config.first_position - 1 if config.first_position else None
        self.position = Embedding(config.max_position_embeddings, width, "positions_T", padding)
        self.token_type = Embedding(config.type_vocab_size, width, "types_T")
        self.norm = LayerNorm(width, config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob, "embedding")

    def forward(self, tokens_T: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        has_types = batch.types_T is not None and self.token_type.num_embeddings > 1
        types_T = batch.types_T if has_types else torch.zeros_like(tokens_T)
        # In the order of the original code, for the same rounding.
        x_TD = self.word(tokens_T) + self.token_type(types_T)
        x_TD = x_TD + self.position(batch.positions_T + self.first_position)
        out: Tensor = self.dropout(self.norm(x_TD), batch.noise)
        return out


class Attention(nn.Module):
    """Bidirectional attention within a document, its projections, and the residual connection."""

    def __init__(self, config: BertConfig, index: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.query, self.key, self.value = (Linear(width, width) for _ in range(3))
        self.output = Linear(width, width)
        self.weight_dropout = Dropout(config.attention_probs_dropout_prob, index, "attention weights")
        self.dropout = Dropout(config.hidden_dropout_prob, index, "attention")

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        linears = (self.query, self.key, self.value)
        q, k, v = (linear(x_TD, batch).unflatten(-1, (self.num_heads, -1)) for linear in linears)
        poll()
        attended_TD = attend_both_ways(q, k, v, batch, self.weight_dropout).flatten(-2)
        poll()
        return self.dropout.added(x_TD, self.output(attended_TD, batch), batch.noise)


class MLP(nn.Module):
    """Two linear layers with the config's activation between them, and the residual connection."""

    def __init__(self, config: BertConfig, index: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.hidden_act]
        self.intermediate = Linear(config.hidden_size, config.intermediate_size)
        self.output = Linear(config.intermediate_size, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob, index, "mlp")

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        inner_TI = self.activation(self.intermediate(x_TD, batch))
        poll()
        return self.dropout.added(x_TD, self.output(inner_TI, batch), batch.noise)


class Block(nn.Module):
    """Attention, then MLP, each with a layer norm after its residual connection."""

    def __init__(self, config: BertConfig, index: int) -> None:
        super().__init__()
        self.attention = Attention(config, index)
        self.attention_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config, index)
        self.mlp_norm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x_TD: Tensor, batch: PackedBatch, poll: Poll) -> Tensor:
        x_TD = self.attention_norm(self.attention(x_TD, batch, poll))
        poll()
        out: Tensor = self.mlp_norm(self.mlp(x_TD, batch, poll))
        return out


class Pooler(nn.Module):
    """Linear layer and tanh on the first token, pre-trained with pairs of sentences."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.pooler = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        return torch.tanh(self.pooler(x_SD, rows)).float()


class PooledClassifier(nn.Module):
    """Pooler and classifier on the first token of a text; logits in fp32."""

    def __init__(self, config: BertConfig, num_outputs: int) -> None:
        super().__init__()
        self.pooler = Linear(config.hidden_size, config.hidden_size)
        self.dropout = Dropout(config.head_dropout, "classifier")
        self.classifier = Linear(config.hidden_size, num_outputs)

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        pooled_SD = torch.tanh(self.pooler(x_SD, rows))
        logits_SC: Tensor = self.classifier(self.dropout(pooled_SD, rows.noise), rows).float()
        return logits_SC


class Classifier(nn.Module):
    """Classifier of each row, without a pooler; logits in fp32."""

    def __init__(self, config: BertConfig, num_outputs: int) -> None:
        super().__init__()
        self.dropout = Dropout(config.head_dropout, "classifier")
        self.classifier = Linear(config.hidden_size, num_outputs)

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        logits_SC: Tensor = self.classifier(self.dropout(x_SD, rows.noise), rows).float()
        return logits_SC


class SpanOutputs(nn.Module):
    """Two logits per token: for the start and the end of an answer; in fp32."""

    def __init__(self, config: BertConfig, num_outputs: int) -> None:
        super().__init__()
        self.qa_outputs = Linear(config.hidden_size, num_outputs)

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        logits_SC: Tensor = self.qa_outputs(x_SD, rows).float()
        return logits_SC


def build_layers(config: BertConfig) -> list[nn.Module]:
    """Return ``Embed``, the blocks, ``Pooler`` on the ``meta`` device: shapes without memory."""
    with torch.device("meta"):
        return [Embed(config), *(Block(config, index) for index in range(config.n_layer)), Pooler(config)]


def with_parts(names: Mapping[str, tuple[str, str]]) -> dict[str, Home | None]:
    """Return the positions of each module's weight and bias, given those of the modules."""
    return {
        f"{theirs}.{part}": (layer, f"{ours}.{part}")
        for theirs, (layer, ours) in names.items()
        for part in ("weight", "bias")
    }


def trunk_keys(prefix: str) -> dict[str, Home | None]:
    """Return the positions of the tensors of embedding and blocks."""
    block = f"{prefix}encoder.layer.{{}}."
    return {
        f"{prefix}embeddings.word_embeddings.weight": ("embed", "word.weight"),
        f"{prefix}embeddings.position_embeddings.weight": ("embed", "position.weight"),
        f"{prefix}embeddings.token_type_embeddings.weight": ("embed", "token_type.weight"),
        f"{prefix}embeddings.position_ids": None,  # buffers in old files
        f"{prefix}embeddings.token_type_ids": None,
        **with_parts({
            f"{prefix}embeddings.LayerNorm": ("embed", "norm"),
            f"{block}attention.self.query": ("block", "attention.query"),
            f"{block}attention.self.key": ("block", "attention.key"),
            f"{block}attention.self.value": ("block", "attention.value"),
            f"{block}attention.output.dense": ("block", "attention.output"),
            f"{block}attention.output.LayerNorm": ("block", "attention_norm"),
            f"{block}intermediate.dense": ("block", "mlp.intermediate"),
            f"{block}output.dense": ("block", "mlp.output"),
            f"{block}output.LayerNorm": ("block", "mlp_norm"),
        }),
    }  # fmt: skip


PRETRAINING = (  # tensors of pre-training heads, which no task uses
    "cls.predictions.bias", "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
    "cls.seq_relationship.weight", "cls.seq_relationship.bias",
)  # fmt: skip

FAMILY = Family(
    model_type="bert",
    class_name="BertModel",
    read_config=read_config,
    build_layers=build_layers,
    keys={
        **trunk_keys("bert."),
        **with_parts({
            "bert.pooler.dense": ("head", "pooler"),
            "classifier": ("head", "classifier"),
            "qa_outputs": ("head", "qa_outputs"),
        }),
        **bertsum.KEYS,
        **dict.fromkeys(PRETRAINING),
    },
    heads=(
        HeadForm(
            "BertForSequenceClassification", PooledClassifier, "classifier", (),
            ("classification", "multi-label", "regression"),
        ),
        HeadForm("BertForTokenClassification", Classifier, "classifier", (), ("token-labels",)),
        HeadForm("BertForQuestionAnswering", SpanOutputs, "qa_outputs", (), ("spans",)),
        bertsum.FORM,
    ),
    prefix="bert.",
    trunk=frozenset({"embeddings", "encoder", "pooler"}),
    # Old conversions kept TensorFlow's names of the norms.
    aliases={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    dropouts=(("hidden_dropout_prob", "classifier_dropout"), ("attention_probs_dropout_prob",)),
    is_encoder=True,
    optional=frozenset({"bert.pooler.dense.weight", "bert.pooler.dense.bias"}),
)  # fmt: skip
