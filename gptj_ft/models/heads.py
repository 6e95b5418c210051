"""Heads for labelling instead of predicting the next token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gptj_ft.models.batch import HeadRows
from gptj_ft.models.dropout import Dropout, seed_of
from gptj_ft.models.linear import Linear
from gptj_ft.models.norm import LayerNorm, RMSNorm
from gptj_ft.models.registry import Architecture, HeadForm

DROPOUT = "classifier_dropout"  # config field of the rate before the labels of words
TEXTS, SPANS, WORDS = "ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification"


class FinalNorm(NamedTuple):
    """The norm behind a family's last block."""

    name: str  # its module
    build: Callable[[Any], nn.Module]  # config -> norm
    parameters: tuple[str, ...]


LAYER_NORM = FinalNorm(
    "ln_f", lambda config: LayerNorm(config.n_embd, config.layer_norm_epsilon), ("ln_f.weight", "ln_f.bias")
)


def rms_norm(offset: float = 0.0) -> FinalNorm:
    """Return an RMS norm named as in `transformers`; see `RMSNorm` for the offset."""
    return FinalNorm("norm", lambda config: RMSNorm(config.n_embd, config.rms_norm_eps, offset), ("norm.weight",))


class NormedOutputs(nn.Module):
    """Final norm and a linear layer of few outputs, named as in `transformers`; in fp32.

    Args:
        dropout: config field of the dropout rate between them; empty: no dropout.
    """

    def __init__(
        self, config: Any, num_outputs: int, norm: FinalNorm, name: str, has_bias: bool = False, dropout: str = ""
    ) -> None:
        super().__init__()
        self.norm_name, self.name = norm.name, name
        self.add_module(norm.name, norm.build(config))
        self.dropout = Dropout(getattr(config, dropout) if dropout else 0.0, "classifier")
        self.add_module(name, Linear(config.n_embd, num_outputs, bias=has_bias))

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        normed_SD = self.dropout(self.get_submodule(self.norm_name)(x_SD), rows.noise)
        out: Tensor = self.get_submodule(self.name)(normed_SD, rows).float()
        return out


def decoder_heads(prefix: str, has_token_labels: bool, norm: FinalNorm = LAYER_NORM) -> tuple[HeadForm, ...]:
    """Return the heads that a decoder has in `transformers`; ``prefix`` begins the class names."""

    def outputs(name: str, has_bias: bool, dropout: str = "") -> Callable[[Any, int], nn.Module]:
        return partial(NormedOutputs, norm=norm, name=name, has_bias=has_bias, dropout=dropout)

    texts = HeadForm(
        f"{prefix}ForSequenceClassification", outputs("score", has_bias=False), "score", norm.parameters,
        ("classification", "multi-label", "regression"),
    )  # fmt: skip
    spans = HeadForm(
        f"{prefix}ForQuestionAnswering", outputs("qa_outputs", has_bias=True), "qa_outputs", norm.parameters,
        ("spans",),
    )  # fmt: skip
    words = HeadForm(
        f"{prefix}ForTokenClassification", outputs("classifier", True, DROPOUT), "classifier", norm.parameters,
        ("token-labels",), dropouts=(DROPOUT,),
    )  # fmt: skip
    return (texts, spans, words) if has_token_labels else (texts, spans)


def generic_heads(
    prefix: str, norm: FinalNorm, classes: Sequence[str], spans_prefix: str | None = None
) -> tuple[HeadForm, ...]:
    """Return the heads of today's decoders, which `transformers` makes alike.

    Args:
        prefix: start of the class names.
        classes: ends of those that exist.
        spans_prefix: see `HeadForm.prefix`.
    """
    texts, spans, words = decoder_heads(prefix, has_token_labels=True, norm=norm)
    build = partial(NormedOutputs, norm=norm, name="score", has_bias=True, dropout=DROPOUT)
    heads = (texts, replace(spans, prefix=spans_prefix), replace(words, output="score", build=build))
    return tuple(head for head in heads if head.class_name.removeprefix(prefix) in classes)


def words_dropout(raw: Mapping[str, Any]) -> Any:
    """Return the dropout rate before the labels of words, as `transformers` reads it from a ``config.json``."""
    rates = (raw.get(name) for name in (DROPOUT, "hidden_dropout"))
    return next((rate for rate in rates if rate is not None), 0.1)


def initialise_head(architecture: Architecture, name: str, view: Tensor, key: tuple[object, ...]) -> None:
    """Initialise a head's parameter that the checkpoint lacks: as the head defines, or matrices normal, biases zero.

    Args:
        name: name of the parameter in the layer.
        view: its memory.
        key: key of the random numbers.
    """
    head, values = architecture.head, torch.empty(view.shape)
    generator = torch.Generator().manual_seed(seed_of((*key, name)))
    if head is not None and head.initialise is not None:
        head.initialise(architecture.skeleton[-1], name, values, generator)
    elif view.ndim < 2:
        values.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    else:
        values.normal_(0.0, architecture.config.initializer_range, generator=generator)
    view.copy_(values)
