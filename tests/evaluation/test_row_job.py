"""Resume jobs over rows, and notice rows without a result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.presets import load_preset
from gptj_ft.config.resolve import build
from gptj_ft.errors import DataError
from gptj_ft.evaluation.row_job import OutputFile, ResultCache, pending_rounds
from gptj_ft.evaluation.text_evaluation import plan_on_rows

BATCHES = [[0, 2], [1, 3], [4]]


def lines_of(numbers: Sequence[int]) -> Iterator[list[dict[str, int]]]:
    return ([{"square": row * row} for row in BATCHES[number]] for number in numbers)


def test_rounds_skip_finished_batches() -> None:
    assert list(pending_rounds(BATCHES, {0, 2, 1}, 2)) == [[1, 2]]
    assert list(pending_rounds(BATCHES, set(), 2)) == [[0, 1], [2]]
    assert list(pending_rounds(BATCHES, {0, 1, 2, 3, 4}, 2)) == []


@pytest.mark.parametrize("round_size", [1, 2, 5])
def test_output_has_every_row_in_order(tmp_path: Path, round_size: int) -> None:
    progress: list[tuple[int, int]] = []
    with OutputFile(tmp_path / "out.jsonl", {}) as file:
        file.write_batches(BATCHES, 5, lines_of, round_size, lambda *counts: progress.append(counts))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines == [{"row": row, "square": row * row} for row in range(5)]
    assert progress[-1] == (5, 5)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (lambda numbers: ([{"square": 0}] for _ in numbers), "out.jsonl: row 2 has no result, 2 of 5 rows are lost"),
        (lambda numbers: lines_of(numbers[:-1]), "out.jsonl: row 0 has no result, 5 of 5 rows are lost"),
    ],
    ids=["lines", "batches"],
)
def test_lost_lines_of_output_are_an_error(tmp_path: Path, lost: Any, message: str) -> None:
    with OutputFile(tmp_path / "out.jsonl", {}) as file, pytest.raises(DataError, match=message):
        file.write_batches(BATCHES, 5, lost)


def test_rows_in_no_batch_are_an_error(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out.jsonl", {}) as file, pytest.raises(DataError, match="row 4 has no result, 1 of 5"):
        file.write_batches(BATCHES[:2], 5, lines_of)


class LossyCache(ResultCache):
    """A cache that loses one kind of result of one row."""

    def __init__(self, kind: str, row: int) -> None:
        super().__init__({"lossy": kind})
        self._kind, self._row = kind, row

    def add(self, kind: str, results: Mapping[int, Any]) -> None:
        super().add(kind, {row: each for row, each in results.items() if (kind, row) != (self._kind, self._row)})


@pytest.mark.parametrize("kind", ["loss", "answer"])
def test_lost_results_of_evaluation_are_an_error(tmp_path: Path, kind: str) -> None:
    texts = [f"The lift of floor {n} stops." for n in range(5)]
    folder = make_tiny(tmp_path / "tiny", texts * 20, seed=0, n_positions=128)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"document": text, "summary": "Lift."}) + "\n" for text in texts))
    generation = {"max_new_tokens": 2}
    options = {"recipe": "summarization", "generation": generation, "max_length": 96}
    recipe = build({**load_preset("summarization"), **options})
    planned = replace(plan_on_rows(folder, recipe, rows, None), cache=LossyCache(kind, 3))
    with pytest.raises(DataError, match=r"rows\.jsonl:4 has no result, 1 of 5 rows are lost"):
        planned.run()
