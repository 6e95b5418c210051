"""Drop activations by random numbers of each document, not of a batch.

A mask depends on the document's seed and on the place in the model alone, so that it is the same when a layer is run
again, wherever weights are, and whatever other documents share the micro-batch. The generators of a CPU and of an
accelerator differ: masks are those of the type of device.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gptj_ft.system.accelerator import seeded

STEPS = 2**16  # of a rate: what is drawn is 16 bits an element, four at a time


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
        parts = [self.mask(span, tuple(x.shape[1:]), x.device) for span in noise]
        return self.apply_mask(x, torch.cat(parts))

    def mask(self, span: NoiseSpan, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Draw which elements of a document's rows stay, bool [rows, *shape]."""
        drawn = draw((span.total, *shape), seed_of((span.seed, self.site)), device)
        return (drawn >= self._threshold - STEPS // 2)[span.start : span.stop]

    def apply_mask(self, x: Tensor, keep: Tensor) -> Tensor:
        """Keep some elements; the expectation of each is what it was."""
        dropped: Tensor = _Masked.apply(x, keep, STEPS / (STEPS - self._threshold))  # type: ignore[no-untyped-call]
        return dropped

    @property
    def _threshold(self) -> int:
        return round(self.rate * STEPS)


def draw(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Draw uniform 16-bit integers, four from each number of a generator; int16 of a shape."""
    numel = torch.Size(shape).numel()
    numbers = -(-numel // 4)
    if device.type == "meta":
        return torch.empty(shape, dtype=torch.int16, device=device)
    generator = seeded(device, seed)
    bits = torch.empty(numbers, dtype=torch.int64, device=generator.device)
    bits.random_(-(2**63), None, generator=generator)
    return bits.view(torch.int16)[:numel].view(shape).to(device)


class _Masked(torch.autograd.Function):
    """Multiply by a mask and a scale; what is kept for backward is a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return (gradients[0] * keep).mul_(ctx.scale), None, None


def seed_of(key: tuple[object, ...]) -> int:
    """Return the seed that belongs to a key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "little")
