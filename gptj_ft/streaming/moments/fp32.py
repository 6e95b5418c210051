"""Moments as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind
from gptj_ft.streaming.moments.form import Noise, Scratch


@dataclass(frozen=True)
class Fp32:
    """Moments in fp32; an update changes them in place."""

    dtype: torch.dtype = torch.float32
    block: int = 1
    items: int = 1
    moved: int = 0
    num_scratch: int = 0

    def load(self, kind: Kind, stored: Tensor, scratch: Scratch) -> Tensor:
        return stored

    def store(self, kind: Kind, values: Tensor, stored: Tensor, noise: Noise | None, scratch: Scratch) -> None:
        if values is not stored:
            stored.copy_(values)
