"""Evaluate a model and its baseline on the same rows, or on tasks of lm-eval, and compare them.

`PairedEvaluation` plans one evaluation per model: `text_evaluation` for language models, `label_evaluation` for models
with another head, `lm_eval.tasks` for tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from gptj_ft.checkpoints.adapter import base_folder
from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.base_model import find_model
from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.data.load import data_path
from gptj_ft.data.readers.source import is_prepared
from gptj_ft.errors import UsageError
from gptj_ft.evaluation.comparison import Evaluation, ModelComparison, compare_models
from gptj_ft.evaluation.label_evaluation import LabelledEvaluation, plan_labelled
from gptj_ft.evaluation.lm_eval.tasks import LoadedTasks, compare_on_tasks, plan_on_tasks
from gptj_ft.evaluation.row_job import Progress
from gptj_ft.evaluation.text_evaluation import EvaluationPlan, plan_on_rows
from gptj_ft.generation.workers import NO_WORKERS, Workers
from gptj_ft.planning.inference_plan import InferencePlan
from gptj_ft.system.paths import is_adapter, is_model, models
from gptj_ft.system.signals import stop_message

STOPPED = "stopped; finished rows are kept, and the same command resumes there"
Count = Callable[[str, int, int | None, str], None]  # called with (model or baseline, done, to do, unit)


@dataclass(frozen=True)
class EvaluateRequest:
    """Rows to evaluate a model on."""

    model: Path  # model folder
    recipe: Recipe  # templates, metrics, generation settings, device
    baseline: str = "auto"  # model to compare with; ``auto``: the model it was tuned from; ``none``
    data: str | None = None  # rows; None: the held-out rows of the model's run
    limit: int | None = None  # maximum number of rows, taken from the start; None: all
    workers: Workers = NO_WORKERS  # ranks that share the rows, see `gptj_ft.distributed.serving.ServingRanks`


@dataclass(frozen=True)
class TasksRequest:
    """Tasks of lm-eval to evaluate a model on."""

    model: Path  # model folder
    recipe: Recipe  # device, memory and precision
    tasks: LoadedTasks
    baseline: str = "auto"  # model to compare with, as in `EvaluateRequest`
    limit: int | None = None  # maximum number of questions per task, taken from the start; None: all
    workers: Workers = NO_WORKERS  # ranks that share the questions


class PlannedEvaluation(Protocol):
    """Planned evaluation of one model."""

    @property
    def plan(self) -> InferencePlan:
        """Memory and token budget."""

    def run(self, progress: Progress | None = None) -> Evaluation:
        """Evaluate the model."""

    def close(self) -> None:
        """Delete cached results; call it once the results are saved."""


@dataclass(frozen=True)
class PairedEvaluation:
    """Planned evaluation of a model and its baseline."""

    request: EvaluateRequest | TasksRequest
    baseline: Path | None  # model folder, if there is a baseline
    runs: Mapping[str, PlannedEvaluation]  # by ``baseline`` and ``model``, in the order of evaluation
    compare: Callable[[Evaluation, Evaluation | None], ModelComparison]
    unit: str = "rows"  # name of the counted items: ``rows``, or ``questions`` of tasks
    data: Path | None = None  # file or folder of the rows; None for tasks, which have their own
    note: str = ""  # warning that rows are cut to the context of the models; usually empty

    @classmethod
    def of(cls, request: EvaluateRequest) -> PairedEvaluation:
        """Read the rows and plan the passes of each model over them."""
        data = data_path(request.data) if request.data else default_rows(request.model)
        baseline, models = _models(request)
        recipe, wanted = fitted(request.recipe, models.values(), data), request.recipe.max_length
        runs: dict[str, EvaluationPlan | LabelledEvaluation]
        plan = plan_on_rows if recipe.task == "language-model" else plan_labelled
        runs = {name: plan(each, recipe, data, request.limit, request.workers) for name, each in models.items()}
        note = ""
        if recipe.max_length < wanted:
            length = f"{recipe.max_length:,}, the context of the model, and not {wanted:,}"
            note = f"max_length is {length}: rows are cut to that"
            runs = {name: each.with_note(note) for name, each in runs.items()}
        compare = partial(compare_models, metrics=recipe.metrics, seed=recipe.seed)
        return cls(request, baseline, runs, compare, data=data, note=note)

    @classmethod
    def of_tasks(cls, request: TasksRequest) -> PairedEvaluation:
        """Plan the passes of each model over the questions of tasks."""
        baseline, models = _models(request)
        runs = {
            name: plan_on_tasks(each, request.recipe, request.tasks, request.limit, request.workers)
            for name, each in models.items()
        }
        return cls(request, baseline, runs, partial(compare_on_tasks, seed=request.recipe.seed), "questions")

    @property
    def plan(self) -> InferencePlan:
        """Plan of the model that needs more memory."""
        return max((each.plan for each in self.runs.values()), key=lambda plan: plan.device_bytes + plan.host_bytes)

    def run(self, count: Count) -> ModelComparison:
        """Evaluate the models and compare them, see `measure`; then delete the cached results."""
        comparison = self.measure(count)
        self.close()
        return comparison

    def measure(self, count: Count) -> ModelComparison:
        """Evaluate the models and compare them; the results stay cached until `close`.

        Raises:
            Interrupted: a signal; finished rows are cached.
            NotFinite: a loss is not finite.
        """
        results: dict[str, Evaluation] = {}
        for name, each in self.runs.items():
            with stop_message(lambda: STOPPED):
                results[name] = each.run(lambda done, total, name=name: count(name, done, total, self.unit))  # type: ignore[misc]
        return self.compare(results["model"], results.get("baseline"))

    def close(self) -> None:
        """Delete cached results; call it once the comparison is saved: until then, the same command reads them."""
        for each in self.runs.values():
            each.close()


def _models(request: EvaluateRequest | TasksRequest) -> tuple[Path | None, dict[str, Path]]:
    """Return the baseline, if any, and the models to evaluate by name, in order.

    The base model of a model with a head usually has no such head, so ``auto`` means no baseline there.
    """
    has_head, is_named = request.recipe.task != "language-model", request.baseline not in ("auto", "none")
    baseline = None if has_head and not is_named else choose_baseline(request.model, request.baseline)
    return baseline, {"baseline": baseline, "model": request.model} if baseline else {"model": request.model}


def fitted(recipe: Recipe, folders: Iterable[Path], data: Path) -> Recipe:
    """Limit ``max_length`` to the context of every compared model; prepared rows keep their length."""
    if is_prepared(data):
        return recipe
    # Both models must read the same tokens, else their losses cannot be compared.
    shortest = min(int(read_architecture(base_folder(folder)).config.n_positions) for folder in folders)
    return recipe.model_copy(update={"max_length": min(recipe.max_length, shortest)})


def choose_baseline(folder: Path, name: str) -> Path | None:
    """Find the folder of the baseline model.

    Args:
        folder: the model to evaluate.
        name: ``none``, ``auto`` (the model that it was tuned from, if that still exists), or a model.
    """
    if name == "none":
        return None
    if name != "auto":
        return find_model(name)
    if is_adapter(folder):
        return base_folder(folder)
    if (tuning := read_metadata(folder)) is None:
        return None
    run = Run(folder.resolve().parent)
    bases = [Path(run.recipe().model or "")] if run.model == folder.resolve() and run.recipe_file.is_file() else []
    bases += [models() / tuning.base_model] if tuning.base_model else []
    return next(filter(is_model, bases), None)


def default_rows(folder: Path) -> Path:
    """Find the validation rows of the run that tuned a model."""
    held_out = Run(folder.parent).data / "validation"
    if not is_prepared(held_out):
        raise UsageError(f"no rows are named, and {folder} has no run with held-out rows beside it: add --data FILE")
    return held_out
