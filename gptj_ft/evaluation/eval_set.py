"""Build an evaluation set: documents for the loss, prompts, and accepted answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptj_ft.checkpoints.architecture import vocab_size_of
from gptj_ft.checkpoints.formats.peft import base_folder
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import Document, Rows
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.load import read_or_prepare
from gptj_ft.data.readers.source import is_prepared
from gptj_ft.data.split import select_rows
from gptj_ft.system.paths import is_adapter

if TYPE_CHECKING:
    from gptj_ft.data.tokenization import RowTokenizer

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
