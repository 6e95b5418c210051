"""A file of rows -> token ids with a report on every row: kept, cut, or skipped and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptj_ft.data.checks import Checks
from gptj_ft.data.fields import LABEL, FieldTexts, choose_columns, read_fields
from gptj_ft.data.files import find_files
from gptj_ft.data.prepared import (
    Prepared,
    Report,
    Skips,
    check_compatible,
    group_of,
    is_prepared,
    load,
    save,
    select,
    settings_of,
    split,
)
from gptj_ft.data.records import Findings, Row, read_rows, sha256_of
from gptj_ft.data.template import Encoded, RowSkipped, assemble, check_templates, eos_of, texts, tokenize
from gptj_ft.data.tokenizer import load_tokenizer, tokenizer_digest
from gptj_ft.errors import DataError
from gptj_ft.recipe import Recipe

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "Prepared",
    "Report",
    "check_compatible",
    "is_prepared",
    "load",
    "load_tokenizer",
    "prepare",
    "save",
    "select",
    "split",
]

# Rows tokenised in one call, which the tokenizer spreads over the cores.
CHUNK_ROWS = 1000
# Columns are chosen by the first rows: a name that turns up once in a million rows must not win.
SURVEY_ROWS = 1000
COLUMNS = ("input_ids", "prompt_length", "references", "source", "line", "group", "label")
# Places listed for each reason to skip.
PLACES_SHOWN = 5


def prepare(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    source: Path,
    vocab_size: int,
    progress: Callable[[int], None] | None = None,
) -> Prepared:
    """Turn a file into token ids.

    The file is read twice: once to find every unreadable line and the columns, before any work is done.

    Args:
        recipe: templates, fields, length policy.
        tokenizer: the model's.
        source: a file, a folder or a pattern (see `files.find_files`).
        vocab_size: rows of the model's embedding; no token id may reach it.
        progress: called with the number of rows done.

    Raises:
        UsageError: no such file, templates that contradict each other, a tokenizer without EOS.
        DataError: unreadable rows, a missing column, a token the model does not have, or no row left.
    """
    check_templates(recipe)
    eos_of(tokenizer)
    columns = _find_columns(source, recipe)
    digest = sha256_of(source)
    tally = _Tally(vocab_size, Checks(recipe))
    findings = Findings(recipe.max_bad_rows)
    rows = read_rows(source, findings, recipe.documents, recipe.quotes)
    while chunk := list(islice(rows, CHUNK_ROWS)):
        _add_chunk(tally, chunk, recipe, tokenizer, columns)
        if progress:
            progress(tally.counts.rows_read)
    for where, problem in findings.bad:
        tally.skip(where, f"cannot be read: {problem}")
    if not tally.counts.rows_kept:
        reasons = "; ".join(f"{reason} ({s.count}, first at {s.first[0]})" for reason, s in tally.skips().items())
        raise DataError(f"{source}: none of the {tally.counts.rows_read} rows can be trained on: {reasons}")
    report = Report(
        files=tuple(str(file.path) for file in find_files(source)),
        notes=tuple(findings.notes),
        rows_skipped=tally.skips(),
        warnings={what: Skips(each.count, tuple(each.first)) for what, each in tally.checks.found.items()},
        columns=columns,
        data_sha256=digest,
        tokenizer_sha256=tokenizer_digest(tokenizer),
        settings=settings_of(recipe),
        **vars(tally.counts),
    )
    return Prepared(tally.rows(), report)


def _find_columns(source: Path, recipe: Recipe) -> dict[str, str]:
    """Read the whole file once; choose columns by its first rows, and by all only if those lack one."""
    first: dict[str, None] = {}
    every: dict[str, None] = {}
    rows = read_rows(source, Findings(recipe.max_bad_rows), recipe.documents, recipe.quotes)
    for number, row in enumerate(rows):
        # A column of nulls is not there.
        every.update((column, None) for column, value in row.values.items() if value is not None)
        if number < SURVEY_ROWS:
            first.update(every)
    try:
        return choose_columns(first, recipe)
    except DataError:
        try:
            return choose_columns(every, recipe)
        except DataError as error:
            raise DataError(f"{source}: {error}") from error


def _add_chunk(
    tally: _Tally, chunk: list[Row], recipe: Recipe, tokenizer: PreTrainedTokenizerFast, columns: dict[str, str]
) -> None:
    """Tokenise rows together and add each to the tally, or the reason why it is skipped."""
    good: list[tuple[Row, FieldTexts]] = []
    prompts: list[str] = []
    completions: list[str] = []
    for row in chunk:
        try:
            found = read_fields(row.values, columns, recipe)
            prompt, completion = texts(recipe, found.values)
        except RowSkipped as reason:
            tally.skip(row.where, str(reason))
        else:
            tally.checks.look(row.where, found, prompt, completion)
            good.append((row, found))
            prompts.append(prompt)
            completions.append(completion)
    ids = zip(tokenize(tokenizer, prompts), tokenize(tokenizer, completions), strict=True)
    for (row, found), (prompt_ids, completion_ids) in zip(good, ids, strict=True):
        try:
            encoded = assemble(recipe, tokenizer, found.values, prompt_ids, completion_ids)
        except RowSkipped as reason:
            tally.skip(row.where, str(reason))
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        else:
            tally.keep(row, found.references, encoded, group_of(recipe, found.values), found.values.get(LABEL, ""))
    tally.close_chunk()


@dataclass
class _Counts:
    """The numbers of a `Report`, while they grow."""

    rows_read: int = 0
    rows_kept: int = 0
    rows_cut: int = 0
    windows: int = 0
    tokens: int = 0
    target_tokens: int = 0
    longest: int = 0


class _Tally:
    """Counts, and the data set as it grows by chunks (ids as Python integers would take 10 times the memory)."""

    def __init__(self, vocab_size: int, checks: Checks) -> None:
        self.vocab_size, self.checks = vocab_size, checks
        self.counts = _Counts()
        self.skipped_at: dict[str, list[str]] = {}
        self.documents: list[dict[str, Any]] = []
        self.chunks: list[Dataset] = []

    def skip(self, where: str, reason: str) -> None:
        self.counts.rows_read += 1
        self.skipped_at.setdefault(reason, []).append(where)

    def keep(self, row: Row, references: list[str], encoded: Encoded, group: int, label: str) -> None:
        """Add a row's documents; a DataError if the model lacks one of the tokens."""
        counts = self.counts
        counts.rows_read += 1
        counts.rows_kept += 1
        counts.rows_cut += encoded.cut
        for ids in encoded.documents:
            if max(ids) >= self.vocab_size:
                raise DataError(
                    f"{row.where}: token id {max(ids)}, but the model's ids end at {self.vocab_size - 1}; "
                    "the tokenizer is not this model's"
                )
            counts.windows += 1
            counts.tokens += len(ids)
            # The first token of a document has nothing before it, so it is never a target.
            counts.target_tokens += len(ids) - max(encoded.prompt_length, 1)
            counts.longest = max(counts.longest, len(ids))
            values = (ids, encoded.prompt_length, references, row.source, row.line, group, label)
            self.documents.append(dict(zip(COLUMNS, values, strict=True)))

    def close_chunk(self) -> None:
        from datasets import Dataset, Features, List, Value

        text, number = Value("string"), Value("int64")
        types = (List(Value("int32")), Value("int32"), List(text), text, number, number, text)
        if self.documents:
            features = Features(dict(zip(COLUMNS, types, strict=True)))
            self.chunks.append(Dataset.from_list(self.documents, features=features))
            self.documents = []

    def rows(self) -> Dataset:
        from datasets import concatenate_datasets

        return concatenate_datasets(self.chunks)

    def skips(self) -> dict[str, Skips]:
        return {reason: Skips(len(at), tuple(at[:PLACES_SHOWN])) for reason, at in self.skipped_at.items()}
