"""Test tables of tokens on disk: written and read without `datasets`, which can open them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import COLUMNS, table_of

from gptj_ft.data.loss_mask import num_targets
from gptj_ft.data.table import LABELLED, SCHEMA, TableWriter, TokenTable, to_arrow, to_python


def rows_of(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


ROWS = rows_of(COLUMNS)
VALUES = {
    pyarrow.int32(): st.integers(-(2**31), 2**31 - 1),
    pyarrow.int64(): st.integers(-(2**63), 2**63 - 1),
    pyarrow.string(): st.text(max_size=5),
    pyarrow.bool_(): st.booleans(),
    pyarrow.list_(pyarrow.int32()): st.lists(st.integers(0, 9), max_size=3),
    pyarrow.list_(pyarrow.float64()): st.lists(st.floats(allow_nan=False), max_size=3),
    pyarrow.list_(pyarrow.string()): st.lists(st.text(max_size=2), max_size=3),
}


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(data=st.data(), kind=st.sampled_from(list(VALUES)))
def test_values_match_arrows_own_conversion(data: st.DataObject, kind: pyarrow.DataType) -> None:
    values = data.draw(st.lists(VALUES[kind], max_size=20))
    array = to_arrow(kind, values)
    array.validate(full=True)
    assert array.equals(pyarrow.array(values, kind))
    start, count = data.draw(st.integers(0, len(values))), data.draw(st.integers(0, 20))
    assert to_python(array.slice(start, count)) == values[start : start + count]


def test_datasets_opens_the_file(tmp_path: Path) -> None:
    table_of(**COLUMNS).save(tmp_path / "rows.arrow")
    loaded = datasets.Dataset.from_file(str(tmp_path / "rows.arrow"))
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
        **dict.fromkeys(("borders", "marks", "targets", "offsets"), "List(Value('int32'))"),
        "values": "List(Value('float64'))",
        "texts": "List(Value('string'))",
    }
    datasets.disable_progress_bars()
    assert len(loaded.filter(lambda row: row["line"] > 2, keep_in_memory=True)) == 3


@pytest.mark.parametrize("repeats", [1, 3])
def test_selected_rows_keep_their_order(repeats: int, tmp_path: Path) -> None:
    with TableWriter(tmp_path / "rows.arrow", batch_bytes=1) as writer:
        for _ in range(repeats):
            writer.write(next(table_of(**COLUMNS).batches()))
    table, rows = TokenTable.open(tmp_path / "rows.arrow").validate(), ROWS * repeats
    places = [3, 4, *range(len(rows)), 0, 3, 3, *reversed(range(len(rows)))]
    chosen, wanted = table.select(places), [rows[place] for place in places]
    assert list(chosen) == wanted
    assert list(chosen.select(range(2, 6))) == wanted[2:6]
    for name in COLUMNS:
        assert list(chosen[name]) == [chosen[name][n] for n in range(len(chosen))] == [row[name] for row in wanted]
    assert chosen.lengths().tolist() == [len(row["input_ids"]) for row in wanted]
    assert chosen.numbers("line").tolist() == [row["line"] for row in wanted]
    some = table.select(row for row in range(len(rows)) if rows[row]["input_ids"])
    targets = [num_targets(len(row["input_ids"]), row["prompt_length"], row["untrained"]) for row in some]
    labelled = [len(row["marks"]) or int(bool(row["targets"])) for row in some]
    assert some.num_targets() == sum(targets) + sum(labelled)
    chosen.save(tmp_path / "chosen.arrow")
    assert list(TokenTable.open(tmp_path / "chosen.arrow").validate()) == wanted
    assert list(table.select([])) == []
    for outside in (-1, len(rows)):
        with pytest.raises(IndexError):
            table.select([outside])


def test_unlabelled_old_file_opens(tmp_path: Path) -> None:
    (batch,) = table_of(**{name: COLUMNS[name] for name in COLUMNS if name not in LABELLED}).batches()
    old = batch.select([name for name in SCHEMA.names if name not in LABELLED])
    with pyarrow.ipc.new_stream(tmp_path / "rows.arrow", old.schema) as stream:
        stream.write_batch(old)
    table = TokenTable.open(tmp_path / "rows.arrow").validate()
    assert list(table) == [{**row, **{name: [] for name in LABELLED}} for row in ROWS]
    table.select([3, 1]).save(tmp_path / "some.arrow")
    assert list(TokenTable.open(tmp_path / "some.arrow").validate()) == list(table.select([3, 1]))
