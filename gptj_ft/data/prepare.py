"""A file of rows -> token ids with a report on every row: kept, cut, or skipped and why."""

from __future__ import annotations

import gc
import os
import tempfile
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gptj_ft.data.checks import Checks, Found
from gptj_ft.data.fields import LABEL, FieldReader, FieldTexts, UnknownColumn, choose_columns
from gptj_ft.data.files import find_files
from gptj_ft.data.prepared import (
    Prepared,
    Report,
    Skips,
    check_compatible,
    group_of,
    is_prepared,
    load,
    number_of,
    save,
    settings_of,
)
from gptj_ft.data.records import Findings, Row, read_rows, sha256_of
from gptj_ft.data.targets import num_targets
from gptj_ft.data.template import (
    Encoded,
    Part,
    assemble,
    check_templates,
    eos_of,
    from_tokens,
    parts,
)
from gptj_ft.data.tokenizer import load_tokenizer, tokenizer_digest
from gptj_ft.data.tokens import TextBatch, Tokens, is_before_blank, splits_before_blanks
from gptj_ft.errors import DataError, RowSkipped
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
]

# Rows tokenised in one call, which the tokenizer spreads over the cores.
CHUNK_ROWS = 500
CHUNK_CHARACTERS = 2_000_000
CHUNKS_AHEAD = 3  # so that the tokenizer never waits for rows
BATCH_BYTES = 16 * 2**20  # opening a file looks at the head of every batch, and maps what is around it
LIKELY_LONG = 3  # characters a token of a text that may have to be shortened
WORTH_SHARING = 200  # characters
# Columns are chosen by the first rows: a name that turns up once in a million rows must not win.
SURVEY_ROWS = 1000
UNSAVED = ".rows-"  # how files of rows begin that have not been saved
COLUMNS = (
    "input_ids", "prompt_length", "untrained", "references", "source", "line", "group", "label", "continues",
)  # fmt: skip
TOKENS, TRAINED = "input_ids", "trained"  # columns of rows that come as tokens


