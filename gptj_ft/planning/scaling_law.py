"""Compare a run with pre-training from scratch by Cerebras-GPT's scaling law.

Cerebras-GPT (https://arxiv.org/abs/2304.03208) fitted a power law of the training FLOPs to seven models, trained on the
Pile with 20 tokens per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gptj_ft.models.layout import Layout
from gptj_ft.planning.flops import count_flops
from gptj_ft.planning.workload import Workload

TOKENS_PER_PARAMETER = 20  # near the best use of compute: https://arxiv.org/abs/2203.15556
FITTED_FLOPS = (2.6e18, 6.3e21)  # 111M to 6.7B
CONFIRMED_FLOPS = 2.3e22  # 13B: within half a percent of the prediction
_COUNTED = 0.88  # least share of these numbers that `pretraining_flops` counts


def pile_loss(flops: float) -> float:
    """Predict the loss on the Pile's test set, in nats per GPT-2 token."""
    return float((flops / 5.984e22) ** -0.0737 + 0.5066)


@dataclass(frozen=True)
class ScalingForecast:
    """Compute of a run, compared with pre-training."""

    tokens: float | None  # of the run; None: its steps are not counted yet
    tokens_per_parameter: float | None
    flops: float | None  # of the run: 6 per weight and token, see `Flops`
    flops_per_step: float
    scratch_tokens: float  # of pre-training at `TOKENS_PER_PARAMETER`
    scratch_flops: float  # as the law counts: with attention scores and embedding
    scratch_pile_loss: float
    is_in_range: bool  # the law was fitted or confirmed for this compute

    @classmethod
    def of(cls, workload: Workload) -> ScalingForecast:
        """Compute the forecast of a run."""
        layouts, num_steps, per_step = workload.model_layouts, workload.num_steps, workload.flops().model
        num_parameters = workload.num_parameters
        tokens = None if num_steps is None else num_steps * workload.step.mean
        scratch_tokens = float(TOKENS_PER_PARAMETER * num_parameters)
        scratch_flops = pretraining_flops(layouts, workload.width, workload.context, scratch_tokens)
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
        law = {"fitted_flops": FITTED_FLOPS, "confirmed_flops": CONFIRMED_FLOPS}
        return {**asdict(self), "scratch_tokens_per_parameter": TOKENS_PER_PARAMETER, **law}


def pretraining_flops(layouts: Sequence[Layout], width: int, context: int, tokens: float) -> float:
    """Count the FLOPs of pre-training by appendix F of https://arxiv.org/abs/2203.15556.

    That includes a product for the embedding, and unmasked attention over whole windows. For Cerebras-GPT's models the
    result is 88 to 94 % of the published numbers.
    """
    vocabulary = max((shape[0] for shape in layouts[-1].used_shapes.values()), default=0)
    forward = 2.0 * vocabulary * width + 4.0 * context * width * (len(layouts) - 2)
    return count_flops(layouts, tokens, tokens).model + 3.0 * forward * tokens
