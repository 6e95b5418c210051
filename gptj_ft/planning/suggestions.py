"""Suggest options that make a run fit, found by forecasting again with each, not by rule of thumb.

The search itself knows no option: each knob is a function. Those of training, and those that every run has, are below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Any, Generic, TypeVar

from gptj_ft.config.options import Recipe
from gptj_ft.planning.workload import Workload

LEAST_LENGTH = 64  # tokens a row; below that a run is of no use
W = TypeVar("W")


@dataclass(frozen=True)
class Candidate(Generic[W]):
    """A run with some options changed, and how to type them.

    Attributes:
        recipe: options of the run.
        load: workload: of a training, or of inference.
        typed: changes as they are typed, one an option.
    """

    recipe: Recipe
    load: W
    typed: tuple[str, ...] = ()

    def with_options(self, typed: str, load: W | None = None, **options: Any) -> Candidate[W]:
        """Return a copy with more options changed."""
        return Candidate(self.recipe.model_copy(update=options), load or self.load, (*self.typed, typed))


Knob = Callable[[Candidate[W]], Iterator[Candidate[W]]]
"""Enumerates the settings of an option, the least change first."""
Lack = Callable[[Recipe, W], int]
"""Returns the bytes that a run lacks in its best placement; 0 if it fits."""


def suggest(now: Candidate[W], knobs: Sequence[Knob[W]], lack: Lack[W], ways: Sequence[str] = ()) -> str:
    """Suggest options to change, as a phrase: the first two that are enough, else a pair, else what helps most.

    Args:
        now: run that does not fit.
        knobs: options that may be turned, in order of preference.
        lack: function that returns the missing bytes of a changed run.
        ways: other ways to make it fit, preferred to all options.
    """
    enough = [first for knob in knobs if (first := _first(knob(now), lack))]
    ways = [*ways, *(" ".join(candidate.typed) for candidate in enough)]
    if ways:
        return "try " + ", or ".join(ways[:2])
    for one, other in combinations(knobs, 2):
        if both := _first((last for first in one(now) for last in other(first)), lack):
            return "try " + " with ".join(both.typed)
    furthest = [candidates[-1] for knob in knobs if (candidates := list(knob(now)))]
    lacks = {" ".join(candidate.typed): lack(candidate.recipe, candidate.load) for candidate in furthest}
    best = sorted(
        (typed for typed in lacks if lacks[typed] < lack(now.recipe, now.load)), key=lambda typed: lacks[typed]
    )
    return f"{' with '.join(best[:2])} helps most, but is not enough" if best else "no option makes it fit"


def _first(candidates: Iterator[Candidate[W]], lack: Lack[W]) -> Candidate[W] | None:
    return next((candidate for candidate in candidates if not lack(candidate.recipe, candidate.load)), None)


def stream_more(now: Candidate[W]) -> Iterator[Candidate[W]]:
    """Let the planner choose places that the user has fixed."""
    forced: dict[str, Any] = {
        name: "auto" for name in ("weights", "optimizer_state", "boundaries") if getattr(now.recipe, name) != "auto"
    }
    if forced:
        yield now.with_options(" ".join(f"--{name.replace('_', '-')} auto" for name in forced), **forced)


def read_less_ahead(now: Candidate[W]) -> Iterator[Candidate[W]]:
    """Prefetch fewer layers."""
    for layers in range(now.recipe.read_ahead - 1, -1, -1):
        yield now.with_options(f"--set read_ahead={layers}", read_ahead=layers)


def lift_caps(now: Candidate[W]) -> Iterator[Candidate[W]]:
    """Raise the caps that the user has set."""
    caps = [name for name in ("device_memory", "host_memory", "disk_space") if getattr(now.recipe, name) is not None]
    if caps:
        names = " and ".join("--" + name.replace("_", "-") for name in caps)
        yield now.with_options(f"a larger {names}", **dict.fromkeys(caps))


def _compute_less_at_once(now: Candidate[Workload]) -> Iterator[Candidate[Workload]]:
    for tokens in halves(min(now.recipe.micro_batch_tokens, now.load.step.most), now.load.rows.longest):
        workload = now.load.with_step(micro_batch=max(tokens, now.load.rows.longest))
        yield now.with_options(f"--set micro_batch_tokens={tokens}", workload, micro_batch_tokens=tokens)


def _smaller_batches(now: Candidate[Workload]) -> Iterator[Candidate[Workload]]:
    for rows in halves(now.recipe.batch_size, 1):
        step = now.load.step.scaled(Fraction(rows, now.recipe.batch_size), now.load.rows.longest)
        workload = replace(now.load, step=step)
        yield now.with_options(f"--batch-size {rows}", workload, batch_size=rows)


def _shorter_rows(now: Candidate[Workload]) -> Iterator[Candidate[Workload]]:
    for length in halves(min(now.recipe.max_length, now.load.rows.longest), LEAST_LENGTH):
        step = now.load.step.scaled(Fraction(length, now.load.rows.longest), length)
        step = replace(step, micro_batch=max(now.recipe.micro_batch_tokens, length))
        workload = replace(now.load, step=step, rows=now.load.rows._replace(longest=length))
        yield now.with_options(f"--max-length {length}", workload, max_length=length)


HARMLESS: Sequence[Knob[Workload]] = (stream_more, read_less_ahead, lift_caps)  # change no number of the run
TRAINING: Sequence[Knob[Workload]] = (*HARMLESS, _compute_less_at_once, _smaller_batches, _shorter_rows)


def halves(value: int, least: int) -> Iterator[int]:
    """Enumerate halves of a value down to a minimum."""
    while value > least:
        value = max(value // 2, least)
        yield value
