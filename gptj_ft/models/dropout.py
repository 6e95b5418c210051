"""Dropout with random numbers per document, independent of the batch.

A mask depends only on the document's seed and the position in the model. So it is the same when a layer is recomputed,
wherever weights are stored, and whichever documents share the micro-batch.

A CPU draws the masks from a generator, seeded per document. On an accelerator each document would cost a kernel launch.
There a hash of row and column decides, which takes two launches for all documents. So the masks of the two differ.

Axis letters: R rows, C columns, G documents, N heads, L tokens of a document with padding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gptj_ft.system.accelerator import seeded_generator

RATE_STEPS = 2**16  # resolution of a rate: 16 random bits per element
PER_NUMBER = 4  # elements per 64-bit random number
GOLDEN, MIXERS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # constants of SplitMix64
HEAD_COLUMNS = 2**32  # column numbers of an attention head; more than tokens of a document


class NoiseSpan(NamedTuple):
    """Computed rows of a document: its seed, the first row, the end, and the document's total number of rows."""

    seed: int
    start: int
    stop: int
    total: int


@dataclass(frozen=True)
class Noise:
    """Dropout noise of a batch, document after document."""

    spans: tuple[NoiseSpan, ...]
    keys_R: Tensor | None = None  # `row_keys` on the device; None: on a CPU, which draws from the seeds


