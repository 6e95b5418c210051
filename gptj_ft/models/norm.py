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
        factor = weight.float() + ctx.offset
        of_x = gradient * factor
        # d/dx of x s with s = (mean(x^2) + eps)^-1/2 is s - x s^3 mean(x .).
        product = of_x * wide
        shift = product.mean(-1, keepdim=True).mul_(scale.pow(3))
        of_weight = None
        if ctx.needs_input_grad[1]:
            torch.mul(gradient, wide, out=product).mul_(scale)
            of_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        of_x.mul_(scale).addcmul_(wide, shift, value=-1)
        return of_x.to(x.dtype), of_weight, None, None
