"""Adapters of frozen linear layers: LoRA and DoRA.

LoRA (https://arxiv.org/abs/2106.09685) adds the product of two narrow matrices to a weight: W + s B A. DoRA
(https://arxiv.org/abs/2402.09353) trains the norm of each row of this sum apart, as PEFT does: y = m z / n + bias with
z = (W + s B A) x and n = ||W + s B A||, the norm of each row, treated as a constant by autograd.

Axis letters: T tokens, I input width, O output width, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.models.dropout import Dropout, seed_of
from gptj_ft.models.linear import Conv1D, Kernel, RowContext, project
from gptj_ft.models.products import ONEDNN, Products, input_gradient, some_rows
from gptj_ft.models.registry import Architecture, Family

A, B = "lora_A", "lora_B"
MAGNITUDE = "lora_magnitude_vector"
GAIN = "lora_gain"
SMALLEST = torch.finfo(torch.float32).tiny  # limit of norms and their squares: a row of zeros gives zeros, not 0 / 0
TILE_NUMEL = 1 << 18  # elements of a weight whose norms a CPU computes at once; they stay in its cache
ALL_LINEAR = "all-linear"  # PEFT's word for every linear layer except the head
QUERIES_AND_VALUES = ("q_proj", "v_proj", "query", "value", "c_attn", "query_key_value")  # some are fused with keys


@dataclass(frozen=True)
class Rank:
    """Rank of an adapter, the scale of its output (alpha / rank), and its magnitude."""

    rank: int
    scaling: float
    magnitude: Literal["trained", "fixed"] | None = None
    """None: LoRA; else DoRA, in training or for inference"""


class LoRALinear(nn.Module):
    """Add ``scaling * B(A(dropout(x)))`` to a linear layer.

    Weight and bias keep their names; the two narrow matrices are additional parameters.

    Args:
        linear: layer to build from, `Linear` or `Conv1D`.
        rank: inner width and scaling.
        dropout: dropout of the inputs of ``lora_A``.
    """

    weight: Tensor
    bias: Tensor | None
    products: Products = ONEDNN

    def __init__(self, linear: nn.Module, rank: Rank, dropout: Dropout) -> None:
        super().__init__()
        width, height = widths(linear)
        self.scaling, self.dropout, self.is_transposed = rank.scaling, dropout, isinstance(linear, Conv1D)
        # Same names as before, so that the base model's tensors still fit.
        for name, parameter in linear.named_parameters():
            self.register_parameter(name, parameter)
        if "bias" not in self._parameters:
            self.register_parameter("bias", None)
        self.lora_A = nn.Parameter(torch.empty(rank.rank, width, device="meta"))
        self.lora_B = nn.Parameter(torch.empty(height, rank.rank, device="meta"))

    def forward(self, x: Tensor, rows: RowContext) -> Tensor:
        # A view made before the dropout: autograd then sums the adapter's gradient of x first, and the layer's second.
        # Another order rounds differently.
        inputs = (x.view_as(x), self.dropout(x, rows.noise))[::-1]
        return self.sum_of_products(*inputs, self.bias, rows)

    def sum_of_products(self, dropped: Tensor, x: Tensor, bias: Tensor | None, rows: RowContext) -> Tensor:
        """Compute ``W x + scaling * B A dropped + bias``."""
        settings = _Settings(self.scaling, rows.kernel, self.is_transposed, self.products)
        out: Tensor = _Adapted.apply(dropped, x, self.lora_A, self.lora_B, (self.weight, bias), settings)  # type: ignore[no-untyped-call]
        return out


class _Settings(NamedTuple):
    scaling: float
    kernel: Kernel
    is_transposed: bool
    products: Products

    def widens(self, x: Tensor) -> bool:
        """Tell whether products with these rows are computed in fp32."""
        return self.products.widens and self.kernel == "training" and x.dtype == torch.bfloat16


class _Adapted(torch.autograd.Function):
    """Frozen linear layer plus adapter: ``x W + dropped A B``, scaled.

    The adapter's product is added in place, and the narrow matrix is scaled instead of the wide one: with a rank of
    16, passes over the output take longer than the products.
    """

    @staticmethod
    def forward(
        ctx: Any, dropped: Tensor, x: Tensor, a: Tensor, b: Tensor, frozen: tuple[Tensor, Tensor | None],
        settings: _Settings,
    ) -> Tensor:  # fmt: skip
        ctx.settings = settings
        out = project(x, *frozen, settings.kernel, settings.is_transposed, settings.products)
        if settings.widens(x):
            narrow = x.new_empty(len(x), len(a))
            _add_widened(out, dropped, narrow, a, b, settings.scaling)
        else:
            narrow = F.linear(dropped, a) * settings.scaling
            out.addmm_(narrow, b.t())
        ctx.save_for_backward(dropped, a, b, narrow, frozen[0])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dropped, a, b, narrow, weight), (gradient,), settings = ctx.saved_tensors, gradients, ctx.settings
        for_dropped, for_x, *_ = ctx.needs_input_grad
        of_x = None
        if for_x:
            weight_OI = weight.t() if settings.is_transposed else weight
            of_x = input_gradient(gradient, weight_OI, settings.products.of(weight))
        if settings.widens(gradient):
            of_dropped, of_a, of_b = _widened_gradients(gradient, dropped, narrow, a, b, settings.scaling)
            return of_dropped, of_x, of_a, of_b, None, None
        of_narrow = (gradient @ b) * settings.scaling
        return (
            of_narrow @ a if for_dropped else None,
            of_x,
            of_narrow.t() @ dropped,
            gradient.t() @ narrow,
            None,
            None,
        )


def _add_widened(
    out_TO: Tensor, dropped_TI: Tensor, narrow_TR: Tensor, a_RI: Tensor, b_OR: Tensor, scaling: float
) -> None:
    """Add an adapter's bf16 output, multiplied in fp32; write the narrow matrix between its two products."""
    a_RI, b_OR = a_RI.float() * scaling, b_OR.float()
    for out, dropped, narrow in some_rows(out_TO, dropped_TI, narrow_TR):
        narrow.copy_(dropped.float() @ a_RI.t())
        out.add_(narrow.float() @ b_OR.t())


