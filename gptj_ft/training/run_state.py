"""State of a run beside its tensors, as each commit and each checkpoint holds it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gptj_ft.streaming.loss_scale import LossScale

LOSS = "validation_loss"


@dataclass(frozen=True)
class BestState:
    """The best validated state of a run.

    Attributes:
        step: optimizer steps behind it.
        validation_loss: nats per target token.
        by: name of the score it was chosen by; default: the loss.
        value: value of that score.
    """

    step: int
    validation_loss: float
    by: str
    value: float

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> BestState:
        """Read the mapping that `to_dict` makes."""
        by = next((name for name in values if name not in ("step", LOSS)), LOSS)
        return cls(values["step"], values[LOSS], by, values[by])

    def to_dict(self) -> dict[str, Any]:
        """Return step, loss and score under their names."""
        return {"step": self.step, LOSS: self.validation_loss, self.by: self.value}

    def score(self, name: str) -> float:
        """Return a score by its name; NaN if this state was chosen by another."""
        return self.validation_loss if name == LOSS else self.value if name == self.by else math.nan


@dataclass(frozen=True)
class RunState:
    """All that resuming needs beside tensors.

    Attributes:
        step: optimizer steps done.
        recipe_sha256: digest of the options that decide numbers.
        loss_before: validation loss before training, nats per target token; ``None`` without validation rows.
        updates_before: updates that the moments had seen before the run.
        best: best validated state so far.
        loss_scale: scale of the next step's loss in fp16, and steps skipped so far; ``None``: another type.
    """

    step: int
    recipe_sha256: str | None
    loss_before: float | None = None
    updates_before: int = 0
    best: BestState | None = None
    loss_scale: LossScale | None = None

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> RunState:
        """Read the state from a commit or the manifest of a checkpoint."""
        facts = saved["facts"]
        best = BestState.of(facts["best"]) if facts.get("best") else None
        loss, updates = facts.get("loss_before"), facts.get("updates_before", 0)
        return cls(saved["step"], facts.get("recipe"), loss, updates, best, LossScale.of(facts.get("loss_scale")))

    def to_dict(self) -> dict[str, Any]:
        """Convert to the values of a commit or a manifest; files of earlier versions have the same keys."""
        facts = {
            "loss_before": self.loss_before,
            "updates_before": self.updates_before,
            "recipe": self.recipe_sha256,
            "best": self.best.to_dict() if self.best else None,
            "loss_scale": asdict(self.loss_scale) if self.loss_scale else None,
        }
        return {"step": self.step, "facts": facts}
