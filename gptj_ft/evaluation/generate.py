"""Answer the rows of a file; the output file resumes after an interruption.

Rows share passes over the weights in batches that depend on the rows and the settings only, and each batch has a seed
of its own. So what was killed and gone on with is, answer by answer, what would have been written without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptj_ft.checkpoints.metadata import template_of
from gptj_ft.config.options import Recipe
from gptj_ft.data.chat import ASSISTANT, MESSAGES, Conversation, is_chat, read_conversation
from gptj_ft.data.columns import FieldReader, cell_text, choose_columns
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings
from gptj_ft.data.readers.source import FileOptions, Source, identify
from gptj_ft.data.readers.tables import check_headers
from gptj_ft.data.template import fields_of
from gptj_ft.errors import DataError, Interrupted, RowSkipped
from gptj_ft.evaluation.row_job import OutputFile
from gptj_ft.generation.decoding import PromptBatch, generate_batches, in_rounds, text_of
from gptj_ft.generation.generator import GenerationSetup, Generator
from gptj_ft.planning.inference_plan import InferencePlan, batches_by_length

_SURVEY_ROWS = 1000  # whose columns are looked at
_TOGETHER = "together"  # setting: tokens of prompts and answers that share the passes over the weights
SEED_STRIDE = 1_000_003  # between the seeds of batches


@dataclass(frozen=True)
class BatchPrompt:
    """A row as a prompt.

    Attributes:
        head: first keys of its output line: line, file if there are several, id if it has one.
        ids: token ids of the prompt; empty if the row cannot be answered.
        cut: whether the prompt was truncated.
        problem: reason why the row cannot be answered.
    """

    head: dict[str, Any]
    ids: list[int]
    cut: bool = False
    problem: str = ""


@dataclass(frozen=True)
class BatchResult:
    """Counts of a finished batch: rows in all, found in the output, truncated, and unusable."""

    rows: int
    found: int
    cut: int
    bad: list[tuple[str, str]]


@dataclass(frozen=True)
class BatchJob:
    """A planned batch generation.

    Attributes:
        questions: prompts of all rows.
        findings: problems of rows.
        output: JSONL file, one line a row; in row order when finished.
        settings: settings that determine the answers.
        num_return: number of answers per row.
        plan: memory and token budget.
    """

    questions: list[BatchPrompt]
    findings: Findings
    output: Path
    settings: dict[str, Any]
    num_return: int
    plan: InferencePlan


def plan_batch(setup: GenerationSetup, source: Path, output: Path, num_return: int = 1) -> BatchJob:
    """Plan the generation for every row of a file, or resume an earlier one.

    Args:
        setup: model and settings; the model folder is noted beside the output.
        source: file of rows.
        output: new file, or one that was begun.
        num_return: number of answers per row; default 1.

    Raises:
        DataError: more unreadable or unusable rows than ``max_bad_rows``.
        ResourceError: it does not fit.
    """
    recipe = setup.recipe
    findings = Findings(recipe.max_bad_rows)
    questions = list(read_prompts(setup, source, findings))
    prompts = [len(question.ids) for question in questions if question.ids]
    before = OutputFile.setting_of(output, _TOGETHER)
    plan = setup.plan(output.absolute().parent, before, prompts=prompts, num_return=num_return)
    settings = {"model": str(setup.folder.resolve()), "num_return": num_return, "seed": recipe.seed,
                _TOGETHER: plan.together.written, "rows": _digest(questions), **template_of(recipe)}  # fmt: skip
    return BatchJob(questions, findings, output, settings, num_return, plan)


def run_batch(
    generator: Generator, planned: BatchJob, progress: Callable[[int, int], None] | None = None
) -> BatchResult:
    """Generate the answers of a batch, resuming where it was interrupted.

    Args:
        generator: open model.
        planned: prompts, settings and output.
        progress: callback for (rows done, rows); default: none.

    Raises:
        UsageError: the output is of something else.
        Interrupted: by Ctrl-C.
    """
    recipe, questions, num_return = generator.setup.recipe, planned.questions, planned.num_return
    answered = [index for index, question in enumerate(questions) if question.ids]
    lengths = [len(questions[index].ids) for index in answered]
    batches = batches_by_length(lengths, recipe.generation, num_return, planned.plan.together.written)
    with OutputFile(planned.output, planned.settings) as file:
        found = len(file.done)
        bad = [(index, question) for index, question in enumerate(questions) if not question.ids]
        file.append((index, question.head | {"text": "", "error": question.problem}) for index, question in bad)
        try:
            numbered = [([answered[each] for each in batch], number) for number, batch in enumerate(batches)]
            left = [(rows, number) for rows, number in numbered if not file.done.issuperset(rows)]
            for some in in_rounds(left, generator.model.offloaded.exchange.num_replicas):
                for rows, lines in zip((rows for rows, _ in some), _answers(generator, planned, some), strict=True):
                    file.append(zip(rows, lines, strict=True))
                if progress:
                    progress(len(file.done), len(questions))
        except KeyboardInterrupt:
            raise Interrupted(
                f"{len(file.done):,} of {len(questions):,} rows are in {planned.output}; the same command goes on from "
                "there"
            ) from None
        file.finish()
    return BatchResult(len(questions), found, sum(question.cut for question in questions), planned.findings.bad)


def read_prompts(setup: GenerationSetup, rows: Path, findings: Findings) -> Iterator[BatchPrompt]:
    """Read the rows of a file as prompts; unusable rows are also recorded in the findings."""
    recipe, source = setup.recipe, identify(rows, FileOptions.of(setup.recipe))
    columns = _columns(source, recipe)
    files = set[str]()
    for row in read_rows(source, findings):
        files.add(row.source)
        head: dict[str, Any] = {"line": row.line} | ({"file": row.source} if len(files) > 1 else {})
        head |= {"id": row.values["id"]} if isinstance(row.values.get("id"), str | int) else {}
        try:
            prompt = setup.encode(_values(row.values, columns, recipe))
            yield BatchPrompt(head, prompt.ids, prompt.cut)
        except DataError as error:
            findings.bad.append((row.where, str(error)))
            yield BatchPrompt(head, [], problem=str(error))


def _columns(source: Source, recipe: Recipe) -> dict[str, str]:
    """Choose the columns of the prompt's fields; answer columns are optional."""
    found: dict[str, None] = {}
    findings = Findings(recipe.max_bad_rows)
    for number, row in enumerate(read_rows(source, findings)):
        found.update(dict.fromkeys(row.values))
        if number >= _SURVEY_ROWS:
            break
    fields = fields_of(recipe.prompt or recipe.completion)
    try:
        return choose_columns(found, recipe, fields)
    except DataError as error:
        check_headers(findings, fields)
        raise DataError(f"{source.path}: {error}") from error


