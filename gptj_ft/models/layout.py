"""Lay out the parameters of a layer in flat tensors, and find parameters shared between layers."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from gptj_ft.models.linear import TiedLinear

Kind = Literal["weight", "master", "low_bits", "exp_avg", "exp_avg_sq", "grad", "frozen", "boundary"]
FROZEN: Kind = "frozen"
MOMENTS: tuple[Kind, Kind] = ("exp_avg", "exp_avg_sq")
PARAMETER_ALIGNMENT = 32  # elements: 64 bytes in bf16, a cache line and the widest vector register
FLAT_ALIGNMENT = 2048  # elements: a 4096-byte page in bf16, so that kinds in a file start on page boundaries
# A matrix with more rows is a vocabulary: labels are fewer (`supported.MOST_LABELS`). Its gradient is summed in tiles
# of rows, because its fp32 sum would be as large as several blocks.
MOST_WHOLE_ROWS, TILE_ROWS = 100_000, 16_384
TILE_ALIGNMENT = 1 << 22  # elements: stores write in chunks of this size
TIED_SOURCE_LAYER = 0  # the embedding: other layers may be tied to its parameters


class TiedParameter(NamedTuple):
    """A parameter of the first layer that another layer computes with too."""

    source: str  # its name in the first layer
    shape: torch.Size


class StoredSize(NamedTuple):
    """Size of a layer's frozen weights in a model's files."""

    num_bytes: int
    codes: int = 0  # bytes of the quantized matrices among them
    quantized: int = 0  # elements of these matrices


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
    stored: StoredSize | None = None  # size in the model's files; None: not known

    @property
    def is_quantized(self) -> bool:
        """Whether matrices are quantized in the model's files."""
        return self.stored is not None and self.stored.quantized > 0

    def bytes_in(self, place: str, dtype: torch.dtype) -> int:
        """Return the bytes of the layer's frozen weights: on disk as in the files, in host memory as codes.

        Args:
            dtype: type of the computation, that of all other weights in memory.
        """
        if place == "disk" and self.stored is not None:
            return self.stored.num_bytes
        if place == "host" and self.stored is not None:
            return self.stored.codes + (self.numel - self.stored.quantized) * dtype.itemsize
        return self.numel * dtype.itemsize

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
    def vocabulary(self) -> str | None:
        """Name of the layer's only matrix, if it has more than `MOST_WHOLE_ROWS` rows."""
        matrices = [name for name, shape in self.shapes.items() if len(shape) >= 2]
        others = sum(shape.numel() for name, shape in self.shapes.items() if name not in matrices)
        is_large = len(matrices) == 1 and MOST_WHOLE_ROWS < self.shapes[matrices[0]][0] > others
        return matrices[0] if is_large and not self.copied else None

    @cached_property
    def has_vocabulary(self) -> bool:
        """Whether a matrix has more than `MOST_WHOLE_ROWS` rows."""
        return any(len(shape) == 2 and shape[0] > MOST_WHOLE_ROWS for shape in self.shapes.values())

    @cached_property
    def tiles(self) -> tuple[slice, ...]:
        """Parts of the flat tensor whose gradients are summed one after another; the other parameters are in the last.

        Empty for layers without a vocabulary.
        """
        if self.vocabulary is None:
            return ()
        width = self.shapes[self.vocabulary][1]
        size = _round_up(TILE_ROWS, TILE_ALIGNMENT // math.gcd(TILE_ALIGNMENT, width)) * width
        starts = range(0, self.shapes[self.vocabulary].numel(), size)
        return tuple(slice(start, start + size if start != starts[-1] else self.numel) for start in starts)

    @cached_property
    def most_summed(self) -> int:
        """Elements of the largest gradient sum."""
        return max((tile.stop - tile.start for tile in self.tiles), default=self.numel)

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

    def tile_rows(self, tile: slice) -> slice:
        """Return the rows of the vocabulary in a tile."""
        assert self.vocabulary is not None
        num_rows, width = self.shapes[self.vocabulary]
        return slice(tile.start // width, min(tile.stop // width, num_rows))

    def tile_views(self, flat: Tensor, tile: slice) -> dict[str, Tensor]:
        """Return the parameters in a tile as views of its flat tensor; of the vocabulary the tile's rows."""
        assert self.vocabulary is not None
        rows, width = self.tile_rows(tile), self.shapes[self.vocabulary][1]
        views = {self.vocabulary: flat[: (rows.stop - rows.start) * width].view(-1, width)}
        for name, offset in self.offsets.items():
            if tile.start < offset < tile.stop:
                start = offset - tile.start
                views[name] = flat[start : start + self.shapes[name].numel()].view(self.shapes[name])
        return views


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
