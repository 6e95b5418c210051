"""Linear layers. On a CPU, `products` multiplies. Products of weight gradients are summed in fp32.

Axis letters: T tokens, S target rows, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.models.dropout import Noise
from gptj_ft.models.products import (
    ONEDNN,
    Libraries,
    Products,
    add_product,
    has_mkl,
    has_onednn,
    input_gradient,
    multiply,
    multiply_row,
)
from gptj_ft.system.machine import bf16_unit

Kernel = Literal["training", "decoding"]
"""``training``: differentiable, the same bits for any number of tokens. ``decoding``: forward only, on a CPU faster for
few tokens, and rounds differently."""
FEW_TOKENS = 32  # up to this many, weights are the left factor
EMULATED_TOKENS = 8  # up to this many, an emulated bf16 product is faster than widening the weight
MANY_TOKENS = 128  # beyond this many, one product for several weights is no faster


class RowContext(Protocol):
    """Context of a linear layer's input rows."""

    @property
    def kernel(self) -> Kernel: ...

    @property
    def noise(self) -> Noise | None: ...


def project(
    x_TD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    kernel: Kernel,
    is_transposed: bool = False,
    products: Products = ONEDNN,
) -> Tensor:
    """Compute `torch.nn.functional.linear` with the given kernel; on a CPU by oneDNN.

    Args:
        weight: shape (output width, input width).
        bias: shape (output width,).
        is_transposed: whether ``weight`` is stored as (input width, output width).
        products: libraries of the backward pass, and the type in which training multiplies.
    """
    # Measured in fp32 (torch 2.13, 2 cores of an AMD EPYC): oneDNN's products run at 1.9 to 2.6 times the rate of MKL's
    # with AVX-512, of which MKL uses half there, and at 0.95 to 1.6 times with AVX2. In bf16, torch uses oneDNN anyway.
    # Decoding 2 to 32 tokens is 1.5 to 5 times as fast with the weights as the left factor. That order rounds
    # differently. Training does without it: forward runs twice there and must give the same bits both times.
    # In bf16 with AMX that order reads weights 1.2 to 1.5 times as fast; without AMX it is two to four times as slow.
    if not has_onednn(x_TD):
        if torch.is_grad_enabled() and weight.requires_grad and sums_products(x_TD.device, x_TD.dtype):
            summed: Tensor = _SummedProduct.apply(x_TD, weight, bias, is_transposed)  # type: ignore[no-untyped-call]
            return summed
        return F.linear(x_TD, weight.t() if is_transposed else weight, bias)
    if kernel == "training":
        out: Tensor = _Product.apply(x_TD, weight, bias, is_transposed, products.of(weight))  # type: ignore[no-untyped-call]
        return out
    if is_transposed:
        weight = weight.t()
    if x_TD.shape[0] <= FEW_TOKENS and has_fast_decoding(x_TD.dtype):
        if x_TD.shape[0] == 1 and not _is_fp32(x_TD) and has_mkl(x_TD.dtype):
            return multiply_row(x_TD, weight, bias)
        if x_TD.shape[0] > 1 and weight.is_contiguous():
            out = multiply(weight, x_TD).t().contiguous()
            return out if bias is None else out.add_(bias)
    return multiply(x_TD, weight, bias, products.widens and x_TD.shape[0] > EMULATED_TOKENS)


@lru_cache
def has_fast_decoding(dtype: torch.dtype) -> bool:
    """Tell whether this CPU multiplies few rows of a type faster by another kernel than training's."""
    return dtype == torch.float32 or bf16_unit() == "AMX"


def _is_fp32(x: Tensor) -> bool:
    return x.dtype == torch.float32


class _Product(torch.autograd.Function):
    """oneDNN product with autograd; backward multiplies with the given libraries.

    If the weight is a leaf that has a ``.grad`` already, backward adds to it by `add_product`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool, libraries: Libraries
    ) -> Tensor:
        for_x, for_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)  # frozen weight: no input needed
        ctx.leaf = (
            weight if weight.is_leaf and weight.requires_grad else None
        )  # for its .grad only: its values may have moved by then
        ctx.is_transposed, ctx.libraries = is_transposed, libraries
        return multiply(x, weight.t() if is_transposed else weight, bias, libraries.widens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, weight), (gradient,), (for_x, for_weight, for_bias, *_) = ctx.saved_tensors, gradients, ctx.needs_input_grad
        of_weight = None
        if for_weight:
            left, right = (x, gradient) if ctx.is_transposed else (gradient, x)
            if ctx.leaf is not None and ctx.leaf.grad is not None:
                add_product(ctx.leaf.grad, left, right, ctx.libraries)
            else:
                of_weight = multiply(left.t(), right.t(), widens=ctx.libraries.widens)
        of_x = None
        if for_x:
            of_x = input_gradient(gradient, weight.t() if ctx.is_transposed else weight, ctx.libraries)
        return of_x, of_weight, gradient.sum(0) if for_bias else None, None, None


@lru_cache
def sums_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether an accelerator adds a product in half precision to an fp32 matrix, by trying it.

    One kernel then adds a micro-batch's gradient of a weight or bias, unrounded. Otherwise it is rounded, stored and
    added.
    """
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        # The first caller may be in inference mode, whose tensors cannot be changed outside it.
        with torch.inference_mode(mode=False), torch.no_grad():
            ones = torch.ones(8, 8, dtype=dtype, device=device)
            add_summed(torch.ones(8, 8, device=device), ones, ones)
            add_rows(torch.ones(8, device=device), ones)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def add_summed(total_OI: Tensor, left_TO: Tensor, right_TI: Tensor) -> None:
    """Add the product of two half-precision matrices over their rows to an fp32 matrix, in one kernel."""
    torch.addmm(total_OI, left_TO.t(), right_TI, out_dtype=torch.float32, out=total_OI)


