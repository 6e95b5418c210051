"""Layer norm, and root-mean-square norm (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gptj_ft.models.products import some_rows


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`; on a CPU the gradients of its parameters are summed in fp32, also in half precision."""

    def forward(self, input: Tensor) -> Tensor:
        # Torch's own kernel sums them in the input's type there: 3,000 rows of ones are 256.
        is_summed_in_half = input.device.type == "cpu" and input.dtype in (torch.bfloat16, torch.float16)
        if not (is_summed_in_half and (self.weight.requires_grad or self.bias.requires_grad)):
            return super().forward(input)
        out: Tensor = _LayerNorm.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return out


class _LayerNorm(torch.autograd.Function):
    """Layer norm of the rows of a matrix; the gradients of weight and bias are fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        # Parameters in fp32 change no bit of the output, but mean and scale stay in fp32.
        out, mean, scale = torch.native_layer_norm(x, weight.shape, weight.float(), bias.float(), eps)
        ctx.save_for_backward(x, weight, mean, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, weight, mean, scale), (gradient,), of_x = ctx.saved_tensors, gradients, None
        if ctx.needs_input_grad[0]:  # as torch does with frozen parameters: freezing a norm changes no other gradient
            rounded = mean.to(x.dtype), scale.to(x.dtype)
            of_x, *_ = torch.ops.aten.native_layer_norm_backward(
                gradient, x, weight.shape, *rounded, weight, None, (True, False, False)
            )
        of_weight, of_bias = (torch.zeros_like(weight, dtype=torch.float32) for _ in range(2))
        for row_gradients, rows, means, scales in some_rows(gradient, x, mean, scale):
            wide = row_gradients.float()
            of_bias += wide.sum(0)
            of_weight += wide.mul_(rows.float().sub_(means).mul_(scales)).sum(0)
        return of_x, of_weight, of_bias, None  # autograd rounds them if the leaf's gradient is not fp32


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
