"""Quantizations of bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes): the same codes and values.

``nf4`` (QLoRA, https://arxiv.org/abs/2305.14314) and ``fp4``: 4-bit codes with an fp32 scale for each block of numbers.
``int8`` (LLM.int8(), https://arxiv.org/abs/2208.07339): 8-bit codes with an fp32 scale for each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from threading import local

import torch
from torch import Tensor

from gptj_ft.models.quantization.form import CODES, SCALES, Encoder, Part

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (
    0.0, 0.005208333333333333, 0.6666666666666666, 1.0, 0.3333333333333333, 0.5, 0.16666666666666666, 0.25,
    0.0, -0.005208333333333333, -0.6666666666666666, -1.0, -0.3333333333333333, -0.5, -0.16666666666666666, -0.25,
)  # fmt: skip
TABLES = {"nf4": NF4, "fp4": FP4}
BLOCK, NESTED_BLOCK = 64, 256
NESTED_SCALES = "nested_scales"

LEAST_SCALE = 1e-38  # a block of zeros is divided by it
INT8_STEP = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it


class _Tables(local):
    """Tables of one thread. Threads have streams of their own, which would have to wait for a common table."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, torch.device], Tensor] = {}


_tables = _Tables()


@dataclass(frozen=True)
class NestedScales:
    """Scales of blocks that are quantized themselves ("double quantization"), with 8-bit codes."""

    values: Tensor = field(compare=False)  # fp32 value of each code, [256], on the CPU
    offset: float = 0.0  # added to every scale


@dataclass(frozen=True)
class FourBit(Encoder):
    """4-bit codes, the first of a byte in its high bits, with a scale for each block."""

    name: str = "nf4"  # of the table of values
    block: int = BLOCK
    nested: NestedScales | None = None

    def parts(self, columns: int) -> Mapping[str, Part]:
        codes = Part(torch.uint8, 2)
        if self.nested is None:
            return {CODES: codes, SCALES: Part(torch.float32, self.block)}
        nested = Part(torch.float32, self.block * NESTED_BLOCK)
        return {CODES: codes, SCALES: Part(torch.uint8, self.block), NESTED_SCALES: nested}

    def values(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        codes, numbers = parts[CODES], rows * columns
        # A byte stands for two fp32 numbers: looked up as one 8-byte number, which takes half of the time.
        pairs = _pairs(self.name, codes.device).index_select(0, codes.int())
        values, whole = pairs.view(torch.float32)[:numbers], numbers // self.block
        scales = self._scales(parts)
        values[: whole * self.block].view(-1, self.block).mul_(scales[:whole, None])
        if numbers % self.block:
            values[whole * self.block :].mul_(scales[whole])
        return values.view(rows, columns)

    def _scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        codes = parts[SCALES]
        if self.nested is None:
            return codes
        scales = self.nested.values.to(codes.device)[codes.int()]
        outer = parts[NESTED_SCALES].repeat_interleave(NESTED_BLOCK)[: len(scales)]
        return scales.mul_(outer).add_(self.nested.offset)

    def scales(self, values: Tensor) -> Tensor:
        flat, whole = self._blocks(values)
        scales = flat[:whole].view(-1, self.block).abs().amax(dim=-1)
        if whole == len(flat):
            return scales
        return torch.cat([scales, flat[whole:].abs().max().clamp(min=LEAST_SCALE)[None]])

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        # In the order of bitsandbytes' operations, which decides a code between two values.
        assert self == FourBit(), "only nf4 in blocks of 64 without nested scales is written"
        (flat, whole), scales = self._blocks(values), self.scales(values)
        inverse = 1.0 / scales[: whole // self.block].clamp(min=LEAST_SCALE)[:, None]
        scaled = torch.clamp(flat[:whole].view(-1, self.block) * inverse, -1, 1).view(-1)
        if whole < len(flat):
            scaled = torch.cat([scaled, torch.clamp(flat[whole:] / scales[-1], -1, 1)])
        if len(scaled) % 2:
            scaled = torch.cat([scaled, scaled.new_zeros(1)])
        codes = torch.bucketize(scaled, _bounds(scaled.device), out_int32=True).to(torch.uint8)
        return {CODES: (codes[::2] << 4) | codes[1::2], SCALES: scales}

    def _blocks(self, values: Tensor) -> tuple[Tensor, int]:
        """Return the numbers, flat and fp32, and how many are in whole blocks."""
        flat = values.float().reshape(-1)
        return flat, len(flat) // self.block * self.block


@dataclass(frozen=True)
class Int8(Encoder):
    """8-bit codes with a scale for each row."""

    name: str = "int8"

    def parts(self, columns: int) -> Mapping[str, Part]:
        return {CODES: Part(torch.int8, 1), SCALES: Part(torch.float32, columns)}

    def values(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        # Two products, each rounded: one with scale / 127 would give other values.
        values = parts[CODES].view(rows, columns).to(torch.float32)
        return values.mul_(parts[SCALES][:rows, None]).mul_(INT8_STEP)

    def scales(self, values: Tensor) -> Tensor:
        return values.to(torch.float16).abs().amax(dim=1).float()

    def encode(self, values: Tensor) -> dict[str, Tensor]:
        # bitsandbytes rounds weights to fp16 first.
        halves, scales = values.to(torch.float16), self.scales(values)
        codes = torch.round(halves * (127.0 / scales[:, None])).to(torch.int8)
        # A row of zeros has no scale to divide by: its products are NaN, which no integer represents.
        return {CODES: codes.masked_fill_((scales == 0)[:, None], 0).reshape(-1), SCALES: scales}


WRITTEN: Mapping[str, Encoder] = {"nf4": FourBit(), "int8": Int8()}
"""Quantizations that `convert --quantize` offers."""


def _pairs(name: str, device: torch.device) -> Tensor:
    """Return the two fp32 values of each byte, [256], as 8-byte numbers."""
    if (name, device) not in _tables.pairs:
        table, byte = torch.tensor(TABLES[name], dtype=torch.float32), torch.arange(256)
        pairs = torch.stack([table[byte >> 4], table[byte & 15]], dim=1).view(torch.float64).view(-1)
        _tables.pairs[name, device] = pairs.to(device)
    return _tables.pairs[name, device]


@lru_cache
def _bounds(device: torch.device) -> Tensor:
    """Return the numbers halfway between adjacent values of NF4."""
    table = torch.tensor(NF4, dtype=torch.float32, device=device)
    return (table[:-1] + table[1:]) / 2
