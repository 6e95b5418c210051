"""Turn rows of a task with labels into documents, in the columns of a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from gptj_ft.config.options import Recipe
from gptj_ft.data.checks.texts import Checks
from gptj_ft.data.counts import RowCounts
from gptj_ft.data.dataset import Prepared
from gptj_ft.data.labelled.assembly import LabelledRow
from gptj_ft.data.labelled.labels import LabelSet
from gptj_ft.data.readers.rows import Occurrences, Row
from gptj_ft.data.table import SCHEMA, TableWriter, TokenTable, bounds_of, numbers_of, to_arrow
from gptj_ft.data.tokenization import Frame, RowTokenizer, frame_of, tokenize_by
from gptj_ft.errors import DataError, RowSkipped, listed
from gptj_ft.system.plain_text import shortened


@dataclass(frozen=True)
class Setting:
    """What all rows of a task have in common.

    Attributes:
        recipe: templates and length policy.
        tokenizer: tokenizer of the model.
        columns: field -> column.
        labels: the task's.
        checks: collector of warnings.
        needs_target: whether rows without what is to be predicted are left out; else all are read without it.
    """

    recipe: Recipe
    tokenizer: RowTokenizer
    columns: Mapping[str, str]
    labels: LabelSet
    checks: Checks
    needs_target: bool = True

    @property
    def frame(self) -> Frame:
        """What stands around texts."""
        return frame_of(self.tokenizer)


class TaskReader(ABC):
    """Reads the rows of one task: their texts first, then, of the tokens of these, their documents."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def read(self, row: Row) -> tuple[list[str], Any]:
        """Return the texts of a row that are to be tokenized, and what `row_of` needs besides.

        Raises:
            RowSkipped: it has none, or no label.
        """

    def tokenizer(self) -> Any:
        """Return the function that tokenizes a list of texts."""
        return tokenize_by(self.setting.tokenizer)

    @abstractmethod
    def row_of(self, row: Row, read: Any, tokens: list[Any]) -> LabelledRow:
        """Return the documents of a row.

        Raises:
            RowSkipped: too long, or not to be labelled.
            DataError: too long, and the policy is `error`.
        """

    def finish(self, table: TokenTable, counts: RowCounts) -> TokenTable:
        """Return the rows with their final targets, once all are read.

        Raises:
            DataError: their labels cannot be learnt.
        """
        return table

    def warnings(self) -> dict[str, Occurrences]:
        """Return warnings about the labels."""
        return {}


class LabelledEncoder:
    """Turns rows into labelled documents; counts and checks them.

    Args:
        setting: settings that all rows share.
        task: reader of its rows.
        vocab_size: rows of the model's embedding; no token id may reach it.

    Attributes:
        counts: counts of rows, tokens and targets.
    """

    def __init__(self, setting: Setting, task: TaskReader, vocab_size: int) -> None:
        self._setting, self._task, self._vocab_size = setting, task, vocab_size
        self._needs_check = max(setting.tokenizer.get_vocab().values(), default=vocab_size) >= vocab_size
        self._tokenize = task.tokenizer()
        self.counts = RowCounts()

    @property
    def labels(self) -> LabelSet:
        """The labels."""
        return self._setting.labels

    def encode(self, rows: Sequence[Row]) -> pyarrow.RecordBatch:
        """Tokenize rows in one call of the tokenizer; return their documents."""
        read = []
        for row in rows:
            try:
                read.append((row, *self._task.read(row)))
            except RowSkipped as reason:
                self.counts.skip(row.where, str(reason))
        tokens = iter(self._tokenize([text for _, texts, _ in read for text in texts]))
        documents: list[tuple[Any, ...]] = []
        for row, texts, rest in read:
            documents += self._documents(row, rest, list(islice(tokens, len(texts))))
        columns = list(zip(*documents, strict=True)) or [()] * len(SCHEMA)
        arrays = [to_arrow(field.type, values) for field, values in zip(SCHEMA, columns, strict=True)]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    def finish(self, writer: TableWriter) -> TokenTable:
        """Return the rows that were written, with their final targets.

        Raises:
            DataError: their labels cannot be learnt.
        """
        table = self._task.finish(writer.table(), self.counts)
        self._setting.checks.warnings |= self._task.warnings()
        return table

    def _documents(self, row: Row, read: Any, tokens: list[Any]) -> list[tuple[Any, ...]]:
        """Return the documents of a row, in the columns of `SCHEMA`; none if it is left out."""
        try:
            found = self._task.row_of(row, read, tokens)
        except RowSkipped as reason:
            self.counts.skip(row.where, str(reason))
            return []
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        columns = []
        for number, each in enumerate(found.documents):
            if self._needs_check and (largest := max(each.ids)) >= self._vocab_size:
                raise DataError(
                    f"{row.where}: token id {largest}, but the model's ids end at {self._vocab_size - 1}; "
                    "the tokenizer is not this model's"
                )
            place = (found.references, row.source, row.line, found.group, found.label, number > 0)
            labelled = (each.borders, each.marks, each.targets, each.values, each.texts, each.offsets)
            columns.append((array("i", each.ids), len(each.ids), (), *place, *labelled))
        self.counts.keep([(len(each.ids), each.num_targets) for each in found.documents], found.tokens_cut)
        return columns


