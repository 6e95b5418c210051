"""The state of a run without its tensors, as stored in each commit and each checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gptj_ft.streaming.loss_scale import LossScale

LOSS = "validation_loss"
WRONG_UPDATES = "damaged: facts.layer_updates: not the updates of each layer in so many steps"


@dataclass(frozen=True)
class BestState:
    """The best validated state of a run."""

    step: int  # optimizer steps
    validation_loss: float  # nats per target token
    by: str  # name of the deciding score
    value: float  # of the deciding score

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> BestState:
        """Read the mapping from `to_dict`."""
        # The deciding score is stored under its own name, the only key without a fixed one.
        by = next((name for name in values if name not in ("step", LOSS)), LOSS)
        return cls(values["step"], values[LOSS], by, values[by])

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, LOSS: self.validation_loss, self.by: self.value}

    def score(self, name: str) -> float:
        """Return a score, or NaN if another score chose this state."""
        return self.validation_loss if name == LOSS else self.value if name == self.by else math.nan


@dataclass(frozen=True)
class RunState:
    """Everything that a resume needs except tensors."""

    step: int  # optimizer steps done
    recipe_sha256: str | None  # digest of the options that decide numbers
    loss_before: float | None = None  # validation loss before training, nats per target token
    updates_before: int = 0  # updates of the moments before the run
    best: BestState | None = None  # so far
    loss_scale: LossScale | None = None  # of the next step, and steps skipped so far; fp16 only
    layer_updates: tuple[int, ...] | None = None  # applied updates of each layer; None: every step updates every layer

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> RunState:
        """Read the state from a commit or the manifest of a checkpoint."""
        facts = saved["facts"]
        best = BestState.of(facts["best"]) if facts.get("best") else None
        loss, updates = facts.get("loss_before"), facts.get("updates_before", 0)
        by_layer = tuple(facts["layer_updates"]) if facts.get("layer_updates") else None
        scale = LossScale.of(facts.get("loss_scale"))
        return cls(saved["step"], facts.get("recipe"), loss, updates, best, scale, by_layer)

    def to_dict(self) -> dict[str, Any]:
        """Return the values of a commit or manifest; the keys are those of earlier versions."""
        facts = {
            "loss_before": self.loss_before,
            "updates_before": self.updates_before,
            "recipe": self.recipe_sha256,
            "best": self.best.to_dict() if self.best else None,
            "loss_scale": asdict(self.loss_scale) if self.loss_scale else None,
            **({"layer_updates": list(self.layer_updates)} if self.layer_updates else {}),
        }
        return {"step": self.step, "facts": facts}
