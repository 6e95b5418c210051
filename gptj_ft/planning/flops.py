"""Count the FLOPs of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptj_ft.models.layout import NO_PARAMETERS, Layout


@dataclass(frozen=True)
class Flops:
    """FLOPs of products with weights. Attention scores are left out, as in the usual 6 x parameters x tokens.

    Attributes:
        forward: 2 per weight and token; for the head, per token with a target, since it runs on no others.
        backward: 4, counted alike; 2 for those that are not trained, and none below the lowest layer that is.
        recompute: 2 more for the blocks that backward runs again.
    """

    forward: float
    backward: float
    recompute: float

    @property
    def model(self) -> float:
        """FLOPs that every way of training this model needs."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """FLOPs that are computed here, recomputation included."""
        return self.forward + self.backward + self.recompute


def count_flops(
    layouts: Sequence[Layout], tokens: float, target_tokens: float, kept: int = 0, frozen: Sequence[Layout] = ()
) -> Flops:
    """Count the FLOPs of training on some tokens; an embedding has none.

    Args:
        layouts: layout of the trained parameters of each layer.
        tokens: tokens that the blocks compute.
        target_tokens: tokens that the head computes.
        kept: blocks, the last ones, that are not recomputed.
        frozen: layouts of the rest: passed by gradients down to the lowest layer that is trained, but without any.
    """
    top, lowest = len(layouts) - 1, next((i for i, layout in enumerate(layouts) if layout.numel), 0)
    runs = [0.0, *[2.0 * tokens] * (top - 1), 2.0 * target_tokens]  # FLOPs a parameter
    trained = [layout.num_used for layout in layouts]
    whole = [own + rest.num_used for own, rest in zip(trained, frozen or [NO_PARAMETERS] * len(trained), strict=True)]
    return Flops(
        forward=sum(run * number for run, number in zip(runs, whole, strict=True)),
        backward=sum(runs[i] * (whole[i] + trained[i]) for i in range(lowest, top + 1)),
        recompute=sum(runs[i] * whole[i] for i in range(max(1, lowest), top - kept)),
    )
