"""Heads for labelling instead of predicting the next token, for families that end with a layer norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gptj_ft.models.batch import HeadRows
from gptj_ft.models.dropout import Dropout, seed_of
from gptj_ft.models.linear import Linear
from gptj_ft.models.registry import Architecture, HeadForm

NORM = ("ln_f.weight", "ln_f.bias")


class NormedOutputs(nn.Module):
    """Final layer norm and a linear layer of few outputs, named as in `transformers`; in fp32."""

    def __init__(self, config: Any, num_outputs: int, name: str, has_bias: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.name = name
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.dropout = Dropout(dropout, "classifier")
        self.add_module(name, Linear(config.n_embd, num_outputs, bias=has_bias))

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        normed_SD = self.dropout(self.ln_f(x_SD), rows.noise)
        out: Tensor = self.get_submodule(self.name)(normed_SD, rows).float()
        return out


def decoder_heads(prefix: str, has_token_labels: bool) -> tuple[HeadForm, ...]:
    """Return the heads that a decoder has in `transformers`; ``prefix`` begins the class names."""

    def outputs(name: str, has_bias: bool, dropout: float = 0.0) -> Callable[[Any, int], nn.Module]:
        return lambda config, num_outputs: NormedOutputs(config, num_outputs, name, has_bias, dropout)

    texts = HeadForm(
        f"{prefix}ForSequenceClassification", outputs("score", has_bias=False), "score", NORM,
        ("classification", "multi-label", "regression"),
    )  # fmt: skip
    spans = HeadForm(
        f"{prefix}ForQuestionAnswering", outputs("qa_outputs", has_bias=True), "qa_outputs", NORM, ("spans",)
    )
    words = HeadForm(
        f"{prefix}ForTokenClassification", outputs("classifier", True, 0.1), "classifier", NORM, ("token-labels",)
    )
    return (texts, spans, words) if has_token_labels else (texts, spans)


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
