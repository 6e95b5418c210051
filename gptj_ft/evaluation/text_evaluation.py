"""Evaluate a language model on rows: the loss of each row, and generated or most likely answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from gptj_ft.data.prepare import TokenizeJob
from gptj_ft.data.readers.source import is_prepared
from gptj_ft.data.split import select_rows
from gptj_ft.data.tokenization import NoTokenizer, has_tokenizer, load_tokenizer
from gptj_ft.errors import NotFinite
from gptj_ft.evaluation.answerer import Answerer, PromptGroup, scores_of
from gptj_ft.evaluation.comparison import Evaluation, with_warnings
from gptj_ft.evaluation.likelihood import label_candidates, losses, passes, share_prompt
from gptj_ft.evaluation.metrics.language_model import RowLoss, language_model
from gptj_ft.evaluation.row_job import Progress, ResultCache, check_complete, pending_rounds
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
DAMAGED = "the model is damaged, or too large for fp16; try --precision fp32"
UNLIMITED = 2**31 - 1  # tokens of a row


@dataclass(frozen=True)
class EvalSet:
    """Rows of an evaluation, tokenized for one model."""

    documents: list[Document]  # tokens of each row, for the loss
    prompts: list[list[int]]  # token ids of each prompt, for the answers
    references: list[list[str]]  # accepted answers of each row
    places: list[str]  # file and line of each row
    facts: dict[str, Any]  # identity of the rows, for the result cache
    notes: tuple[str, ...]  # warnings for the report


def make_eval_set(recipe: Recipe, tokenizer: RowTokenizer, folder: Path, data: Path, limit: int | None) -> EvalSet:
    """Tokenize rows for a model.

    Args:
        limit: maximum number of rows, taken from the start; None: all.
    """
    notes = []
    if recipe.cut == "answer" and not is_prepared(data):
        # Training may cut a long text around its answer. Whoever asks does not know where the answer is.
        recipe = recipe.model_copy(update={"cut": "end"})
    max_prompt, max_length = recipe.generation.max_prompt_tokens, recipe.max_length
    if max_prompt and recipe.prompt and not is_prepared(data):
        # Tokenize whole prompts: `_cut_prompts` truncates them at the end, unlike `max_length`.
        recipe = recipe.model_copy(update={"max_length": UNLIMITED})
    base = base_folder(folder) if is_adapter(folder) else folder
    prepared = read_or_prepare(TokenizeJob.of(recipe, tokenizer, data, vocab_size_of(base)))
    report = prepared.report
    if recipe.cut == "answer" and report.rows_cut:
        notes.append(
            f"{report.rows_cut:,} of these rows were shortened around their answers, which makes them easier "
            "than what will be asked: name the file they come from with --data for figures without that"
        )
    if max_prompt and report.rows_cut:
        notes.append(
            f"{report.rows_cut:,} of these rows were shortened when they were prepared, and not to {max_prompt:,} "
            "tokens as generation.max_prompt_tokens says: name the file they come from with --data"
        )
    notes += [f"{skips.count:,} rows were left out: {reason}" for reason, skips in report.rows_skipped.items()]
    if limit is not None:
        prepared = select_rows(prepared, range(min(limit, len(prepared.rows))))
    facts = {"data": report.data_sha256, "settings": report.settings_sha256, "tokenizer": report.tokenizer_sha256}
    rows = _eval_set(prepared, facts, tuple(notes))
    return _cut_prompts(rows, max_prompt, max_length) if max_prompt else rows


def _eval_set(prepared: Prepared, facts: dict[str, Any], notes: tuple[str, ...]) -> EvalSet:
    rows, table = Rows.of(prepared.rows, length=int(prepared.report.settings["max_length"])), prepared.rows
    return EvalSet(
        documents=[rows.row(index)[0] for index in range(len(rows))],
        prompts=[list(rows.prompt(index)) for index in range(len(rows))],
        references=[list(texts) for texts in table["references"]],
        places=[f"{source}:{line}" for source, line in zip(table["source"], table["line"], strict=True)],
        facts={**facts, "rows": len(rows), "tokens": sum(rows.lengths)},
        notes=notes,
    )


def _cut_prompts(rows: EvalSet, max_prompt: int, max_length: int) -> EvalSet:
    """Truncate long prompts at the end; in documents further, so that the completion fits."""

    def cut(document: Document) -> Document:
        completion = len(document.ids) - document.prompt_length
        room = min(max_prompt, max(max_length - completion, 1))
        if document.prompt_length <= room:
            return document
        removed = document.prompt_length - room
        ids = [*document.ids[:room], *document.ids[document.prompt_length :]]
        # Masked spans come after the prompt, so they all move by the same number of tokens.
        return Document(ids, room, [at - removed for at in document.masked_spans], document.window)

    prompts = [prompt[:max_prompt] for prompt in rows.prompts]
    facts = {**rows.facts, "max_prompt_tokens": max_prompt, "max_length": max_length}
    return replace(rows, documents=[cut(each) for each in rows.documents], prompts=prompts, facts=facts)


def with_short_answers(rows: EvalSet, new_tokens: int, window: int) -> EvalSet:
    """Add a note about prompts that leave too little of the context for a whole answer."""
    count = sum(len(prompt) + new_tokens > window for prompt in rows.prompts)
    if not count:
        return rows
    note = (
        f"{count:,} prompts leave less than {new_tokens:,} of the model's {window:,} tokens: answers end there; "
        f"--set max_length={max(1, window - new_tokens)} shortens what is asked"
    )
    return replace(rows, notes=(*rows.notes, note))


@dataclass(frozen=True)
class EvaluationPlan:
    """A planned evaluation with the results that an interrupted one has left."""

    setup: InferenceSetup
    tokenizer: PreTrainedTokenizerFast | None
    rows: EvalSet
    cache: ResultCache
    plan: InferencePlan

    def with_note(self, note: str) -> EvaluationPlan:
        """Return a copy with one more note."""
        return replace(self, rows=replace(self.rows, notes=(*self.rows.notes, note)))

    def run(self, progress: Progress | None = None) -> Evaluation:
        """Evaluate the model on its rows.

        Raises:
            NotFinite: a loss is not finite.
            DataError: a row got no result.
        """
        recipe, rows = self.setup.recipe, self.rows
        # Store the batch size first: answers depend on it, so a resumed run must use it again.
        self.cache.add("together", {0: self.plan.together.written})
        with self.setup.open(self.plan.weights) as (architecture, offloaded):
            if self.answers_prompts:
                self._answer_prompts(architecture, offloaded, progress)
            self._compute_losses(offloaded, progress)
        loss_of, answer_of, numbers = self.cache.of("loss"), self.cache.of("answer"), range(len(rows.documents))
        for results in (loss_of, answer_of) if self.answers_prompts else (loss_of,):
            check_complete(results.keys(), len(numbers), rows.places.__getitem__)
        row_losses = [RowLoss(**loss_of[row]) for row in numbers]
        answers = [answer_of.get(row, "") for row in numbers]
        figures = {**language_model(row_losses), **scores_of(recipe, answers, rows.references)}
        notes, no_text = rows.notes, sum(row.bytes is None for row in row_losses)
        if no_text:
            why = "the tokenizer lacks their ids" if self.tokenizer else "the model has no tokenizer"
            notes = (*notes, NO_TEXT.format(rows=no_text, why=why))
        num_targets, model = sum(row.targets for row in row_losses), str(self.setup.folder)
        evaluation = Evaluation(model, figures, rows.places, answers, rows.references, notes, num_targets)
        return with_warnings(evaluation, recipe)

    @property
    def answers_prompts(self) -> bool:
        """Whether a metric needs answers."""
        return bool(self.setup.recipe.metrics) and self.tokenizer is not None

    def close(self) -> None:
        """Delete the cached results."""
        self.cache.close()

    def _answer_prompts(self, architecture: Architecture, offloaded: OffloadedModel, progress: Progress | None) -> None:
        """Answer the prompts without a cached answer, and compute losses in the same passes if possible."""
        assert self.tokenizer is not None
        answerer = Answerer(self.setup.recipe, self.tokenizer, architecture, offloaded, self.plan.together)
        groups, answer_of = list(answerer.group(self.rows.prompts)), self.cache.of("answer")
        for numbers in pending_rounds(groups, answer_of.keys(), answerer.round_size):
            some = [groups[number] for number in numbers]
            prompt_groups = [self._prompt_group(rows, answerer.writes) for rows in some]
            # Not strict: `check_complete` reports rows without an answer.
            for rows, (texts, row_losses) in zip(some, answerer.answer(prompt_groups), strict=False):
                if row_losses:
                    self._note_losses(rows, row_losses)
                if len(texts) == len(rows):
                    self.cache.add("answer", dict(zip(rows, texts, strict=True)))
            self._show(progress, len(answer_of))

    def _compute_losses(self, offloaded: OffloadedModel, progress: Progress | None) -> None:
        loss_of, budget = self.cache.of("loss"), self.plan.together
        for span in passes([document.num_inputs for document in self.rows.documents], budget.read):
            # Passes depend on the rows only. A resumed evaluation skips those that are complete.
            if not loss_of.keys() >= set(span):
                documents = [self.rows.documents[row] for row in span]
                self._note_losses(span, losses(offloaded, self.tokenizer, documents, budget.computed))
            self._show(progress, span.stop)

    def _prompt_group(self, rows: Sequence[int], is_written: bool) -> PromptGroup:
        prompts = [self.rows.prompts[row] for row in rows]
        documents = [self.rows.documents[row] for row in rows]
        # The losses can reuse the prefill of the prompts only if the documents start with them, rotated alike.
        switches = self.setup.architecture.rotary_switches
        shared = all(
            len(prompt) < document.num_inputs
            and list(document.ids[: len(prompt)]) == prompt
            and not any(len(prompt) <= switch < document.num_inputs for switch in switches)
            for prompt, document in zip(prompts, documents, strict=True)
        )
        # With prompt lookup the first pass also scores guesses, but `Prefill` keeps the logits of one position.
        with_losses = is_written and shared and not self.setup.recipe.generation.prompt_lookup_num_tokens
        return PromptGroup(prompts, rows[0], documents if with_losses else ())

    def _note_losses(self, rows: Sequence[int], row_losses: Sequence[RowLoss]) -> None:
        if len(row_losses) != len(rows):
            return  # `check_complete` reports rows without a loss
        for row, loss in zip(rows, row_losses, strict=True):
            if not math.isfinite(loss.total):
                raise NotFinite(f"the loss of {self.rows.places[row]} is not a finite number: {DAMAGED}")
        self.cache.add("loss", {row: asdict(loss) for row, loss in zip(rows, row_losses, strict=True)})

    def _show(self, progress: Progress | None, done: int) -> None:
        if progress:
            progress(done, len(self.rows.documents))


def plan_on_rows(
    folder: Path, recipe: Recipe, data: Path, limit: int | None, workers: Workers = NO_WORKERS
) -> EvaluationPlan:
    """Plan an evaluation, or resume an interrupted one.

    Args:
        data: file of rows, or prepared data.
        limit: maximum number of rows, taken from the start; None: all.
        workers: ranks that share the rows.

    Raises:
        ResourceError: the model does not fit in memory.
    """
    setup, own = InferenceSetup.of(folder, recipe, workers=workers), tokenizer_folder(folder)
    check_writes(setup)
    tokenizer = load_tokenizer(own) if has_tokenizer(own) else None
    check_lengths(recipe, setup.architecture)
    rows = make_eval_set(recipe, tokenizer or NoTokenizer(own), folder, data, limit)
    if recipe.metrics and not any(rows.references):  # rows given as tokens or plain text
        rows = replace(rows, notes=(*rows.notes, NO_REFERENCES.format(metrics=", ".join(recipe.metrics))))
        recipe = recipe.model_copy(update={"metrics": ()})
    labels = list(label_candidates(recipe, tokenizer).values()) if tokenizer and recipe.metrics else []
    writes = tokenizer is not None and recipe.metrics and not labels
    if writes:
        rows = with_short_answers(rows, recipe.generation.max_new_tokens, setup.context)
    if recipe.recipe == "custom" and not recipe.metrics:
        rows = replace(rows, notes=(*rows.notes, NO_TEMPLATE))
    setup = replace(setup, recipe=recipe)
    used = {"dtype": str(setup.dtype), "device": setup.device.type}
    cache = ResultCache({**rows.facts, **evaluation_settings(folder, recipe), **used})
    prompts = [len(prompt) for prompt in rows.prompts]
    documents = [max(document.num_inputs, prompt) for document, prompt in zip(rows.documents, prompts, strict=True)]
    documents += [len(each.ids) for prompt in rows.prompts for each in share_prompt(prompt, labels, setup.context)]
    # A resumed evaluation batches the prompts as the first run did, however much memory is free now.
    together = cache.of("together").get(0)
    plan = setup.plan(home(), together, documents=documents, prompts=prompts if writes else ())
    return EvaluationPlan(setup, tokenizer, rows, cache, plan)


def evaluation_settings(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Return the settings that determine the results, except the rows: model, options, version."""
    # Sizes and times, since hashing the weights would take as long as a pass over them.
    files = sorted(path for path in folder.iterdir() if path.is_file())
    keys = {"metrics", "generation", "completion", "labels", "seed", "micro_batch_tokens"}
    return {
        "model": str(folder.resolve()),
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "recipe": recipe.model_dump(mode="json", include=keys),
        "torch": torch.__version__,
    }
