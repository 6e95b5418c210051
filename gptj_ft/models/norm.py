"""Root-mean-square norm (https://arxiv.org/abs/1910.07467).

Axis letters: T tokens, N heads (perhaps none), D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square, and multiply by a weight.

    Args:
        offset: 0: Llama's rule, round to the input's type, then multiply. Otherwise Gemma's: multiply by ``offset`` +
            weight in fp32, then round.
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps, self.offset)  # type: ignore[no-untyped-call]
        return out


class _RMSNorm(torch.autograd.Function):
    """RMS norm that saves only its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        normed = wide * scale
        if offset:
            return normed.mul_(weight.float() + offset).to(x.dtype)
        return normed.to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        gradient, wide = gradients[0].float(), x.float()
        product = gradient * wide
        factor = weight.float() + ctx.offset if ctx.offset else weight.float()
        of_weight = None
        if ctx.needs_input_grad[1]:
            rows = product * scale
            of_weight = rows.flatten(0, -2).sum(0).to(weight.dtype)
            rows = torch.mul(product, factor, out=rows)
        else:
            rows = product * factor  # not in place: both memories are written below
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None, None
        # d/dx of x s with s = (mean(x^2) + eps)^-1/2 is s - x s^3 mean(x .).
        shift = rows.mean(-1, keepdim=True).mul_(scale.pow(3))
        of_x = torch.mul(gradient, factor, out=rows).mul_(scale).sub_(torch.mul(wide, shift, out=product))
        return of_x.to(x.dtype), of_weight, None, None
