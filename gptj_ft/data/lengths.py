"""Measure the lengths of rows: histogram, share of the window, cost of padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gptj_ft.data.batches import Packing, Rows, rows_of_step, steps_per_epoch
from gptj_ft.data.dataset import Prepared

_Numbers = NDArray[np.integer]
BINS = 8
BAR = 32  # characters of the longest bar
STEPS_LOOKED_AT = 2000


@dataclass(frozen=True)
class Lengths:
    """Tokens of each row."""

    prompts: _Numbers  # not targets; for conversations, the first question
    answers: _Numbers  # all other tokens, EOS included
    steps: _Numbers  # inputs of each unit of a step: a row, or a packed window
    window: int  # most inputs of a unit

    @classmethod
    def of(cls, prepared: Prepared, packing: Packing = "off") -> Lengths:
        """Measure prepared rows."""
        window = int(prepared.report.settings["max_length"])
        prompts, rows = prepared.rows.numbers("prompt_length"), prepared.rows.lengths()
        steps = (
            rows - (rows > window) if packing == "off" else np.array(Rows.of(prepared.rows, packing, window).lengths)
        )
        return cls(prompts, rows - prompts, steps, window)

    @property
    def share_of_window(self) -> float:
        """Mean share of the window that a unit fills."""
        return float(self.steps.mean()) / self.window

    def padding(self, batch_size: int, seed: int) -> float:
        """Return the cost of padding each step to its longest unit: padded tokens divided by real ones."""
        padded = real = 0
        for step in range(min(steps_per_epoch(len(self.steps), batch_size), STEPS_LOOKED_AT)):
            batch = self.steps[rows_of_step(step, len(self.steps), batch_size, seed)]
            padded, real = padded + int(batch.max()) * len(batch), real + int(batch.sum())
        return padded / real


@dataclass(frozen=True)
class Bin:
    """A bin of a histogram: rows of ``first`` to ``last`` tokens, both included."""

    first: int
    last: int
    rows: int


def bins_of(lengths: Sequence[int] | _Numbers) -> list[Bin]:
    """Count lengths in a few bins of equal width."""
    numbers = np.asarray(lengths)
    low, high = int(numbers.min()), int(numbers.max())
    width = -(-(high - low + 1) // BINS)
    counts = np.bincount((numbers - low) // width, minlength=-(-(high - low + 1) // width)).tolist()
    ends = [min(low + (number + 1) * width - 1, high) for number in range(len(counts))]
    return [Bin(low + number * width, end, rows) for number, (end, rows) in enumerate(zip(ends, counts, strict=True))]


def histogram(lengths: Sequence[int] | _Numbers) -> list[str]:
    """Format a histogram, one line per bin."""
    bins = bins_of(lengths)
    most = max(each.rows for each in bins)
    lines = []
    for each in bins:
        bar = "█" * max(round(BAR * each.rows / most), 1 if each.rows else 0)
        between = f" - {each.last:<6}" if len(bins) > 1 else " " * 9
        lines.append(f"{each.first:>6}{between}{bar} {each.rows:,}")
    return lines