def prepare(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
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
    eos = eos_of(tokenizer)
    columns = find_columns(source, recipe)
    digest = sha256_of(source)
    reader = None if TOKENS in columns else FieldReader(columns, recipe)
    # What the tokenizer makes needs no check if all of its tokens are the model's.
    needs_check = reader is None or max(tokenizer.get_vocab().values()) >= vocab_size
    tally = _Tally(vocab_size if needs_check else None, Checks(recipe))
    findings = Findings(recipe.max_bad_rows)
    rows = read_rows(source, findings, recipe.documents, recipe.quotes)
    # While chunks are being tokenised, those before are written and those after are read.
    with _no_cycles_sought(), ThreadPoolExecutor(1) as pool, _RowFile() as file:
        ahead: deque[tuple[list[_Texts], Future[list[Tokens]]]] = deque()
        splits = splits_before_blanks(tokenizer)

        def finish() -> None:
            good, ids = ahead.popleft()
            file.write(_assembled(tally, recipe, tokenizer, eos, good, ids.result()))
            if progress:
                progress(tally.counts.rows_read)

        for chunk in _chunks(rows):
            good = _texts_of(tally, chunk, recipe, reader)
            batch = TextBatch(tokenizer, LIKELY_LONG * recipe.max_length)
            heads = _shared_heads(good, recipe.shorten or "") if splits else repeat(0, len(good))
            for each, head in zip(good, heads, strict=True):
                for text, is_trained in each.parts:
                    batch.add(text, 0 if is_trained else head)
            ahead.append((good, pool.submit(batch.tokenize)))
            if len(ahead) > CHUNKS_AHEAD:
                finish()
        while ahead:
            finish()
        tally.checks.close()
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
    rows = read_rows(source, Findings(recipe.max_bad_rows), recipe.documents, recipe.quotes)
    for row in islice(rows, SURVEY_ROWS):
        # A column of nulls is not there.
        found.update((column, None) for column, value in row.values.items() if value is not None)
    if TOKENS in found and TOKENS not in recipe.fields and not recipe.map:
        return {column: column for column in (TOKENS, TRAINED) if column in found}
    try:
        return choose_columns(found, recipe)
    except DataError:
        for row in rows:
            found.update((column, None) for column, value in row.values.items() if value is not None)
    try:
        return choose_columns(found, recipe)
    except UnknownColumn as error:
        raise UnknownColumn(f"{source}: {error}", error.field, error.choices) from error
    except DataError as error:
        raise DataError(f"{source}: {error}") from error


@dataclass(frozen=True)
class _Texts:
    """A row that can be tokenised."""

    row: Row
    found: FieldTexts
    parts: list[Part]  # empty if it came as tokens


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield rows in lists that are short enough to be held several times over, as tokens too."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += sum(len(value) for value in row.values.values() if isinstance(value, str | list))
        if len(chunk) == CHUNK_ROWS or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _texts_of(tally: _Tally, chunk: list[Row], recipe: Recipe, reader: FieldReader | None) -> list[_Texts]:
    """Put rows into the templates; count those that cannot be. Rows that come as tokens have no texts."""
    good = []
    for row in chunk:
        if reader is None:
            good.append(_Texts(row, FieldTexts({}, []), []))
            continue
        try:
            found = reader.read(row.values)
            texts = parts(recipe, found.values)
        except RowSkipped as reason:
            tally.skip(row.where, str(reason))
        else:
            tally.checks.look(row, found, "".join(text for text, _ in texts[:-1]), texts[-1][0])
            good.append(_Texts(row, found, texts))
    return good


def _shared_heads(rows: Sequence[_Texts], field: str) -> Iterator[int]:
    """Yield how much of each row's prompt is that of its neighbours, too, in characters: as far as the same document.

    Questions about one passage stand one after another; it is tokenised once for all of them.
    """
    documents = ["", *(str(each.found.values.get(field, "")) for each in rows), ""]
    for each, before, document, after in zip(rows, documents, documents[1:], documents[2:], strict=False):
        head = 0
        if len(document) >= WORTH_SHARING and document in (before, after) and len(each.parts) == 2:
            prompt = each.parts[0][0]
            head = prompt.find(document) + len(document)
            head = head if is_before_blank(prompt, head) else 0
        yield head


def _assembled(
    tally: _Tally,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    eos: int,
    good: list[_Texts],
    tokens: list[Tokens],
) -> Iterator[tuple[Any, ...]]:
    """Yield the documents of rows, with the values of `COLUMNS`; count those that are left out."""
    rest, cuttable = iter(tokens), 0 if recipe.prompt else 1
    for each in good:
        row, found, own = each.row, each.found, list(islice(rest, len(each.parts)))
        try:
            if each.parts:
                ids, encoding = [ids for ids, _ in own], own[cuttable].encoding
                encoded = assemble(recipe, tokenizer, eos, found.values, each.parts, ids, found.answer_at, encoding)
                group = group_of(recipe, found.values)
            else:
                given = _tokens_of(row)
                encoded = from_tokens(recipe, given, row.values.get(TRAINED))
                group = number_of(array("q", given).tobytes())
        except RowSkipped as reason:
            tally.skip(row.where, str(reason))
            continue
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        tally.keep(row, encoded)
        label = found.values.get(LABEL, "")
        for number, document in enumerate(encoded.documents):
            yield (
                document, encoded.prompt_length, encoded.untrained, found.references, row.source, row.line, group,
                label, number > 0,
            )  # fmt: skip


def _tokens_of(row: Row) -> list[int]:
    """Return the tokens of a row that comes as tokens.

    Raises:
        RowSkipped: they are none.
    """
    tokens = row.values.get(TOKENS)
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise RowSkipped("input_ids is no list of token ids")
    return tokens


def _lists(ids: Sequence[list[int]]) -> Any:
    """Return lists of token ids as Arrow has them; several times as fast as its own conversion."""
    import pyarrow

    offsets = np.fromiter(accumulate(map(len, ids), initial=0), np.int32, len(ids) + 1)
    flat = np.fromiter(chain.from_iterable(ids), np.int32, int(offsets[-1]))
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(flat))


