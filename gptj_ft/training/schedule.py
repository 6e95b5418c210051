"""Learning-rate schedules as sequences of segments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gptj_ft.config.options import NamedShape, Recipe, SchedulePiece
from gptj_ft.errors import UsageError


@dataclass(frozen=True)
class Segment:
    """Part of a schedule.

    ``inverse_sqrt`` divides by the root of the step, counted with the ``before`` steps before the segment, and has no
    end (https://arxiv.org/abs/1706.03762, section 5.3).
    """

    shape: NamedShape
    start: float  # learning rate of the first step
    end: float  # learning rate of the step after the segment
    steps: int
    before: int = 0

    def lr(self, since: int) -> float:
        """Return the learning rate ``since`` steps after the segment's first."""
        if self.shape == "constant":
            return self.end
        if self.shape == "inverse_sqrt":
            return self.start * math.sqrt(max(self.before, 1) / (max(self.before, 1) + since + 1))
        progress = since / self.steps
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True)
class Schedule:
    """The learning rates of a run; after the last segment the rate stays constant."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, recipe: Recipe, num_steps: int) -> Schedule:
        """Derive the schedule of a run; raise `UsageError` if the last step would have a rate of 0."""
        if isinstance(recipe.schedule, str):
            schedule = cls(_stretched(recipe, recipe.schedule, num_steps))
        else:
            schedule = cls(_as_written(recipe.schedule, recipe.lr))
        if schedule.lr(num_steps) == 0.0:
            length = sum(segment.steps for segment in schedule.segments)
            raise UsageError(
                f"the learning rate of the last step, {num_steps}, is 0, so that it would train nothing: the schedule "
                f"has {length:,} steps; use another --max-steps, or --set schedule=cosine, which fits any"
            )
        return schedule

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        since = step - 1
        for segment in self.segments:
            if since < segment.steps:
                return segment.lr(since)
            since -= segment.steps
        return self.segments[-1].end


def _as_written(pieces: Sequence[SchedulePiece], peak: float) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for piece in pieces:
        before = segments[-1].end if segments else 0.0
        start = before if piece.start is None else peak * piece.start
        segments.append(Segment(piece.shape, start, peak * piece.end, piece.steps))
    return tuple(segments)


def _stretched(recipe: Recipe, shape: NamedShape, num_steps: int) -> tuple[Segment, ...]:
    """Stretch a named shape over a run: warm-up, peak, decay.

    The warm-up does not start at 0, which would waste a step, and its last step has the peak rate. The run's last step
    has the final rate. A rate of 0 would waste that step: it belongs to the step after the run, as in `transformers`.
    """
    peak = recipe.lr
    warmup = recipe.num_warmup_steps(num_steps)
    # A linear segment reaches its end one step late, so the peak is a constant segment of one step.
    rise = [Segment("linear", peak / warmup, peak, warmup - 1), Segment("constant", peak, peak, 1)] if warmup else []
    end, length = peak if shape == "constant" else peak * recipe.final_lr, max(1, num_steps - warmup)
    # A run of one step has the peak rate.
    if recipe.revision > 1 and shape in ("linear", "cosine") and end and 1 < num_steps > warmup:
        return (*rise, Segment(shape, peak, end, length - 1), Segment("constant", end, end, 1))
    return (*rise, Segment(shape, peak, end, length, warmup))


def is_multiple(step: int, every: int) -> bool:
    """Tell whether a step is a multiple of ``every``; 0 means never."""
    return every > 0 and step % every == 0
