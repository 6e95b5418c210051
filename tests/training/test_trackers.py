"""Test trackers: they get only the metrics, and their failures do not affect the run."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from accelerate.tracking import GeneralTracker, TrackioTracker, WandBTracker
from support.small_run import assert_same_weights, new_run, small_session, train, weights_of

from gptj_ft.config.resolve import build
from gptj_ft.training import trackers

STEPS = 3


class Notebook(GeneralTracker):
    """Writes down what it gets, disturbs every generator of random numbers, and fails if it is told when."""

    name, requires_logging_directory = "notebook", False

    def __init__(self, fails_at: int | str | None = None) -> None:
        super().__init__()
        self.lines, self.is_finished, self._fails_at = [], False, fails_at

    @property
    def tracker(self):
        return self.lines

    def start(self) -> None:
        print("welcome to the notebook")
        if self._fails_at == "start":
            raise ConnectionError("no such server")

    def log(self, values, step=None, **kwargs) -> None:
        if step == self._fails_at:
            raise ConnectionError("the notebook is full\nof details")
        torch.manual_seed(step)
        random.seed(step)
        self.lines.append((step, values))

    def finish(self) -> None:
        self.is_finished = True


def watched_run(folder: Path, monkeypatch, notebook: Notebook):
    monkeypatch.setattr(trackers, "make_tracker", lambda run, recipe: notebook)
    run = new_run(folder)
    train(small_session(folder, STEPS, report_to="wandb", validate_every=2), run)
    return run


def test_tracker_gets_exactly_the_metrics(tmp_path, monkeypatch, capsys) -> None:
    for name in ("plain", "watched"):
        (tmp_path / name).mkdir()
    plain = new_run(tmp_path / "plain")
    train(small_session(tmp_path / "plain", STEPS, validate_every=2), plain)
    notebook = Notebook()
    run = watched_run(tmp_path / "watched", monkeypatch, notebook)
    assert notebook.lines == [(line["step"], {k: v for k, v in line.items() if k != "step"}) for line in run.metrics()]
    keys = {key for _, values in notebook.lines for key in values}
    assert keys > {"loss", "lr", "tokens_per_second", "memory_bytes", "stall", "validation_loss"}
    assert notebook.is_finished
    assert_same_weights(weights_of(run.model), weights_of(plain.model))
    assert [line.get("loss") for line in run.metrics()] == [line.get("loss") for line in plain.metrics()]
    assert "welcome" not in capsys.readouterr().out  # stdout is for results


@pytest.mark.parametrize("when", ["start", 2])
def test_failing_tracker_is_reported_once(when, tmp_path, monkeypatch) -> None:
    notebook = Notebook(when)
    run = watched_run(tmp_path, monkeypatch, notebook)
    log = (run.folder / "log.txt").read_text(encoding="utf-8")
    assert log.count("wandb gets no more metrics: ConnectionError: ") == 1
    assert "details" not in log
    assert [step for step, _ in notebook.lines] == ([] if when == "start" else [0, 1])
    assert len(run.metrics()) == 2 * STEPS
    assert (run.model / "config.json").is_file()


def test_missing_tracker_fails_before_reading_rows(shell, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    done = shell("finetune --recipe summarization --model tiny --data none.jsonl --report-to wandb")
    assert (done.code, "pip install wandb" in done.err) == (2, True)
    assert len(done.err.splitlines()) == 1


def test_tracker_gets_no_path_or_template(tmp_path, monkeypatch) -> None:
    run = new_run(tmp_path)
    run.recipe_file.write_text("")
    recipe = build(
        {"data": "/secret/rows.jsonl", "model": "/secret/m", "prompt": "secret {{ text }}", "report_to": "wandb"}
    )
    tracker = trackers.make_tracker(run, recipe)
    assert isinstance(tracker, WandBTracker)
    assert "secret" not in str(tracker.init_kwargs["config"])
    assert tracker.init_kwargs["config"]["lr"] == recipe.lr
    assert tracker.init_kwargs["settings"]["console"] == "off", "answers are printed there"
    again = trackers.make_tracker(run, recipe)
    assert again.init_kwargs["id"] == tracker.init_kwargs["id"], "a resumed run goes on in the same place"
    local = trackers.make_tracker(run, recipe.model_copy(update={"report_to": "trackio"}))
    assert isinstance(local, TrackioTracker)


def test_tensorboard_reads_the_curves_of_a_run(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = new_run(tmp_path)
    train(small_session(tmp_path, STEPS, report_to="tensorboard"), run)
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    expected = [line["loss"] for line in run.metrics() if "loss" in line]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(expected)
    assert [event.step for event in events.Scalars("validation_loss")] == [0, STEPS]
