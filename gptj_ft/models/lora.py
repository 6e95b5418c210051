"""LoRA (https://arxiv.org/abs/2106.09685): the product of two narrow matrices parallel to a frozen linear layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.models.dropout import Dropout, seed_of
from gptj_ft.models.linear import Conv1D, Kernel, RowContext, project
from gptj_ft.models.registry import Architecture, Family

A, B = "lora_A", "lora_B"
ALL_LINEAR = "all-linear"  # PEFT's word for every linear layer except the head
QUERIES_AND_VALUES = ("q_proj", "v_proj", "query", "value", "c_attn", "query_key_value")  # some are fused with keys


@dataclass(frozen=True)
class Rank:
    """Rank of an adapter, and the scale of its output (alpha / rank)."""

    rank: int
    scaling: float


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
        settings = _Settings(self.scaling, rows.kernel, self.is_transposed)
        # A view made before the dropout: autograd then sums the adapter's gradient of x first, and the layer's second.
        # Another order rounds differently.
        inputs = (x.view_as(x), self.dropout(x, rows.noise))[::-1]
        out: Tensor = _Adapted.apply(*inputs, self.lora_A, self.lora_B, (self.weight, self.bias), settings)  # type: ignore[no-untyped-call]
        return out


class _Settings(NamedTuple):
    scaling: float
    kernel: Kernel
    is_transposed: bool


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
        narrow = F.linear(dropped, a) * settings.scaling
        ctx.settings = settings
        ctx.save_for_backward(dropped, a, b, narrow, frozen[0])
        return project(x, *frozen, settings.kernel, settings.is_transposed).addmm_(narrow, b.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dropped, a, b, narrow, weight), (gradient,), settings = ctx.saved_tensors, gradients, ctx.settings
        for_dropped, for_x, *_ = ctx.needs_input_grad
        of_narrow = (gradient @ b) * settings.scaling
        return (
            of_narrow @ a if for_dropped else None,
            project(gradient, weight, None, "training", not settings.is_transposed) if for_x else None,
            of_narrow.t() @ dropped,
            gradient.t() @ narrow,
            None,
            None,
        )


def widths(linear: nn.Module) -> tuple[int, int]:
    """Return the input and output width of a linear layer."""
    rows, columns = linear.get_parameter("weight").shape
    return (rows, columns) if isinstance(linear, Conv1D) else (columns, rows)


def is_transposed(architecture: Architecture, layer: int, local: str) -> bool:
    """Tell whether a linear layer's weight is stored (in, out)."""
    return isinstance(architecture.skeleton[layer].get_submodule(local), Conv1D)


def is_adapter_parameter(local: str) -> bool:
    """Tell whether a parameter, named within its layer, belongs to an adapter."""
    return local.endswith((f".{A}", f".{B}"))


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
        setattr(layers[index].get_submodule(parent), own, LoRALinear(linear, rank, Dropout(dropout, index, local)))
    return layers


def initialise(name: str, view: Tensor, key: tuple[object, ...]) -> None:
    """Initialise an adapter's matrix like PEFT: A like a new linear layer's weight, B zeros.

    Args:
        view: memory of the matrix.
        key: key of the random numbers.
    """
    if name.endswith(B):
        view.zero_()
        return
    values = torch.empty(view.shape)
    nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed_of((*key, name))))
    view.copy_(values)


def name_of(family: Family, layer: int, local: str, num_layers: int) -> str:
    """Return the file name of a layer's parameter: Hugging Face's, or PEFT's for an adapter's matrix."""
    if not is_adapter_parameter(local):
        return family.name_of(layer, local, num_layers)
    module, _, matrix = local.rpartition(".")
    return f"{family.name_of(layer, f'{module}.weight', num_layers).removesuffix('.weight')}.{matrix}.weight"
