"""Test the time limit of a session."""

from __future__ import annotations

import pytest

from gptj_ft.training.deadline import Deadline


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_deadline_adds_ten_percent_margin(clock: Clock) -> None:
    deadline = Deadline(100.0, 1000.0, {"step": 20.0, "save": 20.0}, clock)
    clock.now = 1055.9
    assert deadline.allows("step", "save")
    clock.now = 1056.1
    assert not deadline.allows("step", "save")
    assert deadline.allows("step")


def test_estimate_is_longest_recent_duration(clock: Clock) -> None:
    deadline = Deadline(100.0, 1000.0, {"step": 500.0}, clock)
    assert not deadline.allows("step")
    for seconds in (5.0, 40.0, 10.0):
        with deadline.measure("step"):
            clock.now += seconds
    assert deadline.expected("step") == 40.0
    for _ in range(10):
        deadline.record("step", 8.0)
    assert deadline.expected("step") == 8.0


def test_failed_activity_is_not_measured() -> None:
    deadline = Deadline(100.0, 1000.0, {"save": 7.0})
    with pytest.raises(OSError, match="full"), deadline.measure("save"):
        raise OSError("disk full")
    assert deadline.expected("save") == 7.0


def test_no_limit_allows_everything() -> None:
    assert Deadline(None, 0.0, {"step": 1e9}).allows("step")
