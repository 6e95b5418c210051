"""Implement BertSumExt on padded rows in plain torch: the oracle of the sentence head."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_keys, self.linear_values = nn.Linear(width, width), nn.Linear(width, width)
        self.linear_query, self.final_linear = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, longest, width = x.shape
        query, key, value = (
            linear(x).view(rows, longest, 8, width // 8).transpose(1, 2)
            for linear in (self.linear_query, self.linear_keys, self.linear_values)
        )
        scores = (query / math.sqrt(width // 8)) @ key.transpose(2, 3)
        weights = scores.masked_fill(~mask[:, None, None], -1e18).softmax(-1)
        return self.final_linear((weights @ value).transpose(1, 2).reshape(rows, longest, width))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(width, 2048), nn.Linear(2048, width)
        self.layer_norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.w_1(self.layer_norm(x))
        gelu = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        return self.w_2(gelu) + x


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attn, self.feed_forward = Attention(width), FeedForward(width)
        self.layer_norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor, mask: Tensor, is_first: bool) -> Tensor:
        return self.feed_forward(x + self.self_attn(x if is_first else self.layer_norm(x), mask))


class Positions(nn.Module):
    def __init__(self, width: int, most: int = 5000) -> None:
        super().__init__()
        table, position = torch.zeros(most, width), torch.arange(most)[:, None]
        factor = torch.exp(torch.arange(0, width, 2).float() * -(math.log(10000.0) / width))
        table[:, 0::2], table[:, 1::2] = torch.sin(position * factor), torch.cos(position * factor)
        self.register_buffer("pe", table[None])


class Between(nn.Module):
    """Implement the inter-sentence layers; parameter names match the authors' files."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pos_emb, self.transformer_inter = Positions(width), nn.ModuleList([Layer(width), Layer(width)])
        self.layer_norm, self.wo = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x * mask[:, :, None] + self.pos_emb.pe[:, : x.shape[1]]
        for number, layer in enumerate(self.transformer_inter):
            x = layer(x, mask, number == 0)
        return self.wo(self.layer_norm(x)).squeeze(-1)


class BertSumExt(nn.Module):
    """Combine BERT and the inter-sentence layers."""

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__()
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.ext_layer = Between(config.hidden_size)

    def forward(self, inputs: dict[str, Tensor], places: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]):
        """Return the mean loss over the sentences of padded rows, given their places and labels."""
        hidden = self.bert(**inputs).last_hidden_state
        chosen = [hidden[row, list(at)] for row, at in enumerate(places)]
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(at), dtype=torch.bool) for at in places], batch_first=True)
        scores = self.ext_layer(nn.utils.rnn.pad_sequence(chosen, batch_first=True), mask)
        targets = torch.cat([torch.tensor(each, dtype=torch.float32) for each in labels])
        return F.binary_cross_entropy_with_logits(scores[mask], targets)

    def save_pretrained(self, folder: Path) -> None:
        """Write a model folder."""
        folder.mkdir(parents=True)
        config = {**self.bert.config.to_dict(), "architectures": ["BertSumExt"]}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(
            {name: value.contiguous() for name, value in self.state_dict().items()}, folder / "model.safetensors",
            metadata={"format": "pt"},
        )  # fmt: skip
