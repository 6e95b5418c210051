"""LoRA (https://arxiv.org/abs/2106.09685): the product of two narrow matrices parallel to a frozen linear layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.models.dropout import Dropout, seed_of
from gptj_ft.models.linear import Conv1D, RowContext, project
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
        # Keep this order: autograd sums the gradients of x in reverse, and another order rounds differently.
        output = project(x, self.weight, self.bias, rows.kernel, self.is_transposed)
        narrow = F.linear(self.dropout(x, rows.noise), self.lora_A)
        return output + F.linear(narrow, self.lora_B) * self.scaling


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
