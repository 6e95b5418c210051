"""Schedules by hand-computed values; AdamW itself is compared with torch in test_streaming."""

from __future__ import annotations

import pytest
import torch

from gptj_ft.optimizer import Schedule, round_stochastically
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


def test_stochastic_rounding_is_right_on_average_and_the_same_for_the_same_key() -> None:
    exact = torch.full((4096,), 1.0 + 1 / 1024)  # an eighth of the way from 1 to the next bf16 number
    rounded = torch.empty(4096, dtype=torch.bfloat16)
    sums = torch.zeros(4096)
    for step in range(400):
        round_stochastically(exact.clone(), rounded, (0, step), 0)
        assert set(rounded.tolist()) <= {1.0, 1.0078125}
        sums += rounded.float()
    assert (sums / 400).mean().item() == pytest.approx(exact[0].item(), abs=2e-5)
    assert (sums / 400).std().item() < 4e-4  # every place gets noise of its own each time
    again = torch.empty_like(rounded)
    for start in (0, 1024):  # in parts or whole
        part = slice(start, start + 1024 if start == 0 else None)
        round_stochastically(exact[part].clone(), again[part], (0, 399), start)
    assert torch.equal(rounded, again)


def test_moments_in_bf16_keep_small_changes_that_rounding_to_nearest_loses() -> None:
    value, target = torch.ones(1024, dtype=torch.bfloat16), 2.0
    for step in range(2000):
        exact = value.float().mul_(0.999).add_(0.001 * target)
        round_stochastically(exact, value, (1, step), 0)
    assert value.float().mean().item() == pytest.approx(2 - 0.999**2000, abs=0.01)
