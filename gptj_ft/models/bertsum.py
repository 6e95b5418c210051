"""The head that selects the sentences of a summary (BertSumExt, https://arxiv.org/abs/1908.08345).

Between the encoder and one logit per sentence, the sentences of a document attend to each other in two layers of
attention and MLP with pre-norm, except before the first layer's attention. This follows the authors' code and weights;
the paper's formula differs.

Axis letters: S sentences of a batch, document after document, D width, N heads.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.models.attention import attend_in_buckets
from gptj_ft.models.batch import Documents, HeadRows
from gptj_ft.models.dropout import Dropout, Noise
from gptj_ft.models.linear import Linear
from gptj_ft.models.norm import LayerNorm
from gptj_ft.models.registry import HeadForm, Home

NUM_LAYERS, MOST_HEADS, INNER, EPSILON = 2, 8, 2048, 1e-6
NAME = "ext_layer"  # prefix of the head's tensors in the authors' files


class SentenceAttention(nn.Module):
    """Attention between the sentences of a document, and its projections."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        width = config.n_embd
        # The authors use 8 heads. The widths of small models may not be a multiple of 8.
        self.num_heads = next(number for number in range(MOST_HEADS, 0, -1) if width % number == 0)
        self.linear_query, self.linear_keys, self.linear_values = (Linear(width, width) for _ in range(3))
        self.final_linear = Linear(width, width)
        self.dropout = Dropout(config.attention_probs_dropout_prob, "sentences", layer, "attention weights")

    def forward(self, x_SD: Tensor, rows: HeadRows, documents: Documents) -> Tensor:
        linears = (self.linear_query, self.linear_keys, self.linear_values)
        q, k, v = (linear(x_SD, rows).unflatten(-1, (self.num_heads, -1)) for linear in linears)
        out: Tensor = self.final_linear(attend_in_buckets(q, k, v, documents, None, self.dropout).flatten(-2), rows)
        return out


class SentenceMLP(nn.Module):
    """Layer norm, two linear layers with tanh-approximated GELU between them, and a residual connection."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = Linear(config.n_embd, INNER), Linear(INNER, config.n_embd)
        self.layer_norm = LayerNorm(config.n_embd, EPSILON)
        self.inner_dropout, self.dropout = (
            Dropout(config.head_dropout, "sentences", layer, name) for name in ("mlp inner", "mlp")
        )

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        inner_SI = F.gelu(self.w_1(self.layer_norm(x_SD), rows), approximate="tanh")
        out: Tensor = x_SD + self.dropout(self.w_2(self.inner_dropout(inner_SI, rows.noise), rows), rows.noise)
        return out


class SentenceLayer(nn.Module):
    """Attention and MLP, each with a layer norm before it, except the first layer's attention."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = SentenceAttention(config, layer), SentenceMLP(config, layer)
        self.layer_norm = LayerNorm(config.n_embd, EPSILON) if layer else nn.Identity()
        self.dropout = Dropout(config.head_dropout, "sentences", layer, "attention")

    def forward(self, x_SD: Tensor, rows: HeadRows, documents: Documents) -> Tensor:
        attended_SD = self.self_attn(self.layer_norm(x_SD), rows, documents)
        out: Tensor = self.feed_forward(x_SD + self.dropout(attended_SD, rows.noise), rows)
        return out


class SentenceScores(nn.Module):
    """Layers between the sentences of a document, and one logit per sentence, in fp32."""

    def __init__(self, config: Any, num_outputs: int) -> None:
        super().__init__()
        self.transformer_inter = nn.ModuleList(SentenceLayer(config, layer) for layer in range(NUM_LAYERS))
        self.layer_norm = LayerNorm(config.n_embd, EPSILON)
        self.wo = Linear(config.n_embd, num_outputs)

    def forward(self, x_SD: Tensor, rows: HeadRows) -> Tensor:
        noise = rows.noise or Noise(())
        seeds = None if rows.noise is None else tuple(span.seed for span in noise.spans)
        # To `attend_in_buckets`, a sentence is what a token is elsewhere.
        documents = Documents((0, *rows.ends), seeds, x_SD.device, keys_T=noise.keys_R)
        x_SD = x_SD + sinusoids(documents, x_SD.shape[-1]).to(x_SD)
        for layer in self.transformer_inter:
            x_SD = layer(x_SD, rows, documents)
        logits_SC: Tensor = self.wo(self.layer_norm(x_SD), rows).float()
        return logits_SC


def sinusoids(documents: Documents, width: int) -> Tensor:
    """Return sinusoidal embeddings of each sentence's position in its document, fp32 [S, D]."""
    numbers_S = torch.cat([torch.arange(end - start) for start, end in pairwise(documents.cu_seqlens)])
    frequencies = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = numbers_S[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :width]


def initialise_sentences(head: nn.Module, name: str, values: Tensor, generator: torch.Generator) -> None:
    """Initialise a parameter as the authors do: matrices Xavier-uniform, biases as in `torch.nn.Linear`."""
    module = head.get_submodule(name.rpartition(".")[0])
    if values.ndim > 1:
        nn.init.xavier_uniform_(values, generator=generator)
    elif isinstance(module, nn.Linear):
        values.uniform_(-(module.in_features**-0.5), module.in_features**-0.5, generator=generator)
    else:
        values.fill_(1.0 if name.endswith("weight") else 0.0)


def _keys() -> dict[str, Home | None]:
    modules = ["layer_norm", "wo"]
    for layer in range(NUM_LAYERS):
        linears = ("query", "keys", "values")
        parts = [f"self_attn.linear_{name}" for name in linears] + ["self_attn.final_linear"]
        parts += ["feed_forward.w_1", "feed_forward.w_2", "feed_forward.layer_norm", *["layer_norm"] * (layer > 0)]
        modules += [f"transformer_inter.{layer}.{part}" for part in parts]
    names = [f"{module}.{part}" for module in modules for part in ("weight", "bias")]
    unused = ("transformer_inter.0.layer_norm.weight", "transformer_inter.0.layer_norm.bias", "pos_emb.pe")
    return {
        **{f"{NAME}.{name}": ("head", name) for name in names},
        **dict.fromkeys(f"{NAME}.{name}" for name in unused),  # unused in the authors' code too
    }


KEYS = _keys()
FORM = HeadForm("BertSumExt", SentenceScores, "wo", (), ("sentences",), initialise_sentences)
