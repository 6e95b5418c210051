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
    """Settings shared by all rows of a task."""

    recipe: Recipe
    tokenizer: RowTokenizer
    columns: Mapping[str, str]  # field -> column
    labels: LabelSet
    checks: Checks
    needs_target: bool = True  # skip rows without a target; False: read inputs only

    @property
    def frame(self) -> Frame:
        return frame_of(self.tokenizer)


class TaskReader(ABC):
    """Read the rows of one task: first their texts, then, from the tokens, their documents."""

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
    def row_of(self, row: Row, read: Any, tokens: list[Any]) -> LabelledRow:
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


class LabelledEncoder:
    """Turn rows into labelled documents; count and check them.

    Args:
        vocab_size: rows of the model's embedding; every token id must be smaller.
    """

    def __init__(self, setting: Setting, task: TaskReader, vocab_size: int) -> None:
        self._setting, self._task, self._vocab_size = setting, task, vocab_size
        self._needs_check = max(setting.tokenizer.get_vocab().values(), default=vocab_size) >= vocab_size
        self._tokenize = task.tokenizer()
        self.counts = RowCounts()

    @property
    def labels(self) -> LabelSet:
        return self._setting.labels

    def encode(self, rows: Sequence[Row]) -> pyarrow.RecordBatch:
        """Tokenize rows in one call of the tokenizer; return their documents."""
        usable = []
        for row in rows:
            try:
                usable.append((row, *self._task.read(row)))
            except RowSkipped as reason:
                self.counts.skip(row.where, str(reason))
        tokens = iter(self._tokenize([text for _, texts, _ in usable for text in texts]))
        documents: list[tuple[Any, ...]] = []
        for row, texts, rest in usable:
            documents += self._documents(row, rest, list(islice(tokens, len(texts))))
        columns = list(zip(*documents, strict=True)) or [()] * len(SCHEMA)
        arrays = [to_arrow(field.type, values) for field, values in zip(SCHEMA, columns, strict=True)]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=SCHEMA)

    def finish(self, writer: TableWriter) -> TokenTable:
        """Return the written rows with their final targets."""
        table = self._task.finish(writer.table(), self.counts)
        self._setting.checks.warnings |= self._task.warnings()
        return table

    def _documents(self, row: Row, read: Any, tokens: list[Any]) -> list[tuple[Any, ...]]:
        """Return a row's documents in the columns of `SCHEMA`; none if the row is skipped."""
        try:
            labelled = self._task.row_of(row, read, tokens)
        except RowSkipped as reason:
            self.counts.skip(row.where, str(reason))
            return []
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        columns = []
        for number, each in enumerate(labelled.documents):
            if self._needs_check and (largest := max(each.ids)) >= self._vocab_size:
                raise DataError(
                    f"{row.where}: token id {largest}, but the model's ids end at {self._vocab_size - 1}; "
                    "the tokenizer is not this model's"
                )
            place = (labelled.references, row.source, row.line, labelled.group, labelled.label, number > 0)
            targets = (each.borders, each.marks, each.targets, each.values, each.texts, each.offsets)
            columns.append((array("i", each.ids), len(each.ids), (), *place, *targets))
        self.counts.keep([(len(each.ids), each.num_targets) for each in labelled.documents], labelled.tokens_cut)
        return columns


def with_columns(
    table: TokenTable, change: Callable[[dict[str, pyarrow.Array]], dict[str, pyarrow.Array]]
) -> TokenTable:
    """Replace columns of a table; ``change`` maps the columns of a batch to the new ones, by name."""
    with TableWriter() as writer:
        for batch in table.batches():
            columns = dict(zip(SCHEMA.names, batch.columns, strict=True))
            columns |= change(columns)
            writer.write(pyarrow.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA))
        return writer.table()


def renumbered(table: TokenTable, ids: NDArray[np.int32]) -> TokenTable:
    """Replace class ids; ``ids`` has the new id of each old one."""
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
    """Change the class ids of prepared rows to another order of labels.

    Args:
        labels: names in the order of ids, as in the training rows.
        where: folder of the rows.
    """
    report = prepared.report
    if not report.labels or report.labels == tuple(labels):
        return prepared
    counts = dict(zip(report.labels, report.label_counts, strict=True))
    if unknown := [name for name, count in counts.items() if count and name not in labels]:
        raise DataError(
            f"{where}: rows have the label '{shortened(unknown[0])}', but the training rows have: "
            f"{listed(map(shortened, labels))}\nremove the rows with that label, or add such rows to the training data"
        )
    new_id = {name: number for number, name in enumerate(labels)}
    ids = np.array([new_id.get(name, -1) for name in report.labels], np.int32)  # -1: a label that no row has
    rows = prepared.rows
    if report.settings["task"] == "multi-label":
        rows = with_columns(rows, lambda columns: {"values": _reordered(columns["values"], ids, len(labels))})
    else:
        rows = renumbered(rows, ids)
    counted = tuple(counts.get(name, 0) for name in labels)
    return Prepared(rows, replace(report, labels=tuple(labels), label_counts=counted))


def _reordered(values: pyarrow.Array, ids: NDArray[np.int32], count: int) -> pyarrow.Array:
    """Reorder each row's values by the new label ids."""
    new = np.zeros((len(values), count))
    old, are_known = numbers_of(values.flatten()).reshape(len(values), len(ids)), ids >= 0
    new[:, ids[are_known]] = old[:, are_known]
    return to_arrow(values.type, new.tolist())
