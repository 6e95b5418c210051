"""Plan and run evaluations: of a model beside its baseline on rows, or on tasks of lm-eval; of predictions in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gptj_ft.config.options import Recipe
from gptj_ft.data.load import data_path
from gptj_ft.errors import UsageError
from gptj_ft.evaluation.comparison import ModelComparison, compare_models
from gptj_ft.evaluation.evaluate import (
    Evaluation,
    EvaluationPlan,
    choose_baseline,
    default_rows,
    evaluate_model,
    fitted,
    plan_evaluation,
)
from gptj_ft.evaluation.lm_eval.tasks import (
    LoadedTasks,
    TaskSelection,
    TasksPlan,
    ask,
    compare_on_tasks,
    load_tasks,
    plan_tasks,
)
from gptj_ft.evaluation.predictions import score_predictions
from gptj_ft.planning.inference_plan import InferencePlan
from gptj_ft.system.signals import stop_says

_STOPPED = "stopped; what was measured so far is kept, and the same command goes on from there"
Count = Callable[[str, int, int | None, str], None]  # called with (model or baseline, done, to do, unit)


@dataclass(frozen=True)
class EvaluateRequest:
    """Rows to evaluate a model on.

    Attributes:
        model: model folder.
        recipe: templates, metrics, generation settings, device.
        baseline: model to compare with; ``auto``: what it was tuned from; ``none``.
        data: rows; ``None``: those that the model's run held out.
        limit: most rows, the first ones; ``None``: all.
    """

    model: Path
    recipe: Recipe
    baseline: str = "auto"
    data: str | None = None
    limit: int | None = None


@dataclass(frozen=True)
class PairedEvaluation:
    """An evaluation of a model and its baseline, planned and not begun.

    Attributes:
        request: model, options and rows as they were asked for.
        data: file or folder of the rows.
        baseline: model folder; ``None``: nothing is compared.
        recipe: options that both models can follow.
        runs: plan of each, by ``baseline`` and ``model``, in the order of evaluation.
        note: shortening of rows to the context of the models; empty if there is none.
    """

    request: EvaluateRequest
    data: Path
    baseline: Path | None
    recipe: Recipe
    runs: Mapping[str, EvaluationPlan]
    note: str

    @classmethod
    def of(cls, request: EvaluateRequest) -> PairedEvaluation:
        """Read the rows, and plan the passes of each model over them.

        Raises:
            GptjFtError: no rows, no such model, or it does not fit.
        """
        folder = request.model
        data = data_path(request.data) if request.data else default_rows(folder)
        baseline = choose_baseline(folder, request.baseline)
        models = {"baseline": baseline, "model": folder} if baseline is not None else {"model": folder}
        recipe, asked = fitted(request.recipe, models.values(), data), request.recipe.max_length
        runs = {name: plan_evaluation(each, recipe, data, request.limit) for name, each in models.items()}
        note = ""
        if recipe.max_length < asked:
            length = f"{recipe.max_length:,}, the context of the model, and not {asked:,}"
            note = f"max_length is {length}: rows are cut to that"
            runs = {name: each.with_note(note) for name, each in runs.items()}
        return cls(request, data, baseline, recipe, runs, note)

    @property
    def plan(self) -> InferencePlan:
        """What the larger of the models takes."""
        return max((each.plan for each in self.runs.values()), key=_memory)

    def run(self, count: Count) -> ModelComparison:
        """Evaluate the models, and compare them.

        Args:
            count: receiver of the rows done.

        Raises:
            Interrupted: a signal; what was measured is kept.
            NotFinite: a loss.
        """
        found: dict[str, Evaluation] = {}
        for name, each in self.runs.items():
            with stop_says(lambda: _STOPPED):
                found[name] = evaluate_model(each, lambda done, total, name=name: count(name, done, total, "rows"))  # type: ignore[misc]
        verdict = compare_models(found["model"], found.get("baseline"), self.recipe.metrics, self.recipe.seed)
        for each in self.runs.values():
            each.journal.close()
        return verdict


@dataclass(frozen=True)
class TasksRequest:
    """Tasks of lm-eval to evaluate a model by.

    Attributes:
        model: model folder.
        recipe: device, memory and precision.
        tasks: names, number of examples, limit.
        baseline: as in `EvaluateRequest`.
        offline: whether rows of tasks may not be fetched.
    """

    model: Path
    recipe: Recipe
    tasks: TaskSelection
    baseline: str = "auto"
    offline: bool = False


@dataclass(frozen=True)
class PairedTaskEvaluation:
    """An evaluation by tasks, planned and not begun; attributes as in `PairedEvaluation`."""

    request: TasksRequest
    loaded: LoadedTasks
    baseline: Path | None
    runs: Mapping[str, TasksPlan]

    @classmethod
    def of(cls, request: TasksRequest) -> PairedTaskEvaluation:
        """Load the tasks, and plan the passes of each model over their questions.

        Raises:
            GptjFtError: no such task or model, or it does not fit.
        """
        loaded = load_tasks(request.tasks, request.offline)
        baseline = choose_baseline(request.model, request.baseline)
        models = {"baseline": baseline, "model": request.model} if baseline is not None else {"model": request.model}
        return cls(request, loaded, baseline, {name: plan_tasks(each, request.recipe) for name, each in models.items()})

    @property
    def plan(self) -> InferencePlan:
        """What the larger of the models takes."""
        return max((each.plan for each in self.runs.values()), key=_memory)

    def run(self, count: Count) -> ModelComparison:
        """Ask the models, and compare them; as `PairedEvaluation.run`."""
        found, journals = {}, []
        for name, each in self.runs.items():
            with stop_says(lambda: _STOPPED):
                advance = lambda done, total, name=name: count(name, done, total, "questions")  # noqa: E731
                found[name], own = ask(each, self.loaded, self.request.tasks.limit, advance)
            journals += own
        verdict = compare_on_tasks(found["model"], found.get("baseline"), self.request.recipe.seed)
        for journal in journals:
            journal.close()
        return verdict


@dataclass(frozen=True)
class PredictionsRequest:
    """Outputs of any system to score.

    Attributes:
        predictions: file of outputs.
        recipe: metrics, and the columns of the rows.
        data: rows with references; ``None``: the outputs have them.
        baseline: file of outputs of another system; ``auto`` and ``none``: nothing is compared.
        limit: most rows, the first ones; ``None``: all.
        allow_empty: whether empty outputs are scored as they are.
    """

    predictions: Path
    recipe: Recipe
    data: str | None = None
    baseline: str = "none"
    limit: int | None = None
    allow_empty: bool = False


def score_files(request: PredictionsRequest) -> ModelComparison:
    """Score outputs in files, without a model.

    Raises:
        UsageError: no metrics are named, or the rows of both systems differ.
        DataError: outputs that cannot be matched with rows.
    """
    recipe = request.recipe
    if not recipe.metrics:
        raise UsageError("which scores? name a recipe, e.g. --recipe summarization, or add --set metrics=[rouge]")
    data = data_path(request.data) if request.data else None
    before = None
    if request.baseline not in ("auto", "none"):
        before = score_predictions(Path(request.baseline), recipe, data, request.limit, request.allow_empty)
    after = score_predictions(request.predictions, recipe, data, request.limit, request.allow_empty)
    return compare_models(after, before, recipe.metrics, recipe.seed)


def _memory(plan: InferencePlan) -> int:
    return plan.device_bytes + plan.host_bytes
