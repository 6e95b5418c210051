"""Keep a session within ``max_time``: estimate each activity by its earlier durations."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from gptj_ft.training.schedule import is_multiple
from gptj_ft.training.setup import TrainSetup

_MARGIN = 1.1  # factor on estimates
RECENT = 10  # durations kept; the estimate is the longest, because steps differ


class Deadline:
    """Time limit of a session, and durations of its activities.

    Args:
        limit: seconds.
        start: value of ``clock`` at the start of the session; default clock: `time.monotonic`.
        expected: seconds of each activity, used until it is measured.
    """

    def __init__(
        self,
        limit: float | None,
        start: float,
        expected: Mapping[str, float],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._limit, self._start, self._expected, self._clock = limit, start, expected, clock or time.monotonic
        self._measured: dict[str, deque[float]] = {}

    def record(self, activity: str, seconds: float) -> None:
        self._measured.setdefault(activity, deque(maxlen=RECENT)).append(seconds)

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Record the duration of the block, unless it fails."""
        start = self._clock()
        yield
        self.record(activity, self._clock() - start)

    def expected(self, activity: str) -> float:
        """Estimate the seconds of an activity."""
        return max(self._measured.get(activity) or [self._expected[activity]])

    def allows(self, *activities: str) -> bool:
        """Tell whether the activities, one after the other, end within the limit."""
        if self._limit is None:
            return True
        needed = _MARGIN * sum(self.expected(activity) for activity in activities)
        return self._clock() - self._start + needed <= self._limit


def next_activities(setup: TrainSetup, step: int) -> list[str]:
    """Return the activities from a step to the next possible stop: at least one more step."""
    validates, every = len(setup.validation) > 0, setup.recipe.validate_every
    activities = ["flush", "validation"] if validates and is_multiple(step, every) else []
    activities.append("step")
    if step + 1 == setup.num_steps:
        return [*activities, "flush", *(["validation"] if validates else []), "export"]
    # A run on disk is saved after each step; any other must flush and make a checkpoint to stop.
    return activities if setup.plan.placement.is_durable and not setup.recipe.mirror else [*activities, "flush", "save"]


def forecast_seconds(setup: TrainSetup) -> dict[str, float]:
    """Forecast the seconds of each activity, for use until it is measured."""
    costs = setup.plan.costs
    return {
        "step": costs.seconds_per_step,
        "flush": costs.seconds_per_step,
        "validation": costs.validations.seconds,
        "save": costs.checkpoints.seconds,
        "export": costs.end.seconds,
    }
