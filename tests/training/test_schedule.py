"""Test schedules against hand-computed values, and against torch and transformers where both define them."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_linear_schedule_with_warmup

from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import build, dump_recipe, resolve
from gptj_ft.errors import UsageError
from gptj_ft.training.schedule import Schedule

# The two published fine-tunings of GPT-J (Cerebras Model Zoo 1.7.1 and 1.9.1), as one would type them.
CNN_DAILYMAIL = "[{shape: linear, start: 0.0, end: 1.0, steps: 100}, {shape: linear, start: 1.0, end: 0.0, steps: 150}]"
TRC2 = "[{shape: linear, start: 0.0, end: 1.0, steps: 500}, {shape: cosine, start: 1.0, end: 0.2, steps: 50000}]"


def written(text: str, lr: float = 1.0, *more: str) -> Recipe:
    return resolve({"lr": lr}, assignments=(f"schedule={text}", *more), environment={}).recipe


def rates(recipe: Recipe, num_steps: int) -> list[float]:
    schedule = Schedule.of(recipe, num_steps)
    return [schedule.lr(step) for step in range(1, num_steps + 1)]


def rates_of(scheduler_of, peak: float, num_steps: int) -> list[float]:
    """The rates that a scheduler of torch's kind gives to each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler, values = scheduler_of(optimizer), []
    for _ in range(num_steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def test_linear_schedule_rises_then_falls() -> None:
    recipe = Recipe(lr=1.0, schedule="linear", warmup=4, final_lr=0.0)
    assert rates(recipe, 8) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_schedule_is_halved_at_midpoint() -> None:
    recipe = Recipe(lr=2.0, schedule="cosine", warmup=0, final_lr=0.1)
    values = rates(recipe, 11)
    assert values[0] == 2.0
    assert values[5] == pytest.approx(2.0 * 0.55)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup", "num_steps"), [(0, 2), (0, 10), (1, 2), (3, 10), (9, 10)])
def test_last_step_has_final_rate(schedule: str, warmup: int, num_steps: int) -> None:
    values = rates(Recipe(lr=2.0, schedule=schedule, warmup=warmup, final_lr=0.1), num_steps)
    assert values[max(0, warmup - 1)] == 2.0
    assert values[-1] == 0.2
    assert all(value > 0.2 for value in values[max(0, warmup - 1) : -1])


def test_one_step_has_peak_rate() -> None:
    assert rates(Recipe(lr=2.0), 1) == [2.0]


def test_constant_schedule_stays_at_peak() -> None:
    assert rates(Recipe(lr=1.0, schedule="constant", warmup=0.5), 4) == [0.5, 1.0, 1.0, 1.0]


def test_long_warmup_covers_the_whole_run() -> None:
    assert rates(Recipe(lr=1.0, warmup=500), 2) == pytest.approx([1 / 500, 2 / 500])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0, 3])
def test_rates_are_positive_for_any_length(schedule: str, warmup: float) -> None:
    for num_steps in (1, 2, 3, 10):
        values = rates(Recipe(lr=1.0, schedule=schedule, warmup=warmup, final_lr=0.0), num_steps)
        assert all(0 < value <= 1 for value in values)


def test_named_schedules_match_transformers_and_torch() -> None:
    linear = rates(Recipe(lr=3e-5, schedule="linear", warmup=0, final_lr=0.0), 40)
    theirs = rates_of(lambda optimizer: get_linear_schedule_with_warmup(optimizer, 0, 40), 3e-5, 40)
    assert linear == pytest.approx(theirs, rel=1e-12)
    cosine = rates(Recipe(lr=3e-5, schedule="cosine", warmup=0, final_lr=0.1), 40)
    theirs = rates_of(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 39, eta_min=3e-6), 3e-5, 40)
    assert cosine == pytest.approx(theirs, rel=1e-9)


def test_first_revision_reaches_final_rate_later() -> None:
    cosine = rates(Recipe(lr=3e-5, schedule="cosine", warmup=0, final_lr=0.1, revision=1), 40)
    theirs = rates_of(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=3e-6), 3e-5, 40)
    assert cosine == pytest.approx(theirs, rel=1e-9)


def test_cnn_dailymail_schedule_matches_transformers() -> None:
    ours = rates(written(CNN_DAILYMAIL, 5e-5), 250)
    theirs = rates_of(lambda optimizer: get_linear_schedule_with_warmup(optimizer, 100, 250), 5e-5, 250)
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert (ours[0], ours[50], ours[100]) == (0.0, 2.5e-5, 5e-5)
    assert ours[249] == pytest.approx(5e-5 / 150)


def test_trc2_schedule_matches_transformers_then_constant() -> None:
    schedule = Schedule.of(written(TRC2, 6e-6), 60_000)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=6e-6)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 500, 50_500, min_lr=1.2e-6).lr_lambdas[0]
    for since in (0, 1, 499, 500, 501, 10_000, 25_500, 50_499):
        assert schedule.lr(since + 1) == pytest.approx(6e-6 * theirs(since), rel=1e-12), since
    assert schedule.lr(25_501) == pytest.approx(3.6e-6)
    assert schedule.lr(50_501) == schedule.lr(60_000) == pytest.approx(1.2e-6, rel=1e-15)


