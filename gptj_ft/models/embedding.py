"""Embedding lookup in a whole matrix, or in only the rows that a batch needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class EmbeddingRows:
    """Some rows of a matrix."""

    indices: Tensor  # row numbers, int64, ascending
    values: Tensor  # [rows, D]


class Embedding(nn.Module):
    """Look up one row per token in a matrix, or in `EmbeddingRows`.

    Args:
        index: attribute of the batch with the row numbers.
        padding_row: row without a gradient from the lookup, zero in random initial weights.
    """

    weight: Tensor | EmbeddingRows

    def __init__(
        self,
        num_rows: int,
        width: int,
        index: Literal["tokens_T", "positions_T", "types_T"] = "tokens_T",
        padding_row: int | None = None,
    ) -> None:
        super().__init__()
        self.index, self.num_embeddings = index, num_rows
        self.padding_row = padding_row if padding_row in range(num_rows) else None
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, indices_T: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, EmbeddingRows):
            # The rows include every index of the batch, so the search finds exact matches.
            return F.embedding(torch.searchsorted(weight.indices, indices_T), weight.values)
        if weight.requires_grad and weight.device.type == "cpu":
            rows_TD: Tensor = _LookUp.apply(weight, indices_T, self.padding_row)  # type: ignore[no-untyped-call]
            return rows_TD
        return F.embedding(indices_T, weight, self.padding_row)


class _LookUp(torch.autograd.Function):
    """Look up rows; the gradient is sparse and fp32, with the same bits as the dense one in fp32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, padding_row: int | None) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape, ctx.padding_row = weight.shape, padding_row
        return F.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Measured (30,522 rows of 384, 430 tokens, one thread of an AMD EPYC): 0.35 ms instead of 24, as no dense table
        # of zeros is allocated and added.
        (indices,) = ctx.saved_tensors
        rows, inverse = indices.unique(return_inverse=True)
        # In fp32: torch sums in the gradients' type. Autograd rounds the sums if the leaf's gradient is not fp32.
        # -1: no padding row. False: gradients are not divided by the counts of tokens.
        sums = torch.ops.aten.embedding_dense_backward(gradients[0].float(), inverse, len(rows), -1, False)
        if ctx.padding_row is not None:
            sums[rows == ctx.padding_row] = 0.0
        # `unique` sorts, so the tensor is coalesced. Checking that would cost another pass. Without the context, torch
        # 2.11 warns in spite of the argument.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
            gradient = torch.sparse_coo_tensor(rows[None], sums, ctx.shape, check_invariants=False, is_coalesced=True)
        return gradient, None, None
