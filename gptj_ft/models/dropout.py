"""Drop activations by random numbers of each document, not of a batch.

A mask depends on the document's seed and on the place in the model alone, so that it is the same when a layer is run
again, wherever weights are, and whatever other documents share the micro-batch. The generators of a CPU and of an
accelerator differ: masks are those of the type of device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gptj_ft.system.accelerator import seeded_generator

RATE_STEPS = 2**16  # of a rate: what is drawn is 16 bits an element
PER_NUMBER = 4  # elements for which one number of a generator is enough


class NoiseSpan(NamedTuple):
    """Rows of a document that are computed: its seed, the first row, the one after the last, and how many there are."""

    seed: int
    start: int
    stop: int
    total: int


Noise = tuple[NoiseSpan, ...]
"""Random numbers of a batch: the rows of one document after another."""


class Dropout(nn.Module):
    """Set a share of the elements to zero, and scale the others, by the seeds of the documents; without seeds, nothing.

    Args:
        rate: share that is dropped.
        site: place in the model, layer and name; two places of one model never share it.
    """

    def __init__(self, rate: float, *site: object) -> None:
        super().__init__()
        self.rate, self.site = rate, seed_of(site)

    def forward(self, x: Tensor, noise: Noise | None) -> Tensor:
        if noise is None or not self.rate:
            return x
        return self.apply_mask(x, self.mask(noise, tuple(x.shape[1:]), x.device))

    def mask(self, noise: Noise, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw which elements of the rows of documents stay, bool [rows, *shape]."""
        width = math.prod(shape)
        drawn = self._draw(noise, [span.total * width for span in noise], device)
        if all(start == 0 and stop == total and total * width % PER_NUMBER == 0 for _, start, stop, total in noise):
            drawn_N = drawn  # what was drawn for one document ends where that for the next begins
        else:
            sizes = [_numbers(span.total * width) * PER_NUMBER for span in noise]
            parts = zip(drawn.split_with_sizes(sizes), noise, strict=True)
            drawn_N = torch.cat([part[span.start * width : span.stop * width] for part, span in parts])
        return self._stays(drawn_N).view(sum(stop - start for _, start, stop, _ in noise), *shape)

    def mask_squares(self, noise: Noise, longest: int, device: torch.device) -> Tensor:
        """Draw which elements of square matrices of documents stay, bool [documents, rows, longest, longest].

        Args:
            noise: rows of the documents, each row a matrix; as many of each.
            longest: length of the matrices, which the lengths of their documents alone decide.
            device: device of the matrices.
        """
        rows = noise[0].total
        count = rows * longest * longest
        drawn = self._draw(noise, [count] * len(noise), device).view(len(noise), -1)
        return self._stays(drawn[:, :count]).reshape(len(noise), rows, longest, longest)

    def _stays(self, drawn: Tensor) -> Tensor:
        """Return the mask of elements that stay; overwrites ``drawn``: torch compares into bool six times as slowly."""
        return drawn.ge_(self._least_kept).to(torch.bool)

    def _draw(self, noise: Noise, counts: Sequence[int], device: torch.device) -> Tensor:
        """Draw uniform 16-bit integers of documents, four from each number of a generator, one document after another.

        Args:
            noise: seeds of the documents.
            counts: integers to draw for each; those left over of its last number are drawn, too.
            device: device of the numbers.
        """
        sizes = [_numbers(count) for count in counts]
        if device.type == "meta":
            return torch.empty(sum(sizes) * PER_NUMBER, dtype=torch.int16, device=device)
        generator = seeded_generator(device, 0)
        numbers = torch.empty(sum(sizes), dtype=torch.int64, device=generator.device)
        for span, part in zip(noise, numbers.split_with_sizes(sizes), strict=True):
            generator.manual_seed(seed_of((span.seed, self.site)))
            part.random_(-(2**63), None, generator=generator)
        return numbers.view(torch.int16).to(device)

    def apply_mask(self, x: Tensor, keep: Tensor) -> Tensor:
        """Keep some elements; the expectation of each is what it was."""
        dropped: Tensor = _Masked.apply(x, keep, self.scale)  # type: ignore[no-untyped-call]
        return dropped

    @property
    def scale(self) -> float:
        """What is kept is multiplied by."""
        return RATE_STEPS / (RATE_STEPS - self._threshold)

    @property
    def _threshold(self) -> int:
        return round(self.rate * RATE_STEPS)

    @property
    def _least_kept(self) -> int:
        return self._threshold - RATE_STEPS // 2


def _numbers(count: int) -> int:
    """Count the numbers of a generator that so many 16-bit integers are made of."""
    return -(-count // PER_NUMBER)


class _Masked(torch.autograd.Function):
    """Multiply by a mask and a scale; what is kept for backward is a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return as_numbers(keep, x.dtype).mul_(x).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return as_numbers(keep, gradients[0].dtype).mul_(gradients[0]).mul_(ctx.scale), None, None


def as_numbers(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as ones and zeros of a type: by way of bytes, since torch converts bool element by element.

    Measured (430 rows of 384, a thread of an AMD EPYC): 0.010 ms, not 0.066.
    """
    return keep.view(torch.uint8).to(dtype)


def seed_of(key: tuple[object, ...]) -> int:
    """Return the seed that belongs to a key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "little")
