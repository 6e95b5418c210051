"""A file of rows -> token ids with a report on every row: kept, cut, or skipped and why."""

from __future__ import annotations

import gc
import glob
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from gptj_ft.config.options import Recipe
from gptj_ft.data.assembly import TOKENS, TRAINED, assembled, texts_of
from gptj_ft.data.columns import FieldReader, UnknownColumn, choose_columns, recipe_fields
from gptj_ft.data.dataset import Prepared, Report, Skips, check_compatible, is_prepared, load, save, settings_of
from gptj_ft.data.readers.files import find_files
from gptj_ft.data.readers.records import FileOptions, Findings, Row, read_rows, sha256_of
from gptj_ft.data.readers.tables import check_headers
from gptj_ft.data.row_counts import Tally
from gptj_ft.data.row_file import RowFile
from gptj_ft.data.template import check_templates, eos_of
from gptj_ft.data.tokenization import tokenize_by
from gptj_ft.data.tokenizer import load_tokenizer, tokenizer_digest
from gptj_ft.data.validation import Checks
from gptj_ft.errors import DataError
from gptj_ft.system.plain_text import shortened

if TYPE_CHECKING:
    from gptj_ft.data.tokenizer import RowTokenizer

__all__ = [
    "Prepared",
    "Report",
    "check_compatible",
    "is_prepared",
    "load",
    "load_tokenizer",
    "prepare",
    "save",
]

# Rows that are texts and tokens at once; texts that words are not looked up of are spread over the cores.
CHUNK_ROWS = 500
CHUNK_CHARACTERS = 2_000_000
# Columns are chosen by the first rows: a name that turns up once in a million rows must not win.
SURVEY_ROWS = 1000


def prepare(
    recipe: Recipe,
    tokenizer: RowTokenizer,
    source: Path,
    vocab_size: int,
    progress: Callable[[int], None] | None = None,
) -> Prepared:
    """Turn a file into token ids.

    The first rows are read twice: once to find the columns, before any work is done.

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
    columns = find_columns(source, recipe)
    reader = None if TOKENS in columns else FieldReader(columns, recipe)
    if reader is not None:
        eos_of(tokenizer)  # that there is none is said before all is read
    digest = sha256_of(source)
    # What the tokenizer makes needs no check if all of its tokens are the model's.
    known = max(tokenizer.get_vocab().values(), default=vocab_size) + 1
    needs_check = reader is None or known > vocab_size
    tally = Tally(vocab_size if needs_check else None, Checks(recipe), None if reader else known)
    tokenize = tokenize_by(tokenizer) if reader else lambda texts: []
    findings = Findings(recipe.max_bad_rows)
    rows = read_rows(source, findings, FileOptions.of(recipe))
    with _no_cycles_sought(), RowFile() as file:
        for chunk in _chunks(rows):
            good = texts_of(tally, chunk, recipe, reader)
            tokens = tokenize([text for each in good for text, _ in each.parts])
            file.write(assembled(tally, recipe, tokenizer, good, tokens))
            if progress:
                progress(tally.counts.rows_read)
        tally.checks.close()
        for where, problem in findings.bad:
            tally.skip(where, f"cannot be read: {problem}")
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
        _require_rows(source, report)
        return Prepared(file.table(), report)


def _require_rows(source: Path, report: Report) -> None:
    if not report.rows_kept:
        reasons = "; ".join(f"{why} ({of.count}, first at {of.first[0]})" for why, of in report.rows_skipped.items())
        raise DataError(f"{source}: none of the {report.rows_read} rows can be trained on: {reasons}")


@contextmanager
def _no_cycles_sought() -> Iterator[None]:
    """Keep Python from looking for cycles of references among millions of lists, of which none is in one."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def find_columns(source: Path, recipe: Recipe) -> dict[str, str]:
    """Choose columns by the first rows, and by all only if those lack one.

    Raises:
        UnknownColumn: as `choose_columns`.
        DataError: unreadable rows among those that were looked at.
    """
    found: dict[str, None] = {}
    seen: dict[str, None] = {}  # with those that are null in every row
    number = 0

    def look_at(row: Row) -> None:
        nonlocal number
        number += 1
        seen.update(dict.fromkeys(row.values))
        found.update((column, None) for column, value in row.values.items() if value is not None)

    findings = Findings(recipe.max_bad_rows)
    rows = read_rows(source, findings, FileOptions.of(recipe))
    has_pattern = any(glob.has_magic(column) for column in recipe.map.values())  # which a later row may add to
    for row in islice(rows, None if has_pattern else SURVEY_ROWS):
        look_at(row)
    if TOKENS in found and TOKENS not in recipe.fields and not recipe.map:
        return {column: column for column in (TOKENS, TRAINED) if column in found}
    try:
        return choose_columns(found, recipe)
    except DataError:
        for row in rows:
            look_at(row)
    try:
        return choose_columns(found, recipe)
    except DataError as error:
        if empty := _empty_column(found, seen, recipe):
            rows_seen = f"all {number:,} rows" if number > 1 else "its only row"
            raise DataError(f"{source}: column '{shortened(empty)}' is empty in {rows_seen}") from error
        if not isinstance(error, UnknownColumn):
            raise DataError(f"{source}: {error}") from error
        check_headers(findings, recipe_fields(recipe))
        raise UnknownColumn(f"{source}: {error}", error.field, error.choices) from error


def _empty_column(found: Collection[str], seen: Collection[str], recipe: Recipe) -> str:
    """Return the column that would be chosen if it had a value in any row; empty if there is none."""
    with suppress(DataError):
        return next((column for column in choose_columns(seen, recipe).values() if column not in found), "")
    return ""


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield rows in lists that are short enough to be held several times over, as tokens too."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        for value in row.values.values():
            if isinstance(value, (str, list)):
                characters += len(value)
        if len(chunk) == CHUNK_ROWS or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
