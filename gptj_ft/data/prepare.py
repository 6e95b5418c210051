"""A file of rows -> token ids with a report on every row: kept, cut, or skipped and why."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptj_ft.data.checks import Checks, Found
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
from gptj_ft.home import home
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
CHUNK_CHARACTERS = 4_000_000
# Columns are chosen by the first rows: a name that turns up once in a million rows must not win.
SURVEY_ROWS = 1000
COLUMNS = ("input_ids", "prompt_length", "references", "source", "line", "group", "label")


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
    columns = find_columns(source, recipe)
    digest = sha256_of(source)
    tally = _Tally(vocab_size, Checks(recipe))
    findings = Findings(recipe.max_bad_rows)
    rows = read_rows(source, findings, recipe.documents, recipe.quotes)
    # While one chunk is being tokenised, the one before is written and the one after read.
    with ThreadPoolExecutor(1) as pool, _RowFile() as file:
        ahead: tuple[list[_Texts], Future[list[list[int]]]] | None = None
        for chunk in chain(_chunks(rows), [None]):
            good = _texts_of(tally, chunk, recipe, columns) if chunk is not None else []
            tokens = pool.submit(
                tokenize, tokenizer, [text for each in good for text in (each.prompt, each.completion)]
            )
            if ahead is not None:
                file.write(_assembled(tally, recipe, tokenizer, ahead[0], ahead[1].result()))
                if progress:
                    progress(tally.counts.rows_read)
            ahead = good, tokens
        for where, problem in findings.bad:
            tally.skip(where, f"cannot be read: {problem}")
        if not tally.counts.rows_kept:
            reasons = "; ".join(f"{reason} ({s.count}, first at {s.first[0]})" for reason, s in tally.skips().items())
            raise DataError(f"{source}: none of the {tally.counts.rows_read} rows can be trained on: {reasons}")
        report = Report(
            files=tuple(str(found.path) for found in find_files(source)),
            notes=tuple(findings.notes),
            rows_skipped=tally.skips(),
            warnings={what: Skips(each.count, tuple(each.first)) for what, each in tally.checks.found.items()},
            columns=columns,
            data_sha256=digest,
            tokenizer_sha256=tokenizer_digest(tokenizer),
            settings=settings_of(recipe),
            **vars(tally.counts),
        )
        return Prepared(file.rows(), report)


def find_columns(source: Path, recipe: Recipe) -> dict[str, str]:
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


@dataclass(frozen=True)
class _Texts:
    """A row that can be tokenised."""

    row: Row
    found: FieldTexts
    prompt: str
    completion: str


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield rows in lists that are short enough to be held several times over, as tokens too."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += sum(len(value) for value in row.values.values() if isinstance(value, str))
        if len(chunk) == CHUNK_ROWS or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _texts_of(tally: _Tally, chunk: list[Row], recipe: Recipe, columns: dict[str, str]) -> list[_Texts]:
    """Put rows into the templates; count those that cannot be."""
    good = []
    for row in chunk:
        try:
            found = read_fields(row.values, columns, recipe)
            prompt, completion = texts(recipe, found.values)
        except RowSkipped as reason:
            tally.skip(row.where, str(reason))
        else:
            tally.checks.look(row.where, found, prompt, completion)
            good.append(_Texts(row, found, prompt, completion))
    return good


def _assembled(
    tally: _Tally, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, good: list[_Texts], ids: list[list[int]]
) -> Iterator[tuple[Any, ...]]:
    """Yield the documents of rows, with the values of `COLUMNS`; count those that are left out."""
    for each, prompt_ids, completion_ids in zip(good, ids[::2], ids[1::2], strict=True):
        row, found = each.row, each.found
        try:
            encoded = assemble(recipe, tokenizer, found.values, prompt_ids, completion_ids)
        except RowSkipped as reason:
            tally.skip(row.where, str(reason))
            continue
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        tally.keep(row, encoded)
        origin = (found.references, row.source, row.line, group_of(recipe, found.values), found.values.get(LABEL, ""))
        for document in encoded.documents:
            yield (document, encoded.prompt_length, *origin)


class _RowFile:
    """Documents on their way to a data set: in a file, of which no more is in memory than is looked at."""

    def __init__(self) -> None:
        import pyarrow

        number, text = pyarrow.int64(), pyarrow.string()
        types = (pyarrow.list_(pyarrow.int32()), pyarrow.int32(), pyarrow.list_(text), text, number, number, text)
        self._schema = pyarrow.schema(list(zip(COLUMNS, types, strict=True)))
        home().mkdir(parents=True, exist_ok=True)  # not where temporary files go: that may be memory
        descriptor, name = tempfile.mkstemp(prefix=".rows-", suffix=".arrow", dir=home())
        os.close(descriptor)
        self._path = Path(name)
        self._writer = pyarrow.ipc.new_stream(name, self._schema)

    def __enter__(self) -> _RowFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
        self._path.unlink(missing_ok=True)  # what has it open keeps it

    def write(self, documents: Iterable[tuple[Any, ...]]) -> None:
        """Append documents, given as the values of `COLUMNS`."""
        import pyarrow

        if columns := list(zip(*documents, strict=True)):
            arrays = [pyarrow.array(values, field.type) for values, field in zip(columns, self._schema, strict=True)]
            self._writer.write_batch(pyarrow.record_batch(arrays, schema=self._schema))

    def rows(self) -> Dataset:
        """Return all documents."""
        from datasets import Dataset

        self._writer.close()
        return Dataset.from_file(str(self._path))


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
    """What becomes of the rows."""

    def __init__(self, vocab_size: int, checks: Checks) -> None:
        self.vocab_size, self.checks = vocab_size, checks
        self.counts = _Counts()
        self._skipped: dict[str, Found] = {}

    def skip(self, where: str, reason: str) -> None:
        self.counts.rows_read += 1
        self._skipped.setdefault(reason, Found()).add(where)

    def keep(self, row: Row, encoded: Encoded) -> None:
        """Count a row's documents; a DataError if the model lacks one of the tokens."""
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

    def skips(self) -> dict[str, Skips]:
        return {reason: Skips(each.count, tuple(each.first)) for reason, each in self._skipped.items()}
