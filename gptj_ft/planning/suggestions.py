"""Suggest options that make a run fit, found by forecasting again with each, not by rule of thumb."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from gptj_ft.config.options import Recipe
from gptj_ft.planning.workload import Load

LEAST_LENGTH = 64  # tokens a row; below that a run is of no use


@dataclass(frozen=True)
class Candidate:
    """A run with some options changed, and how to type them."""

    recipe: Recipe
    load: Load
    typed: tuple[str, ...] = ()

    def with_options(self, typed: str, load: Load | None = None, **options: Any) -> Candidate:
        """Return a copy with more options changed."""
        return Candidate(self.recipe.model_copy(update=options), load or self.load, (*self.typed, typed))


Knob = Callable[[Candidate], Iterator[Candidate]]
"""Yields what an option can be turned to, the least change first."""
Lack = Callable[[Recipe, Load], int]
"""Returns the bytes that a run lacks where it lacks the least; 0 if it fits."""


def suggest(recipe: Recipe, load: Load, lack: Lack, ways: Sequence[str] = (), has_begun: bool = False) -> str:
    """Suggest options to change, as a phrase: the two that help most.

    Options that change no number of the run come first. Where none is enough alone, pairs are tried.

    Args:
        recipe: recipe of the run that does not fit.
        load: workload of the run.
        lack: function that returns the missing bytes of a changed run.
        ways: other ways to make it fit, which come before all.
        has_begun: whether the run is resumed, which only takes options that change no number.
    """
    now, knobs = Candidate(recipe, load), HARMLESS if has_begun else (*HARMLESS, *OTHERS)
    enough = [first for knob in knobs if (first := _first(knob(now), lack))]
    ways = [*ways, *(" ".join(setting.typed) for setting in enough)]
    if ways:
        return "try " + ", or ".join(ways[:2])
    for one, other in combinations(knobs, 2):
        if both := _first((last for first in one(now) for last in other(first)), lack):
            return "try " + " with ".join(both.typed)
    furthest = [settings[-1] for knob in knobs if (settings := list(knob(now)))]
    lacks = {" ".join(setting.typed): lack(setting.recipe, setting.load) for setting in furthest}
    best = sorted((typed for typed in lacks if lacks[typed] < lack(recipe, load)), key=lambda typed: lacks[typed])
    return f"{' with '.join(best[:2])} helps most, but is not enough" if best else "no option makes it fit"


def _first(settings: Iterator[Candidate], lack: Lack) -> Candidate | None:
    return next((setting for setting in settings if not lack(setting.recipe, setting.load)), None)


def _stream_more(now: Candidate) -> Iterator[Candidate]:
    forced: dict[str, Any] = {
        name: "auto" for name in ("weights", "optimizer_state", "boundaries") if getattr(now.recipe, name) != "auto"
    }
    if forced:
        yield now.with_options(" ".join(f"--{name.replace('_', '-')} auto" for name in forced), **forced)


def _read_less_ahead(now: Candidate) -> Iterator[Candidate]:
    for layers in range(now.recipe.read_ahead - 1, -1, -1):
        yield now.with_options(f"--set read_ahead={layers}", read_ahead=layers)


def _lift_caps(now: Candidate) -> Iterator[Candidate]:
    caps = [name for name in ("device_memory", "host_memory", "disk_space") if getattr(now.recipe, name) is not None]
    if caps:
        names = " and ".join("--" + name.replace("_", "-") for name in caps)
        yield now.with_options(f"a larger {names}", **dict.fromkeys(caps))


def _compute_less_at_once(now: Candidate) -> Iterator[Candidate]:
    for tokens in _halves(min(now.recipe.micro_batch_tokens, now.load.step_tokens), now.load.longest_row):
        load = replace(now.load, micro_batch_tokens=max(tokens, now.load.longest_row))
        yield now.with_options(f"--set micro_batch_tokens={tokens}", load, micro_batch_tokens=tokens)


def _smaller_batches(now: Candidate) -> Iterator[Candidate]:
    for rows in _halves(now.recipe.batch_size, 1):
        load = _scaled(now.load, rows / now.recipe.batch_size)
        yield now.with_options(f"--batch-size {rows}", load, batch_size=rows)


def _shorter_rows(now: Candidate) -> Iterator[Candidate]:
    for length in _halves(min(now.recipe.max_length, now.load.longest_row), LEAST_LENGTH):
        load = _scaled(replace(now.load, longest_row=length), length / now.load.longest_row)
        load = replace(load, micro_batch_tokens=max(now.recipe.micro_batch_tokens, length))
        yield now.with_options(f"--max-length {length}", load, max_length=length)


HARMLESS: Sequence[Knob] = (_stream_more, _read_less_ahead, _lift_caps)  # change no number of the run
OTHERS: Sequence[Knob] = (_compute_less_at_once, _smaller_batches, _shorter_rows)  # the first only its rounding


def _halves(value: int, least: int) -> Iterator[int]:
    """Enumerate halves of a value down to a minimum."""
    while value > least:
        value = max(value // 2, least)
        yield value


def _scaled(load: Load, share: float) -> Load:
    """Scale the tokens of a workload's steps, keeping at least one row."""
    return replace(
        load,
        step_tokens=max(round(load.step_tokens * share), load.longest_row),
        mean_step_tokens=load.mean_step_tokens * share,
        mean_step_targets=load.mean_step_targets * share,
    )