class Dropout(nn.Module):
    """Zero a share of the elements and scale the others, by the documents' seeds; without noise, do nothing.

    Args:
        site: position in the model (layer and name); unique within the model.
    """

    def __init__(self, rate: float, *site: object) -> None:
        super().__init__()
        self.rate, self.site = rate, seed_of(site)

    def forward(self, x: Tensor, noise: Noise | None) -> Tensor:
        if noise is None or not self.rate:
            return x
        return self.apply_mask(x, self.mask(noise, tuple(x.shape[1:]), x.device))

    def mask(self, noise: Noise, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw which elements to keep, bool [rows, *shape]."""
        if noise.keys_R is None:
            return self._drawn(noise.spans, shape, device)
        count = math.prod(shape)
        return self._hashed(noise.keys_R[:, None], column_keys(self.site, 1, count, device)).view(-1, *shape)

    def hashed_squares(self, keys_GL: Tensor, num_heads: int) -> Tensor:
        """Hash which attention weights to keep, bool [G, N, L, L]; the mask of a document ignores padding.

        Args:
            keys_GL: `row_keys` of the queries.
        """
        columns_NL = column_keys(self.site, num_heads, keys_GL.shape[1], keys_GL.device)
        return self._hashed(keys_GL[:, None, :, None], columns_NL[:, None])

    def _hashed(self, keys: Tensor, columns: Tensor) -> Tensor:
        """Hash which elements to keep, bool; keys of rows and columns broadcast to its shape.

        Args:
            keys: see `row_keys`; the last axis has length 1.
            columns: see `column_keys`.
        """
        low, high = torch.split(keys.view(torch.int32), 1, -1)
        # Multiply-shift hashing (Dietzfelbinger, 1996), modulo 2^32 on every device: the high bits of a random line at
        # random columns. Rows have their own lines, sites their own columns.
        return torch.addcmul(high, low, columns) >= self._least_kept * RATE_STEPS

    def _drawn(self, noise: Sequence[NoiseSpan], shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw which elements to keep, bool [rows, *shape]."""
        width = math.prod(shape)
        # Draw for all rows of a document, even if few are computed: noise depends on a row's index only.
        drawn = self._draw(noise, [span.total * width for span in noise], device)
        # Otherwise up to three spare draws lie between two documents.
        if all(start == 0 and stop == total and total * width % PER_NUMBER == 0 for _, start, stop, total in noise):
            drawn_N = drawn  # the draws of consecutive documents are adjacent
        else:
            sizes = [_numbers(span.total * width) * PER_NUMBER for span in noise]
            parts = zip(drawn.split_with_sizes(sizes), noise, strict=True)
            drawn_N = torch.cat([part[span.start * width : span.stop * width] for part, span in parts])
        return self._stays(drawn_N).view(sum(stop - start for _, start, stop, _ in noise), *shape)

    def mask_squares(self, noise: Sequence[NoiseSpan], longest: int, device: torch.device) -> Tensor:
        """Draw which elements of square matrices to keep, bool [documents, rows, longest, longest].

        Args:
            noise: documents with equal numbers of rows; each row is a matrix.
            longest: size of the matrices; it must depend only on the documents.
        """
        rows = noise[0].total
        count = rows * longest * longest
        drawn = self._draw(noise, [count] * len(noise), device).view(len(noise), -1)
        return self._stays(drawn[:, :count]).reshape(len(noise), rows, longest, longest)

    def _stays(self, drawn: Tensor) -> Tensor:
        """Convert draws to a mask, in place: comparing into a bool tensor takes six times as long in torch."""
        return drawn.ge_(self._least_kept).to(torch.bool)

    def _draw(self, noise: Sequence[NoiseSpan], counts: Sequence[int], device: torch.device) -> Tensor:
        """Draw uniform 16-bit integers for each document, in order; four from each random number.

        Args:
            noise: seeds of the documents.
            counts: integers for each document, rounded up to whole random numbers.
        """
        sizes = [_numbers(count) for count in counts]
        generator = seeded_generator(device, 0)
        numbers = torch.empty(sum(sizes), dtype=torch.int64, device=generator.device)
        for span, part in zip(noise, numbers.split_with_sizes(sizes), strict=True):
            generator.manual_seed(seed_of((span.seed, self.site)))
            # These bounds mean all 64 bits. The default range would leave the top bit of each number zero.
            part.random_(-(2**63), None, generator=generator)
        # Each 64-bit number is reinterpreted as four 16-bit ones.
        return numbers.view(torch.int16).to(device)

    def added(self, x: Tensor, update: Tensor, noise: Noise | None) -> Tensor:
        """Return ``x`` plus the dropped ``update``."""
        if noise is None or not self.rate or noise.keys_R is None:
            total: Tensor = x + self(update, noise)
            return total
        keep = self.mask(noise, tuple(x.shape[1:]), x.device)
        out: Tensor = _MaskedSum.apply(x, update, keep, self.scale)  # type: ignore[no-untyped-call]
        return out

    def apply_mask(self, x: Tensor, keep: Tensor) -> Tensor:
        """Apply a mask; the expectation of each element stays the same."""
        dropped: Tensor = _Masked.apply(x, keep, self.scale)  # type: ignore[no-untyped-call]
        return dropped

    @property
    def scale(self) -> float:
        """Factor of kept elements."""
        return RATE_STEPS / (RATE_STEPS - self._threshold)

    @property
    def _threshold(self) -> int:
        return round(self.rate * RATE_STEPS)

    @property
    def _least_kept(self) -> int:
        # Draws are signed: the smallest is -RATE_STEPS / 2, and the lowest `_threshold` of them are dropped.
        return self._threshold - RATE_STEPS // 2


def _numbers(count: int) -> int:
    """Count the random numbers for ``count`` 16-bit integers."""
    return -(-count // PER_NUMBER)


def row_keys(noise: Sequence[NoiseSpan]) -> Tensor:
    """Return 64 random bits for each row, int64 on the CPU: element ``row`` of SplitMix64 with the document's seed.

    The lowest bit is set: an odd slope maps different columns to different numbers.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    seeds = torch.tensor([span.seed for span in noise], dtype=torch.int64)
    counts = torch.tensor([span.stop - span.start for span in noise], dtype=torch.int64)
    rows = [torch.arange(span.start + 1, span.stop + 1) for span in noise]
    return _mixed(seeds.repeat_interleave(counts), torch.cat(rows) if rows else seeds) | 1


def column_keys(site: int, heads: int, count: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each column of each head, int32 [heads, count]."""
    return _column_keys(site, heads, 1 << (count - 1).bit_length(), device)[:, :count]


@lru_cache(maxsize=4096)  # a few kilobytes for each site, computed once
def _column_keys(site: int, heads: int, count: int, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # later callers may record a graph
        columns_NC = torch.arange(heads)[:, None] * HEAD_COLUMNS + torch.arange(1, count + 1)
        return _mixed(torch.tensor(site), columns_NC).to(torch.int32).to(device)


def _mixed(seeds: Tensor, numbers: Tensor) -> Tensor:
    """Return elements of SplitMix64, modulo 2^64."""
    bits = seeds + numbers * _signed(GOLDEN)
    for shift, mixer in zip((30, 27), MIXERS, strict=True):
        bits = (bits ^ _shifted(bits, shift)) * _signed(mixer)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift right, filling with zeros; torch repeats the sign."""
    shifted: Tensor = bits >> count & (2 ** (64 - count) - 1)
    return shifted


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


class _Masked(torch.autograd.Function):
    """Multiply by a mask and a scale; saves one byte per element for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return masked(x, keep, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return masked(gradients[0], keep, ctx.scale), None, None


class _MaskedSum(torch.autograd.Function):
    """Add a masked and scaled tensor, in one kernel; saves one byte per element for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, update: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return torch.addcmul(x, update, keep, value=scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return gradients[0], masked(gradients[0], keep, ctx.scale), None, None


def masked(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Multiply by a mask and a scale, without a graph."""
    if x.device.type == "cpu":
        return mask_to(keep, x.dtype).mul_(x).mul_(scale)
    # One kernel, in spite of its name.
    out: Tensor = torch.ops.aten.native_dropout_backward.default(x, keep, scale)
    return out


def mask_to(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to ones and zeros of a type."""
    # Through bytes, since torch converts bool element by element. Measured with 430 rows of 384 on one thread of an AMD
    # EPYC: 0.010 ms instead of 0.066.
    return keep.view(torch.uint8).to(dtype)


def seed_of(key: tuple[object, ...]) -> int:
    """Return the seed of a key."""
    # Not `hash`, which differs between processes. 56 bits fit every generator's seed.
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "little")
