"""Scale the loss in fp16, so that gradients neither vanish nor overflow.

fp16 rounds numbers below 2^-25 to 0, and most gradients are smaller. Dynamic loss scaling multiplies the loss by the
largest scale that does not overflow: it doubles the scale from time to time, and halves it after an overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

GROWTH, BACKOFF = 2.0, 0.5
LARGEST_SCALE = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class LossScale:
    """State of dynamic loss scaling (https://arxiv.org/abs/1710.03740), by the rule of `torch.amp.GradScaler`."""

    scale: float = 65536.0  # factor of the loss in the next step
    growth_tracker: int = 0  # steps without overflow since the scale last changed
    num_skipped: int = 0  # skipped steps of the run: weights, moments and learning rate stay as they are
    growth_interval: int = 2000  # steps without overflow before the scale doubles

    @classmethod
    def of(cls, saved: Mapping[str, Any] | None) -> LossScale | None:
        """Restore the state from its `dataclasses.asdict`; None for a run without loss scaling."""
        return cls(**saved) if saved else None

    def after_step(self, overflows: bool) -> LossScale:
        """Return the state after a step; ``overflows`` tells whether a gradient was not finite."""
        if overflows:
            return replace(self, scale=self.scale * BACKOFF, growth_tracker=0, num_skipped=self.num_skipped + 1)
        if self.growth_tracker + 1 < self.growth_interval:
            return replace(self, growth_tracker=self.growth_tracker + 1)
        grown = self.scale * GROWTH
        return replace(self, scale=grown if grown <= LARGEST_SCALE else self.scale, growth_tracker=0)
