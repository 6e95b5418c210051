"""Test that tokenized rows from any source are checked."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cli_runner import Shell

from gptj_ft.data.checks.tokens import check_tokens
from gptj_ft.data.dataset import Prepared, Report
from gptj_ft.data.loss_mask import num_targets
from gptj_ft.data.table import LABELLED, SCHEMA, TokenTable, to_arrow
from gptj_ft.errors import DataError

VOCABULARY, LENGTH = 100, 12
Row = tuple[list[int], int, list[int]]
GOOD: Row = ([5, 6, 7, 8, 9, 10], 2, [3, 4])


def batch_of(rows: list[Row], **labelled: list[Any]) -> pyarrow.RecordBatch:
    columns: dict[str, Any] = {
        "input_ids": [array("i", ids) for ids, _, _ in rows],
        "prompt_length": [prompt for _, prompt, _ in rows],
        "untrained": [borders for _, _, borders in rows],
        "references": [[] for _ in rows],
        **{name: ["x"] * len(rows) for name in ("source", "label")},
        **{name: list(range(len(rows))) for name in ("line", "group")},
        "continues": [False] * len(rows),
        **{name: [[]] * len(rows) for name in LABELLED},
        **labelled,
    }
    arrays = [to_arrow(field.type, columns[field.name]) for field in SCHEMA]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def checked(*rows: Row) -> str:
    """Return the problem reported for rows, written in two batches; "" for valid rows."""
    batches = [batch_of([*rows[:2]]), batch_of([*rows[2:]])]
    table = TokenTable([batch for batch in batches if batch.num_rows])
    return said_of(table)


def said_of(table: TokenTable, *labels: str) -> str:
    """Return the problem reported for rows with a number of labels."""
    report = Report((), 0, 0, {}, {}, 0, 0, 0, 0, 0, 0, {}, "", "", (), {}, labels)
    try:
        check_tokens(Prepared(table, report), Path("rows"), VOCABULARY, LENGTH)
    except DataError as error:
        return str(error).partition("\n")[0]
    return ""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (([5, -1, 7], 0, []), "token id -1, but the model's ids are 0 to 99"),
        (([5, 6, 100], 0, []), "token id 100, but the model's ids are 0 to 99"),
        (([2**31 - 1, -5], 0, []), "token id 2147483647, but the model's ids are 0 to 99"),
        (([], 0, []), "no tokens"),
        (([5] * 14, 0, []), "longer than max_length (12)"),
        (([5, 6], -5, []), "negative prompt length"),
        (([5, 6], 10**6, []), "no token that is trained on"),
        (([5], 0, []), "no token that is trained on"),
        (([5, 6, 7], 1, [1, 3]), "no token that is trained on"),
        *((([5, 6, 7, 8], 1, borders), "untrained spans must be ascending (start, end) pairs after the prompt")
          for borders in ([2], [3, 2], [2, 9], [0, 2], [-3, 2], [2, 3, 1, 2])),
    ],
)  # fmt: skip
def test_malformed_prepared_row_is_named(row: Row, said: str) -> None:
    assert checked(GOOD, GOOD, GOOD, row) == f"rows:4: {said}"
    assert checked(GOOD, row, row, GOOD, row) == f"rows:2: {said}; 2 more bad rows"


def test_wellformed_rows_pass_targetless_rows_fail() -> None:
    assert checked(GOOD, ([5] * 13, 0, []), ([0, 99], 1, []), ([5, 6, 7, 8, 9], 1, [2, 3, 4, 5])) == ""
    assert checked(([5], 0, []), ([5, 6], 2, [])) == "rows: no row has a token to train on"


def plainly_bad(ids: list[int], prompt: int, borders: list[int]) -> bool:
    """Tell whether a row is bad, by a plain restatement of the rules."""
    first = max(prompt, 1)
    inside = [first, *borders, len(ids)]
    return (
        prompt < 0
        or not 1 <= len(ids) <= LENGTH + 1
        or any(not 0 <= each < VOCABULARY for each in ids)
        or len(borders) % 2 == 1
        or (bool(borders) and inside != sorted(inside))
        or num_targets(len(ids), prompt, borders) < 1
    )


IDS = st.lists(st.integers(0, 99) | st.sampled_from([-1, 100, 2**31 - 1, -(2**31)]), max_size=15) | st.lists(
    st.integers(0, 99), min_size=2, max_size=13
)
ROWS = st.lists(
    st.tuples(IDS, st.integers(-2, 14), st.lists(st.integers(-1, 15), max_size=4) | st.just([])) | st.just(GOOD),
    min_size=1,
    max_size=6,
)


def agrees(rows: list[Row]) -> None:
    bad = [number for number, row in enumerate(rows, 1) if plainly_bad(*row)]
    said = checked(*rows)
    if len(bad) == len(rows) and said == "rows: no row has a token to train on":
        return
    assert bool(said) == bool(bad), (said, rows)
    if bad:
        assert said.startswith(f"rows:{bad[0]}: "), (said, bad, rows)
        assert len(bad) == 1 or f"; {len(bad) - 1} more bad row" in said


QUIET: dict[str, Any] = {
    "derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck)
}  # fmt: skip


@settings(max_examples=60, **QUIET)
@given(rows=ROWS)
def test_row_is_rejected_exactly_if_bad(rows: list[Row]) -> None:
    agrees(rows)


@pytest.mark.slow
@settings(max_examples=5000, **QUIET)
@given(rows=ROWS)
def test_thousands_of_rows_are_checked_exactly(rows: list[Row]) -> None:
    agrees(rows)


LABELLED_ROW: dict[str, list[int] | list[float]] = {"marks": [0, 2], "targets": [2, 0], "borders": [1, 3]}
SPAN: dict[str, list[int] | list[float]] = {"targets": [1, 2], "offsets": [-1, -1, 0, 3, 3, 5, -1, -1]}


@pytest.mark.parametrize(
    ("labelled", "said"),
    [
        (LABELLED_ROW, ""),
        (SPAN, ""),
        (SPAN | {"targets": [0, 0]}, ""),
        ({"marks": [0], "targets": [0], "values": [0.0, 1.0, 1.0]}, ""),
        (LABELLED_ROW | {"targets": [2]}, "numbers of labels and labelled tokens differ"),
        ({"marks": [0]}, "no token that is trained on"),
        (LABELLED_ROW | {"targets": [3, 0]}, "a label id is not one of the 3 labels"),
        (LABELLED_ROW | {"targets": [2, -1]}, "a label id is not one of the 3 labels"),
        (LABELLED_ROW | {"marks": [2, 2]}, "labelled tokens must ascend within the row"),
        (LABELLED_ROW | {"marks": [0, 4]}, "labelled tokens must ascend within the row"),
        (LABELLED_ROW | {"borders": [3, 1]}, "borders of token types must ascend within the row"),
        (LABELLED_ROW | {"borders": [-1, 1]}, "borders of token types must ascend within the row"),
        (SPAN | {"targets": [2, 1]}, "the answer span is outside its window"),
        (SPAN | {"targets": [1, 4]}, "the answer span is outside its window"),
        (SPAN | {"offsets": [0, 1]}, "not two offsets per token"),
        (SPAN | {"offsets": [-2, 1] * 4}, "an offset is below -1"),
        ({"marks": [0], "targets": [0], "values": [float("nan")]}, "a value is not a finite number"),
    ],
)
def test_malformed_labelled_row_is_named(labelled: Any, said: str) -> None:
    rows: list[Row] = [([5, 6, 7, 8], 4, [])] * 3
    columns = {name: [LABELLED_ROW.get(name, []), labelled.get(name, []), []] for name in LABELLED}
    columns |= {
        "targets": [[2, 0], labelled.get("targets", []), [0]],
        "marks": [[0, 2], labelled.get("marks", []), [0]],
    }
    table = TokenTable([batch_of(rows, **columns)])
    assert said_of(table, "a", "b", "c") == (f"rows:2: {said}" if said else "")


def test_damaged_offsets_are_found_before_reading() -> None:
    batch = batch_of([GOOD, GOOD])
    kind = SCHEMA.field(0).type
    offsets = pyarrow.py_buffer(np.array([0, 10**6, 12], np.int32))
    lists = pyarrow.Array.from_buffers(kind, 2, [None, offsets], children=[batch.column(0).values])
    for column in (lists, pyarrow.array([None, [5]], kind), pyarrow.array([[5], [None]], kind)):
        table = TokenTable([pyarrow.RecordBatch.from_arrays([column, *batch.columns[1:]], schema=SCHEMA)])
        with pytest.raises(ValueError, match=r"offset|missing"):
            table.validate()


def test_targetless_token_rows_exit_with_3(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "some words of a text"}\n' * 9)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": [n]}) + "\n" for n in range(5)))
    done = shell("prepare-data --recipe autocomplete --model tiny --data texts.jsonl --output texts --json")
    size = json.loads(Path(done.json["model"], "config.json").read_text())["vocab_size"]
    for row, said in (
        (
            {"input_ids": [1]},
            "none of the 5 rows can be trained on: no token that is trained on (5, first",
        ),
        ({"input_ids": []}, "none of the 5 rows can be trained on: no tokens (5, first at rows.jsonl:1)"),
        ({"input_ids": [1, -1]}, "input_ids is not a list of token ids"),
        ({"input_ids": [1, size]}, f"rows.jsonl:1: token id {size}, but the model's ids end at {size - 1}"),
        ({"input_ids": "text"}, "input_ids is not a list of token ids"),
        ({"input_ids": [1, 2, 3], "trained": [2, 1]}, "rows.jsonl:1: 'trained' must be a list"),
        ({"input_ids": [1, 2, 3], "trained": "all"}, "rows.jsonl:1: 'trained' must be a list"),
        ({"input_ids": [1, 2, 3], "trained": 7}, "rows.jsonl:1: 'trained' must be a list"),
    ):
        (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 5)
        got = shell(f"prepare-data --recipe autocomplete --model {done.json['model']} --data rows.jsonl --output none")
        assert got.code == 3, (row, got.err)
        assert said in got.said, (row, got.err)
