"""Build tokenized rows in memory."""

from __future__ import annotations

from typing import Any

import pyarrow

from gptj_ft.data.table import SCHEMA, TokenTable, to_arrow

COLUMNS: dict[str, list[Any]] = {
    "input_ids": [[1, 2, 3], [], [4], [5, 6, 7, 8], [9, 10]],
    "prompt_length": [2, 0, 0, 1, 1],
    "untrained": [[], [], [], [2, 3], []],
    "references": [["a", "é 🙂"], [], [""], ["b"], ["c"]],
    "source": ["rows.jsonl"] * 4 + ["ö.jsonl"],
    "line": [1, 2, 3, 2**40, 5],
    "group": [-(2**63), 2**63 - 1, 0, 0, 7],
    "label": ["", "yes", "", "no", "yes"],
    "continues": [False, True, False, False, True],
    "borders": [[], [], [], [1, 3], []],
    "marks": [[], [], [], [0, 2], []],
    "targets": [[], [], [], [1, 0], [0, 1]],
    "values": [[], [], [], [0.0, 1.0], [-2.5]],
    "texts": [[], [], [], ["é", ""], ["a"]],
    "offsets": [[], [], [], [], [-1, -1, 0, 5]],
}


def table_of(**columns: list[Any]) -> TokenTable:
    """Return rows in memory; missing columns are empty, zero or false."""
    empty = {name: type(values[0])() for name, values in COLUMNS.items()}
    count = len(next(iter(columns.values())))
    arrays = [to_arrow(field.type, columns.get(field.name, [empty[field.name]] * count)) for field in SCHEMA]
    return TokenTable([pyarrow.RecordBatch.from_arrays(arrays, schema=SCHEMA)])
