"""Evaluate a model on a dataset: per-row loss, and generated or most likely answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.base_model import find_model
from gptj_ft.checkpoints.formats.peft import base_folder, tokenizer_folder
from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.data.readers.source import is_prepared
from gptj_ft.data.tokenization import NoTokenizer, has_tokenizer, load_tokenizer
from gptj_ft.errors import NotFinite, UsageError
from gptj_ft.evaluation.eval_set import EvalSet, make_eval_set, with_short_answers
from gptj_ft.evaluation.likelihood import label_candidates, losses, passes
from gptj_ft.evaluation.metrics import Statistic
from gptj_ft.evaluation.metrics import rouge as rouge_metric
from gptj_ft.evaluation.metrics.label_scores import LabelScores
from gptj_ft.evaluation.metrics.language_model import RowLoss, language_model
from gptj_ft.evaluation.metrics.statistic import values
from gptj_ft.evaluation.predict import Predictor, PromptGroup, scores_of
from gptj_ft.evaluation.result_cache import ResultCache
from gptj_ft.generation.generator import InferenceSetup, check_writes
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.inference_plan import InferencePlan
from gptj_ft.planning.resources import check_lengths
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.paths import home, is_adapter, is_model, models
from gptj_ft.system.processes.group import ALONE, Group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NO_TEMPLATE = (
    "this model has no template, and no recipe is named: only the loss of the rows as plain text is measured; "
    "--recipe NAME asks for answers"
)
NO_TEXT = "{rows:,} rows have targets that are no text ({why}): the perplexities of words and bytes are left out"
NO_REFERENCES = "these rows have no texts to compare answers with: only their loss is measured, not {metrics}"
_Progress = Callable[[int, int], None]  # called with (rows done, rows to do)


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model, or of the outputs of any system, on a dataset.

    Attributes:
        model: model folder, or file of outputs.
        figures: statistics by name, loss and perplexities included.
        places: file and line of each row.
        answers: generated text of each row; empty where none was asked for.
        references: accepted answers of each row.
        notes: warnings on the scores.
        target_tokens: tokens the loss is over; 0 if there is none.
        labels: scores of each label; ``None`` where the answers are no labels of a head.
    """

    model: str
    figures: dict[str, Statistic]
    places: list[str]
    answers: list[str]
    references: list[list[str]]
    notes: tuple[str, ...] = ()
    target_tokens: int = 0
    labels: LabelScores | None = None

    @property
    def rows(self) -> int:
        return len(self.places)

    @property
    def scores(self) -> dict[str, float]:
        """Scores of all rows, by name."""
        return values(self.figures, self.rows)


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation that is planned, with cached results.

    Attributes:
        setup: model and options.
        tokenizer: tokenizer of the model, or ``None``.
        task: the rows.
        journal: cache of per-row results.
        plan: memory and token budget.
    """

    setup: InferenceSetup
    tokenizer: PreTrainedTokenizerFast | None
    task: EvalSet
    journal: ResultCache
    plan: InferencePlan

    def with_note(self, note: str) -> EvaluationPlan:
        """Return a copy with one more note."""
        return replace(self, task=replace(self.task, notes=(*self.task.notes, note)))

    def run(self, progress: _Progress | None = None) -> Evaluation:
        """Evaluate the model on its rows.

        Args:
            progress: callback for (rows done, rows to do); default: none.

        Raises:
            NotFinite: a loss.
        """
        recipe, task = self.setup.recipe, self.task
        self.journal.add("together", {0: self.plan.together.written})
        with self.setup.open(self.plan.weights) as opened:
            rows, answers = EvaluationRun(self, *opened, progress).run()
        figures = {**language_model(rows), **scores_of(recipe, answers, task.references)}
        notes, no_text = task.notes, sum(row.bytes is None for row in rows)
        if no_text:
            why = "the tokenizer lacks their ids" if self.tokenizer else "the model has no tokenizer"
            notes = (*notes, NO_TEXT.format(rows=no_text, why=why))
        targets, model = sum(row.targets for row in rows), str(self.setup.folder)
        return with_warnings(Evaluation(model, figures, task.places, answers, task.references, notes, targets), recipe)

    def close(self) -> None:
        """Remove the cache of results, once they are saved."""
        self.journal.close()


def plan_on_rows(folder: Path, recipe: Recipe, data: Path, limit: int | None, group: Group = ALONE) -> EvaluationPlan:
    """Plan an evaluation, or resume one that was interrupted.

    Args:
        folder: the model folder.
        recipe: templates, metrics, generation settings, device.
        data: file of rows, or prepared data.
        limit: most rows, the first ones; ``None``: all.
        group: processes that the rows are dealt out to.

    Raises:
        ResourceError: the model does not fit in memory.
    """
    setup, own = InferenceSetup.of(folder, recipe, group=group), tokenizer_folder(folder)
    check_writes(setup)
    tokenizer = load_tokenizer(own) if has_tokenizer(own) else None
    check_lengths(recipe, setup.architecture)
    task = make_eval_set(recipe, tokenizer or NoTokenizer(own), folder, data, limit)
    if recipe.metrics and not any(task.references):  # rows that came as tokens, or plain text
        task = replace(task, notes=(*task.notes, NO_REFERENCES.format(metrics=", ".join(recipe.metrics))))
        recipe = recipe.model_copy(update={"metrics": ()})
    writes = tokenizer is not None and recipe.metrics and not label_candidates(recipe, tokenizer)
    if writes:
        task = with_short_answers(task, recipe.generation.max_new_tokens, setup.context)
    if recipe.recipe == "custom" and not recipe.metrics:
        task = replace(task, notes=(*task.notes, NO_TEMPLATE))
    setup = replace(setup, recipe=recipe)
    used = {"dtype": str(setup.dtype), "device": setup.device.type}
    journal = ResultCache({**task.facts, **evaluation_settings(folder, recipe), **used})
    prompts = [len(prompt) for prompt in task.prompts]
    documents = [max(document.num_inputs, prompt) for document, prompt in zip(task.documents, prompts, strict=True)]
    before = journal.of("together").get(0)
    plan = setup.plan(home(), before, documents=documents, prompts=prompts if writes else ())
    return EvaluationPlan(setup, tokenizer, task, journal, plan)


def fitted(recipe: Recipe, folders: Iterable[Path], data: Path) -> Recipe:
    """Limit row length to the context of every model that is compared; prepared rows keep theirs.

    Args:
        recipe: recipe whose ``max_length`` may exceed a model's context.
        folders: folders of the models to evaluate on the same rows.
        data: the rows.
    """
    if is_prepared(data):
        return recipe
    shortest = min(int(read_architecture(base_folder(folder)).config.n_positions) for folder in folders)
    return recipe.model_copy(update={"max_length": min(recipe.max_length, shortest)})


def evaluation_settings(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Collect what, besides the rows, determines the results: model, options, version."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    keys = {"metrics", "generation", "completion", "labels", "seed", "micro_batch_tokens"}
    return {
        "model": str(folder.resolve()),
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "recipe": recipe.model_dump(mode="json", include=keys),
        "torch": torch.__version__,
    }


@dataclass(frozen=True)
class EvaluationRun:
    """Run an evaluation on an open model, reusing cached results.

    Attributes:
        planned: model and rows.
        architecture: family and configuration of the model.
        offloaded: the model.
        progress: callback, see `EvaluationPlan.run`; default: none.
    """

    planned: EvaluationPlan
    architecture: Architecture
    offloaded: OffloadedModel
    progress: _Progress | None = None

    def run(self) -> tuple[list[RowLoss], list[str]]:
        """Compute per-row losses and answers (the most likely label, else generated text).

        Without a metric that asks for it, nothing is answered.

        Raises:
            NotFinite: a loss.
        """
        planned, task = self.planned, self.planned.task
        known, answers = planned.journal.of("loss"), planned.journal.of("answer")
        number, recipe, together = len(task.documents), planned.setup.recipe, planned.plan.together
        if recipe.metrics and planned.tokenizer:
            answerer = Predictor(recipe, planned.tokenizer, self.architecture, self.offloaded, together)
            left = [rows for rows in answerer.together(task.prompts) if not answers.keys() >= set(rows)]
            for some in answerer.rounds(left):
                self._answer(answerer, some)
                self._show(len(answers))
        for rows in passes([document.num_inputs for document in task.documents], together.read):
            if not known.keys() >= set(rows):
                documents = [task.documents[row] for row in rows]
                self._note_losses(rows, losses(self.offloaded, planned.tokenizer, documents, together.computed))
            self._show(rows.stop)
        return [RowLoss(**known[row]) for row in range(number)], [answers.get(row, "") for row in range(number)]

    def _answer(self, answerer: Predictor, groups: Sequence[Sequence[int]]) -> None:
        """Answer groups of rows; compute the loss in the same pass where it shares their prompts."""
        asked = [self._group(rows, answerer.writes) for rows in groups]
        for rows, (texts, found) in zip(groups, answerer.answer(asked), strict=True):
            if found:
                self._note_losses(rows, found)
            self.planned.journal.add("answer", dict(zip(rows, texts, strict=True)))

    def _group(self, rows: Sequence[int], is_written: bool) -> PromptGroup:
        task = self.planned.task
        prompts, documents = [task.prompts[row] for row in rows], [task.documents[row] for row in rows]
        shared = all(
            len(prompt) < document.num_inputs and list(document.ids[: len(prompt)]) == prompt
            for prompt, document in zip(prompts, documents, strict=True)
        )
        scores = is_written and shared and not self.planned.setup.recipe.generation.prompt_lookup_num_tokens
        return PromptGroup(prompts, rows[0], documents if scores else ())

    def _note_losses(self, rows: Sequence[int], found: Sequence[RowLoss]) -> None:
        for row, loss in zip(rows, found, strict=True):
            if not math.isfinite(loss.total):
                place = self.planned.task.places[row]
                why = "the model is damaged, or too large for fp16; try --precision fp32"
                raise NotFinite(f"the loss of {place} is not a finite number: {why}")
        self.planned.journal.add("loss", {row: asdict(loss) for row, loss in zip(rows, found, strict=True)})

    def _show(self, done: int) -> None:
        if self.progress:
            self.progress(done, len(self.planned.task.documents))


def with_warnings(evaluation: Evaluation, recipe: Recipe) -> Evaluation:
    """Add warnings about metrics that do not suit these rows."""
    warning = rouge_metric.warning(evaluation.references) if "rouge" in recipe.metrics else None
    return replace(evaluation, notes=(*evaluation.notes, warning)) if warning else evaluation


def choose_baseline(folder: Path, name: str) -> Path | None:
    """Choose the baseline model.

    Args:
        folder: the model that is measured.
        name: ``none``, ``auto`` (what the model was tuned from, if that is still there), or a model.
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
    """Find the validation rows of the run that made a model.

    Raises:
        UsageError: there are none.
    """
    held_out = Run(folder.parent).data / "validation"
    if not is_prepared(held_out):
        raise UsageError(f"no rows are named, and {folder} has no run with held-out rows beside it: add --data FILE")
    return held_out
