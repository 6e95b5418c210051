"""Moments in 8 bits: the codes of bitsandbytes, each block of 256 with its largest magnitude as an fp32 scale.

Source: https://arxiv.org/abs/2110.02861; https://github.com/bitsandbytes-foundation/bitsandbytes. Its optimizers round
to nearest. Here, as in bf16, the noise of a step decides between the two neighbouring codes. A block is 260 bytes: its
codes, then its scale. A value is the product of its code's number and the scale.

The first moment has the signed map of codes, the second one the unsigned map. Two exceptions to the exact expectation:

* A positive second moment never becomes 0, but the least positive code. In a step without gradient, a zero below a
  first moment that is not zero would divide by Adam's epsilon alone.
* The signed map ends at -0.993 of the scale: lower values become that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind
from gptj_ft.streaming.moments.form import Noise, Scratch

BLOCK, SCALE_BYTES = 256, 4
NEGLIGIBLE, ONE = (127 - 40) << 23, 127 << 23  # bits of 2 ** -40 and of 1 in fp32
LEAST_SCALE = 1e-38  # a block of zeros is divided by it
DECADES = 7
# A lookup by the upper 20 bits of a normalized fp32 value, a *cell*, gives its position among the codes: that of the
# cell's start, in units of 1 / 65536 code, and the slope in the cell. A cell contains at most one code.
CELL_BITS, SLOPE_BITS, FRACTION_BITS = 12, 6, 16


@dataclass(frozen=True)
class Int8:
    """Moments as 8-bit codes."""

    dtype: torch.dtype = torch.int8  # of bytes; uint8 is the type of quantized weights
    block: int = BLOCK
    items: int = BLOCK + SCALE_BYTES
    moved: int = 170  # as many as take the time that lookups take on a CPU (benchmarks/moments.py)
    num_scratch: int = 2  # cells, and what they hold

    def load(self, kind: Kind, stored: Tensor, scratch: Scratch) -> Tensor:
        rows = stored.view(-1, self.items)
        out = scratch(kind, len(rows) * BLOCK)
        # Two codes stand for two fp32 numbers: looked up as one 8-byte number, in half of the time.
        pairs = rows[:, :BLOCK].view(torch.int16).int().view(-1).bitwise_and_(0xFFFF)
        _look_up(_pairs(is_signed(kind), stored.device), _index(pairs), out.view(torch.int64))
        out.view(-1, BLOCK).mul_(rows[:, BLOCK:].view(torch.float32))
        return out

    def store(self, kind: Kind, values: Tensor, stored: Tensor, noise: Noise | None, scratch: Scratch) -> None:
        rows, signed = stored.view(-1, self.items), is_signed(kind)
        rows[:, BLOCK:].view(torch.float32).copy_(normalize(values, signed, scratch))
        if noise is not None:
            codes = _random_codes(values, signed, noise, scratch)
        else:
            codes = nearest_codes(values, dynamic_map(signed).to(values.device))
            if not signed:
                codes[(codes == 0) & (values > 0)] = 1
        rows[:, :BLOCK].view(torch.uint8).copy_(codes.view(-1, BLOCK))


def is_signed(kind: Kind) -> bool:
    """Tell whether a moment has the signed map: the first one, as the second one is never negative."""
    return kind == "exp_avg"


def normalize(values: Tensor, signed: bool, scratch: Scratch) -> Tensor:
    """Divide each block by its largest magnitude, in place; return these scales, [blocks, 1]."""
    blocks = values.view(-1, BLOCK)
    magnitudes = torch.abs(blocks, out=scratch("cells", len(values)).view(-1, BLOCK)) if signed else blocks
    scales = magnitudes.amax(dim=1, keepdim=True)
    # A product with the inverse, as in bitsandbytes: a quotient may have another code.
    blocks *= 1 / scales.clamp(min=LEAST_SCALE)
    return scales


def nearest_codes(values: Tensor, numbers: Tensor) -> Tensor:
    """Return the codes of the nearest numbers, as bitsandbytes does; of two the lower one.

    Args:
        values: normalized.
        numbers: map of codes.
    """
    values = values.clamp(-1, 1)
    low = torch.bucketize(values, numbers, right=True).sub_(1).clamp_(0, len(numbers) - 2)
    return low + (values - numbers[low] > numbers[low + 1] - values)


def _random_codes(values: Tensor, signed: bool, noise: Noise, scratch: Scratch) -> Tensor:
    """Return one of each value's two neighbouring codes.

    Args:
        values: normalized; overwritten.
    """
    positions, slopes = _cells(signed, values.device)
    bits = values.view(torch.int32)
    cells, found = (scratch(name, len(values)).view(torch.int32) for name in ("cells", "found"))
    torch.bitwise_right_shift(bits, CELL_BITS, out=cells)
    if signed:
        cells &= len(positions) - 1
    index = _index(cells)
    _look_up(slopes, index, found)
    bits &= (1 << CELL_BITS) - 1
    bits *= found
    bits >>= CELL_BITS + SLOPE_BITS
    _look_up(positions, index, found)
    bits += found
    # The sum carries into the code with a probability equal to the fraction of the position.
    noise.add_to(bits)
    bits >>= FRACTION_BITS
    return bits


def _index(places: Tensor) -> Tensor:
    """Return int32 places in a table as the type that `_look_up` is fastest with."""
    return places.long() if _uses_gather(places.device) else places


def _look_up(table: Tensor, index: Tensor, out: Tensor) -> None:
    """Look up items of a flat table.

    Args:
        index: flat, from `_index`.
        out: target of the table's type and the index's length.
    """
    if _uses_gather(index.device):
        index = index.view(-1, BLOCK // 2)
        torch.gather(table.expand(len(index), -1), 1, index, out=out.view(index.shape))
    else:
        torch.index_select(table, 0, index, out=out)


def _uses_gather(device: torch.device) -> bool:
    # On a CPU `index_select` from a flat table uses one thread. `gather` from rows of it uses all, but wider indices. A
    # whole update takes as long with both in two threads, 1.3 times as long with `gather` in one.
    return device.type == "cpu" and torch.get_num_threads() > 2


@lru_cache
def dynamic_map(signed: bool) -> Tensor:
    """Return the number of each code, [256], ascending: bitsandbytes' dynamic map."""
    # Its arithmetic on a CPU with a fused multiply-add, written out: `torch.linspace` may round differently elsewhere.
    tenth, one = torch.tensor(0.1), torch.tensor(1.0)
    numbers = [torch.tensor([0.0, 1.0])]
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        step, at = ((one - tenth) / count).double(), torch.arange(count + 1, dtype=torch.float64)
        bounds = torch.where(at < (count + 1) // 2, tenth.double() + step * at, 1 - step * (count - at)).float()
        means = (bounds[:-1] + bounds[1:]) / 2 * torch.tensor(10.0 ** (decade - DECADES + 1))
        numbers += [means, -means] if signed else [means]
    return torch.cat(numbers).sort().values


@lru_cache
def _pairs(signed: bool, device: torch.device) -> Tensor:
    """Return the two fp32 numbers of each pair of codes, [65536], as 8-byte numbers."""
    numbers, pair = dynamic_map(signed), torch.arange(1 << 16)
    return torch.stack([numbers[pair & 255], numbers[pair >> 8]], dim=1).view(torch.int64).view(-1).to(device)


@lru_cache
def _cells(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the position of each cell's start, and its slope times 2 ** `SLOPE_BITS`; int32."""
    numbers, num_cells = dynamic_map(signed).double(), 1 << (31 - CELL_BITS)
    starts = torch.arange(NEGLIGIBLE, ONE, 1 << CELL_BITS)
    between = slice(NEGLIGIBLE >> CELL_BITS, ONE >> CELL_BITS)
    sides = []
    for sign in (1, -1) if signed else (1,):  # cells of negative values follow those of positive ones
        positions = torch.full((num_cells,), int((numbers == 0).nonzero()) << FRACTION_BITS, dtype=torch.int32)
        slopes = torch.zeros_like(positions)
        positions[between], slopes[between] = _positions(starts, sign, numbers)
        positions[between.stop :] = len(numbers) - 1 << FRACTION_BITS if sign > 0 else 0
        sides.append((positions, slopes))
    if not signed:  # no positive number becomes 0
        at_least = slice(1, int(numbers[1].float().view(torch.int32) >> CELL_BITS) + 1)
        positions[at_least], slopes[at_least] = 1 << FRACTION_BITS, 0
    positions, slopes = (torch.cat(parts).to(device) for parts in zip(*sides, strict=True))
    return positions, slopes


def _positions(starts: Tensor, sign: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions and slopes of cells.

    Args:
        starts: fp32 bits of their least magnitudes.
        sign: sign of their values, 1 or -1.
        numbers: map of codes, in fp64.
    """
    unit, first, last = 1 << FRACTION_BITS, float(numbers[0]), float(numbers[-1])
    ends = starts + (1 << CELL_BITS)
    one, other = (sign * bits.int().view(torch.float32).double() for bits in (starts, ends))
    start, end = (_position(values.clamp(first, last), numbers) for values in (one, other))
    slopes = ((end - start) * unit * (1 << SLOPE_BITS)).trunc().long()

    def advance(offset: Tensor | int) -> Tensor:
        return offset * slopes >> (CELL_BITS + SLOPE_BITS)

    # The code below the whole cell, or the one inside it. There the position must be exact.
    low = torch.minimum(start, end).floor().long()
    inside = (torch.maximum(start, end).ceil().long() - low > 1).nonzero().view(-1)
    positions = (start * unit).round().long()
    most = (low + 1) * unit - advance((1 << CELL_BITS) - 1).clamp(min=0)
    least = low * unit - advance((1 << CELL_BITS) - 1).clamp(max=0)
    positions = torch.minimum(torch.maximum(positions, least), most)
    codes = low[inside] + 1
    offsets = numbers[codes].abs().float().view(torch.int32).long() - starts[inside]
    positions[inside] = codes * unit - (offsets * slopes[inside] >> (CELL_BITS + SLOPE_BITS))
    # Values beyond the lowest code become that, and so do those in its cell.
    lowest = torch.minimum(start, end) <= 0
    return positions.masked_fill_(lowest, 0).int(), slopes.masked_fill_(lowest, 0).int()


def _position(values: Tensor, numbers: Tensor) -> Tensor:
    """Return the position of each value among the codes: a whole number at a code's number, and linear between."""
    low = torch.searchsorted(numbers, values, right=True).sub_(1).clamp_(0, len(numbers) - 2)
    return low + (values - numbers[low]) / (numbers[low + 1] - numbers[low])
