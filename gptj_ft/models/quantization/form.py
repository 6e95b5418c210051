"""Describe how a matrix is stored in quantized form, and restore its values a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CODES, SCALES = "codes", "scales"  # parts of every quantized matrix
NUMBERS_AT_ONCE = 1 << 17  # restored at a time: their fp32 values stay in a processor's cache


class Part(NamedTuple):
    """One of the flat tensors that a quantized matrix is stored in."""

    dtype: torch.dtype
    numbers: int  # of the matrix for each item, in the order of its rows

    def span(self, start: int, stop: int) -> slice:
        """Return the items for numbers ``start`` to ``stop``."""
        return slice(start // self.numbers, -(-stop // self.numbers))


class Codec(Protocol):
    """A quantization that is read: codes, scales and the arithmetic that restores fp32 values.

    Arithmetic is the same on every device, so that a matrix has the same values everywhere.
    """

    @property
    def name(self) -> str: ...

    def parts(self, columns: int) -> Mapping[str, Part]:
        """Return the stored tensors of a matrix, by name."""

    def values(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        """Return fp32 values, [rows, columns], of whole rows.

        Args:
            parts: items of these rows; of each part the rows begin at the first item.
        """


class Encoder(Codec, Protocol):
    """A quantization that is written, too."""

    def scales(self, values: Tensor) -> Tensor:
        """Return the scales of rows of a matrix, as `encode` does, in a fraction of its time."""

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        """Quantize rows of a matrix, [rows, columns]; return the items of each part."""


@dataclass(frozen=True)
class QuantizedForm:
    """Quantized form of a parameter."""

    codec: Codec
    rows: int  # of the stored matrix
    columns: int
    dtype: torch.dtype  # type that values are rounded to before anything computes with them
    is_transposed: bool = False  # the parameter is the transpose of the stored matrix

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return torch.Size((self.columns, self.rows) if self.is_transposed else (self.rows, self.columns))

    def parts(self) -> Mapping[str, Part]:
        """Return the stored tensors, by name."""
        return self.codec.parts(self.columns)

    def num_items(self) -> dict[str, int]:
        """Count the items of each part."""
        return {name: part.span(0, self.rows * self.columns).stop for name, part in self.parts().items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        items, parts = self.num_items(), self.parts()
        return sum(items[name] * part.dtype.itemsize for name, part in parts.items())

    @property
    def row_step(self) -> int:
        """Rows, of which each whole number begins at the start of an item in every part."""
        steps = (part.numbers // math.gcd(part.numbers, self.columns) for part in self.parts().values())
        return math.lcm(*steps)

    def spans(self, start: int, stop: int) -> dict[str, slice]:
        """Return the items of each part for stored rows from ``start``, a multiple of `row_step`, to ``stop``."""
        return {name: part.span(start * self.columns, stop * self.columns) for name, part in self.parts().items()}

    def dequantize(self, parts: Mapping[str, Tensor], out: Tensor) -> None:
        """Restore the whole parameter.

        Args:
            parts: flat tensors with all items, on the device of ``out``.
            out: target of the parameter's shape, any float type.
        """
        target = out.t() if self.is_transposed else out
        for rows, values in self.row_values(parts, 0, self.rows):
            target[rows].copy_(values)

    def some_rows(self, rows: Sequence[int], read: Callable[[str, Sequence[slice], Tensor], None]) -> Tensor:
        """Restore the values of some stored rows, [rows, columns], on the CPU.

        Args:
            read: reads the items of a part: its name, the slices of its items, and a target with a row for each slice.
        """
        step, groups = self.row_step, dict[int, int]()  # `row_step` rows are read together; group -> its place
        for row in rows:
            groups.setdefault(row // step, len(groups))
        size, end, parts = step * self.columns, self.rows * self.columns, dict[str, Tensor]()
        for name, part in self.parts().items():
            found = torch.zeros(len(groups), part.span(0, size).stop, dtype=part.dtype)
            read(name, [part.span(group * size, min((group + 1) * size, end)) for group in groups], found)
            parts[name] = found.view(-1)
        values = self.codec.values(parts, len(groups) * step, self.columns)
        places = [groups[row // step] * step + row % step for row in rows]
        return values[torch.tensor(places, dtype=torch.int64)].to(self.dtype)

    def row_values(self, parts: Mapping[str, Tensor], start: int, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield stored rows and their values, rounded to `dtype`, a few rows at a time.

        Args:
            parts: items of rows ``start`` to ``stop``; ``start`` is a multiple of `row_step`.
        """
        step = self.row_step
        at_once = max(1, NUMBERS_AT_ONCE // (step * self.columns)) * step
        items = {name: span.stop for name, span in self.spans(0, at_once).items()}
        # Split beforehand: slicing in the loop would take as long as the arithmetic.
        pieces = zip(*(torch.split(parts[name], count) for name, count in items.items()), strict=True)
        for first, own in zip(range(start, stop, at_once), pieces, strict=True):
            last = min(first + at_once, stop)
            values = self.codec.values(dict(zip(items, own, strict=True)), last - first, self.columns)
            yield slice(first, last), values if self.dtype == torch.float32 else values.to(self.dtype)
