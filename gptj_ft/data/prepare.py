"""Tokenize rows of files and report on every row: kept, truncated, or skipped and why."""

from __future__ import annotations

import gc
import glob
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gptj_ft.config.options import Recipe
from gptj_ft.config.presets import load_preset
from gptj_ft.data.chat_template import has_template
from gptj_ft.data.checks.texts import Checks
from gptj_ft.data.columns import UnknownColumn, choose_columns, input_fields, recipe_fields
from gptj_ft.data.dataset import Prepared, Report, settings_of
from gptj_ft.data.encode import check_templates, tokens_digest
from gptj_ft.data.encoder import RowEncoder, Setting, TaskReader
from gptj_ft.data.labelled.labels import LabelSet
from gptj_ft.data.labelled.sentences import SentenceReader
from gptj_ft.data.labelled.spans import SpanReader
from gptj_ft.data.labelled.texts import NumberReader, SetReader, TextReader
from gptj_ft.data.labelled.words import WordReader
from gptj_ft.data.language_model import TOKENS, TRAINED, ChatReader, PromptReader, TokenReader
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings, Row
from gptj_ft.data.readers.source import FileOptions, Source, identify
from gptj_ft.data.readers.tables import check_headers
from gptj_ft.data.table import TableWriter, TokenTable
from gptj_ft.data.tokenization import RowTokenizer
from gptj_ft.errors import DataError
from gptj_ft.system.plain_text import shortened

# Rows in memory at once, as texts and tokens. Texts that miss the word cache are tokenized by all cores.
CHUNK_ROWS = 500
CHUNK_CHARACTERS = 2_000_000
# The first rows choose the columns: a key that occurs once in a million rows must not win.
SURVEY_ROWS = 1000
PLAIN_CHAT = (
    "no chat template: conversations are written as 'User: ...' and 'Assistant: ...'; "
    "add a template by --set chat_template=@FILE"
)

READERS: Mapping[str, type[TaskReader]] = {  # of tasks with labels
    "classification": TextReader,
    "multi-label": SetReader,
    "regression": NumberReader,
    "token-labels": WordReader,
    "spans": SpanReader,
    "sentences": SentenceReader,
}


@dataclass(frozen=True)
class TokenizeJob:
    """Rows to tokenize, and the settings that the result depends on."""

    recipe: Recipe
    tokenizer: RowTokenizer
    source: Source
    vocab_size: int  # rows of the model's embedding; every token id must be smaller
    labels: Sequence[str] = ()
    """Label names in the order of their ids, as in the training rows. Rows with other labels are skipped. Empty:
    collect the labels from the rows.
    """
    known_labels: Sequence[str] = ()  # the model's labels; their order is used if the rows have exactly these
    needs_target: bool = True  # skip rows without a target; False: read inputs only

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: RowTokenizer, path: Path, vocab_size: int, **labels: Any) -> TokenizeJob:
        """Identify the files of a path; ``labels`` are the remaining fields."""
        return cls(recipe, tokenizer, identify(path, FileOptions.of(recipe)), vocab_size, **labels)


def tokenize_rows(
    job: TokenizeJob,
    progress: Callable[[int], None] | None = None,
    survey_rows: int = SURVEY_ROWS,
    chunk_rows: int = CHUNK_ROWS,
) -> Prepared:
    """Tokenize the rows of files; report on every row: kept, cut, or skipped and why.

    The first rows are read twice: first to choose the columns, before any work is done.

    Args:
        progress: called with the number of rows done.
        survey_rows: rows that choose the columns.
        chunk_rows: most rows in memory.
    """
    recipe, tokenizer, source = job.recipe, job.tokenizer, job.source
    check_templates(recipe)
    columns = find_columns(source, recipe, job.needs_target, survey_rows)
    checks = Checks(recipe)
    if recipe.task == "language-model":
        labels = LabelSet()
        reader: type[TaskReader] = (
            TokenReader if TOKENS in columns else ChatReader if has_template(recipe) else PromptReader
        )
    else:
        labels, reader = LabelSet(recipe.labels, job.labels, job.known_labels), READERS[recipe.task]
    setting = Setting(
        recipe, tokenizer, columns, labels, checks, job.needs_target,
        rows=lambda: read_rows(source, Findings(recipe.max_bad_rows)),
    )  # fmt: skip
    encoder = RowEncoder(reader(setting), job.vocab_size)
    digest = source.sha256  # before the rows are read
    findings = Findings(recipe.max_bad_rows)
    counts = encoder.counts
    with _paused_garbage_collector(), TableWriter() as writer:
        for chunk in _chunks(read_rows(source, findings), chunk_rows):
            writer.write(encoder.encode(chunk))
            if progress:
                progress(counts.numbers["rows_read"])
        checks.close()
        for where, problem in findings.bad:
            counts.skip(where, f"cannot be read: {problem}")
        if not counts.numbers["rows_kept"]:
            why = "; ".join(f"{why} ({of.count}, first at {of.first[0]})" for why, of in counts.skipped.items())
            use = "trained on" if job.needs_target else "labelled"
            raise DataError(f"{source.path}: none of the {counts.numbers['rows_read']} rows can be {use}: {why}")
        try:
            table = encoder.finish(writer)
        except DataError as error:
            raise DataError(f"{source.path}: {error}") from error
        report = Report(
            files=tuple(file.name for file in source.files),
            notes=(*findings.notes, *([PLAIN_CHAT] if uses_plain_chat(recipe, columns) else [])),
            rows_skipped=counts.skipped,
            warnings=checks.warnings,
            columns=columns,
            data_sha256=digest,
            tokenizer_sha256=tokens_digest(recipe, tokenizer),
            settings=settings_of(recipe),
            labels=labels.order(),
            label_counts=labels.counts(),
            cut_places=tuple(counts.cut.first),
            **counts.numbers,
        )
        _check_complete(table, report, recipe.task != "language-model")
        return Prepared(table, report)