def _remove_leftovers() -> None:
    """Remove the files of rows that processes which have ended could not."""
    import psutil

    for path in home().glob(f"{UNSAVED}*.arrow"):
        process = path.name.removeprefix(UNSAVED).partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            path.unlink(missing_ok=True)


class _RowFile:
    """Documents on their way to a data set: in a file, of which no more is in memory than is looked at."""

    def __init__(self) -> None:
        import pyarrow

        number, text, small = pyarrow.int64(), pyarrow.string(), pyarrow.int32()
        several = pyarrow.list_(small)
        types = (several, small, several, pyarrow.list_(text), text, number, number, text, pyarrow.bool_())
        self._schema = pyarrow.schema(list(zip(COLUMNS, types, strict=True)))
        home().mkdir(parents=True, exist_ok=True)  # not where temporary files go: that may be memory
        _remove_leftovers()
        descriptor, name = tempfile.mkstemp(prefix=f"{UNSAVED}{os.getpid()}-", suffix=".arrow", dir=home())
        os.close(descriptor)
        self._path = Path(name)
        self._writer = pyarrow.ipc.new_stream(name, self._schema)
        self._waiting: list[Any] = []
        self._is_used = False

    def __enter__(self) -> _RowFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
        if not self._is_used:
            self._path.unlink(missing_ok=True)

    def write(self, documents: Iterable[tuple[Any, ...]]) -> None:
        """Append documents, given as the values of `COLUMNS`."""
        import pyarrow

        if columns := list(zip(*documents, strict=True)):
            ids, *others = columns
            arrays = [_lists(ids)]
            arrays += [
                pyarrow.array(values, field.type) for values, field in zip(others, list(self._schema)[1:], strict=True)
            ]
            self._waiting.append(pyarrow.record_batch(arrays, schema=self._schema))
            if sum(batch.nbytes for batch in self._waiting) > BATCH_BYTES:
                self._flush()

    def _flush(self) -> None:
        import pyarrow

        for batch in pyarrow.Table.from_batches(self._waiting, self._schema).combine_chunks().to_batches():
            self._writer.write_batch(batch)
        self._waiting.clear()

    def rows(self) -> Dataset:
        """Return all documents."""
        from datasets import Dataset

        self._flush()
        self._writer.close()
        rows = Dataset.from_file(str(self._path))
        self._is_used = True  # saving them links the file
        weakref.finalize(rows, self._path.unlink, missing_ok=True)
        return rows


@dataclass
class _Counts:
    """The numbers of a `Report`, while they grow."""

    rows_read: int = 0
    rows_kept: int = 0
    rows_cut: int = 0
    tokens_cut: int = 0
    windows: int = 0
    tokens: int = 0
    target_tokens: int = 0
    longest: int = 0


class _Tally:
    """What becomes of the rows."""

    def __init__(self, vocab_size: int | None, checks: Checks) -> None:
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
        counts.rows_cut += encoded.tokens_cut > 0
        counts.tokens_cut += encoded.tokens_cut
        for ids in encoded.documents:
            if self.vocab_size is not None and max(ids) >= self.vocab_size:
                raise DataError(
                    f"{row.where}: token id {max(ids)}, but the model's ids end at {self.vocab_size - 1}; "
                    "the tokenizer is not this model's"
                )
            counts.windows += 1
            counts.tokens += len(ids)
            counts.target_tokens += num_targets(len(ids), encoded.prompt_length, encoded.untrained)
            counts.longest = max(counts.longest, len(ids))

    def skips(self) -> dict[str, Skips]:
        return {reason: Skips(each.count, tuple(each.first)) for reason, each in self._skipped.items()}
