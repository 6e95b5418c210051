"""Suggest options that make a run fit, by forecasting again with each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Any, Generic, TypeVar

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.models.products import ONEDNN
from gptj_ft.planning.workload import Workload
from gptj_ft.system.machine import emulates_bf16

LEAST_LENGTH = 64  # tokens of a row; a run with shorter rows is useless
W = TypeVar("W")


@dataclass(frozen=True)
class Candidate(Generic[W]):
    """A run with some options changed."""

    recipe: Recipe
    workload: W  # of training or of inference
    typed: tuple[str, ...] = ()  # the changes as flags, one per option

    def with_options(self, typed: str, workload: W | None = None, **options: Any) -> Candidate[W]:
        """Return a copy with more options changed."""
        return Candidate(self.recipe.model_copy(update=options), workload or self.workload, (*self.typed, typed))


Knob = Callable[[Candidate[W]], Iterator[Candidate[W]]]
"""Yields the settings of an option, the smallest change first."""
Lack = Callable[[Recipe, W], int]
"""Returns the missing bytes of a run in its best placement; 0 if it fits."""


def suggest(now: Candidate[W], knobs: Sequence[Knob[W]], lack: Lack[W], others: Sequence[str] = ()) -> str:
    """Suggest options in a phrase: the first two that suffice, else a pair of options, else those that help most.

    Args:
        now: run that does not fit.
        knobs: options in order of preference.
        others: other remedies, preferred to all options.
    """
    sufficient = [first for knob in knobs if (first := _first_that_fits(knob(now), lack))]
    ways = [*others, *(" ".join(candidate.typed) for candidate in sufficient)]
    if ways:
        return "try " + ", or ".join(ways[:2])
    for one, other in combinations(knobs, 2):
        if both := _first_that_fits((last for first in one(now) for last in other(first)), lack):
            return "try " + " with ".join(both.typed)
    furthest = [candidates[-1] for knob in knobs if (candidates := list(knob(now)))]
    lacks = {" ".join(candidate.typed): lack(candidate.recipe, candidate.workload) for candidate in furthest}
    best = sorted(
        (typed for typed in lacks if lacks[typed] < lack(now.recipe, now.workload)), key=lambda typed: lacks[typed]
    )
    return f"{' with '.join(best[:2])} helps most, but is not enough" if best else "no option makes it fit"


def _first_that_fits(candidates: Iterator[Candidate[W]], lack: Lack[W]) -> Candidate[W] | None:
    return next((candidate for candidate in candidates if not lack(candidate.recipe, candidate.workload)), None)


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
    workload = now.workload
    for tokens in halves(min(now.recipe.micro_batch_tokens, workload.step.most), workload.rows.longest):
        smaller = workload.with_step(micro_batch=max(tokens, workload.rows.longest))
        yield now.with_options(f"--set micro_batch_tokens={tokens}", smaller, micro_batch_tokens=tokens)


def _compute_in_bf16(now: Candidate[Workload]) -> Iterator[Candidate[Workload]]:
    workload = now.workload
    if workload.dtype == torch.float32:
        products = replace(workload.products or ONEDNN, widens=emulates_bf16())
        narrow = replace(workload, dtype=torch.bfloat16, products=products)
        yield now.with_options("--precision bf16", narrow, precision="bf16")


def _smaller_batches(now: Candidate[Workload]) -> Iterator[Candidate[Workload]]:
    workload = now.workload
    for rows in halves(now.recipe.batch_size, 1):
        step = workload.step.scaled(Fraction(rows, now.recipe.batch_size), workload.rows.longest)
        yield now.with_options(f"--batch-size {rows}", replace(workload, step=step), batch_size=rows)


def _shorter_rows(now: Candidate[Workload]) -> Iterator[Candidate[Workload]]:
    workload = now.workload
    for length in halves(min(now.recipe.max_length, workload.rows.longest), LEAST_LENGTH):
        step = workload.step.scaled(Fraction(length, workload.rows.longest), length)
        step = replace(step, micro_batch=max(now.recipe.micro_batch_tokens, length))
        shorter = replace(workload, step=step, rows=workload.rows._replace(longest=length))
        yield now.with_options(f"--max-length {length}", shorter, max_length=length)


HARMLESS: Sequence[Knob[Workload]] = (stream_more, read_less_ahead, lift_caps)  # change no number of the run
TRAINING: Sequence[Knob[Workload]] = (*HARMLESS, _compute_less_at_once, _smaller_batches, _shorter_rows)
# An accelerator computes in 16 bits anyway, unless the user wants fp32.
ON_CPU: Sequence[Knob[Workload]] = (*TRAINING[:-2], _compute_in_bf16, *TRAINING[-2:])


def halves(value: int, least: int) -> Iterator[int]:
    """Yield halves of a value down to a minimum."""
    while value > least:
        value = max(value // 2, least)
        yield value
