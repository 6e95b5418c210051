"""Forecast a run on several machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gptj_ft.config.options import Recipe
from gptj_ft.distributed.scale_out import Job, Network, ScaleOut, scale_out
from gptj_ft.training.finetune import Forecast


@dataclass(frozen=True)
class SharedForecast(Forecast):
    """What a run would cost on several machines.

    Attributes:
        plan: plan of one machine that does it alone.
        problem: reason why it does not fit on all of them.
        machines: ways to share it.
    """

    machines: ScaleOut = field(kw_only=True)

    @classmethod
    def of(cls, forecast: Forecast, recipe: Recipe, num_nodes: int, network: Network) -> SharedForecast:
        """Forecast a run on several machines like the one that it is planned for.

        Raises:
            UsageError: there are too few rows in a step for so many.
        """
        plan = forecast.plan
        found = scale_out(Job(recipe, plan.workload, plan.have, plan.rates, network), num_nodes)
        return cls(plan, found.problem, forecast.notes, forecast.published, machines=found)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for `--json`."""
        return {**super().to_dict(), "machines": self.machines.to_dict()}
