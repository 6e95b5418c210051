"""Causal attention within one document, by chunks of queries: grouped heads, sliding windows, capped scores.

Each chunk reads only the keys that one of its queries sees. Scores exist for one chunk at a time; the backward pass
computes them again.

Axis letters: L tokens of a document, C queries of a chunk, S keys that they see, N query heads, K key heads, R = N / K
query heads of a key head, H head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Measured, forward and backward of 300 tokens, one thread of an AMD EPYC with AVX-512, beside torch's fused kernel: 5.3
# and 8.1 ms with 9/3 heads of 64, 18.0 and 29.4 with 32/8 of 64, 20.1 and 28.8 with 16/8 of 128; documents of 2,048
# tokens take as long as in the fused kernel. One thread takes as long with 16 to 64 queries; two threads take a tenth
# longer with 32, whose products are small. One product for all documents was slower: it leaves the caches.
CPU_CHUNK = 64
ACCELERATOR_CHUNK = 256  # fewer, larger kernels


@dataclass(frozen=True)
class ScoreRule:
    """Computation of attention scores from queries and keys."""

    scale: float
    window: int | None = None  # keys that a query sees, its own included; None: all earlier ones
    cap: float | None = None  # scores become ``cap * tanh(score / cap)``, as in Gemma 2

    @property
    def factor(self) -> float:
        """Factor of the queries, before the tanh if scores are capped."""
        return self.scale if self.cap is None else self.scale / self.cap

    def is_windowed(self, length: int) -> bool:
        """Tell whether the window hides keys in a document of this length."""
        return self.window is not None and length > self.window


@dataclass(frozen=True)
class _Chunk:
    start: int  # first query
    end: int  # of queries and keys
    first_key: int


def _chunks(length: int, rule: ScoreRule, device: torch.device) -> Iterator[_Chunk]:
    """Yield the chunks of a document; they depend on nothing else, so its bits are the same in every batch."""
    size = CPU_CHUNK if device.type == "cpu" else ACCELERATOR_CHUNK
    for start in range(0, length, size):
        yield _Chunk(start, min(start + size, length), max(0, start + 1 - (rule.window or length)))


@lru_cache(maxsize=16)
def _triangle(count: int, diagonal: int, is_upper: bool, device: torch.device) -> Tensor:
    """Return -inf above or below a diagonal, zero elsewhere, fp32 [count, 1, count]."""
    with torch.inference_mode(mode=False):
        full = torch.full((count, count), -math.inf, device=device)
        return (full.triu(diagonal) if is_upper else full.tril(diagonal))[:, None]


def _weights(queries: Tensor, keys: Tensor, chunk: _Chunk, rule: ScoreRule) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's attention weights, fp32 [K, C R, S], and the tanh of its scores if they are capped.

    Args:
        queries: scaled by `ScoreRule.factor`, [K, C R, H].
        keys: [K, S, H].
    """
    scores, tanh = torch.bmm(queries, keys.transpose(1, 2)).float(), None
    if rule.cap is not None:
        tanh = scores.tanh_()
        scores = tanh * rule.cap
    count = chunk.end - chunk.start
    scores_KCRS = scores.view(len(scores), count, -1, scores.shape[-1])
    # The last C keys are those of the queries: each sees the earlier ones and its own.
    scores_KCRS[..., -count:].add_(_triangle(count, 1, True, scores.device))
    if rule.window is not None:
        # Windows begin one key later for each query. Near the document's start they begin before the first key.
        later = chunk.first_key - (chunk.start + 1 - rule.window)
        if later < count - 1:
            scores_KCRS[..., :count].add_(_triangle(count, -1 - later, False, scores.device))
    return torch.softmax(scores, -1), tanh