def test_pieces_are_torchs_schedulers_in_sequence() -> None:
    constant, linear = "{shape: constant, end: 1, steps: 5}", "{shape: linear, end: 0.5, steps: 4}"

    def sequence(optimizer):
        parts = [lr_scheduler.ConstantLR(optimizer, 1.0, 5), lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 4)]
        return lr_scheduler.SequentialLR(optimizer, parts, [5])

    ours = rates(written(f"[{constant}, {linear}]", 2e-3), 12)
    assert ours == pytest.approx(rates_of(sequence, 2e-3, 12), rel=1e-12)


def test_piece_starts_at_previous_end_by_default() -> None:
    follows = written("[{shape: linear, end: 1.0, steps: 2}, {shape: linear, end: 0.5, steps: 2}]", 4.0)
    assert rates(follows, 5) == pytest.approx([0.0, 2.0, 4.0, 3.0, 2.0])
    jumps = written("[{shape: constant, end: 0.2, steps: 2}, {shape: linear, start: 1.0, end: 0.6, steps: 2}]")
    assert rates(jumps, 5) == pytest.approx([0.2, 0.2, 1.0, 0.8, 0.6])


@pytest.mark.parametrize("num_steps", [1, 251, 1000])
def test_zero_rate_at_last_step_is_rejected(num_steps: int) -> None:
    with pytest.raises(UsageError, match=rf"the last step, {num_steps}, is 0.* has 250 steps"):
        Schedule.of(written(CNN_DAILYMAIL), num_steps)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("cosin", "schedule: Input should be 'linear', 'cosine', 'constant' or 'inverse_sqrt', not 'cosin'"),
        ("5", "schedule: expected linear, cosine, constant, inverse_sqrt or a list of pieces, not 5"),
        ("[]", "one of all of them must be 1"),
        (
            "[{shape: linear, end: 5e-5, steps: 3}]",
            "schedule: no piece reaches lr: start and end are fractions of lr, so one of all of them must be 1",
        ),
        ("[{shape: linear, from: 0, to: 1, steps: 3}]", "unknown option 'schedule.0.from' (known: shape, start,"),
        ("[{shape: linear, ed: 1, steps: 3}]", "unknown option 'schedule.0.ed' (did you mean 'end'?)"),
        ("[{shape: linear, end: 1, steps: 3}, {shape: linear, end: 0, steps: 0}]", "schedule.1.steps: Input should be"),
        ("[{shape: linear, end: .inf, steps: 3}]", "schedule.0.end: Input should be a finite number"),
        ("[{shape: constant, start: 0, end: 1, steps: 3}]", "schedule.0: a constant piece has a single rate, `end`"),
    ],
)
def test_invalid_schedule_piece_is_rejected(schedule: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        written(schedule)
    assert message in str(error.value)


def test_pieces_exclude_warmup_and_final_lr() -> None:
    for key in ("warmup", "final_lr"):
        with pytest.raises(UsageError, match=f"command line: {key} has no effect"):
            written(TRC2, 1.0, f"{key}=0.5")
        with pytest.raises(UsageError, match=f"{key} has no effect, because the schedule .recipe continuous"):
            resolve({"recipe": "continuous-pretraining", key: 0.5}, environment={})
    below = resolve({"recipe": "summarization"}, assignments=(f"schedule={TRC2}",), environment={})
    assert below.recipe.warmup == Recipe().warmup
    text = dump_recipe(below.recipe, below.origins)
    assert not any(f"\n{key}:" in text for key in ("warmup", "final_lr"))
    above = resolve({"recipe": "continuous-pretraining"}, assignments=("schedule=linear", "warmup=7"), environment={})
    assert (above.recipe.schedule, above.recipe.warmup) == ("linear", 7)


def test_trc2_preset_schedule_scales_with_lr() -> None:
    preset = resolve({"recipe": "continuous-pretraining"}, environment={}).recipe
    assert Schedule.of(preset, 60_000) == Schedule.of(written(TRC2, 6e-6), 60_000)
    assert build(preset.model_dump()) == preset
    scaled = resolve({"recipe": "continuous-pretraining", "lr": 3e-5}, environment={}).recipe
    assert Schedule.of(scaled, 60_000).lr(501) == 3e-5


def test_inverse_sqrt_schedule_matches_bertsum() -> None:
    recipe = resolve({"lr": 2e-5}, assignments=("schedule=inverse_sqrt", "warmup=10000"), environment={}).recipe
    schedule = Schedule.of(recipe, 50_000)
    for step in (1, 500, 10_000, 10_001, 30_000, 50_000):
        assert schedule.lr(step) == pytest.approx(2e-3 * min(step**-0.5, step * 10_000**-1.5))
