"""Successive halving, by thirds, that says why a candidate is dropped: a clear difference, or the budget.

Jamieson and Talwalkar, Non-stochastic best arm identification (2016), https://arxiv.org/abs/1502.07943. Here a
comparison on the same rows decides: the 95 % interval of the paired bootstrap, of a candidate against the leader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from gptj_ft.evaluation.comparison import LOWER_IS_BETTER
from gptj_ft.evaluation.metrics.statistic import Estimate, PairedEstimates, Statistic, estimate_scores

# Shares of the steps after which candidates are compared. A ninth is just after the usual warm-up of a tenth. There is
# no rung later: halfway, a high rate still looks worse than it ends, because the schedule has yet to lower it. So a
# third of the candidates, at least two, train to the end. Six cost 41 % of the steps of training all to the end.
RUNG_SHARES = (1 / 9, 1.0)
KEPT_SHARE, FEWEST_KEPT = 3, 2
# Least gain over the untuned model, as a share of its score, for a rung to predict the end. A small GPT-2 that had been
# trained on the same rows before had gained 0.01 %, by a low rate, and ended best with the rate that looked worst.
LEAST_GAIN = 0.01
MARGIN = 1.1  # factor on forecasts, as in `deadline`
Fate = Literal["best", "kept", "worse", "budget", "diverged"]
Figures = Mapping[str, Statistic]
STATES: Mapping[Fate, str] = {
    "best": "best",
    "kept": "not separable from the best",
    "worse": "worse by more than its interval",
    "budget": "not separable, dropped by the budget",
    "diverged": "diverged",
}


def rungs_of(num_steps: int, num_candidates: int) -> list[int]:
    """Return the steps after which candidates are compared; the last one is the end of the run."""
    shares = RUNG_SHARES if num_candidates > FEWEST_KEPT else RUNG_SHARES[-1:]
    return sorted({math.ceil(num_steps * share) for share in shares})


def plain_counts(num_candidates: int, num_rungs: int) -> list[int]:
    """Return the number of candidates that train to each rung: a third of those at the rung before, at least two."""
    counts = [num_candidates]
    while len(counts) < num_rungs:
        counts.append(min(counts[-1], max(FEWEST_KEPT, counts[-1] // KEPT_SHARE)))
    return counts


@dataclass(frozen=True)
class Budget:
    """Forecast seconds of the parts of a search, and their limit."""

    seconds_per_step: float
    seconds_per_rung: float  # of a candidate: fill the stores, score the validation rows, save
    seconds_at_start: float  # the validation of the initial model
    seconds_per_end: float  # of a candidate: the export
    limit: float | None  # ``max_time``; None: the cost of keeping a third

    def seconds(self, rungs: Sequence[int], counts: Sequence[int]) -> float:
        """Forecast a search, given how many candidates train to each rung."""
        steps = num_steps(rungs, counts)
        ends = self.seconds_at_start + counts[-1] * self.seconds_per_end
        return MARGIN * (steps * self.seconds_per_step + sum(counts) * self.seconds_per_rung + ends)

    def num_kept(self, rungs: Sequence[int], counts: Sequence[int], most: int) -> int:
        """Return how many of ``most`` inseparable candidates may train on: a third, or all that fit to the end.

        Args:
            counts: candidates that have trained to each rung so far.
        """
        plain = plain_counts(counts[0], len(rungs))
        limit = self.seconds(rungs, plain) if self.limit is None else self.limit
        left = len(rungs) - len(counts)
        # Inseparable candidates stay while the budget lets each of them finish.
        fitting = [n for n in range(1, most + 1) if self.seconds(rungs, [*counts, *[n] * left]) <= limit]
        return min(most, max(plain[len(counts)], *fitting, 1))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def num_steps(rungs: Sequence[int], counts: Sequence[int]) -> int:
    """Return the optimizer steps of a search, given how many candidates train to each rung."""
    return sum(count * (step - before) for count, step, before in zip(counts, rungs, [0, *rungs], strict=False))


@dataclass(frozen=True)
class Standing:
    """A candidate at a rung."""

    candidate: str  # name
    fate: Fate
    score: float | None = None  # None: it diverged
    difference: Estimate | None = None  # to the leader, with its interval; None for the leader
    reason: str = ""  # of a divergence


@dataclass(frozen=True)
class Decision:
    """The comparison of the candidates at a rung."""

    step: int
    standings: tuple[Standing, ...]  # best first
    has_learned: bool = True  # whether the leader is better than the untuned model, see `Comparison.has_learned`

    @property
    def leader(self) -> Standing:
        return self.standings[0]

    @property
    def kept(self) -> list[str]:
        """Candidates that train on; at the last rung, the best and those not separable from it."""
        return [each.candidate for each in self.standings if each.fate in ("best", "kept")]


def decide(
    rungs: Sequence[int],
    counts: Sequence[int],
    scored: Mapping[str, Figures | str],
    compare: Comparison,
    budget: Budget,
    start: Figures | None = None,
) -> Decision:
    """Compare candidates at a rung. The best third trains on; others do if inseparable, as far as the budget goes.

    If no candidate has learned yet, a worse score predicts nothing, and worse candidates count as inseparable.

    Args:
        counts: candidates that have trained to each rung so far.
        scored: statistics of each candidate, or the reason of its divergence.
        start: statistics of the untuned model; None: unknown.
    """
    diverged = [Standing(name, "diverged", reason=each) for name, each in scored.items() if isinstance(each, str)]
    figures = {name: each for name, each in scored.items() if not isinstance(each, str)}
    ranked = compare.ranked(figures)
    standings = [Standing(ranked[0][0], "best", ranked[0][1])] if ranked else []
    for name, score in ranked[1:]:
        difference = compare.difference(figures[name], figures[ranked[0][0]])
        standings.append(Standing(name, "worse" if compare.is_worse(difference) else "kept", score, difference))
    has_learned = True
    if len(counts) < len(rungs):
        if start is not None and ranked:
            has_learned = compare.has_learned(figures[ranked[0][0]], start)
        # The interval covers the choice of rows, not the steps to come: a third stays even if it is clearly worse.
        third = min(len(standings), plain_counts(counts[0], len(rungs))[len(counts)])
        is_worse = [each.fate == "worse" for each in standings]
        others = [place for place in range(third, len(standings)) if not (is_worse[place] and has_learned)]
        room = budget.num_kept(rungs, counts, third + len(others)) - third
        fates: dict[int, Fate] = dict.fromkeys((*range(1, third), *others[:room]), "kept")
        fates |= {place: "budget" for place in others[room:] if not is_worse[place]}
        standings = [replace(each, fate=fates.get(place, each.fate)) for place, each in enumerate(standings)]
    return Decision(rungs[len(counts) - 1], (*standings, *diverged), has_learned)


@dataclass(frozen=True)
class Comparison:
    """How two candidates are compared."""

    by: str  # name of the score
    num_rows: int  # validation rows
    seed: int  # of the bootstrap

    def ranked(self, figures: Mapping[str, Figures]) -> list[tuple[str, float]]:
        """Return names and scores, best first; of equal ones, the first candidate."""
        estimates = {name: self._estimate(each, {}).scores[self.by].value for name, each in figures.items()}
        sign = 1.0 if self.by in LOWER_IS_BETTER else -1.0
        # An undefined score, such as a correlation with constant answers, ranks last.
        return sorted(estimates.items(), key=lambda item: (math.isnan(item[1]), sign * item[1]))

    def difference(self, candidate: Figures, leader: Figures) -> Estimate:
        """Estimate the score of a candidate minus that of the leader, on the same samples of the rows."""
        return self._estimate(candidate, leader).differences[self.by]

    def is_worse(self, difference: Estimate) -> bool:
        """Tell whether a candidate is worse than the leader by more than its interval."""
        low, high = difference.low, difference.high
        if low is None or high is None:
            return math.isnan(difference.value)
        return low > 0.0 if self.by in LOWER_IS_BETTER else high < 0.0

    def has_learned(self, leader: Figures, start: Figures) -> bool:
        """Tell whether a candidate is better than the untuned model, by more than its interval and `LEAST_GAIN`."""
        least, gain = LEAST_GAIN * abs(self._estimate(start, {}).scores[self.by].value), self.difference(start, leader)
        # The gain is the lead of the candidate: the untuned model is the worse one. Its score may be undefined.
        return self.is_worse(gain) and not abs(gain.value) < least

    def _estimate(self, figures: Figures, baseline: Figures) -> PairedEstimates:
        one, other = ({self.by: each[self.by]} if each else {} for each in (figures, baseline))
        return estimate_scores(one, other, self.num_rows, self.seed)
