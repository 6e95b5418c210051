"""Generate answers to the rows of a file.

`plan_batch` reads the rows as prompts and plans the passes over the weights; `run_batch` writes one line per row. Each
batch of prompts has its own seed, so answers depend neither on interruptions nor on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.metadata import template_of
from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import ASSISTANT, MESSAGES, Conversation, is_chat, read_conversation
from gptj_ft.data.chat_template import has_template
from gptj_ft.data.columns import FieldReader, cell_text, choose_columns, tools_of
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings
from gptj_ft.data.readers.source import FileOptions, Source, identify
from gptj_ft.data.readers.tables import check_headers
from gptj_ft.data.template import fields_of
from gptj_ft.errors import DataError, RowSkipped
from gptj_ft.evaluation.row_job import OutputFile, Progress
from gptj_ft.generation.decoding import PromptBatch, generate_batches, text_of
from gptj_ft.generation.generator import GenerationSetup, Generator
from gptj_ft.planning.inference_plan import InferencePlan, batches_by_length

_SURVEY_ROWS = 1000  # rows whose columns are looked at
_TOGETHER = "together"  # setting: tokens of prompts and answers per batch
SEED_STRIDE = 1_000_003  # between the seeds of batches


@dataclass(frozen=True)
class BatchPrompt:
    """One row as a prompt."""

    head: dict[str, Any]  # first keys of its output line: line number, file if there are several, id if it has one
    ids: list[int]  # token ids; empty: the row cannot be answered
    cut: bool = False  # whether the prompt was truncated
    problem: str = ""  # reason why the row cannot be answered


@dataclass(frozen=True)
class BatchResult:
    """Row counts of a finished job."""

    rows: int
    resumed: int  # rows that were in the output before
    cut: int  # rows with a truncated prompt
    bad: list[tuple[str, str]]  # place and problem of each unusable row


@dataclass(frozen=True)
class BatchJob:
    """Planned generation for a file's rows."""

    questions: list[BatchPrompt]
    findings: Findings  # problems of rows
    output: Path  # JSON Lines, sorted by row when finished
    settings: dict[str, Any]  # everything that determines the answers
    num_return: int  # answers per row
    plan: InferencePlan
    has_references: bool  # whether the file has the columns of the expected answers


def plan_batch(setup: GenerationSetup, source: Path, output: Path, num_return: int = 1) -> BatchJob:
    """Read the rows of a file and plan the passes over the weights, or resume an earlier job.

    Args:
        output: new file or an unfinished one.
        num_return: number of answers per row; default 1.

    Raises:
        DataError: more unreadable or unusable rows than ``max_bad_rows``.
        ResourceError: the model does not fit.
    """
    recipe = setup.recipe
    findings = Findings(recipe.max_bad_rows)
    questions = list(read_prompts(setup, source, findings))
    lengths = [len(question.ids) for question in questions if question.ids]
    # A resumed job batches the rows as the first run did, however much memory is free now.
    together = OutputFile.setting_of(output, _TOGETHER)
    plan = setup.plan(output.absolute().parent, together, prompts=lengths, num_return=num_return)
    settings = {"model": str(setup.folder.resolve()), "num_return": num_return, "seed": recipe.seed,
                _TOGETHER: plan.together.written, "rows": _digest(questions), **template_of(recipe)}  # fmt: skip
    return BatchJob(questions, findings, output, settings, num_return, plan, _has_references(source, recipe))


