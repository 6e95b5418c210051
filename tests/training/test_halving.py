"""Decisions of a search at its rungs: clear differences, the budget, divergence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gptj_ft.evaluation.metrics.statistic import mean
from gptj_ft.training.halving import Budget, Comparison, Decision, decide, num_steps, plain_counts, rungs_of

RUNGS = [10, 90]
NOISE = np.random.default_rng(0).normal(size=200)
STEPS_ONLY = Budget(1.0, 0.0, 0.0, 0.0, None)


def losses(shift: float, seed: int | None = None) -> dict[str, object]:
    """Return losses around ``shift``; with a seed, their noise is not that of the other candidates."""
    noise = NOISE if seed is None else np.random.default_rng(seed).normal(size=200)
    return {"loss": mean(5.0 + noise + shift), "accuracy": mean(90.0 - noise - shift)}


def decided(
    shifts: Sequence[object], counts: Sequence[int], by: str = "loss", limit: float | None = None, start: float = 9.0
) -> Decision:
    scored = {f"c{n}": shift if isinstance(shift, str | dict) else losses(shift) for n, shift in enumerate(shifts)}
    budget = Budget(1.0, 0.0, 0.0, 0.0, limit)
    return decide(RUNGS, counts, scored, Comparison(by, 200, 0), budget, losses(start))  # type: ignore[arg-type]


def fates(decision: Decision) -> dict[str, str]:
    return {each.candidate: each.fate for each in decision.standings}


def test_six_candidates_cost_41_percent() -> None:
    rungs = rungs_of(180, 6)
    assert rungs == [20, 180]
    assert num_steps(rungs, plain_counts(6, 2)) == 6 * 20 + 2 * 160
    assert num_steps(rungs, plain_counts(6, 2)) / (6 * 180) < 0.41


@pytest.mark.parametrize(
    ("steps", "count", "rungs", "counts"),
    [
        (1, 6, [1], [6]),
        (2, 6, [1, 2], [6, 2]),
        (90, 9, [10, 90], [9, 3]),
        (90, 3, [10, 90], [3, 2]),
        (90, 2, [90], [2]),
    ],
)
def test_short_searches_have_fewer_rungs(steps: int, count: int, rungs: list[int], counts: list[int]) -> None:
    assert rungs_of(steps, count) == rungs
    assert plain_counts(count, len(rungs)) == counts


def test_paired_small_difference_is_clear() -> None:
    # The rows differ by 1, the candidates by 0.01 on every row: only a paired interval separates them.
    assert fates(decided([0.0, 0.01], [2, 2])) == {"c0": "best", "c1": "worse"}
    assert fates(decided([losses(0.0), losses(0.05, seed=3)], [4, 2])) == {"c0": "best", "c1": "kept"}


@pytest.mark.parametrize("by", ["loss", "accuracy"])
def test_better_score_leads(by: str) -> None:
    decision = decided([0.2, 0.0, 0.1], [6, 3], by)
    assert [each.candidate for each in decision.standings] == ["c1", "c2", "c0"]
    assert fates(decision) == {"c1": "best", "c2": "worse", "c0": "worse"}


def test_third_stays_though_clearly_worse() -> None:
    decision = decided([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [6])
    assert [each.fate for each in decision.standings] == ["best", "kept", *["worse"] * 4]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("by", ["loss", "accuracy"])
def test_being_worse_says_nothing_before_anything_is_learned(by: str) -> None:
    shifts, all_to_the_end = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], 1.1 * 6 * 90
    learned = decided(shifts, [6], by, all_to_the_end, start=1.0)
    assert learned.has_learned
    assert [each.fate for each in learned.standings] == ["best", "kept", *["worse"] * 4]
    for start in (-0.1, 0.0, 0.04):  # worse, equal, and a gain below a hundredth: 0.04 of 5.04, or of 89.96
        nothing = decided(shifts, [6], by, all_to_the_end, start=start)
        assert not nothing.has_learned
        assert [each.fate for each in nothing.standings] == ["best", *["kept"] * 5]
        cheap = decided(shifts, [6], by, start=start)
        assert [each.fate for each in cheap.standings] == ["best", "kept", *["worse"] * 4], "no time for more"


def test_inseparable_candidates_stay_within_a_third() -> None:
    alike = [losses(0.001 * seed, seed) for seed in range(2)]
    decision = decided([*alike, 3.0, 3.0, 3.0, 3.0], [6])
    assert len(decision.kept) == 2
    assert [each.fate for each in decision.standings[2:]] == ["worse"] * 4


def test_only_budget_drops_inseparable_ones() -> None:
    alike = [losses(0.0, seed) for seed in range(6)]
    decision = decided(alike, [6])
    assert sorted(each.fate for each in decision.standings) == ["best", *["budget"] * 4, "kept"]


def test_time_left_keeps_inseparable_ones() -> None:
    alike = [losses(0.0, seed) for seed in range(6)]
    assert len(decided(alike, [6], limit=STEPS_ONLY.seconds(RUNGS, [6, 6])).kept) == 6
    assert len(decided(alike, [6], limit=STEPS_ONLY.seconds(RUNGS, [6, 5])).kept) == 5
    assert len(decided(alike, [6], limit=1.0).kept) == 2


def test_last_rung_drops_nobody_by_budget() -> None:
    decision = decided([losses(0.0, 0), losses(0.0, 1), losses(0.0, 2), 4.0], [4, 4])
    assert sorted(fates(decision).values()) == ["best", "kept", "kept", "worse"]


def test_diverged_candidate_is_named() -> None:
    decision = decided(["the loss is not finite", 0.0, 0.1], [3])
    assert decision.standings[-1].candidate == "c0"
    assert decision.standings[-1].reason == "the loss is not finite"
    assert decision.kept == ["c1", "c2"]
    assert decided(["a", "b"], [2]).kept == []


def test_equal_candidates_rank_in_order() -> None:
    decision = decided([0.0, 0.0, 0.0], [3])
    assert [each.candidate for each in decision.standings] == ["c0", "c1", "c2"]
    assert fates(decision) == {"c0": "best", "c1": "kept", "c2": "budget"}
