"""Count the FLOPs of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gptj_ft.models.layout import NO_PARAMETERS, Layout


@dataclass(frozen=True)
class Flops:
    """FLOPs of products with weights; attention scores are left out, as in the usual 6 x parameters x tokens."""

    forward: float  # 2 per weight and token; the head runs only on tokens with a target
    backward: float  # 4 per trained weight, 2 per frozen one, none below the lowest trained layer
    recompute: float  # 2 per weight of the recomputed blocks

    @property
    def model(self) -> float:
        """FLOPs of any training of this model."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """FLOPs with recomputation."""
        return self.forward + self.backward + self.recompute


def count_flops(
    layouts: Sequence[Layout], tokens: float, target_tokens: float, kept: int = 0, frozen: Sequence[Layout] = ()
) -> Flops:
    """Count the FLOPs of training on some tokens; embeddings have none.

    Args:
        layouts: trained parameters of each layer.
        kept: number of top blocks that are not recomputed.
        frozen: frozen parameters of each layer.
    """
    top, lowest = len(layouts) - 1, next((i for i, layout in enumerate(layouts) if layout.numel), 0)
    runs = [0.0, *[2.0 * tokens] * (top - 1), 2.0 * target_tokens]  # FLOPs per parameter
    trained = [layout.num_used for layout in layouts]
    whole = [own + rest.num_used for own, rest in zip(trained, frozen or [NO_PARAMETERS] * len(trained), strict=True)]
    return Flops(
        forward=sum(run * number for run, number in zip(runs, whole, strict=True)),
        backward=sum(runs[i] * (whole[i] + trained[i]) for i in range(lowest, top + 1)),
        # Embedding and head are never recomputed.
        recompute=sum(runs[i] * whole[i] for i in range(max(1, lowest), top - kept)),
    )
