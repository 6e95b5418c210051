"""Moments in bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind
from gptj_ft.streaming.moments.form import Noise, Scratch


@dataclass(frozen=True)
class Bf16:
    """Moments in bf16, rounded up or down at random so that the expected value is exact."""

    dtype: torch.dtype = torch.bfloat16
    block: int = 1
    items: int = 1
    # Widened: 2 read and 4 written. Stored: noise is added and the lower bits masked, in place, then copied.
    moved: int = 2 + 4 + 4 * 4 + 4 + 4 + 2
    num_scratch: int = 0

    def load(self, kind: Kind, stored: Tensor, scratch: Scratch) -> Tensor:
        return scratch(kind, len(stored)).copy_(stored)

    def store(self, kind: Kind, values: Tensor, stored: Tensor, noise: Noise | None, scratch: Scratch) -> None:
        # Rounding to nearest would lose every change of a moment below half a unit in the last place. With a decay of
        # 0.999 these are nearly all changes.
        if noise is not None:
            bits = values.view(torch.int32)
            # The sum carries into the upper half with a probability equal to the fraction that is cut off.
            noise.add_to(bits)
            bits &= -65536  # the upper 16 bits of fp32 are bf16
        stored.copy_(values)
