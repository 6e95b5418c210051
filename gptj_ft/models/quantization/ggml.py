"""Quantizations of llama.cpp's GGUF files: the same codes, and the values of the package ``gguf``, bit for bit.

All have fp16 scales for short blocks of a row. K types divide a block of 256 numbers into smaller ones, whose scales
are integers. Files hold a block's codes and scales side by side; here each part is a tensor of one type.
https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gptj_ft.models.quantization.form import CODES, SCALES, Codec, Part

OFFSETS, MINIMA = "offsets", "minima"
HIGH_CODES, BLOCK_SCALES, BLOCK_MINIMA = "high_codes", "block_scales", "block_minima"
K_BLOCK = 256


class GgmlCodec(Codec):
    """A quantization of ggml, by the name of its type."""

    def unpack(self, blocks: Tensor) -> dict[str, Tensor]:
        """Return the items of each part, flat.

        Args:
            blocks: as in a file, uint8 [blocks, bytes of a block].
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Q8_0(GgmlCodec):
    """8-bit codes with a scale for 32 numbers: 34 bytes."""

    name: str = "Q8_0"

    def parts(self, columns: int) -> Mapping[str, Part]:
        return {CODES: Part(torch.int8, 1), SCALES: Part(torch.float16, 32)}

    def unpack(self, blocks: Tensor) -> dict[str, Tensor]:
        return {CODES: _flat(blocks[:, 2:], torch.int8), SCALES: _flat(blocks[:, :2], torch.float16)}

    def values(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        codes = parts[CODES].view(-1, 32).float()
        return codes.mul_(parts[SCALES].float()[:, None]).view(rows, columns)


@dataclass(frozen=True)
class ShortBlocks(GgmlCodec):
    """4-bit or 5-bit codes for blocks of 32 numbers, with a scale, and an offset or none: 18 to 24 bytes."""

    # A byte holds the low four bits of numbers i and i + 16. The fifth bits of all numbers follow each other.
    name: str = "Q4_0"
    bits: int = 4
    has_offset: bool = False  # value = scale * code + offset; else the code minus half of its range, times the scale

    def parts(self, columns: int) -> Mapping[str, Part]:
        parts = {CODES: Part(torch.uint8, 2), SCALES: Part(torch.float16, 32)}
        parts |= {HIGH_CODES: Part(torch.uint8, 8)} if self.bits == 5 else {}
        return parts | ({OFFSETS: Part(torch.float16, 32)} if self.has_offset else {})

    def unpack(self, blocks: Tensor) -> dict[str, Tensor]:
        parts = {CODES: _flat(blocks[:, -16:]), SCALES: _flat(blocks[:, :2], torch.float16)}
        parts |= {HIGH_CODES: _flat(blocks[:, -20:-16])} if self.bits == 5 else {}
        return parts | ({OFFSETS: _flat(blocks[:, 2:4], torch.float16)} if self.has_offset else {})

    def values(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        values = _nibbles(parts[CODES].view(-1, 16))
        if self.bits == 5:
            values.view(-1, 8).add_(_bits(parts[HIGH_CODES], 16.0))
        if not self.has_offset:
            values.sub_(1 << self.bits - 1)
        values.mul_(parts[SCALES].float()[:, None])
        if self.has_offset:
            values.add_(parts[OFFSETS].float()[:, None])
        return values.view(rows, columns)


@dataclass(frozen=True)
class KBlocks(GgmlCodec):
    """4-bit or 5-bit codes with an integer scale and minimum for 32 numbers, and a scale of each for 256."""

    name: str = "Q4_K"
    bits: int = 4

    def parts(self, columns: int) -> Mapping[str, Part]:
        small, large = Part(torch.uint8, 32), Part(torch.float16, K_BLOCK)
        high = {HIGH_CODES: Part(torch.uint8, 8)} if self.bits == 5 else {}
        return {
            CODES: Part(torch.uint8, 2), **high, SCALES: small, MINIMA: small, BLOCK_SCALES: large, BLOCK_MINIMA: large,
        }  # fmt: skip

    def unpack(self, blocks: Tensor) -> dict[str, Tensor]:
        # Twelve bytes hold eight scales and eight minima of 6 bits: the first four in the low bits of bytes 0 to 3 and
        # 4 to 7; the last four have their low bits in the halves of bytes 8 to 11, the others above those first four.
        low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
        scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
        minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
        parts = {
            CODES: _flat(blocks[:, -128:]),
            SCALES: _flat(scales),
            MINIMA: _flat(minima),
            BLOCK_SCALES: _flat(blocks[:, :2], torch.float16),
            BLOCK_MINIMA: _flat(blocks[:, 2:4], torch.float16),
        }
        return parts | ({HIGH_CODES: _flat(blocks[:, 16:48])} if self.bits == 5 else {})

    def values(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        # 32 bytes hold 32 numbers in their low halves and the next 32 in their upper halves. The fifth bits of number j
        # in each of the eight groups of 32 are the bits of byte j.
        codes = _nibbles(parts[CODES].view(-1, 32)).view(-1, 8, 32)
        if self.bits == 5:
            codes.transpose(1, 2).add_(_bits(parts[HIGH_CODES], 16.0).view(-1, 32, 8))
        scales = parts[SCALES].view(-1, 8).float().mul_(parts[BLOCK_SCALES].float()[:, None])
        minima = parts[MINIMA].view(-1, 8).float().mul_(parts[BLOCK_MINIMA].float()[:, None])
        # Two operations, each rounded, as in the package gguf.
        return codes.mul_(scales[..., None]).sub_(minima[..., None]).view(rows, columns)


@dataclass(frozen=True)
class Q6_K(GgmlCodec):
    """6-bit codes with an integer scale for 16 numbers, and a scale for 256: 210 bytes."""

    name: str = "Q6_K"

    def parts(self, columns: int) -> Mapping[str, Part]:
        return {
            CODES: Part(torch.uint8, 2), HIGH_CODES: Part(torch.uint8, 4), SCALES: Part(torch.int8, 16),
            BLOCK_SCALES: Part(torch.float16, K_BLOCK),
        }  # fmt: skip

    def unpack(self, blocks: Tensor) -> dict[str, Tensor]:
        return {
            CODES: _flat(blocks[:, :128]),
            HIGH_CODES: _flat(blocks[:, 128:192]),
            SCALES: _flat(blocks[:, 192:208], torch.int8),
            BLOCK_SCALES: _flat(blocks[:, 208:], torch.float16),
        }

    def values(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Tensor:
        # Half a block, 128 numbers, has 64 bytes with two low halves each, and 32 bytes with four pairs of upper bits.
        low, high = parts[CODES].view(-1, 64), parts[HIGH_CODES].view(-1, 32)
        codes = torch.cat([low & 15, low >> 4], 1).view(-1, 4, 32)
        for group in range(4):
            codes[:, group] |= (high >> 2 * group & 3) << 4
        scales = parts[SCALES].view(-1, 16).float().mul_(parts[BLOCK_SCALES].float()[:, None])
        values = codes.float().sub_(32.0).view(-1, 16, 16)
        return values.mul_(scales.view(-1, 16, 1)).view(rows, columns)


GGML: Mapping[str, GgmlCodec] = {
    codec.name: codec
    for codec in (
        Q8_0(),
        ShortBlocks(),
        ShortBlocks("Q4_1", 4, has_offset=True),
        ShortBlocks("Q5_0", 5),
        ShortBlocks("Q5_1", 5, has_offset=True),
        KBlocks(),
        KBlocks("Q5_K", 5),
        Q6_K(),
    )
}
"""Quantizations whose codes `convert --quantize keep` keeps."""


def _flat(items: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    return items.contiguous().view(dtype).view(-1)


def _nibbles(codes: Tensor) -> Tensor:
    """Return the low halves of each row of bytes, then the upper halves, fp32 [rows, 2 x bytes]."""
    out = torch.empty(len(codes), 2 * codes.shape[1], dtype=torch.float32, device=codes.device)
    low, high = out.chunk(2, 1)
    low.copy_(codes & 15)
    high.copy_(codes >> 4)
    return out


def _bits(packed: Tensor, value: float) -> Tensor:
    """Return ``value`` for each set bit of bytes and 0 for the others, lowest bit first, fp32 [bytes, 8]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 1).float().mul_(value)
