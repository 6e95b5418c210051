"""Embedding lookup in a whole matrix, or in the few rows of it that a batch needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class EmbeddingRows:
    """Some rows of a matrix, where a layer needs no others.

    Attributes:
        numbers: which, int64, rising.
        values: theirs, [rows, D].
    """

    indices: Tensor
    values: Tensor


class Embedding(nn.Module):
    """Look up a row per token in a matrix, or in just the `EmbeddingRows` that a pass needs.

    Args:
        num_rows: rows of the matrix.
        width: width of a row.
        index: function from a batch to the rows that it looks up.
    """

    weight: Tensor | EmbeddingRows

    def __init__(
        self, num_rows: int, width: int, index: Literal["tokens_T", "positions_T", "types_T"] = "tokens_T"
    ) -> None:
        super().__init__()
        self.index, self.num_embeddings = index, num_rows
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, indices_T: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, EmbeddingRows):
            return F.embedding(torch.searchsorted(weight.indices, indices_T), weight.values)
        return F.embedding(indices_T, weight)
