"""Resume jobs over rows, and notice rows without a result."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptj_ft import api
from gptj_ft.checkpoints.metadata import ModelMetadata, template_of
from gptj_ft.checkpoints.model_folder import METADATA_FILE
from gptj_ft.checkpoints.tiny import make_tiny
from gptj_ft.config.presets import load_preset
from gptj_ft.config.resolve import build
from gptj_ft.data.readers.cells import settings_file
from gptj_ft.errors import DataError, UsageError
from gptj_ft.evaluation.row_job import OutputFile, ResultCache, pending_rounds
from gptj_ft.evaluation.text_evaluation import plan_on_rows
from gptj_ft.planning import inference_plan

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


def test_settings_are_checked_under_the_lock(tmp_path: Path) -> None:
    output, settings = tmp_path / "out.jsonl", settings_file(tmp_path / "out.jsonl")
    with OutputFile(output, {"model": "first"}) as file:
        settings.unlink()  # as if the first process had not come so far
        with pytest.raises(UsageError, match="another process"):
            OutputFile(output, {"model": "second"})
        assert not settings.exists(), "rows of one model would continue with another"
        file.write_batches(BATCHES, 5, lines_of)
    with pytest.raises(UsageError, match="was not made by this command"):
        OutputFile(output, {"model": "second"})


def test_refused_output_leaves_no_hidden_file(tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("a,b\n")
    hidden = tmp_path / ".out.csv.lines"
    with pytest.raises(UsageError, match="was not made by this command"):
        OutputFile(hidden, {}, tmp_path / "out.csv")
    assert not hidden.exists()
    (tmp_path / "new.jsonl").touch()  # a process was killed before it wrote its settings
    with OutputFile(tmp_path / "new.jsonl", {}) as file:
        assert file.done == set()


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


NUM_ROWS = 9
COMMANDS = {
    "predict": "predict --model head --input rows.jsonl --output out",
    "evaluate head": "evaluate head --data rows.jsonl --baseline none --output out.jsonl",
    "evaluate": "evaluate writer --data rows.jsonl --baseline none --output out.jsonl",
    "evaluate losses": "evaluate writer --data rows.jsonl --baseline none --output out.jsonl --set metrics=[]",
    "generate": "generate --model writer --input rows.jsonl --output out.jsonl --num-return 2 --temperature 1",
}
# Functions whose last result a bug may lose: parts of the rows, batches of a part, and rows of a batch.
LOSSES = [
    ("predict", "evaluation.predict.split_rows"),
    ("predict", "evaluation.predict.row_outputs"),
    ("predict", "evaluation.label_evaluation.passes"),
    ("predict", "evaluation.label_evaluation.first_fit"),
    ("predict", "evaluation.label_evaluation.head_outputs"),
    ("predict", "evaluation.row_job.pending_rounds"),
    ("evaluate head", "evaluation.label_evaluation.row_outputs"),
    ("evaluate head", "evaluation.label_evaluation.passes"),
    ("evaluate head", "evaluation.label_evaluation.first_fit"),
    ("evaluate head", "evaluation.label_evaluation.head_outputs"),
    ("evaluate losses", "evaluation.text_evaluation.passes"),
    ("evaluate losses", "evaluation.text_evaluation.losses"),
    ("evaluate", "evaluation.text_evaluation.pending_rounds"),
    ("evaluate", "evaluation.answerer.batches_by_length"),
    ("evaluate", "evaluation.answerer.generate_tokens"),
    ("generate", "evaluation.generate.batches_by_length"),
    ("generate", "evaluation.generate.generate_batches"),
    ("generate", "evaluation.row_job.pending_rounds"),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a writer, a classifier and rows."""
    folder = tmp_path_factory.mktemp("rows")
    texts = [f"The lift of floor {n} stops{' again' * (n % 3)}." for n in range(NUM_ROWS)]
    lines = [{"document": text, "summary": "Lift.", "label": "ab"[n % 2]} for n, text in enumerate(texts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = {"recipe": "summarization", "generation": {"max_new_tokens": 2}, "max_length": 64}
    make_tiny(folder / "writer", texts * 20, seed=0, n_positions=128)
    tuning = ModelMetadata("base", template_of(build({**load_preset("summarization"), **options})), {}, {})
    (folder / "writer" / METADATA_FILE).write_text(json.dumps(tuning.to_dict()), encoding="utf-8")
    task = {"task": "classification", "prompt": "{{ text }}", "completion": "{{ label }}", "on_long": "shorten"}
    fields = {"fields": {"text": ("document",), "label": ("label",)}, "micro_batch_tokens": 32, "max_length": 32}
    trained = {"data": folder / "rows.jsonl", "model": "tiny-bert", "max_steps": 1, "output": folder / "run"}
    Path(api.finetune(**task, **fields, **trained, precision="fp32").model).rename(folder / "head")
    return folder


@pytest.fixture
def several_parts(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the few rows into several passes and batches."""
    monkeypatch.chdir(work)
    for name in ("BATCH_TOKENS", "PASS_TOKENS"):
        monkeypatch.setattr(inference_plan, name, 40)
    for path in work.glob("out*"):
        path.unlink()


@pytest.mark.usefixtures("several_parts")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_row_of_several_parts_is_written(command: str, shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    for name in ("label_evaluation.passes", "text_evaluation.passes", "generate.batches_by_length"):
        count_results(f"evaluation.{name}", counts, monkeypatch)
    suffix = ".jsonl" if command == "predict" else ""
    outcome = shell(f"{COMMANDS[command]}{suffix} --precision fp32 --set micro_batch_tokens=32")
    assert outcome.code == 0, outcome.said
    lines = [json.loads(line) for line in Path("out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == NUM_ROWS
    assert sum(counts) > 2


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("several_parts")
@pytest.mark.parametrize(("command", "function"), LOSSES)
def test_lost_rows_end_commands_with_3(
    command: str, function: str, shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, name = function.rpartition(".")
    original = getattr(importlib.import_module(f"gptj_ft.{module}"), name)
    monkeypatch.setattr(f"gptj_ft.{function}", lambda *args, **more: [*original(*args, **more)][:-1])
    suffix = ".csv" if command == "predict" else ""
    outcome = shell(f"{COMMANDS[command]}{suffix} --precision fp32 --set micro_batch_tokens=32")
    assert outcome.code == 3, outcome.said
    assert f" of {NUM_ROWS} rows are lost: this is a bug of gptj-ft, please report it" in outcome.said
    assert not Path("out.csv").exists()


def count_results(function: str, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = function.rpartition(".")
    original = getattr(importlib.import_module(f"gptj_ft.{module}"), name)

    def counted(*args: Any, **more: Any) -> list[Any]:
        found = [*original(*args, **more)]
        counts.append(len(found))
        return found

    monkeypatch.setattr(f"gptj_ft.{function}", counted)
