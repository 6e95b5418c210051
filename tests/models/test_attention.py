"""Test causal attention on a CPU: neither grouping nor type changes a document's result."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models import kv_cache
from gptj_ft.models.attention import attend
from gptj_ft.models.batch import PackedBatch, pack
from gptj_ft.models.dropout import Dropout
from gptj_ft.models.kv_cache import KVCache

LENGTHS = (5, 70, 31, 7, 1, 40, 30, 8, 33, 6)  # short ones are filled up to 8 and 32, and computed together
HEADS, WIDTH = 6, 12
CPU = torch.device("cpu")


def inputs(dtype: torch.dtype, key_heads: int = HEADS) -> tuple[PackedBatch, list[Tensor], Tensor]:
    """Return a batch with fillers; queries, keys and values; the gradient of the output."""
    torch.manual_seed(0)
    batch = pack([[1] * length for length in LENGTHS]).padded()
    rows = len(batch.tokens_T)
    assert batch.num_fillers
    taken = [torch.randn(rows, heads, WIDTH).to(dtype).requires_grad_() for heads in (HEADS, key_heads, key_heads)]
    gradient = torch.randn(rows, HEADS, WIDTH).to(dtype)
    gradient[batch.cu_seqlens[-1] :] = 0.0
    return batch, taken, gradient


def found(batch: PackedBatch, taken: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return attention and its gradients."""
    out = attend(*taken, batch, 0)
    return [out.detach(), *torch.autograd.grad(out, taken, gradient)]


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of one document, with all scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    unseen = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    scores = torch.einsum("qnh,knh->nqk", q, k) * WIDTH**-0.5
    return torch.einsum("nqk,knh->qnh", F.softmax(scores.masked_fill(unseen, -torch.inf), -1), v)


@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_document_bits_are_independent_of_batch(key_heads: int) -> None:
    batch, taken, gradient = inputs(torch.float32, key_heads)
    together = found(batch, taken, gradient)
    for start, end in pairwise(batch.cu_seqlens):
        parts = [x[start:end].detach().requires_grad_() for x in taken]
        alone = found(pack([[1] * (end - start)]), parts, gradient[start:end])
        for ours, theirs in zip(alone, together, strict=True):
            assert torch.equal(ours, theirs[start:end]), end - start
    for each in together:
        assert not each[batch.cu_seqlens[-1] :].any(), "fillers"


@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_attention_and_gradients_match_fp64_torch(dtype: torch.dtype, tolerance: float, key_heads: int) -> None:
    batch, taken, gradient = inputs(dtype, key_heads)
    ours = found(batch, taken, gradient)
    for start, end in pairwise(batch.cu_seqlens):
        parts = [x[start:end].detach().double().requires_grad_() for x in taken]
        out = reference(*parts)
        theirs = [out, *torch.autograd.grad(out, parts, gradient[start:end].double())]
        for each, expected in zip(ours, theirs, strict=True):
            assert each.dtype == dtype
            torch.testing.assert_close(each[start:end].double(), expected.detach(), rtol=tolerance, atol=tolerance)


def test_dropout_drops_per_query_head() -> None:
    batch, taken, _ = inputs(torch.float32, 2)
    batch = pack([[1] * length for length in LENGTHS])
    q, k, v = (x[: len(batch.tokens_T)].detach() for x in taken)
    seeded = PackedBatch(batch.tokens_T, batch.positions_T, batch.targets_T, batch.cu_seqlens, seeds=(3,) * 10)
    dropout = Dropout(0.5, 0)
    grouped = attend(q, k, v, seeded, 0, dropout=dropout)
    expanded = attend(q, *(x.repeat_interleave(3, 1) for x in (k, v)), seeded, 0, dropout=dropout)
    assert torch.equal(grouped, expanded)
    assert not torch.equal(grouped, attend(q, k, v, batch, 0))


@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("beams", [1, 2])
def test_decoding_matches_full_attention(key_heads: int, beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode two prompts, with beams that swap and finish, and compare with one pass over each row's tokens."""
    torch.manual_seed(0)
    monkeypatch.setattr(kv_cache, "MORE_ROOM", 0)  # so that unseen slots are dropped early
    prompts, new = (4, 9), 16
    cache = KVCache()
    cache.begin(prompts, beams, CPU)
    rows = [[torch.randn(length, heads, WIDTH) for heads in (HEADS, key_heads, key_heads)] for length in prompts]
    filled = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    attend(*filled, pack([[1] * length for length in prompts], cache=cache), 0)
    rows = [row for row in rows for _ in range(beams)]
    for step in range(new):
        positions = cache.begin_decode_step(1, torch.float32)
        assert positions.flatten().tolist() == [len(row[0]) for row in rows]
        tokens = [torch.randn(len(rows), heads, WIDTH) for heads in (HEADS, key_heads, key_heads)]
        ids = torch.ones(len(rows), dtype=torch.int64)
        batch = PackedBatch(ids, ids, ids, tuple(range(len(rows) + 1)), cache, is_decode_step=True)
        out = attend(*tokens, batch, 0)
        rows = [[torch.cat((x, t[i : i + 1])) for x, t in zip(row, tokens, strict=True)] for i, row in enumerate(rows)]
        for i, row in enumerate(rows):
            torch.testing.assert_close(out[i], reference(*row)[-1], rtol=1e-6, atol=1e-6)
        order = [0, 1, 2, 3][: len(rows)]
        if step == new - 4:
            order.pop()  # a row finishes
        elif beams > 1 and len(rows) == 4 and step % 2:
            order = [1, 1, 2, 3] if step % 4 == 1 else [1, 0, 3, 2]
        cache.select(torch.tensor(order))
        rows = [rows[i] for i in order]