def with_columns(
    table: TokenTable, change: Callable[[dict[str, pyarrow.Array]], dict[str, pyarrow.Array]]
) -> TokenTable:
    """Return rows with other columns.

    Args:
        table: the rows.
        change: given the columns of a batch by name, returns those to replace.
    """
    with TableWriter() as writer:
        for batch in table.batches():
            columns = dict(zip(SCHEMA.names, batch.columns, strict=True))
            columns |= change(columns)
            writer.write(pyarrow.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA))
        return writer.table()


def renumbered(table: TokenTable, ids: NDArray[np.int32]) -> TokenTable:
    """Return rows with other class ids.

    Args:
        table: the rows.
        ids: the new id of each old one.
    """
    if (ids == np.arange(len(ids))).all():
        return table

    def change(columns: dict[str, pyarrow.Array]) -> dict[str, pyarrow.Array]:
        targets = columns["targets"]
        flat, bounds = ids[numbers_of(targets.flatten())], bounds_of(targets)
        starts = pyarrow.py_buffer(bounds - bounds[0])
        children = [to_arrow(pyarrow.int32(), flat)]
        return {"targets": pyarrow.Array.from_buffers(targets.type, len(targets), [None, starts], children=children)}

    return with_columns(table, change)


def with_labels(prepared: Prepared, labels: Sequence[str], where: Path) -> Prepared:
    """Return prepared rows with class ids in another order of labels.

    Args:
        prepared: rows of a task with labels; of others, they are returned as they are.
        labels: names in the order of ids, as the training rows have them.
        where: the folder of the rows.

    Raises:
        DataError: the rows have a label that is none of these.
    """
    report = prepared.report
    if not report.labels or report.labels == tuple(labels):
        return prepared
    counts = dict(zip(report.labels, report.label_counts, strict=True))
    if unknown := [name for name, count in counts.items() if count and name not in labels]:
        raise DataError(
            f"{where}: there are rows with the label '{shortened(unknown[0])}', and the labels are: "
            f"{listed(map(shortened, labels))}\nprepare the rows of that label apart, or train on all together"
        )
    place = {name: number for number, name in enumerate(labels)}
    ids = np.array([place.get(name, -1) for name in report.labels], np.int32)  # of labels that no row has, none
    rows = prepared.rows
    if report.settings["task"] == "multi-label":
        rows = with_columns(rows, lambda columns: {"values": _reordered(columns["values"], ids, len(labels))})
    else:
        rows = renumbered(rows, ids)
    counted = tuple(counts.get(name, 0) for name in labels)
    return Prepared(rows, replace(report, labels=tuple(labels), label_counts=counted))


def _reordered(values: pyarrow.Array, ids: NDArray[np.int32], count: int) -> pyarrow.Array:
    """Return each row's values of the labels in the order of their new ids."""
    changed = np.zeros((len(values), count))
    said, are_known = numbers_of(values.flatten()).reshape(len(values), len(ids)), ids >= 0
    changed[:, ids[are_known]] = said[:, are_known]
    return to_arrow(values.type, changed.tolist())
