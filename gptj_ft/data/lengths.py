"""How long rows are: what decides what a run costs, and what padding would have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from gptj_ft.data.batches import Packing, Rows, rows_of_step, steps_per_epoch
from gptj_ft.data.prepared import Prepared

BINS = 8
BAR = 32  # characters of the longest bar
STEPS_LOOKED_AT = 2000


@dataclass(frozen=True)
class Lengths:
    """Tokens of each row.

    Attributes:
        prompts: not trained on; of conversations, the first question.
        answers: all else, EOS included.
        steps: of what a step takes so many of: rows, or windows of several.
        window: most that a row may have.
    """

    prompts: Sequence[int]
    answers: Sequence[int]
    steps: Sequence[int]
    window: int

    @classmethod
    def of(cls, prepared: Prepared, packing: Packing = "off") -> Lengths:
        """Count the tokens of prepared rows."""
        window = int(prepared.report.settings["max_length"])
        prompts = list(prepared.rows["prompt_length"])
        answers = [len(ids) - prompt for ids, prompt in zip(prepared.rows["input_ids"], prompts, strict=True)]
        return cls(prompts, answers, Rows.of(prepared.rows, packing, window).lengths, window)

    @property
    def share_of_window(self) -> float:
        """Share of the window that a row fills on average."""
        return sum(self.steps) / (len(self.steps) * self.window)

    def padding(self, batch_size: int, seed: int) -> float:
        """Return how many times as many tokens a step would have if its rows were padded to the longest of them."""
        lengths, padded, real = self.steps, 0, 0
        for step in islice(range(steps_per_epoch(len(lengths), batch_size)), STEPS_LOOKED_AT):
            batch = [lengths[row] for row in rows_of_step(step, len(lengths), batch_size, seed)]
            padded, real = padded + max(batch) * len(batch), real + sum(batch)
        return padded / real


def histogram(lengths: Sequence[int]) -> list[str]:
    """Return lines of a histogram, one for each of a few bins of equal width."""
    low, high = min(lengths), max(lengths)
    if low == high:
        return [f"{low:>6}         {'█' * BAR} {len(lengths):,}"]
    width = -(-(high - low + 1) // BINS)
    counts = [0] * (-(-(high - low + 1) // width))
    for length in lengths:
        counts[(length - low) // width] += 1
    most = max(counts)
    lines = []
    for number, count in enumerate(counts):
        first = low + number * width
        bar = "█" * max(round(BAR * count / most), 1 if count else 0)
        lines.append(f"{first:>6} - {first + width - 1:<6}{bar} {count:,}")
    return lines
