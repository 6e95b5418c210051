"""Schedules by hand-computed values; AdamW itself is compared with torch in test_streaming."""

from __future__ import annotations

import pytest

from gptj_ft.optimizer import Schedule
from gptj_ft.recipe import Recipe


def rates(recipe: Recipe, num_steps: int) -> list[float]:
    schedule = Schedule.of(recipe, num_steps)
    return [schedule.lr(step) for step in range(1, num_steps + 1)]


def test_linear_schedule_rises_to_the_peak_and_falls_towards_its_end() -> None:
    recipe = Recipe(lr=1.0, schedule="linear", warmup=4, final_lr=0.0)
    assert rates(recipe, 8) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_schedule_is_half_way_in_the_middle() -> None:
    recipe = Recipe(lr=2.0, schedule="cosine", warmup=0, final_lr=0.1)
    values = rates(recipe, 10)
    assert values[0] == 2.0
    assert values[5] == pytest.approx(2.0 * 0.55)
    assert values[9] == pytest.approx(2.0 * (0.1 + 0.9 * 0.0244717), rel=1e-5)


def test_constant_schedule_stays_at_the_peak_after_the_warm_up() -> None:
    assert rates(Recipe(lr=1.0, schedule="constant", warmup=0.5), 4) == [0.5, 1.0, 1.0, 1.0]


def test_a_warm_up_longer_than_the_run_never_leaves_the_warm_up() -> None:
    assert rates(Recipe(lr=1.0, warmup=500), 2) == pytest.approx([1 / 500, 2 / 500])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0, 3])
def test_every_run_length_has_positive_rates(schedule: str, warmup: float) -> None:
    for num_steps in (1, 2, 3, 10):
        values = rates(Recipe(lr=1.0, schedule=schedule, warmup=warmup, final_lr=0.0), num_steps)
        assert all(0 < value <= 1 for value in values)
