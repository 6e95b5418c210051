"""Find options that make a run much faster, and state their cost in exactness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.models.layout import Layout, StoredSize
from gptj_ft.models.quantization.bitsandbytes import WRITTEN
from gptj_ft.models.quantization.form import QuantizedForm
from gptj_ft.planning.plan import Plan, fastest_within
from gptj_ft.planning.suggestions import Candidate
from gptj_ft.planning.workload import Workload

MUCH = 1.5  # times as many tokens per second: less is not worth other numbers
WAITS = 1 / 3  # of a step: with less waiting, fewer bytes cannot make it that much faster
SHORT = 600.0  # seconds of a run that is not worth advice
# Types by option, from wide to narrow, and what they cost; the first, fp32, costs nothing.
NARROWER = {
    "moments": {
        "bf16": "Adam's moments are rounded stochastically to bf16",
        "int8": "Adam's moments are rounded stochastically to 8-bit codes",
    },
    "gradients": {"bf16": "stored gradients are rounded to bf16"},
}


@dataclass(frozen=True)
class Advice:
    """An option and its effect."""

    typed: str  # as on the command line
    speedup: float  # tokens per second, as a multiple of the plan's
    cost: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.typed}: {self.speedup:.1f} times as fast; {self.cost}"


def advise(plan: Plan) -> list[Advice]:
    """Return the options that each make a run at least `MUCH` times as fast, the fastest first.

    Empty for a short run, or one that hardly waits for transfers, without further forecasts.
    """
    timeline, costs = plan.timeline, plan.costs
    is_short = costs.seconds_per_step < 1 if costs.seconds is None else costs.seconds < SHORT
    if plan.lack or is_short or timeline is None or timeline.stall < WAITS:
        return []
    now = plan.workload.step.mean / plan.costs.seconds_per_step
    found = []
    for candidate, cost in _candidates(Candidate(plan.recipe, plan.workload)):
        better = fastest_within(candidate.recipe, candidate.workload, plan.have, plan.rates)
        if better is not None:
            speedup = better.workload.step.mean / better.costs.seconds_per_step / now
            found.append(Advice(" ".join(candidate.typed), speedup, cost))
    return sorted((each for each in found if each.speedup >= MUCH), key=lambda each: -each.speedup)


def _candidates(now: Candidate[Workload]) -> Iterator[tuple[Candidate[Workload], str]]:
    """Yield the run with other options, and what they cost."""
    recipe, workload = now.recipe, now.workload
    for types in _narrower(recipe) if recipe.method != "lora" else ():
        narrow = now
        for name, narrow_type in types.items():
            options: dict[str, Any] = {name: narrow_type}
            narrow = narrow.with_options(f"--set {name}={narrow_type}", **options)
        costs = (NARROWER[name][narrow_type] for name, narrow_type in types.items())
        yield narrow, " and ".join(costs) + ": other numbers than in fp32"
    if recipe.method == "lora" and not any(layout.is_quantized for layout in workload.frozen):
        for name, bits in (("int8", "8"), ("nf4", "4.5")):
            typed = f"--model of `gptj-ft convert --quantize {name}`"
            yield now.with_options(typed, quantized(workload, name)), f"frozen weights are rounded to {bits} bits"
    num_steps = (workload.num_steps or 0) + workload.steps_done
    if num_steps and recipe.max_steps is None and num_steps < 4 * recipe.epochs:
        return  # fewer rows than four times as many
    rows = 4 * recipe.batch_size
    larger = replace(workload, step=workload.step.scaled(Fraction(4), workload.rows.longest))
    yield now.with_options(f"--batch-size {rows}", larger, batch_size=rows), "a fourth of the updates per epoch"


def _narrower(recipe: Recipe) -> Iterator[dict[str, str]]:
    """Yield narrower types of the moments, of the gradients, and of both."""
    by_option = []
    for name, costs in NARROWER.items():
        types = ["fp32", *costs]
        by_option.append(types[types.index(getattr(recipe, name)) :])
    for chosen in product(*by_option):
        changed = {name: new for name, new in zip(NARROWER, chosen, strict=True) if new != getattr(recipe, name)}
        if changed:
            yield changed


def quantized(workload: Workload, name: str) -> Workload:
    """Return the same work with the frozen matrices of the blocks quantized."""

    def resized(layout: Layout) -> Layout:
        shapes = [shape for shape in layout.shapes.values() if len(shape) == 2]
        codes = sum(QuantizedForm(WRITTEN[name], *shape, torch.float32).num_bytes for shape in shapes)
        numbers = sum(shape.numel() for shape in shapes)
        others = (layout.numel - numbers) * workload.dtype.itemsize
        return replace(layout, stored=StoredSize(codes + others, codes, numbers))

    embedding, *blocks, head = workload.frozen
    return replace(workload, frozen=(embedding, *map(resized, blocks), head))
