"""How long rows are: what decides what a run costs, and what padding would have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from gptj_ft.data.batches import rows_of_step, steps_per_epoch
from gptj_ft.data.prepared import Prepared

BINS = 8
BAR = 32  # characters of the longest bar
STEPS_LOOKED_AT = 2000


@dataclass(frozen=True)
class Lengths:
    """Tokens of each row.

    Attributes:
        prompts: not trained on.
        answers: trained on, EOS included.
        window: most that a row may have.
    """

    prompts: Sequence[int]
    answers: Sequence[int]
    window: int

    @classmethod
    def of(cls, prepared: Prepared) -> Lengths:
        """Count the tokens of prepared rows."""
        prompts = list(prepared.rows["prompt_length"])
        answers = [len(ids) - prompt for ids, prompt in zip(prepared.rows["input_ids"], prompts, strict=True)]
        return cls(prompts, answers, int(prepared.report.settings["max_length"]))

    @property
    def rows(self) -> list[int]:
        """Tokens of each row, prompt and answer."""
        return [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    @property
    def share_of_window(self) -> float:
        """Share of the window that a row fills on average."""
        return sum(self.rows) / (len(self.prompts) * self.window)

    def padding(self, batch_size: int, seed: int) -> float:
        """Return how many times as many tokens a step would have if its rows were padded to the longest of them."""
        lengths, padded, real = self.rows, 0, 0
        for step in islice(range(steps_per_epoch(len(lengths), batch_size)), STEPS_LOOKED_AT):
            batch = [lengths[row] for row in rows_of_step(step, len(lengths), batch_size, seed)]
            padded, real = padded + max(batch) * len(batch), real + sum(batch)
        return padded / real


@dataclass(frozen=True)
class Bin:
    """How many rows have ``first`` to ``last`` tokens, both included."""

    first: int
    last: int
    rows: int


def bins_of(lengths: Sequence[int]) -> list[Bin]:
    """Count lengths in a few bins of equal width."""
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // BINS)
    counts = [0] * (-(-(high - low + 1) // width))
    for length in lengths:
        counts[(length - low) // width] += 1
    return [Bin(low + number * width, low + (number + 1) * width - 1, count) for number, count in enumerate(counts)]


def histogram(lengths: Sequence[int]) -> list[str]:
    """Return lines of a histogram, one for each of a few bins of equal width."""
    bins = bins_of(lengths)
    most = max(each.rows for each in bins)
    lines = []
    for each in bins:
        bar = "█" * max(round(BAR * each.rows / most), 1 if each.rows else 0)
        between = f" - {each.last:<6}" if len(bins) > 1 else " " * 9
        lines.append(f"{each.first:>6}{between}{bar} {each.rows:,}")
    return lines
