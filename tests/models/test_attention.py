"""Test causal attention on a CPU: neither grouping nor type changes a document's result."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.attention import attend
from gptj_ft.models.batch import PackedBatch, pack

LENGTHS = (5, 70, 31, 7, 1, 40, 30, 8, 33, 6)  # short ones are filled up to 8 and 32, and computed together
HEADS, WIDTH = 3, 12


def inputs(dtype: torch.dtype) -> tuple[PackedBatch, list[Tensor], Tensor]:
    """Return a batch with fillers; queries, keys and values; the gradient of the output."""
    torch.manual_seed(0)
    batch = pack([[1] * length for length in LENGTHS]).padded()
    shape = len(batch.tokens_T), HEADS, WIDTH
    assert batch.num_fillers
    taken = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]
    gradient = torch.randn(shape).to(dtype)
    gradient[batch.cu_seqlens[-1] :] = 0.0
    return batch, taken, gradient


def found(batch: PackedBatch, taken: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return attention and its gradients."""
    out = attend(*taken, batch, 0)
    return [out.detach(), *torch.autograd.grad(out, taken, gradient)]


def test_document_bits_are_independent_of_batch() -> None:
    batch, taken, gradient = inputs(torch.float32)
    together = found(batch, taken, gradient)
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        parts = [x[start:end].detach().requires_grad_() for x in taken]
        alone = found(pack([[1] * (end - start)]), parts, gradient[start:end])
        for ours, theirs in zip(alone, together, strict=True):
            assert torch.equal(ours, theirs[start:end]), end - start
    for each in together:
        assert not each[batch.cu_seqlens[-1] :].any(), "fillers"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_attention_and_gradients_match_fp64_torch(dtype: torch.dtype, tolerance: float) -> None:
    batch, taken, gradient = inputs(dtype)
    ours = found(batch, taken, gradient)
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        q, k, v = parts = [x[start:end].detach().double().requires_grad_() for x in taken]
        unseen = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        scores = torch.einsum("qnh,knh->nqk", q, k) * WIDTH**-0.5
        weights = F.softmax(scores.masked_fill(unseen, -torch.inf), -1)
        out = torch.einsum("nqk,knh->qnh", weights, v)
        for each, theirs in zip(
            ours, [out, *torch.autograd.grad(out, parts, gradient[start:end].double())], strict=True
        ):
            assert each.dtype == dtype
            torch.testing.assert_close(each[start:end].double(), theirs.detach(), rtol=tolerance, atol=tolerance)
