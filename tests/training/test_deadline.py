"""Whether what is coming still fits."""

from __future__ import annotations

import time

import pytest

from gptj_ft.training.deadline import Deadline


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def test_what_ends_in_time_is_allowed_with_a_margin_of_ten_percent(clock: Clock) -> None:
    deadline = Deadline(100.0, 1000.0, {"step": 20.0, "save": 20.0})
    clock.now = 1055.9
    assert deadline.allows("step", "save")
    clock.now = 1056.1
    assert not deadline.allows("step", "save")
    assert deadline.allows("step")


def test_the_longest_of_the_last_measurements_is_expected_and_forecasts_are_forgotten(clock: Clock) -> None:
    deadline = Deadline(100.0, 1000.0, {"step": 500.0})
    assert not deadline.allows("step")
    for seconds in (5.0, 40.0, 10.0):
        with deadline.measure("step"):
            clock.now += seconds
    assert deadline.expected("step") == 40.0
    for _ in range(10):
        deadline.record("step", 8.0)
    assert deadline.expected("step") == 8.0


def test_what_fails_is_not_measured() -> None:
    deadline = Deadline(100.0, 1000.0, {"save": 7.0})
    with pytest.raises(OSError, match="full"), deadline.measure("save"):
        raise OSError("disk full")
    assert deadline.expected("save") == 7.0


def test_without_a_limit_everything_is_allowed() -> None:
    assert Deadline(None, 0.0, {"step": 1e9}).allows("step")