def _values(row: dict[str, Any], columns: dict[str, str], recipe: Recipe) -> dict[str, Any]:
    if not is_chat(recipe):
        return FieldReader(columns, recipe).read(row).values
    if MESSAGES in columns:
        messages = read_conversation(row.get(columns[MESSAGES]))
    else:
        texts = {role: cell_text(row.get(column)) or "" for role, column in columns.items()}
        asked = "\n\n".join(text for text in (texts["user"], texts.get("input", "")) if text.strip())
        system = [{"role": "system", "content": texts["system"]}] if texts.get("system", "").strip() else []
        messages = read_conversation([*system, {"role": "user", "content": asked}])
    while messages and messages[-1]["role"] == ASSISTANT:  # what is to be written
        messages = Conversation(messages[:-1])
    if not messages:
        raise RowSkipped("no message to answer")
    return {MESSAGES: messages}


def _answers(
    generator: Generator, planned: BatchJob, batches: Sequence[tuple[Sequence[int], int]]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of each of some batches: rows, and the number of the batch."""
    recipe, tokenizer, num_return = generator.setup.recipe, generator.setup.tokenizer, planned.num_return
    asked = [
        PromptBatch(
            [planned.questions[row].ids for row in rows],
            recipe.generation,
            recipe.seed + number * SEED_STRIDE,
            num_return,
        )
        for rows, number in batches
    ]
    for (rows, _), found in zip(batches, generate_batches(generator.model, tokenizer, asked), strict=True):
        written = [text_of(tokenizer, each, recipe.generation) for each in found]
        texts = [written[start : start + num_return] for start in range(0, len(written), num_return)]
        yield [_line(planned.questions[row], each) for row, each in zip(rows, texts, strict=True)]


def _line(question: BatchPrompt, texts: Sequence[str]) -> dict[str, Any]:
    return (
        question.head
        | {"text": texts[0]}
        | ({"texts": list(texts)} if len(texts) > 1 else {})
        | ({"shortened": True} if question.cut else {})
    )


def _digest(questions: Sequence[BatchPrompt]) -> str:
    whole = hashlib.sha256()
    for question in questions:
        whole.update(json.dumps([question.head, question.ids, question.problem]).encode())
    return whole.hexdigest()
