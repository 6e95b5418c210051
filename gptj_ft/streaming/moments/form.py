"""Contract of the forms of moments, and the noise of stochastic rounding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind

NOISE = (1 << 20) + 7  # random numbers drawn once; a prime, so that chunks and steps start at different ones


Scratch = Callable[[str, int], Tensor]
"""Return fp32 memory of a name and a length, which is reused."""


@dataclass(frozen=True)
class Noise:
    """Random bits of a rounding; the same key gives the same bits."""

    key: tuple[object, ...]
    start: int  # index of the first element in the longer tensor that these are part of
    num_tiles: int = 1  # tiles of noise that are added at once

    def add_to(self, bits: Tensor) -> None:
        """Add 16 random bits to each element.

        Args:
            bits: flat, int32.
        """
        # Not `hash`, which Python salts anew in each process.
        digest = hashlib.blake2b(repr(self.key).encode(), digest_size=8).digest()
        offset = (int.from_bytes(digest, "little") + self.start) % NOISE
        noise = _noise(bits.device, self.num_tiles)
        # Tile the noise over the tensor, beginning in the middle of a tile.
        for first in range(-offset, len(bits), len(noise)):
            part = bits[max(first, 0) : first + len(noise)]
            part += noise[max(-first, 0) : max(-first, 0) + len(part)]


@lru_cache
def _noise(device: torch.device, num_tiles: int) -> Tensor:
    """Draw 16 random bits for `NOISE` elements, and repeat them; every rounding starts at another offset."""
    # Drawn on the CPU, so that every device rounds with the same bits.
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 1 << 16, (NOISE,), dtype=torch.int32, generator=generator).to(device).repeat(num_tiles)


class MomentForm(Protocol):
    """A form in which moments are stored. The arithmetic is the same on every device."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored items. State files record it, so no other form or kind of tensor in a store has it."""

    @property
    def block(self) -> int:
        """Elements that are stored together."""

    @property
    def items(self) -> int:
        """Items of a block."""

    @property
    def moved(self) -> int:
        """Bytes per element that `load` and `store` read and write in the device's memory."""

    @property
    def num_scratch(self) -> int:
        """Fp32 tensors of scratch memory, without that of the values."""

    def load(self, kind: Kind, stored: Tensor, scratch: Scratch) -> Tensor:
        """Return the fp32 values of stored moments: in scratch memory, or in their own."""

    def store(self, kind: Kind, values: Tensor, stored: Tensor, noise: Noise | None, scratch: Scratch) -> None:
        """Store fp32 values.

        Args:
            kind: first or second moment.
            values: flat, fp32; overwritten.
            stored: target, items of the same elements.
            noise: rounds stochastically; None: to nearest.
        """
