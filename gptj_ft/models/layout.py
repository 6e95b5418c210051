"""Lay out the parameters of a layer in flat tensors, and find parameters shared between layers."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from gptj_ft.models.linear import TiedLinear

Kind = Literal["weight", "master", "exp_avg", "exp_avg_sq", "grad", "frozen", "boundary"]
FROZEN: Kind = "frozen"
MOMENTS: tuple[Kind, Kind] = ("exp_avg", "exp_avg_sq")
PARAMETER_ALIGNMENT = 32  # elements: 64 bytes in bf16, a cache line and the widest vector register
FLAT_ALIGNMENT = 2048  # elements: a 4096-byte page in bf16, so that kinds in a file start on page boundaries
TIED_SOURCE_LAYER = 0  # the embedding: other layers may be tied to its parameters


class TiedParameter(NamedTuple):
    """A parameter of the first layer that another layer computes with too."""

    source: str  # its name in the first layer
    shape: torch.Size


@dataclass(frozen=True)
class Layout:
    """Offsets of a layer's parameters in its flat tensors, in elements.

    Matrices come first: weight decay applies to ``flat[:num_decayed]`` and to nothing else (biases, norms, padding).
    A tied parameter is not part of its layer's tensors: the first layer stores, updates and checksums it.
    """

    shapes: Mapping[str, torch.Size]
    offsets: Mapping[str, int]
    num_decayed: int
    numel: int
    tied: Mapping[str, TiedParameter] = field(default_factory=dict)
    copied: frozenset[str] = frozenset()
    """names of tied parameters copied into this layer; allowed only for frozen ones"""

    def __hash__(self) -> int:
        return hash((self.numel, self.num_decayed, tuple(self.shapes)))  # the hashable part of what __eq__ compares

    @classmethod
    def of(cls, layer: nn.Module, names: Container[str] | None = None, copies: bool = False) -> Layout:
        """Lay out a layer's parameters.

        Args:
            names: parameters to include; ``None``: all.
            copies: whether tied parameters get a place in this layer too.
        """
        ties = {name: tie for name, tie in tied_parameters(layer).items() if names is None or name in names}
        shapes = {
            name: parameter.shape for name, parameter in layer.named_parameters() if names is None or name in names
        }
        if copies:
            shapes |= {name: tie.shape for name, tie in ties.items()}
        offsets, offset, num_decayed = {}, 0, 0
        adjacent = getattr(layer, "adjacent", ())
        # Matrices first, adjacent ones at the start; the sort is stable and keeps the layer's order otherwise.
        for name in sorted(shapes, key=lambda name: (len(shapes[name]) < 2, name not in adjacent)):
            offsets[name] = offset
            offset = _round_up(offset + shapes[name].numel(), PARAMETER_ALIGNMENT)
            if len(shapes[name]) >= 2:
                num_decayed = offset
        numel = _round_up(offset, FLAT_ALIGNMENT)
        return cls(shapes, offsets, num_decayed, numel, {} if copies else ties, frozenset(ties if copies else ()))

    @cached_property
    def num_parameters(self) -> int:
        return sum(shape.numel() for name, shape in self.shapes.items() if name not in self.copied)

    @cached_property
    def used_shapes(self) -> dict[str, torch.Size]:
        """Shapes of all parameters that the layer computes with, tied ones included."""
        return {**self.shapes, **{name: tie.shape for name, tie in self.tied.items()}}

    @cached_property
    def num_used(self) -> int:
        return sum(shape.numel() for shape in self.used_shapes.values())

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each parameter as a view of a flat tensor."""
        return {
            name: flat[self.offsets[name] : self.offsets[name] + shape.numel()].view(shape)
            for name, shape in self.shapes.items()
        }


def tied_parameters(layer: nn.Module) -> dict[str, TiedParameter]:
    """Find the parameters of a layer that are tied to the first layer's."""
    return {
        f"{path}.weight": TiedParameter(module.source, module.weight.shape)
        for path, module in layer.named_modules()
        if isinstance(module, TiedLinear)
    }


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


NO_PARAMETERS = Layout({}, {}, 0, 0)
