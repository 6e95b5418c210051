"""Tokenize rows of files and report on every row: kept, truncated, or skipped and why."""

from __future__ import annotations

import gc
import glob
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow

from gptj_ft.config.options import Recipe
from gptj_ft.data.checks.texts import Checks
from gptj_ft.data.columns import (
    LABEL,
    FieldReader,
    FieldTexts,
    UnknownColumn,
    choose_columns,
    input_fields,
    recipe_fields,
)
from gptj_ft.data.counts import RowCounts
from gptj_ft.data.dataset import Prepared, Report, content_hash, document_hash, settings_of
from gptj_ft.data.encode import Encoded, TextPart, assemble, check_templates, eos_of, from_tokens, parts
from gptj_ft.data.labelled.encoder import LabelledEncoder, Setting
from gptj_ft.data.labelled.labels import LabelSet
from gptj_ft.data.labelled.tasks import labelled_encoder
from gptj_ft.data.loss_mask import num_targets
from gptj_ft.data.readers.records import read_rows
from gptj_ft.data.readers.rows import Findings, Row
from gptj_ft.data.readers.source import FileOptions, Source, identify
from gptj_ft.data.readers.tables import check_headers
from gptj_ft.data.table import LABELLED, SCHEMA, TableWriter, TokenTable, empty_lists, to_arrow
from gptj_ft.data.tokenization import RowTokenizer, Tokens, tokenize_by, tokenizer_digest
from gptj_ft.errors import DataError, RowSkipped
from gptj_ft.system.plain_text import shortened

UNKNOWN_IDS = "token ids that the model has and its tokenizer lacks, e.g. separators of other systems"
TOKENS, TRAINED = "input_ids", "trained"  # columns of tokenized rows
# Rows in memory at once, as texts and tokens. Texts that miss the word cache are tokenized by all cores.
CHUNK_ROWS = 500
CHUNK_CHARACTERS = 2_000_000
# The first rows choose the columns: a key that occurs once in a million rows must not win.
SURVEY_ROWS = 1000


class Texts(NamedTuple):
    """A row rendered by the templates."""

    row: Row
    fields: FieldTexts
    parts: list[TextPart]  # empty if the row came as tokens