def add_rows(total_O: Tensor, rows_TO: Tensor) -> None:
    """Add all rows of a half-precision matrix to an fp32 vector, in one kernel."""
    count = len(rows_TO)
    add_summed(total_O[None], _ones(1 << (count - 1).bit_length(), rows_TO.dtype, rows_TO.device)[:count], rows_TO)


@lru_cache(maxsize=32)
def _ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.ones(count, 1, dtype=dtype, device=device)


def sum_products_into(parameter: Tensor, total: Tensor) -> None:
    """Have `project` add the gradient of a leaf to an fp32 tensor, if the device can; see `sums_products`."""
    # Not its .grad: autograd would convert other gradients of the leaf to fp32 as a whole, an embedding's, say.
    if sums_products(parameter.device, parameter.dtype):
        parameter._fp32_sum = total  # type: ignore[attr-defined]


class _SummedProduct(torch.autograd.Function):
    """Multiply in half precision; backward adds to the sums that `sum_products_into` has set for weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.leaves = weight, bias  # for their sums only: their values may have moved by then
        ctx.is_transposed = is_transposed
        return F.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, weight), (gradient,), (for_x, _, for_bias, _) = ctx.saved_tensors, gradients, ctx.needs_input_grad
        left, right = (x, gradient) if ctx.is_transposed else (gradient, x)
        of_weight = of_bias = None
        weight_sum, bias_sum = (getattr(leaf, "_fp32_sum", None) for leaf in ctx.leaves)
        if weight_sum is None:
            of_weight = left.t() @ right
        else:
            add_summed(weight_sum, left, right)
        if for_bias and bias_sum is not None:
            add_rows(bias_sum, gradient)
        elif for_bias:
            of_bias = gradient.sum(0)
        of_x = gradient @ (weight.t() if ctx.is_transposed else weight) if for_x else None
        return of_x, of_weight, of_bias, None


def project_by_all(x_TD: Tensor, linears: Sequence[Linear], rows: RowContext) -> Iterator[Tensor]:
    """Yield the outputs of several linear layers for the same inputs.

    For decoding few tokens, weights that are adjacent in memory share one product: it reads them faster.
    """
    is_plain = all(type(linear) is Linear for linear in linears)  # no adapters
    first, *others = weights = [linear.weight for linear in linears]
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    is_few = rows.kernel == "decoding" and x_TD.shape[0] <= MANY_TOKENS
    is_few = is_few and has_onednn(x_TD) and has_fast_decoding(x_TD.dtype)
    if not (is_plain and is_few and [weight.data_ptr() for weight in others] == ends[:-1]):
        yield from (linear(x_TD, rows) for linear in linears)
        return
    heights = [weight.shape[0] for weight in weights]
    # The addresses have shown that the weights are adjacent: one view covers them all.
    whole = project(x_TD, first.as_strided((sum(heights), x_TD.shape[-1]), first.stride()), None, rows.kernel)
    for part, linear in zip(whole.split_with_sizes(heights, dim=-1), linears, strict=True):
        yield part if linear.bias is None else part + linear.bias


class Linear(nn.Linear):
    """`torch.nn.Linear` through `project`."""

    products: Products = ONEDNN

    def forward(self, input: Tensor, rows: RowContext) -> Tensor:  # type: ignore[override]
        return project(input, self.weight, self.bias, rows.kernel, products=self.products)


class Conv1D(nn.Module):
    """A linear layer whose weight is stored (in, out), as in TensorFlow."""

    products: Products = ONEDNN

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.empty(num_out))

    def forward(self, x_TI: Tensor, rows: RowContext) -> Tensor:
        return project(x_TI, self.weight, self.bias, rows.kernel, is_transposed=True, products=self.products)


class TiedLinear(nn.Module):
    """A projection that shares its weight with the model's first layer, usually the embedding.

    The first layer owns the weight: it stores, updates and counts it. Here it is a buffer outside ``state_dict``, which
    the caller replaces for each run; see `layout.Layout.tied`.

    Args:
        shape: shape of the weight, (output width, input width).
    """

    weight: Tensor
    products: Products = ONEDNN

    def __init__(self, shape: tuple[int, int], source: str) -> None:
        super().__init__()
        self.source = source
        self.register_buffer("weight", torch.empty(shape), persistent=False)

    def forward(self, x: Tensor, rows: RowContext) -> Tensor:
        return project(x, self.weight, None, rows.kernel, products=self.products)


class VocabularyHead(nn.Module):
    """Final norm and projection to a vocabulary; the projection may run on some rows of its weight at a time."""

    def forward(self, x_SD: Tensor, rows: RowContext) -> Tensor:
        return self.logits(self.normed(x_SD, rows), rows)

    def normed(self, x_SD: Tensor, rows: RowContext) -> Tensor:
        """Run the norm."""
        raise NotImplementedError

    def logits(self, h_SD: Tensor, rows: RowContext) -> Tensor:
        """Run the projection; logits are fp32. The loss may overwrite them: no operation may save them."""
        raise NotImplementedError
