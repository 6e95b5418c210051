"""Keep a session within ``max_time``: expect of activities what they took before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gptj_ft.training.schedule import is_multiple
from gptj_ft.training.setup import TrainSetup

_MARGIN = 1.1  # on what is expected
RECENT = 10  # steps differ in length: the longest of so many is expected


class Deadline:
    """Time limit of a session, and measured durations of its activities.

    Args:
        limit: seconds of the session; ``None`` is no limit.
        began: time at which the session began, by `time.monotonic`.
        expected: seconds of each activity, until it has been measured.
    """

    def __init__(self, limit: float | None, began: float, expected: Mapping[str, float]) -> None:
        self._limit, self._began, self._expected = limit, began, expected
        self._measured: dict[str, deque[float]] = {}

    def record(self, activity: str, seconds: float) -> None:
        """Note how long an activity took."""
        self._measured.setdefault(activity, deque(maxlen=RECENT)).append(seconds)

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Note how long what is done inside takes, unless it fails."""
        start = time.monotonic()
        yield
        self.record(activity, time.monotonic() - start)

    def expected(self, activity: str) -> float:
        """Return the seconds that an activity may take."""
        return max(self._measured.get(activity) or [self._expected[activity]])

    def allows(self, *activities: str) -> bool:
        """Tell whether these, one after the other, end in time."""
        if self._limit is None:
            return True
        needed = _MARGIN * sum(self.expected(activity) for activity in activities)
        return time.monotonic() - self._began + needed <= self._limit


def next_activities(setup: TrainSetup, step: int) -> list[str]:
    """Return the activities of a session after a step until it can stop again: one more step at least."""
    validates, every = len(setup.validation) > 0, setup.recipe.validate_every
    activities = ["flush", "validation"] if validates and is_multiple(step, every) else []
    activities.append("step")
    if step + 1 == setup.num_steps:
        return [*activities, "flush", *(["validation"] if validates else []), "export"]
    return activities if setup.plan.placement.is_durable and not setup.recipe.mirror else [*activities, "flush", "save"]


def forecast_seconds(setup: TrainSetup) -> dict[str, float]:
    """Forecast the seconds of a run's activities; measured ones take their place later."""
    costs = setup.plan.costs
    return {
        "step": costs.seconds_per_step,
        "flush": costs.seconds_per_step,
        "validation": costs.validations.seconds,
        "save": costs.checkpoints.seconds,
        "export": costs.end.seconds,
    }