class RowEncoder:
    """Turn rows into tokenized documents; count and check them.

    Args:
        reader: reader of the fields; ``None`` for rows of tokens.
        vocab_size: rows of the model's embedding; every token id must be smaller.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: RowTokenizer, reader: FieldReader | None, vocab_size: int, checks: Checks
    ) -> None:
        self._recipe, self._tokenizer, self._reader, self._vocab_size = recipe, tokenizer, reader, vocab_size
        self._known_ids = max(tokenizer.get_vocab().values(), default=vocab_size) + 1
        # A tokenizer with no more ids than the model cannot exceed the embedding.
        self._needs_check = reader is None or self._known_ids > vocab_size
        self._tokenize = tokenize_by(tokenizer) if reader else lambda texts: []
        self._eos = eos_of(tokenizer) if reader else 0  # a missing EOS fails before any row is read
        self._checks = checks
        self.counts, self.labels = RowCounts(), LabelSet()

    def encode(self, rows: Sequence[Row]) -> pyarrow.RecordBatch:
        """Tokenize rows in one call of the tokenizer; return their documents."""
        rendered = [texts for row in rows if (texts := self._render(row))]
        tokens = iter(self._tokenize([text for each in rendered for text, _ in each.parts]))
        documents: list[tuple[Any, ...]] = []
        for texts in rendered:
            documents += self._documents(texts, list(islice(tokens, len(texts.parts))))
        columns = list(zip(*documents, strict=True)) or [()] * (len(SCHEMA) - len(LABELLED))
        arrays = [to_arrow(field.type, values) for field, values in zip(SCHEMA, columns, strict=False)]
        arrays += [empty_lists(SCHEMA.field(name).type, len(documents)) for name in LABELLED]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    def finish(self, writer: TableWriter) -> TokenTable:
        return writer.table()

    def _render(self, row: Row) -> Texts | None:
        """Render a row with the templates; ``None`` if it is skipped."""
        if self._reader is None:
            return Texts(row, FieldTexts({}, []), [])
        try:
            fields = self._reader.read(row.values)
            texts = parts(self._recipe, fields.values)
        except RowSkipped as reason:
            self.counts.skip(row.where, str(reason))
            return None
        prompt = texts[0][0] if len(texts) == 2 else "".join(text for text, _ in texts[:-1])
        self._checks.check_row(row, fields, prompt, texts[-1][0])
        return Texts(row, fields, texts)

    def _documents(self, texts: Texts, tokens: list[Tokens]) -> list[tuple[Any, ...]]:
        """Return a row's documents in the columns of `SCHEMA`; none if the row is skipped."""
        row, fields, recipe = texts.row, texts.fields, self._recipe
        try:
            if texts.parts:
                settings = (recipe, self._tokenizer, self._eos, fields.values)
                encoded = assemble(*settings, texts.parts, tokens, fields.answer_at)
                group = document_hash(recipe, fields.values)
            else:
                ids = _tokens_of(row)
                encoded = from_tokens(recipe, ids, row.values.get(TRAINED))
                group = content_hash(array("q", ids).tobytes())
        except RowSkipped as reason:
            self.counts.skip(row.where, str(reason))
            return []
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        self._count(row, encoded)
        first, label = encoded.documents[0], fields.values.get(LABEL, "")
        rest = (encoded.prompt_length, encoded.masked_spans, fields.references, row.source, row.line, group, label)
        return [(document, *rest, document is not first) for document in encoded.documents]

    def _count(self, row: Row, encoded: Encoded) -> None:
        for ids in encoded.documents:
            if self._needs_check and (largest := max(ids)) >= self._vocab_size:
                raise DataError(
                    f"{row.where}: token id {largest}, but the model's ids end at {self._vocab_size - 1}; "
                    "the tokenizer is not this model's"
                )
            if self._reader is None and max(ids) >= self._known_ids and ids is encoded.documents[0]:
                self._checks.add(UNKNOWN_IDS, row.where)
        sizes = [(len(ids), num_targets(len(ids), encoded.prompt_length, encoded.masked_spans))
                 for ids in encoded.documents]  # fmt: skip
        self.counts.keep(sizes, encoded.tokens_cut)


def _tokens_of(row: Row) -> list[int]:
    """Return the tokens of a row that came as tokens.

    Raises:
        RowSkipped: they are no token ids.
    """
    tokens = row.values.get(TOKENS)
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise RowSkipped("input_ids is not a list of token ids")
    if not tokens:
        raise RowSkipped("no tokens")
    return tokens


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
        reader = None if TOKENS in columns else FieldReader(columns, recipe)
        encoder: RowEncoder | LabelledEncoder = RowEncoder(recipe, tokenizer, reader, job.vocab_size, checks)
    else:
        names = LabelSet(recipe.labels, job.labels, job.known_labels)
        setting = Setting(recipe, tokenizer, columns, names, checks, job.needs_target)
        encoder = labelled_encoder(setting, job.vocab_size)
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
            what = "trained on" if job.needs_target else "labelled"
            raise DataError(f"{source.path}: none of the {counts.numbers['rows_read']} rows can be {what}: {why}")
        try:
            table = encoder.finish(writer)
        except DataError as error:
            raise DataError(f"{source.path}: {error}") from error
        report = Report(
            files=tuple(str(file.path) for file in source.files),
            notes=tuple(findings.notes),
            rows_skipped=counts.skipped,
            warnings=checks.warnings,
            columns=columns,
            data_sha256=digest,
            tokenizer_sha256=tokenizer_digest(tokenizer),
            settings=settings_of(recipe),
            labels=encoder.labels.order(),
            label_counts=encoder.labels.counts(),
            **counts.numbers,
        )
        return Prepared(table, report)


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