def run_batch(generator: Generator, job: BatchJob, progress: Progress | None = None) -> BatchResult:
    """Generate the answers of a job, starting after the rows that the output already has.

    Raises:
        UsageError: the output was made by another command or with other settings.
        Interrupted: a signal; finished rows are in the output.
        ResourceError: the disk is full.
    """
    recipe, questions = generator.setup.recipe, job.questions
    usable = [row for row, question in enumerate(questions) if question.ids]
    lengths = [len(questions[row].ids) for row in usable]
    groups = batches_by_length(lengths, recipe.generation, job.num_return, job.plan.together.written)
    batches = [[usable[index] for index in group] for group in groups]

    def answer(numbers: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
        prompts = [
            PromptBatch(
                [questions[row].ids for row in batches[number]],
                recipe.generation,
                recipe.seed + number * SEED_STRIDE,
                job.num_return,
            )
            for number in numbers
        ]
        outputs = generate_batches(generator.model, generator.setup.tokenizer, prompts)
        for number, continuations in zip(numbers, outputs, strict=False):
            rows = batches[number]
            texts = [text_of(generator.setup.tokenizer, tokens, recipe.generation) for tokens in continuations]
            answers = [texts[at : at + job.num_return] for at in range(0, len(texts), job.num_return)]
            # With an answer too few, no answer has a certain row; `check_complete` reports rows without one.
            complete = len(texts) == len(rows) * job.num_return
            yield [_line(questions[row], each) for row, each in zip(rows, answers, strict=True)] if complete else []

    with OutputFile(job.output, job.settings) as file:
        resumed = len(file.done)
        bad = [(row, question) for row, question in enumerate(questions) if not question.ids]
        file.append((row, question.head | {"text": "", "error": question.problem}) for row, question in bad)
        file.write_batches(batches, len(questions), answer, generator.model.offloaded.exchange.num_replicas, progress)
    return BatchResult(len(questions), resumed, sum(question.cut for question in questions), job.findings.bad)


def read_prompts(setup: GenerationSetup, rows: Path, findings: Findings) -> Iterator[BatchPrompt]:
    """Read the rows of a file as prompts; record unusable rows in ``findings`` too."""
    recipe, source = setup.recipe, identify(rows, FileOptions.of(setup.recipe))
    columns = _columns(source, recipe)
    files = set[str]()
    for row in read_rows(source, findings):
        files.add(row.source)
        # The first file's rows are read before a second file is known, so only later files are named.
        head: dict[str, Any] = {"line": row.line} | ({"file": row.source} if len(files) > 1 else {})
        head |= {"id": row.values["id"]} if isinstance(row.values.get("id"), str | int) else {}
        try:
            prompt = setup.encode(_values(row.values, columns, recipe))
            yield BatchPrompt(head, prompt.ids, prompt.cut)
        except DataError as error:
            findings.bad.append((row.where, str(error)))
            yield BatchPrompt(head, [], problem=str(error))


def _has_references(rows: Path, recipe: Recipe) -> bool:
    names = _column_names(identify(rows, FileOptions.of(recipe)), Findings(recipe.max_bad_rows))
    try:
        return bool(choose_columns(names, recipe))
    except DataError:
        return False


def _column_names(source: Source, findings: Findings) -> dict[str, None]:
    names: dict[str, None] = {}
    for number, row in enumerate(read_rows(source, findings)):
        names.update(dict.fromkeys(row.values))
        if number >= _SURVEY_ROWS:
            break
    return names


def _columns(source: Source, recipe: Recipe) -> dict[str, str]:
    """Choose the columns that fill the prompt's fields."""
    findings = Findings(recipe.max_bad_rows)
    names = _column_names(source, findings)
    fields = fields_of(recipe.prompt or recipe.completion)
    try:
        return choose_columns(names, recipe, fields)
    except DataError as error:
        check_headers(findings, fields)
        raise DataError(f"{source.path}: {error}") from error


def _values(row: dict[str, Any], columns: dict[str, str], recipe: Recipe) -> dict[str, Any]:
    """Return the values of the prompt's fields; a conversation ends before the answer to generate."""
    if not is_chat(recipe):
        return FieldReader(columns, recipe).read(row).values
    for_template = has_template(recipe)
    if MESSAGES in columns:
        messages = read_conversation(row.get(columns[MESSAGES]), for_template)
    else:
        texts = {role: cell_text(row.get(column)) or "" for role, column in columns.items()}
        question = "\n\n".join(text for text in (texts["user"], texts.get("input", "")) if text.strip())
        system = [{"role": "system", "content": texts["system"]}] if texts.get("system", "").strip() else []
        messages = read_conversation([*system, {"role": "user", "content": question}], for_template)
    while messages and messages[-1]["role"] == ASSISTANT:
        messages = Conversation(messages[:-1])
    if not messages:
        raise RowSkipped("no message to answer")
    return {MESSAGES: messages, **tools_of(row, for_template)}


def _line(question: BatchPrompt, texts: Sequence[str]) -> dict[str, Any]:
    return (
        question.head
        | {"text": texts[0]}
        | ({"texts": list(texts)} if len(texts) > 1 else {})
        | ({"shortened": True} if question.cut else {})
    )


def _digest(questions: Sequence[BatchPrompt]) -> str:
    digest = hashlib.sha256()
    for question in questions:
        digest.update(json.dumps([question.head, question.ids, question.problem]).encode())
    return digest.hexdigest()
