"""Change the order of labels in tables of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
from numpy.typing import NDArray

from gptj_ft.data.dataset import Prepared
from gptj_ft.data.table import SCHEMA, TableWriter, TokenTable, bounds_of, numbers_of, to_arrow
from gptj_ft.errors import DataError, listed
from gptj_ft.system.plain_text import shortened


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
        # In a slice, bounds count from the start of the whole array, flatten() from that of the slice.
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
