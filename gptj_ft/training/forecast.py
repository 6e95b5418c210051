"""Forecast the memory, disk and time of a run before it starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.base_model import choose_model, is_config
from gptj_ft.checkpoints.initial_model import read_config_file
from gptj_ft.checkpoints.model_folder import has_weights
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import Resolved, check_effects
from gptj_ft.config.run_folder import choose_folder
from gptj_ft.errors import UsageError
from gptj_ft.models.batch import padded_length
from gptj_ft.models.layer_sampling import layer_choice
from gptj_ft.models.published import Published, find_published
from gptj_ft.models.quantization.bitsandbytes import WRITTEN
from gptj_ft.models.registry import Architecture
from gptj_ft.models.supported import DEFAULT_REPOSITORY, TINY_MODELS
from gptj_ft.models.trainable import select
from gptj_ft.planning.advice import Advice, advise, quantized
from gptj_ft.planning.devices import is_published_name
from gptj_ft.planning.machine_profile import rates
from gptj_ft.planning.plan import DoesNotFit, Plan, choose
from gptj_ft.planning.resources import Target, check_lengths
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload
from gptj_ft.system.machine import choose_device
from gptj_ft.system.units import clock
from gptj_ft.training.finetune import planning_activity, prepare_new_run, use_threads
from gptj_ft.training.parallel import ONE_PROCESS
from gptj_ft.training.reporter import Reporter
from gptj_ft.training.schedule import Schedule
from gptj_ft.training.setup import sized


@dataclass(frozen=True)
class Forecast:
    """Forecast cost of a run."""

    plan: Plan  # if none fits, the one that lacks least
    problem: DoesNotFit | None = None  # reason why it does not fit
    notes: tuple[str, ...] = ()  # on the treatment of the model and the rows
    published: Published | None = None  # facts of a model known by name

    @cached_property
    def advice(self) -> list[Advice]:
        """Options that make the run much faster, at a cost in exactness."""
        return [] if self.problem else advise(self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        published = self.published.to_dict() if self.published else None
        problem = {"error": str(self.problem), "exit_code": self.problem.exit_code} if self.problem else {}
        advice = {"advice": [each.to_dict() for each in self.advice]} if self.advice else {}
        return {**self.plan.to_dict(), "notes": list(self.notes), "published": published, **advice, **problem}


def forecast_run(
    resolved: Resolved,
    measure_again: bool = False,
    filled: float = 0.0,
    quantize: str | None = None,
    reporter: Reporter | None = None,
) -> Forecast:
    """Plan a run from its rows, or without ``data`` for rows of ``max_length`` tokens.

    Without rows, a published model need not be downloaded, see `published`. The default model is GPT-J.

    Args:
        measure_again: measure this machine even if its rates are known.
        filled: measure it again, the disk after so many seconds of writing.
        quantize: plan for the model folder that ``gptj-ft convert --quantize`` would write.

    Raises:
        UsageError: an option is invalid, the model is missing, or ``quantize`` does not suit it.
    """
    recipe, reporter = resolved.recipe, reporter or Reporter()
    if quantize not in (None, *WRITTEN):
        raise UsageError(f"--quantize {quantize}: expected {' or '.join(WRITTEN)}")
    if quantize is not None and recipe.method != "lora":
        raise UsageError("quantized weights are frozen, so only LoRA trains such a model: add --method lora")
    check_effects(resolved)
    use_threads(recipe, ONE_PROCESS, reporter)
    folder = choose_folder(recipe)
    is_local = not is_published_name(recipe.device)
    if measure_again or filled:
        first = f"writing for {clock(filled)}, then " if filled else ""
        reporter.on_activity(f"{first}measuring this machine, up to 10 s")
        rates(choose_device(recipe.device if is_local else "cpu"), folder, again=True, filled=filled)
    elif is_local and recipe.data is None:
        reporter.on_activity(planning_activity(choose_device(recipe.device, recipe.device_memory), folder))
    forecast = _of_rows(resolved, folder, reporter) if recipe.data is not None else _without_rows(resolved, folder)
    return forecast if quantize is None else _quantized(forecast, quantize)


def _of_rows(resolved: Resolved, folder: Path, reporter: Reporter) -> Forecast:
    """Plan a run from its rows."""
    recipe = resolved.recipe
    target = Target.of(recipe, folder) if is_published_name(recipe.device) else None
    name = target.name if target else ""
    try:
        ready = prepare_new_run(resolved, reporter, target)
    except DoesNotFit as problem:
        return Forecast(replace(problem.nearest, device=name), problem)
    setup, notes = ready.setup, ready.report.notes
    return Forecast(replace(setup.plan, device=name), notes=(*setup.architecture.notes, *notes))


def _without_rows(resolved: Resolved, folder: Path) -> Forecast:
    """Plan a run for rows of ``max_length`` tokens."""
    recipe = resolved.recipe
    if recipe.model in TINY_MODELS:
        raise UsageError("the tiny model is made from the rows: add --data FILE")
    published = find_published(recipe.model or DEFAULT_REPOSITORY)
    architecture, model = _model(recipe, published)
    architecture = architecture.with_head(recipe.task, tuple(recipe.labels.values()) or ("0", "1"))
    architecture = architecture.with_dropout(recipe.dropout, recipe.attention_dropout)
    if "max_length" in resolved.typed:
        check_lengths(recipe, architecture)
    if recipe.max_steps is not None:
        Schedule.of(recipe, recipe.max_steps)
    target = Target.of(recipe, folder)
    length = min(recipe.max_length, architecture.config.n_positions)
    tokens = recipe.batch_size * length
    selection = select(architecture, recipe)
    if model is not None:
        selection = sized(selection, architecture, model)
    is_encoder, drops = architecture.family.is_encoder, architecture.drops_attention
    pairs = recipe.batch_size * padded_length(length) ** 2 if is_encoder or drops else 0
    workload = Workload(
        layouts=selection.trained,
        frozen=selection.frozen,
        layers=selection.build(),
        width=architecture.config.n_embd,
        dtype=torch.float32,
        step=StepTokens(max(recipe.micro_batch_tokens, length), tokens, tokens, tokens, pairs=pairs),
        num_steps=recipe.max_steps,
        rows=RowLengths(length, attended=length if is_encoder else 0.0),
        context=architecture.config.n_positions,
        dropped_heads=architecture.config.n_head if drops else 0,
        choice=layer_choice(recipe, len(selection.trained)),
    )
    workload = target.settled(workload, recipe)
    try:
        plan = choose(recipe, workload, target.free, target.rates)
    except DoesNotFit as problem:
        return Forecast(replace(problem.nearest, device=target.name), problem, architecture.notes, published)
    return Forecast(replace(plan, device=target.name), None, architecture.notes, published)


def _quantized(forecast: Forecast, codec: str) -> Forecast:
    """Return the forecast of the same run on the model with quantized blocks."""
    plan = forecast.plan
    if any(layout.is_quantized for layout in plan.workload.frozen):
        raise UsageError("the model is quantized already: leave out --quantize")
    note = f"for the model that `gptj-ft convert MODEL DEST --quantize {codec}` would write"
    workload, problem = quantized(plan.workload, codec), None
    try:
        chosen = choose(plan.recipe, workload, plan.have, plan.rates)
    except DoesNotFit as found:
        chosen, problem = found.nearest, found
    return Forecast(replace(chosen, device=plan.device), problem, (*forecast.notes, note), forecast.published)


def _model(recipe: Recipe, published: Published | None) -> tuple[Architecture, Path | None]:
    """Return the architecture of a recipe's model: of the config or folder that it names, else of a published model.

    Returns: architecture, and the model folder if there is one with weights.
    """
    if recipe.model is not None and is_config(recipe.model):
        return read_config_file(Path(recipe.model).expanduser()), None
    try:
        folder = choose_model(recipe, None)
    except UsageError:
        if published is None or (recipe.model is not None and Path(recipe.model).exists()):
            raise
        return published.architecture, None
    return read_architecture(folder), folder if has_weights(folder) else None
