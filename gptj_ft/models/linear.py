"""Linear layers, and their products: by the BLAS in training, by oneDNN for the few tokens of decoding.

Axis letters: T tokens, D their width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.models.dropout import Noise

Kernel = Literal["training", "decoding"]
"""Which product computes: the BLAS always, or one that is faster for few tokens on a CPU and rounds differently."""
FEW_TOKENS = 32  # for fewer, weights are better on the left of a product
MANY_TOKENS = 128  # for more, the BLAS is as fast


class RowContext(Protocol):
    """What a linear layer is told of the rows that it computes: how, and the random numbers of dropout."""

    @property
    def kernel(self) -> Kernel: ...

    @property
    def noise(self) -> Noise | None: ...


def project(x_TD: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel) -> Tensor:
    """Compute `torch.nn.functional.linear`; decoding on a CPU, by oneDNN rather than by the BLAS.

    Measured (torch 2.13 with MKL, 2 cores with AVX2): one token reads the weights 1.4 to 1.9 times as fast, as fast as
    they can be read; 2 to 32, with weights on the left, 1.5 to 5 times; up to 128, 0.9 to 1.7 times. It rounds
    differently, so training, which runs forward twice, does without.
    """
    if kernel == "training" or x_TD.shape[0] > MANY_TOKENS or not has_onednn(x_TD):
        return F.linear(x_TD, weight, bias)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    if 1 < x_TD.shape[0] <= FEW_TOKENS and weight.is_contiguous():
        out: Tensor = multiply(weight, x_TD, None, "none", [], "").t().contiguous()
        return out if bias is None else out.add_(bias)
    out = multiply(x_TD, weight, bias, "none", [], "")
    return out


def has_onednn(x_TD: Tensor) -> bool:
    """Tell whether oneDNN has products for them: in fp32, on a CPU."""
    is_kind = x_TD.device.type == "cpu" and x_TD.dtype == torch.float32
    return is_kind and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def project_by_all(x_TD: Tensor, linears: Sequence[Linear], rows: RowContext) -> Iterator[Tensor]:
    """Yield the outputs of several linear layers for the same inputs, in one product where that is faster.

    One product where few tokens are decoded and the weights lie side by side: they are read faster together.
    """
    is_plain = all(type(linear) is Linear for linear in linears)  # no adapters
    first, *others = weights = [linear.weight for linear in linears]
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    is_few = rows.kernel == "decoding" and x_TD.shape[0] <= MANY_TOKENS and has_onednn(x_TD)
    if not (is_plain and is_few and [weight.data_ptr() for weight in others] == ends[:-1]):
        yield from (linear(x_TD, rows) for linear in linears)
        return
    heights = [weight.shape[0] for weight in weights]
    whole = project(x_TD, first.as_strided((sum(heights), x_TD.shape[-1]), first.stride()), None, rows.kernel)
    for part, linear in zip(whole.split_with_sizes(heights, dim=-1), linears, strict=True):
        yield part if linear.bias is None else part + linear.bias


class Linear(nn.Linear):
    """`torch.nn.Linear` by way of `project`."""

    def forward(self, input: Tensor, rows: RowContext) -> Tensor:  # type: ignore[override]
        return project(input, self.weight, self.bias, rows.kernel)


class OneDNNLinear(Linear):
    """`Linear` whose products are oneDNN's in training, too, by way of `project_by_onednn`."""

    def forward(self, input: Tensor, rows: RowContext) -> Tensor:  # type: ignore[override]
        return project_by_onednn(input, self.weight, self.bias)


def project_by_onednn(x_TD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `torch.nn.functional.linear`, in fp32 on a CPU by oneDNN, forward and backward.

    Measured (torch 2.13, whose MKL uses AVX2 on an AMD EPYC with AVX-512; 430 and 2048 tokens, widths 384 to 3072): 1.8
    to 2.4 times the rate of the BLAS. A number of tokens that was not met before costs half a millisecond a shape.
    """
    if not has_onednn(x_TD):
        return F.linear(x_TD, weight, bias)
    out: Tensor = _OneDNNProduct.apply(x_TD, weight, bias)  # type: ignore[no-untyped-call]
    return out


class _OneDNNProduct(torch.autograd.Function):
    """oneDNN's product, and those of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        multiply = torch.ops.mkldnn._linear_pointwise.default
        (x, weight), (gradient,), (for_x, for_weight, for_bias) = ctx.saved_tensors, gradients, ctx.needs_input_grad
        return (
            multiply(gradient, weight.t(), None, "none", [], "") if for_x else None,
            multiply(gradient.t(), x.t(), None, "none", [], "") if for_weight else None,
            gradient.sum(0) if for_bias else None,
        )


class Conv1D(nn.Module):
    """A linear layer whose weight is stored (in, out), as TensorFlow did."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.empty(num_out))

    def forward(self, x_TI: Tensor, rows: RowContext) -> Tensor:
        return project(x_TI, self.weight.t(), self.bias, rows.kernel)


class TiedLinear(nn.Module):
    """A projection whose weight is a parameter of the model's first layer: its transposed embedding, say.

    The weight is a buffer, and in no ``state_dict``: it is stored, updated and counted where it belongs. Whoever runs
    the layer hands it in; see `stores.Layout.tied`.

    Args:
        shape: shape of the weight, (output width, input width).
        source: name of the weight in the first layer.
    """

    weight: Tensor

    def __init__(self, shape: tuple[int, int], source: str) -> None:
        super().__init__()
        self.source = source
        self.register_buffer("weight", torch.empty(shape), persistent=False)

    def forward(self, x: Tensor, rows: RowContext) -> Tensor:
        return project(x, self.weight, None, rows.kernel)