def _queries(q_LKRH: Tensor, chunk: _Chunk, dtype: torch.dtype, factor: float) -> Tensor:
    """Copy a chunk's queries, scaled, [K, C R, H]: the query heads of a key head become further queries."""
    part_KCRH = q_LKRH[chunk.start : chunk.end].transpose(0, 1).to(dtype)
    out = torch.empty(part_KCRH.shape, dtype=dtype, device=q_LKRH.device)
    return torch.mul(part_KCRH, factor, out=out).flatten(1, 2)


def _write(x_CKRH: Tensor, result: Tensor) -> None:
    """Write a chunk's rows, the inverse of `_queries`."""
    x_KCRH = x_CKRH.transpose(0, 1)
    x_KCRH.copy_(result.view(x_KCRH.shape))


def _by_key_head(x_LNH: Tensor, num_key_heads: int) -> Tensor:
    length, heads, width = x_LNH.shape
    return x_LNH.view(length, num_key_heads, heads // num_key_heads, width)


def attend_forward(out: Tensor, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, dtype: torch.dtype) -> None:
    """Write the attention of one document into ``out``.

    Args:
        out, q: [L, N, H].
        k, v: [L, K, H].
        dtype: type of the products; the softmax is in fp32.
    """
    keys, values = (x.transpose(0, 1).to(dtype) for x in (k, v))
    q_LKRH, out_LKRH = (_by_key_head(x, len(keys)) for x in (q, out))
    for chunk in _chunks(len(q), rule, q.device):
        seen, rows = slice(chunk.first_key, chunk.end), slice(chunk.start, chunk.end)
        weights, _ = _weights(_queries(q_LKRH, chunk, dtype, rule.factor), keys[:, seen], chunk, rule)
        _write(out_LKRH[rows], torch.bmm(weights.to(dtype), values[:, seen]))


def attend_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    rule: ScoreRule,
    dtype: torch.dtype,
) -> None:
    """Write the gradients of one document's queries, keys and values.

    Args:
        gradients: tensors for the gradients of q, k and v, to be written.
        inputs: gradient of the output, q, k, v, output.
    """
    (dq, dk, dv), (dout, q, k, v, out) = gradients, inputs
    keys, values = (x.transpose(0, 1).to(dtype) for x in (k, v))
    key_sum, value_sum = (torch.zeros(keys.shape, dtype=torch.float32, device=q.device) for _ in range(2))
    q_LKRH, dq_LKRH, dout_LKRH, out_LKRH = (_by_key_head(x, len(keys)) for x in (q, dq, dout, out))
    for chunk in _chunks(len(q), rule, q.device):
        seen, rows = slice(chunk.first_key, chunk.end), slice(chunk.start, chunk.end)
        queries = _queries(q_LKRH, chunk, dtype, rule.factor)
        weights, tanh = _weights(queries, keys[:, seen], chunk, rule)
        received = _queries(dout_LKRH, chunk, dtype, 1.0)
        _accumulate(value_sum[:, seen], weights.to(dtype), received)
        dweights = torch.bmm(received, values[:, seen].transpose(1, 2)).float()
        # Softmax backward: each row's mean of dweights, weighted, is the product of the output and its gradient.
        # `torch._softmax_backward_data` would give other bits with another number of threads.
        mean = (received * _queries(out_LKRH, chunk, dtype, 1.0)).float().sum(-1, keepdim=True)
        dscores = dweights.sub_(mean).mul_(weights)
        if tanh is not None and rule.cap is not None:
            dscores.mul_(tanh.square_().sub_(1.0).mul_(-rule.cap))
        dscores = dscores.to(dtype)
        _write(dq_LKRH[rows], torch.bmm(dscores, keys[:, seen]).mul_(rule.factor))
        _accumulate(key_sum[:, seen], dscores, queries)
    dk.copy_(key_sum.transpose(0, 1))
    dv.copy_(value_sum.transpose(0, 1))


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left.T @ right`` to fp32 sums."""
    if left.dtype == torch.float32:
        total.baddbmm_(left.transpose(1, 2), right)
    else:
        total += torch.bmm(left.transpose(1, 2), right)
