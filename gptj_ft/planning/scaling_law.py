"""Compare a run with pre-training from scratch by Cerebras-GPT's scaling law.

Cerebras-GPT (https://arxiv.org/abs/2304.03208) fitted seven models, trained on the Pile with 20 tokens a parameter, by
one power law of the FLOPs that went into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gptj_ft.models.layout import Layout
from gptj_ft.planning.flops import count_flops

TOKENS_PER_PARAMETER = 20  # near the best use of compute: https://arxiv.org/abs/2203.15556
FITTED_FLOPS = (2.6e18, 6.3e21)  # 111M to 6.7B
CONFIRMED_FLOPS = 2.3e22  # 13B came within half a percent of the prediction
_COUNTED = 0.88  # of these numbers, by `pretraining_flops`, at least


def pile_loss(flops: float) -> float:
    """Predict the loss on the Pile's test set, in nats per GPT-2 token, for a compute budget in FLOPs."""
    return float((flops / 5.984e22) ** -0.0737 + 0.5066)


@dataclass(frozen=True)
class ScalingForecast:
    """Compute of a run beside that of pre-training.

    Attributes:
        tokens: tokens of the run; ``None`` while its steps are not counted.
        tokens_per_parameter: tokens of the run per parameter, likewise.
        flops: FLOPs of the run, likewise: 6 per weight and token, as everyone counts (see `Flops`).
        flops_per_step: FLOPs of an average step.
        scratch_tokens: tokens of pre-training at `TOKENS_PER_PARAMETER`.
        scratch_flops: FLOPs of pre-training, counted as the law does: with attention scores and embedding.
        scratch_pile_loss: loss predicted for that compute.
        is_in_range: whether the law was fitted or confirmed there.
    """

    tokens: float | None
    tokens_per_parameter: float | None
    flops: float | None
    flops_per_step: float
    scratch_tokens: float
    scratch_flops: float
    scratch_pile_loss: float
    is_in_range: bool

    @classmethod
    def of(
        cls,
        layouts: Sequence[Layout],
        width: int,
        context: int,
        step: tuple[float, float],
        num_steps: int | None,
        flops_per_step: float | None = None,
    ) -> ScalingForecast:
        """Compute the forecast of a run.

        Args:
            layouts: layout of each layer.
            width: width of the hidden states.
            context: tokens of a window when it is trained from scratch.
            step: tokens of an average step, and those of them with a target.
            num_steps: steps of the run.
            flops_per_step: FLOPs of a step; default: of training all parameters.
        """
        num_parameters = sum(layout.num_parameters for layout in layouts)
        per_step = count_flops(layouts, *step).model if flops_per_step is None else flops_per_step
        tokens = None if num_steps is None else num_steps * step[0]
        scratch_tokens = float(TOKENS_PER_PARAMETER * num_parameters)
        scratch_flops = pretraining_flops(layouts, width, context, scratch_tokens)
        return cls(
            tokens=tokens,
            tokens_per_parameter=None if tokens is None else tokens / num_parameters,
            flops=None if num_steps is None else num_steps * per_step,
            flops_per_step=per_step,
            scratch_tokens=scratch_tokens,
            scratch_flops=scratch_flops,
            scratch_pile_loss=pile_loss(scratch_flops),
            is_in_range=_COUNTED * FITTED_FLOPS[0] <= scratch_flops <= CONFIRMED_FLOPS,
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        law = {"fitted_flops": FITTED_FLOPS, "confirmed_flops": CONFIRMED_FLOPS}
        return {**asdict(self), "scratch_tokens_per_parameter": TOKENS_PER_PARAMETER, **law}


def pretraining_flops(layouts: Sequence[Layout], width: int, context: int, tokens: float) -> float:
    """Count the FLOPs of pre-training as appendix F of https://arxiv.org/abs/2203.15556.

    That is, with a product for the embedding, and with attention scores that are computed in whole windows and not
    masked. For the models of Cerebras-GPT this gives 88 to 94 % of the published numbers.
    """
    vocabulary = max((shape[0] for shape in layouts[-1].used_shapes.values()), default=0)
    forward = 2.0 * vocabulary * width + 4.0 * context * width * (len(layouts) - 2)
    return count_flops(layouts, tokens, tokens).model + 3.0 * forward * tokens
