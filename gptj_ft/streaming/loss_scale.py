"""Scale the loss of a run in fp16, so that its gradients neither vanish nor overflow.

The smallest number of fp16 is 2^-24: most gradients would be 0. So the loss is multiplied by a scale, as large as the
gradients allow; how large that is, is found by trying.
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
    """State of dynamic loss scaling (https://arxiv.org/abs/1710.03740), by the rule of `torch.amp.GradScaler`.

    Attributes:
        scale: factor of the loss in the next step.
        growth_tracker: steps in a row without overflow, since the scale last changed.
        num_skipped: steps of the run that were skipped: no weight, moment or learning rate moved.
        growth_interval: steps in a row without overflow after which the scale is doubled.
    """

    scale: float = 65536.0
    growth_tracker: int = 0
    num_skipped: int = 0
    growth_interval: int = 2000

    @classmethod
    def of(cls, saved: Mapping[str, Any] | None) -> LossScale | None:
        """Read what `dataclasses.asdict` makes; ``None``: of a run that does not scale its loss."""
        return cls(**saved) if saved else None

    def after_step(self, overflows: bool) -> LossScale:
        """Return the state after a step, given whether a gradient of it was not finite."""
        if overflows:
            return replace(self, scale=self.scale * BACKOFF, growth_tracker=0, num_skipped=self.num_skipped + 1)
        if self.growth_tracker + 1 < self.growth_interval:
            return replace(self, growth_tracker=self.growth_tracker + 1)
        grown = self.scale * GROWTH
        return replace(self, scale=grown if grown <= LARGEST_SCALE else self.scale, growth_tracker=0)
