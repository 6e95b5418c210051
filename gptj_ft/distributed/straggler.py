"""Detect stragglers: ranks that compute more slowly than the others and make all of them wait."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SLOWER = 1.5  # times the others' seconds per FLOP
WATCHED_STEPS = 5  # in a row: a machine may be busy for a moment
LEAST_SECONDS = 0.1  # of a step: shorter times are noise


class StragglerWatch:
    """Compare the seconds per FLOP of all ranks after each step.

    Args:
        names: name of each rank, for messages.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._slow_steps, self._factors = [0] * len(names), [0.0] * len(names)
        self._warned = set[int]()

    def after_step(self, step: int, works: Sequence[tuple[float, float]]) -> str | None:
        """Return a warning of new stragglers; each rank is named once in a run.

        Args:
            works: seconds without waiting, and FLOPs, of each rank.
        """
        slow = []
        for rank, (seconds, flops) in enumerate(works):
            others = [work for other, work in enumerate(works) if other != rank and work[1]]
            is_slow = False
            if others and flops:
                factor = seconds / flops / max(1e-18, median(each / count for each, count in others))
                # With a smaller share, a slow machine may still be done first: then nobody waits for it.
                is_slow = factor > SLOWER and seconds > max(LEAST_SECONDS, median(each for each, _ in others))
                # Report the least factor of the watched steps, which every one of them confirms.
                self._factors[rank] = min(factor, self._factors[rank]) if self._slow_steps[rank] else factor
            self._slow_steps[rank] = self._slow_steps[rank] + 1 if is_slow else 0
            if self._slow_steps[rank] == WATCHED_STEPS and rank not in self._warned:
                self._warned.add(rank)
                slow.append(f"{self._names[rank]} takes {self._factors[rank]:.1f} times as long")
        if not slow:
            return None
        return f"{', '.join(slow)} as the others for the same work, up to step {step}: all wait for it"