def uses_plain_chat(recipe: Recipe, columns: Collection[str]) -> bool:
    """Tell whether the recipe ``chat`` writes conversations by its own prompt, for lack of a chat template."""
    has_own_prompt = recipe.prompt == load_preset("chat")["prompt"]
    return has_own_prompt and not has_template(recipe) and TOKENS not in columns


def _check_complete(table: TokenTable, report: Report, has_labels: bool) -> None:
    """Check that the table has every document, and with labels every row, that the report counts."""
    num_rows = len(table) - sum(table["continues"]) if has_labels else report.rows_kept
    if (len(table), num_rows) != (report.windows, report.rows_kept):
        counts = f"{num_rows:,} of {report.rows_kept:,} rows and {len(table):,} of {report.windows:,} documents"
        raise DataError(f"{report.files[0]}: only {counts} were written: this is a bug of gptj-ft, please report it")


@contextmanager
def _paused_garbage_collector() -> Iterator[None]:
    """Pause the garbage collector: it would scan millions of lists, and none is part of a cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def find_columns(
    source: Source, recipe: Recipe, needs_target: bool = True, survey_rows: int = SURVEY_ROWS
) -> dict[str, str]:
    """Choose the columns by the first rows; by all rows if those lack a column.

    Raises:
        UnknownColumn: see `choose_columns`.
    """
    fields = None if needs_target else input_fields(recipe)
    filled: dict[str, None] = {}  # columns with a value in some row
    seen: dict[str, None] = {}  # all columns
    findings, number = Findings(recipe.max_bad_rows), 0
    rows = read_rows(source, findings)
    # A later row may have further columns that match a pattern.
    has_pattern = any(glob.has_magic(column) for column in recipe.map.values())
    # islice(rows, None) reads on from the survey's last row to the end.
    for count in (None,) if has_pattern else (survey_rows, None):
        for row in islice(rows, count):
            number += 1
            seen.update(dict.fromkeys(row.values))
            filled.update((column, None) for column, value in row.values.items() if value is not None)
        if TOKENS in filled and recipe.task == "language-model" and TOKENS not in recipe.fields and not recipe.map:
            return {column: column for column in (TOKENS, TRAINED) if column in filled}
        try:
            return choose_columns(filled, recipe, fields)
        except DataError as problem:
            error = problem
    if empty := _empty_column(filled, seen, recipe, fields):
        rows_seen = f"all {number:,} rows" if number > 1 else "its only row"
        raise DataError(f"{source.path}: column '{shortened(empty)}' is empty in {rows_seen}") from error
    if not isinstance(error, UnknownColumn):
        raise DataError(f"{source.path}: {error}") from error
    check_headers(findings, recipe_fields(recipe))
    raise UnknownColumn(f"{source.path}: {error}", error.field, error.choices) from error


def _empty_column(filled: Collection[str], seen: Collection[str], recipe: Recipe, fields: Sequence[str] | None) -> str:
    """Return the column that would be chosen if it had a value in any row; "" if there is none."""
    with suppress(DataError):
        return next((column for column in choose_columns(seen, recipe, fields).values() if column not in filled), "")
    return ""


def _chunks(rows: Iterator[Row], most: int) -> Iterator[list[Row]]:
    """Yield rows in chunks small enough to hold as texts and tokens at once."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        for value in row.values.values():
            if isinstance(value, (str, list)):
                characters += len(value)
        if len(chunk) == most or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
