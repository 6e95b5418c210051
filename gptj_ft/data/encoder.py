"""Encode rows as documents in the columns of a table; count and check them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import pyarrow

from gptj_ft.config.options import Recipe
from gptj_ft.data.checks.texts import Checks
from gptj_ft.data.labelled.labels import LabelSet
from gptj_ft.data.loss_mask import num_targets
from gptj_ft.data.readers.rows import Occurrences, Row
from gptj_ft.data.table import SCHEMA, TableWriter, TokenTable, to_arrow
from gptj_ft.data.tokenization import Frame, RowTokenizer, check_ids, frame_of, tokenize_by
from gptj_ft.errors import DataError, RowSkipped

COUNTS = ("rows_read", "rows_kept", "rows_cut", "tokens_cut", "windows", "tokens", "target_tokens", "longest")


@dataclass(frozen=True)
class Setting:
    """Settings shared by all rows of a task."""

    recipe: Recipe
    tokenizer: RowTokenizer
    columns: Mapping[str, str]  # field -> column
    labels: LabelSet
    checks: Checks
    needs_target: bool = True  # skip rows without a target; False: read inputs only
    rows: Callable[[], Iterable[Row]] = tuple  # reads all rows once more, for choices that depend on all

    @property
    def frame(self) -> Frame:
        return frame_of(self.tokenizer)


class EncodedDocument(NamedTuple):
    """A text, a pair or a window as the model reads it; `data.table.SCHEMA` explains the fields."""

    ids: Sequence[int]
    borders: Sequence[int] = ()
    marks: Sequence[int] = ()
    targets: Sequence[int] = (0,)
    values: Sequence[float] = ()
    texts: Sequence[str] = ()
    offsets: Sequence[int] = ()
    prompt_length: int | None = None  # for language models; None: next tokens are no targets
    masked_spans: Sequence[int] = ()

    @property
    def num_targets(self) -> int:
        """Number of target tokens; for tasks with labels, of marks, or 1 for a window with a span."""
        if self.prompt_length is not None:
            return num_targets(len(self.ids), self.prompt_length, self.masked_spans)
        return len(self.marks) or int(bool(self.targets))


class EncodedRow(NamedTuple):
    """The documents of a row, and its labels."""

    documents: Sequence[EncodedDocument]  # in order; several if the row is split into windows
    group: int  # hash; equal groups stay together in training or validation
    label: str = ""  # names of its labels, for stratified splits; may be empty
    references: Sequence[str] = ()  # correct answers, for scoring
    tokens_cut: int = 0  # tokens lost by truncation
    references_of: Sequence[Sequence[str]] = ()  # of each document, if each is a row of its own and no window


class RowCounts:
    """Count kept and skipped rows, their tokens and targets."""

    def __init__(self) -> None:
        self.numbers = dict.fromkeys(COUNTS, 0)  # named as in `Report`
        self.skipped: dict[str, Occurrences] = {}  # by reason
        self.cut = Occurrences()  # truncated rows

    def skip(self, where: str, reason: str) -> None:
        """Count a skipped row."""
        self.numbers["rows_read"] += 1
        self.skipped.setdefault(reason, Occurrences()).add(where)

    def keep(self, where: str, row: EncodedRow) -> None:
        """Count a kept row."""
        numbers = self.numbers
        if row.tokens_cut:
            self.cut.add(where)
        numbers["rows_read"] += 1
        numbers["rows_kept"] += 1
        numbers["rows_cut"] += row.tokens_cut > 0
        numbers["tokens_cut"] += row.tokens_cut
        numbers["windows"] += len(row.documents)
        for document in row.documents:
            numbers["tokens"] += len(document.ids)
            numbers["target_tokens"] += document.num_targets
            numbers["longest"] = max(numbers["longest"], len(document.ids))


class TaskReader(ABC):
    """Read the rows of one task: first their texts, then, from the tokens, their documents."""

    reads_tokens = False  # whether rows are token ids

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def read(self, row: Row) -> tuple[list[str], Any]:
        """Return the row's texts to tokenize, and further values for `row_of`.

        Raises:
            RowSkipped: it has no text or no label.
        """

    def tokenizer(self) -> Any:
        """Return the function that tokenizes a list of texts."""
        return tokenize_by(self.setting.tokenizer)

    @abstractmethod
    def row_of(self, row: Row, read: Any, tokens: list[Any]) -> EncodedRow:
        """Return the documents of a row.

        Raises:
            RowSkipped: the row is too long, or cannot be labelled.
        """

    def finish(self, table: TokenTable, counts: RowCounts) -> TokenTable:
        """Return the rows with their final targets, after reading all rows."""
        return table

    def warnings(self) -> dict[str, Occurrences]:
        """Return warnings about the labels."""
        return {}


class RowEncoder:
    """Encode rows by the reader of their task; count and check them.

    Args:
        vocab_size: rows of the model's embedding; every token id must be smaller.
    """

    def __init__(self, reader: TaskReader, vocab_size: int) -> None:
        self._reader, self._vocab_size = reader, vocab_size
        # A tokenizer with no more ids than the model cannot exceed the embedding.
        largest = max(reader.setting.tokenizer.get_vocab().values(), default=vocab_size)
        self._needs_check = reader.reads_tokens or largest >= vocab_size
        self._tokenize = reader.tokenizer()
        self.counts = RowCounts()

    def encode(self, rows: Sequence[Row]) -> pyarrow.RecordBatch:
        """Tokenize rows in one call of the tokenizer; return their documents."""
        usable = []
        for row in rows:
            try:
                usable.append((row, *self._reader.read(row)))
            except RowSkipped as reason:
                self.counts.skip(row.where, str(reason))
        tokens = iter(self._tokenize([text for _, texts, _ in usable for text in texts]))
        documents: list[tuple[Any, ...]] = []
        for row, texts, rest in usable:
            # All texts were tokenized in one call: each row takes as many results as it has texts.
            documents += self._documents(row, rest, list(islice(tokens, len(texts))))
        # A chunk whose rows are all skipped still needs a batch with every column.
        columns = list(zip(*documents, strict=True)) or [()] * len(SCHEMA)
        arrays = [to_arrow(field.type, values) for field, values in zip(SCHEMA, columns, strict=True)]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    def finish(self, writer: TableWriter) -> TokenTable:
        """Return the written rows with their final targets."""
        table = self._reader.finish(writer.table(), self.counts)
        self._reader.setting.checks.warnings |= self._reader.warnings()
        return table

    def _documents(self, row: Row, read: Any, tokens: list[Any]) -> list[tuple[Any, ...]]:
        """Return a row's documents in the columns of `SCHEMA`; none if the row is skipped."""
        try:
            encoded = self._reader.row_of(row, read, tokens)
            if self._needs_check:
                for each in encoded.documents:
                    check_ids(each.ids, self._vocab_size)
        except RowSkipped as reason:
            self.counts.skip(row.where, str(reason))
            return []
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        columns = []
        for number, each in enumerate(encoded.documents):
            prompt_length = len(each.ids) if each.prompt_length is None else each.prompt_length
            references, continues = encoded.references, number > 0
            if encoded.references_of:
                references, continues = encoded.references_of[number], False
            place = (references, row.source, row.line, encoded.group, encoded.label, continues)
            labelled = (each.borders, each.marks, each.targets, each.values, each.texts, each.offsets)
            columns.append((array("i", each.ids), prompt_length, each.masked_spans, *place, *labelled))
        self.counts.keep(row.where, encoded)
        return columns
