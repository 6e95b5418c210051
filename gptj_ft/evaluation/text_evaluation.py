"""Evaluate a model on a dataset: per-row loss, and generated or most likely answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gptj_ft.checkpoints.adapter import base_folder, tokenizer_folder
from gptj_ft.checkpoints.architecture import vocab_size_of
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Document, Rows
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.load import read_or_prepare
from gptj_ft.data.readers.source import is_prepared
from gptj_ft.data.split import select_rows
from gptj_ft.data.tokenization import NoTokenizer, has_tokenizer, load_tokenizer
from gptj_ft.errors import NotFinite
from gptj_ft.evaluation.answerer import Answerer, PromptGroup, scores_of
from gptj_ft.evaluation.comparison import Evaluation, with_warnings
from gptj_ft.evaluation.likelihood import label_candidates, losses, passes
from gptj_ft.evaluation.metrics.language_model import RowLoss, language_model
from gptj_ft.evaluation.row_job import ResultCache
from gptj_ft.generation.generator import InferenceSetup, check_writes
from gptj_ft.generation.workers import NO_WORKERS, Workers
from gptj_ft.models.registry import Architecture
from gptj_ft.planning.inference_plan import InferencePlan
from gptj_ft.planning.resources import check_lengths
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.paths import home, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from gptj_ft.data.tokenization import RowTokenizer


NO_TEMPLATE = (
    "this model has no template, and no recipe is named: only the loss of the rows as plain text is measured; "
    "--recipe NAME asks for answers"
)
NO_TEXT = "{rows:,} rows have targets that are no text ({why}): the perplexities of words and bytes are left out"
NO_REFERENCES = "these rows have no texts to compare answers with: only their loss is measured, not {metrics}"
_Progress = Callable[[int, int], None]  # called with (rows done, rows to do)
UNLIMITED = 2**31 - 1  # tokens of a row


@dataclass(frozen=True)
class EvalSet:
    """Rows of an evaluation, tokenized for one model.

    Attributes:
        documents: tokens of each row, for the loss.
        prompts: token ids of each prompt, for answers.
        references: accepted answers of each row.
        places: file and line of each row.
        facts: identity of the rows, for the result cache.
        notes: warnings on the rows, for the report.
    """

    documents: list[Document]
    prompts: list[list[int]]
    references: list[list[str]]
    places: list[str]
    facts: dict[str, Any]
    notes: tuple[str, ...]


def make_eval_set(recipe: Recipe, tokenizer: RowTokenizer, folder: Path, data: Path, limit: int | None) -> EvalSet:
    """Tokenize rows for a model.

    Raises:
        UsageError, DataError: as `read_or_prepare`.
    """
    notes = []
    if recipe.cut == "answer" and not is_prepared(data):
        recipe = recipe.model_copy(update={"cut": "end"})  # who asks does not know where the answer is
    most, max_length = recipe.generation.max_prompt_tokens, recipe.max_length
    if most and recipe.prompt and not is_prepared(data):
        recipe = recipe.model_copy(update={"max_length": UNLIMITED})  # the whole prompt, of which the end is cut off
    base = base_folder(folder) if is_adapter(folder) else folder
    prepared = read_or_prepare(recipe, tokenizer, vocab_size_of(base), data)
    report = prepared.report
    if recipe.cut == "answer" and report.rows_cut:
        notes.append(
            f"{report.rows_cut:,} of these rows were shortened around their answers, which makes them easier "
            "than what will be asked: name the file they come from with --data for figures without that"
        )
    if most and report.rows_cut:
        notes.append(
            f"{report.rows_cut:,} of these rows were shortened when they were prepared, and not to {most:,} tokens as "
            "generation.max_prompt_tokens says: name the file they come from with --data"
        )
    notes += [f"{skips.count:,} rows were left out: {reason}" for reason, skips in report.rows_skipped.items()]
    if limit is not None:
        prepared = select_rows(prepared, range(min(limit, len(prepared.rows))))
    facts = {"data": report.data_sha256, "settings": report.settings_sha256, "tokenizer": report.tokenizer_sha256}
    task = _task(prepared, facts, tuple(notes))
    return _cut_prompts(task, most, max_length) if most else task


def with_short_answers(task: EvalSet, new_tokens: int, window: int) -> EvalSet:
    """Note the prompts that leave no room for a whole answer in the context."""
    count = sum(len(prompt) + new_tokens > window for prompt in task.prompts)
    if not count:
        return task
    note = (
        f"{count:,} prompts leave less than {new_tokens:,} of the model's {window:,} tokens: answers end there; "
        f"--set max_length={max(1, window - new_tokens)} shortens what is asked"
    )
    return replace(task, notes=(*task.notes, note))


def _task(prepared: Prepared, facts: dict[str, Any], notes: tuple[str, ...]) -> EvalSet:
    rows, table = Rows.of(prepared.rows, length=int(prepared.report.settings["max_length"])), prepared.rows
    documents = [rows.row(index)[0] for index in range(len(rows))]
    return EvalSet(
        documents=documents,
        prompts=[list(rows.prompt(index)) for index in range(len(rows))],
        references=[list(texts) for texts in table["references"]],
        places=[f"{source}:{line}" for source, line in zip(table["source"], table["line"], strict=True)],
        facts={**facts, "rows": len(rows), "tokens": sum(rows.lengths)},
        notes=notes,
    )


def _cut_prompts(task: EvalSet, most: int, max_length: int) -> EvalSet:
    """Truncate long prompts at the end; for the loss further, so that the completion fits."""

    def cut(document: Document) -> Document:
        completion = len(document.ids) - document.prompt_length
        room = min(most, max(max_length - completion, 1))
        if document.prompt_length <= room:
            return document
        lost = document.prompt_length - room
        ids = [*document.ids[:room], *document.ids[document.prompt_length :]]
        return Document(ids, room, [at - lost for at in document.masked_spans], document.window)

    prompts = [prompt[:most] for prompt in task.prompts]
    facts = {**task.facts, "max_prompt_tokens": most, "max_length": max_length}
    return replace(task, documents=[cut(each) for each in task.documents], prompts=prompts, facts=facts)


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


def plan_on_rows(
    folder: Path, recipe: Recipe, data: Path, limit: int | None, workers: Workers = NO_WORKERS
) -> EvaluationPlan:
    """Plan an evaluation, or resume one that was interrupted.

    Args:
        folder: the model folder.
        recipe: templates, metrics, generation settings, device.
        data: file of rows, or prepared data.
        limit: most rows, the first ones; ``None``: all.
        workers: ranks that share the work.

    Raises:
        ResourceError: the model does not fit in memory.
    """
    setup, own = InferenceSetup.of(folder, recipe, workers=workers), tokenizer_folder(folder)
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
            answerer = Answerer(recipe, planned.tokenizer, self.architecture, self.offloaded, together)
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

    def _answer(self, answerer: Answerer, groups: Sequence[Sequence[int]]) -> None:
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
