"""Define kernels that the CPU lacks, or that round or draw random numbers differently on a device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from support.accelerator.simulation import now
from torch import Tensor

aten = torch.ops.aten


def draws(func: Any, kwargs: dict[str, Any], index: int) -> dict[str, Any]:
    """Seed the generator of a random operation when it is issued, like Philox offsets."""
    if not _is_random(func):
        return kwargs
    if kwargs.get("generator") is not None:
        raise RuntimeError("Expected a 'sim' device type for generator but found 'cpu'")
    return {**kwargs, "generator": _generator(index)}


@lru_cache
def _is_random(func: Any) -> bool:
    takes = any(argument.name == "generator" for argument in func._schema.arguments)
    return takes or func is aten.native_dropout.default


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(now().devices[index].draw())


def _dropout(x: Tensor, p: float, train: bool | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    mask = torch.rand(x.shape, generator=generator) >= p
    return x * mask / (1 - p), mask


def _scores(
    q: Tensor, k: Tensor, start: int, end: int, scale: float, seen: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    one, two = (x[start:end].float().transpose(0, 1) for x in (q, k))
    return one, two, (one @ two.transpose(1, 2) * scale).masked_fill(~visible(end - start, seen), float("-inf"))


def seen_keys(is_causal: bool, window: Sequence[int] | None) -> tuple[int, int]:
    """Return the number of keys that a query sees before and after its own; -1: all."""
    before, after = (-1, -1) if window is None else window
    return before, 0 if is_causal else after


def visible(length: int, seen: tuple[int, int]) -> Tensor:
    """Return the mask of visible keys in a document, bool [queries, keys]."""
    mask = torch.ones(length, length, dtype=torch.bool)
    before, after = (length if keys < 0 else keys for keys in seen)
    return mask.triu(-before) & mask.tril(after)


def _per_query(x_TKH: Tensor, q_TNH: Tensor) -> Tensor:
    """Repeat key heads for the query heads that share them."""
    return x_TKH.repeat_interleave(q_TNH.shape[1] // x_TKH.shape[1], 1)


def _varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, ends_k: Any, max_q: Any, max_k: Any,
            is_causal: Any = False, scale: float | None = None, window_size: Sequence[int] | None = None,
            *rest: Any, **more: Any) -> tuple[Tensor, ...]:  # fmt: skip
    """Attend to each document separately, in fp32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = _per_query(k, q), _per_query(v, q)
    outs, logsums, seen = [], [], seen_keys(is_causal, window_size)
    for start, end in pairwise(ends.tolist()):
        scores = _scores(q, k, start, end, scale, seen)[2]
        logsums.append(scores.logsumexp(-1))
        outs.append((scores.softmax(-1) @ v[start:end].float().transpose(0, 1)).transpose(0, 1))
    return torch.cat(outs).to(q.dtype), torch.cat(logsums, dim=1), torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Tensor,
                     ends_k: Any, max_q: Any, max_k: Any, is_causal: Any, rng: Any, scale: float | None = None,
                     window_size: Sequence[int] | None = None, *rest: Any) -> tuple[Tensor, ...]:  # fmt: skip
    scale, num_key_heads = q.shape[-1] ** -0.5 if scale is None else scale, k.shape[1]
    k, v = _per_query(k, q), _per_query(v, q)
    grads, seen = [], seen_keys(is_causal, window_size)
    for start, end in pairwise(ends.tolist()):
        one, two, scores = _scores(q, k, start, end, scale, seen)
        weights, above = scores.softmax(-1), grad[start:end].float().transpose(0, 1)
        of_weights = above @ v[start:end].float().transpose(0, 1).transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        found = of_scores @ two, of_scores.transpose(1, 2) @ one, weights.transpose(1, 2) @ above
        grads.append([x.transpose(0, 1) for x in found])
    of_q, *of_keys = (torch.cat(parts) for parts in zip(*grads, strict=True))
    of_keys = [x.unflatten(1, (num_key_heads, -1)).sum(2) for x in of_keys]
    return tuple(x.to(q.dtype) for x in (of_q, *of_keys))


def _layer_norm_backward(grad: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, weight: Tensor | None,
                         bias: Tensor | None, mask: Any) -> Any:  # fmt: skip
    """Accept fp32 statistics for any input dtype, as a GPU does; the CPU wants the weights' dtype."""
    kind = x.dtype if weight is None else weight.dtype
    return aten.native_layer_norm_backward.default(grad, x, shape, mean.to(kind), rstd.to(kind), weight, bias, mask)


def _addmm(total: Tensor, one: Tensor, two: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """Add a product of half precision to an fp32 matrix without rounding it, as CUDA does."""
    return out.copy_(torch.addmm(total, one.to(out_dtype), two.to(out_dtype)))


EMULATED = {
    "aten::addmm.dtype_out": _addmm,
    "torch_attn::_varlen_attn": _varlen,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::native_dropout": _dropout,
}
