"""Rows as tokens on the disk: written and read without `datasets`, which opens them all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptj_ft.data.arrow_columns import SCHEMA, array_of, values_of
from gptj_ft.data.loss_mask import column_of, count_targets, lengths_of, num_targets
from gptj_ft.data.table_folder import INFO, STATE, open_table, write_table
from gptj_ft.data.token_table import TokenTable

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
}


def table_of(**columns: list[Any]) -> TokenTable:
    """Rows in memory; columns that are not given are empty, zero or false."""
    empty = {name: type(values[0])() for name, values in COLUMNS.items()}
    count = len(next(iter(columns.values())))
    arrays = [array_of(field.type, columns.get(field.name, [empty[field.name]] * count)) for field in SCHEMA]
    return TokenTable([pyarrow.RecordBatch.from_arrays(arrays, schema=SCHEMA)])


def rows_of(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


ROWS = rows_of(COLUMNS)
VALUES = {
    pyarrow.int32(): st.integers(-(2**31), 2**31 - 1),
    pyarrow.int64(): st.integers(-(2**63), 2**63 - 1),
    pyarrow.string(): st.text(max_size=5),
    pyarrow.bool_(): st.booleans(),
    pyarrow.list_(pyarrow.int32()): st.lists(st.integers(0, 9), max_size=3),
    pyarrow.list_(pyarrow.string()): st.lists(st.text(max_size=2), max_size=3),
}


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(data=st.data(), kind=st.sampled_from(list(VALUES)))
def test_values_are_in_arrow_as_arrow_itself_would_have_them(data: st.DataObject, kind: pyarrow.DataType) -> None:
    values = data.draw(st.lists(VALUES[kind], max_size=20))
    array = array_of(kind, values)
    array.validate(full=True)
    assert array.equals(pyarrow.array(values, kind))
    start, count = data.draw(st.integers(0, len(values))), data.draw(st.integers(0, 20))
    assert values_of(array.slice(start, count)) == values[start : start + count]


def test_what_is_written_is_what_datasets_writes_and_opens(tmp_path: Path) -> None:
    write_table(table_of(**COLUMNS), tmp_path / "ours")
    loaded = datasets.load_from_disk(str(tmp_path / "ours"))
    assert loaded.to_list() == ROWS
    assert {name: str(feature) for name, feature in loaded.features.items()} == {
        "input_ids": "List(Value('int32'))",
        "prompt_length": "Value('int32')",
        "untrained": "List(Value('int32'))",
        "references": "List(Value('string'))",
        "source": "Value('string')",
        "line": "Value('int64')",
        "group": "Value('int64')",
        "label": "Value('string')",
        "continues": "Value('bool')",
    }
    datasets.disable_progress_bars()
    assert len(loaded.filter(lambda row: row["line"] > 2, keep_in_memory=True)) == 3
    loaded.save_to_disk(str(tmp_path / "theirs"), num_shards=2)
    theirs = open_table(tmp_path / "theirs")
    assert list(theirs) == ROWS
    assert not theirs.is_whole  # of several files
    facts = [json.loads((tmp_path / name / INFO).read_text()) for name in ("ours", "theirs")]
    assert facts[0] == facts[1]
    states = [json.loads((tmp_path / name / STATE).read_text()) for name in ("ours", "theirs")]
    assert states[0].keys() == states[1].keys()


@pytest.mark.parametrize("names", [("a",), ("a", "b", "a")])
def test_some_rows_are_these_rows_in_this_order(names: tuple[str, ...], tmp_path: Path) -> None:
    files = []
    for name in dict.fromkeys(names):
        write_table(table_of(**COLUMNS), tmp_path / name)
    files = [tmp_path / name / "data-00000-of-00001.arrow" for name in names]
    table, rows = TokenTable.open(files), ROWS * len(names)
    places = [3, 4, *range(len(rows)), 0, 3, 3, *reversed(range(len(rows)))]
    chosen, wanted = table.select(places), [rows[place] for place in places]
    assert list(chosen) == wanted
    assert list(chosen.select(range(2, 6))) == wanted[2:6]
    for name in COLUMNS:
        assert list(chosen[name]) == [chosen[name][n] for n in range(len(chosen))] == [row[name] for row in wanted]
    assert lengths_of(chosen).tolist() == [len(row["input_ids"]) for row in wanted]
    assert column_of(chosen, "line", int).tolist() == [row["line"] for row in wanted]
    some = table.select(row for row in range(len(rows)) if rows[row]["input_ids"])
    targets = [num_targets(len(row["input_ids"]), row["prompt_length"], row["untrained"]) for row in some]
    assert count_targets(some) == sum(targets)
    write_table(chosen, tmp_path / "chosen")
    assert list(open_table(tmp_path / "chosen")) == wanted
    assert list(table.select([])) == []
    for outside in (-1, len(rows)):
        with pytest.raises(IndexError):
            table.select([outside])
