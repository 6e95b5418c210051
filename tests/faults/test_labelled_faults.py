"""Cut the power under task heads with dropout: masks depend on the document, so resumed runs keep all bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.small_run import Power, assert_same_weights, cut_and_resume, new_run, train, weights_of

from gptj_ft.config.resolve import resolve
from gptj_ft.config.run_folder import Run
from gptj_ft.data.dataset import save_dataset
from gptj_ft.training.finetune import PreparedRun, prepare_new_run

TEXTS = [
    f"Room {n} is {'cold' if n % 2 else 'warm'} at night. Nobody here knows why it is so. It has {n} beds in all of it."
    for n in range(10)
]
ROWS = [
    {
        "text": text,
        "label": n % 2,
        "labels": ["cold", "late"][: n % 3],
        "score": n / 2,
        "tokens": text.split(),
        "ner_tags": [int(word.isdigit()) for word in text.split()],
        "question": "How is the room?",
        "context": text,
        "answers": {"text": [text[10:14]], "answer_start": [10]},
        "summary": f"It has {n} beds in all of it.",
    }
    for n, text in enumerate(TEXTS)
]
RECIPES = ("classification", "multi-label", "regression", "token-labels", "squad-bert", "bertsum")


def labelled_run(recipe: str, model: str) -> PreparedRun:
    """Prepare a run with dropout on eight rows and two validation rows, everything on disk."""
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options: dict[str, Any] = {
        "recipe": recipe, "model": model, "data": "rows.jsonl", "holdout": 0.2, "max_steps": 3, "batch_size": 3,
        "max_length": 48, "stride": 8, "lr": 1e-2, "schedule": "constant", "weights": "disk", "optimizer_state": "disk",
        "precision": "fp32", "device": "cpu", "dropout": 0.2, "attention_dropout": 0.2, "output": "unused",
    }  # fmt: skip
    return prepare_new_run(resolve(options))


def begun(prepared: PreparedRun, folder: Path) -> Run:
    """Return a new run folder with its validation rows."""
    run, validation = new_run(folder), prepared.rows[1]
    assert validation is not None
    run.data.mkdir()
    save_dataset(validation, run.data / "validation")
    return run


def check_cuts(prepared: PreparedRun, folder: Path, first: int, stride: int) -> None:
    """Cut runs at every n-th disk operation; each must end with the weights of an uncut run."""
    session = prepared.setup
    train(session, run := begun(prepared, folder))
    straight = weights_of(run.model)
    shutil.rmtree(run.folder)
    run = begun(prepared, folder)
    with pytest.MonkeyPatch.context() as patch:
        power = Power(patch)
        train(session, run)
    shutil.rmtree(run.folder)
    for last in range(first, power.count, stride):
        run = begun(prepared, folder)
        cut_and_resume(session, run, [last])
        assert_same_weights(weights_of(run.model), straight, last)
        shutil.rmtree(run.folder)


@pytest.mark.thorough
def test_power_cut_with_dropout_changes_no_bit(tmp_path: Path) -> None:
    check_cuts(labelled_run("classification", "tiny-bert"), tmp_path, first=7, stride=37)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "model"), [*((recipe, "tiny-bert") for recipe in RECIPES), ("classification", "tiny-gpt2")]
)
def test_power_cut_under_any_head(recipe: str, model: str, tmp_path: Path) -> None:
    check_cuts(labelled_run(recipe, model), tmp_path, first=1, stride=3)
