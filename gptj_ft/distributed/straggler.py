"""Watch how long each process of a run computes: one that is slower than the others makes all of them wait."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SLOWER = 1.5  # times as long as the others for the same work, from which on it is told
WATCHED_STEPS = 5  # in a row, for a machine may be busy with something else for a moment
LEAST_SECONDS = 0.1  # of a step: below, what is measured is not the work

Pace = tuple[float, float]


def pace_of(seconds: float, waited: float, flops: float) -> Pace:
    """Return the seconds of a step in which a process has not waited for others, and the FLOPs of its own work."""
    return max(0.0, seconds - waited), flops


class PaceWatch:
    """Find processes that are slower than the others of their run, by what each says after a step.

    Args:
        names: name of each process for messages, by rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._slow_steps, self._factors = [0] * len(names), [0.0] * len(names)
        self._told = set[int]()

    def after_step(self, step: int, paces: Sequence[Pace]) -> str | None:
        """Return a warning of a process that has been slower for some steps; each is told of once.

        Args:
            step: number of the step.
            paces: pace of each process, by rank; what they compute may differ, so it is compared by FLOP.
        """
        slow = []
        for rank, (seconds, flops) in enumerate(paces):
            others = [pace for other, pace in enumerate(paces) if other != rank and pace[1]]
            is_slow = False
            if others and flops:
                factor = seconds / flops / max(1e-18, median(each / count for each, count in others))
                is_slow = factor > SLOWER and seconds > max(LEAST_SECONDS, median(each for each, _ in others))
                self._factors[rank] = min(factor, self._factors[rank]) if self._slow_steps[rank] else factor
            self._slow_steps[rank] = self._slow_steps[rank] + 1 if is_slow else 0
            if self._slow_steps[rank] == WATCHED_STEPS and rank not in self._told:
                self._told.add(rank)
                slow.append(f"{self._names[rank]} takes {self._factors[rank]:.1f} times as long")
        if not slow:
            return None
        return f"{', '.join(slow)} as the others for the same work, up to step {step}: all wait for it"