def _widened_gradients(
    gradient_TO: Tensor, dropped_TI: Tensor, narrow_TR: Tensor, a_RI: Tensor, b_OR: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute an adapter's bf16 gradients in fp32: of its input, of A, of B."""
    of_dropped_TI, dtype = torch.empty_like(dropped_TI), a_RI.dtype
    a_RI, b_OR = a_RI.float() * scaling, b_OR.float()
    of_a_RI, of_b_OR = torch.zeros_like(a_RI), torch.zeros_like(b_OR)
    for gradient, dropped, narrow, of_dropped in some_rows(gradient_TO, dropped_TI, narrow_TR, of_dropped_TI):
        wide = gradient.float()
        of_narrow = wide @ b_OR
        of_dropped.copy_(of_narrow @ a_RI)
        of_a_RI.addmm_(of_narrow.t(), dropped.float(), alpha=scaling)
        of_b_OR.addmm_(wide.t(), narrow.float())
    return of_dropped_TI, of_a_RI.to(dtype), of_b_OR.to(dtype)


class DoRALinear(LoRALinear):
    """Linear layer with a DoRA adapter, for training.

    ``lora_magnitude_vector`` holds m - ||W||, the difference of the magnitude from the norms of the frozen weight.
    Gradients and Adam's updates are the same for both. Rounding m itself to bf16 would be coarser than most updates,
    and a new adapter would change the model.
    """

    def __init__(self, linear: nn.Module, rank: Rank, dropout: Dropout) -> None:
        super().__init__(linear, rank, dropout)
        self.lora_magnitude_vector = nn.Parameter(torch.empty(len(self.lora_B), device="meta"))

    def forward(self, x: Tensor, rows: RowContext) -> Tensor:
        dropped = self.dropout(x, rows.noise)
        z = self.sum_of_products(dropped.view_as(dropped), dropped, None, rows)
        out: Tensor = _Rescaled.apply(z, self.lora_magnitude_vector, self._norms())  # type: ignore[no-untyped-call]
        if dropped is not x:
            # For dropped inputs x', PEFT adds m z / n - W x' to W x.
            change = project(x - dropped, self.weight, self.bias, rows.kernel, self.is_transposed, self.products)
            return out.add_(change)
        return out if self.bias is None else out.add_(self.bias)

    @torch.no_grad()
    def _norms(self) -> tuple[Tensor, Tensor]:
        """Return ||W|| and ||W + s B A|| of each row, fp32 [O]; the same bits while B is zero."""
        # By ||W||^2 + 2 s <W, B A> + s^2 ||B A||^2, each term from products of rank R. PEFT's sum W + s B A is a second
        # matrix, and takes 5 times as long even in tiles: 18 ms instead of 3 with 4096 x 2048 and rank 16, where the
        # product with 512 tokens takes 24. The norms agree within 1e-6, unless the adapter cancels a row of W.
        a_RI, b_OR, scaling = self.lora_A, self.lora_B, self.scaling
        of_weight = row_norms(self.weight, self.is_transposed).square_()
        both_OR = project(a_RI, self.weight, None, "training", self.is_transposed, self.products).t()
        cross = (both_OR * b_OR).sum(1, dtype=torch.float32)
        a32_RI, b32_OR = a_RI.float(), b_OR.float()
        of_change = (b32_OR @ (a32_RI @ a32_RI.t()) * b32_OR).sum(1)
        of_sum = of_weight + (2 * scaling * cross + scaling**2 * of_change)
        return of_weight.sqrt_(), of_sum.clamp_min_(SMALLEST).sqrt_()


class FixedDoRALinear(LoRALinear):
    """Linear layer with a DoRA adapter, for inference: ``lora_gain`` holds m / ||W + s B A|| - 1."""

    def __init__(self, linear: nn.Module, rank: Rank, dropout: Dropout) -> None:
        super().__init__(linear, rank, dropout)
        self.lora_gain = nn.Parameter(torch.empty(len(self.lora_B), device="meta"))

    def forward(self, x: Tensor, rows: RowContext) -> Tensor:
        z = self.sum_of_products(x, x, None, rows)
        out = torch.addcmul(z, z, self.lora_gain)
        return out if self.bias is None else out.add_(self.bias)


class _Rescaled(torch.autograd.Function):
    """Scale outputs z by m / n; keeps z, and recomputes no product for the magnitude's gradient."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, difference: Tensor, norms: tuple[Tensor, Tensor]) -> Tensor:
        of_weight, of_sum = norms
        # m / n - 1 instead of m / n: its rounding to bf16 is small against 1.
        gain = ((of_weight - of_sum + difference) / of_sum).to(z.dtype)
        ctx.save_for_backward(z, gain, of_sum)
        return torch.addcmul(z, z, gain)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (z, gain, of_sum), (gradient,) = ctx.saved_tensors, gradients
        of_magnitude = (gradient * z).sum(0, dtype=torch.float32) / of_sum
        return torch.addcmul(gradient, gradient, gain), of_magnitude.to(gradient.dtype), None


def row_norms(weight: Tensor, is_transposed: bool) -> Tensor:
    """Return the fp32 norms of a weight's rows, [O]; of its columns if it is stored (in, out)."""
    if weight.device.type != "cpu":
        norms: Tensor = torch.linalg.vector_norm(weight, dim=0 if is_transposed else 1, dtype=torch.float32)
        return norms
    # In tiles. On a CPU, torch's norm along columns takes 15 times as long, and in bf16 it converts the whole weight.
    tiles = torch.split(weight, max(1, TILE_NUMEL // weight.shape[1]))
    if not is_transposed:
        return torch.cat([torch.linalg.vector_norm(tile.float(), dim=1) for tile in tiles])
    total = torch.zeros(weight.shape[1])
    for tile in tiles:
        total += tile.float().square().sum(0)
    return total.sqrt_()


LAYERS = {None: LoRALinear, "trained": DoRALinear, "fixed": FixedDoRALinear}


def widths(linear: nn.Module) -> tuple[int, int]:
    """Return the input and output width of a linear layer."""
    rows, columns = linear.get_parameter("weight").shape
    return (rows, columns) if isinstance(linear, Conv1D) else (columns, rows)


def is_transposed(architecture: Architecture, layer: int, local: str) -> bool:
    """Tell whether a linear layer's weight is stored (in, out)."""
    return isinstance(architecture.skeleton[layer].get_submodule(local), Conv1D)


def transposed_parameters(architecture: Architecture) -> frozenset[str]:
    """Return the weights that are stored (in, out), by Hugging Face's names."""
    return frozenset(
        f"{name}.weight" for name, place in linear_layers(architecture).items() if is_transposed(architecture, *place)
    )


def is_adapter_parameter(local: str) -> bool:
    """Tell whether a parameter, named within its layer, belongs to an adapter."""
    return local.endswith((f".{A}", f".{B}", f".{MAGNITUDE}", f".{GAIN}"))


def linear_layers(architecture: Architecture) -> dict[str, tuple[int, str]]:
    """Return the modules that can have an adapter: Hugging Face's name -> (layer, name inside it)."""
    layers = architecture.skeleton
    return {
        architecture.family.name_of(index, f"{local}.weight", len(layers)).removesuffix(".weight"): (index, local)
        for index, layer in enumerate(layers)
        for local, module in layer.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


def targets_in(architecture: Architecture) -> dict[str, tuple[int, str]]:
    """Return the linear layers that can get adapters, without those trained in full."""
    whole = architecture.trained_whole
    return {name: place for name, place in linear_layers(architecture).items() if f"{name}.weight" not in whole}


def in_blocks(architecture: Architecture) -> list[str]:
    """Return the linear layers of the blocks, without those trained in full."""
    last = len(architecture.skeleton) - 1
    return [name for name, (layer, _) in targets_in(architecture).items() if 0 < layer < last]


def adapted_layers(architecture: Architecture, adapters: Mapping[str, Rank], dropout: float = 0.0) -> list[nn.Module]:
    """Build a model's layers with adapters.

    Args:
        adapters: linear layers with an adapter, by Hugging Face's names.
        dropout: dropout rate of the adapters' inputs.
    """
    layers, modules = architecture.layers(), linear_layers(architecture)
    for name, rank in adapters.items():
        index, local = modules[name]
        parent, _, own = local.rpartition(".")
        linear = layers[index].get_submodule(local)
        setattr(
            layers[index].get_submodule(parent),
            own,
            LAYERS[rank.magnitude](linear, rank, Dropout(dropout, index, local)),
        )
    return layers


def initialise(name: str, view: Tensor, key: tuple[object, ...]) -> None:
    """Initialise a parameter of an adapter like PEFT: A like a new linear layer's weight; B and `DoRALinear` zeros.

    Args:
        view: memory of the parameter.
        key: key of the random numbers.
    """
    if name.endswith((B, MAGNITUDE)):
        view.zero_()
        return
    values = torch.empty(view.shape)
    nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed_of((*key, name))))
    view.copy_(values)


def name_of(family: Family, layer: int, local: str, num_layers: int) -> str:
    """Return the file name of a layer's parameter: Hugging Face's, or PEFT's for an adapter's."""
    if not is_adapter_parameter(local):
        return family.name_of(layer, local, num_layers)
    module, _, part = local.rpartition(".")
    return file_name(family.name_of(layer, f"{module}.weight", num_layers).removesuffix(".weight"), part)


def file_name(module: str, part: str) -> str:
    """Return PEFT's name of a parameter of an adapter, without PEFT's prefix."""
    return f"{module}.{part}" if part == MAGNITUDE else f"{module}.{part}.weight"
