"""The page of a run while it trains: whole, current, cheap, and private."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.small_run import Power, PowerCut, new_run, small_session

from gptj_ft.cli.html.history import Curve
from gptj_ft.cli.html.live_page import LEAST_PAUSE, LivePage
from gptj_ft.cli.html.refresh import SCRIPT
from gptj_ft.config.run_folder import Run
from gptj_ft.errors import Interrupted
from gptj_ft.system.lock import locked
from gptj_ft.training.loop import Session, train
from gptj_ft.training.reporter import Progress, RecentSteps, Reporter, Reporters, StepReport
from gptj_ft.training.setup import TrainSetup
from gptj_ft.training.throughput import StepCounts, Throughput
from gptj_ft.training.validation import ValidationSample

FINETUNE = (
    "finetune --recipe summarization --data rows.jsonl --model tiny --lr 5e-3 --batch-size 8 --max-steps 2 "
    "--max-length 128 --set holdout=0.2 --set generation.max_new_tokens=4"
)


class Clock:
    """Clock that each call advances."""

    def __init__(self, seconds: float) -> None:
        self.time, self._seconds = 0.0, seconds

    def __call__(self) -> float:
        self.time += self._seconds
        return self.time


class AfterStep(Reporter):
    """Call a function after each step."""

    def __init__(self, action: Callable[[int], None]) -> None:
        self._action = action

    def on_step(self, step: StepReport, progress: Progress) -> None:
        self._action(step.step)


def step_report(step: int, seconds: float = 1.0, loss: float = 3.0) -> StepReport:
    counts = StepCounts(40, 20, seconds, 0.25 * seconds, 10**9, 0, 10**9, 0)
    return StepReport(step, loss, 0.0, 1e-4, 1.5, counts, Throughput(20, 40, 1, 1, 0.5, 0.5, 0.25))


def page_for(setup: TrainSetup, run: Run, seconds: float = 0.0, messages: list[str] | None = None) -> LivePage:
    """Return a page; ``seconds`` is the time that each look at the clock takes."""
    return LivePage(setup, run, [].append if messages is None else messages.append, Clock(seconds))


def train_watched(setup: TrainSetup, run: Run, page: LivePage, after_step: Callable[[int], None]) -> None:
    if not run.record_file.is_file():
        run.start_record(setup.recipe)
    with page:
        train(setup, run, Reporters(page, AfterStep(after_step)), Session())


def text_of(run: Run) -> str:
    return (run.folder / "report.html").read_text(encoding="utf-8")


def interrupt_at(last: int) -> Callable[[int], None]:
    def stop(step: int) -> None:
        if step == last:
            raise Interrupted("stopped")

    return stop


@pytest.fixture
def setup(tmp_path: Path) -> TrainSetup:
    return small_session(tmp_path, num_steps=4)


def test_page_follows_every_step(setup: TrainSetup, tmp_path: Path) -> None:
    run, seen = new_run(tmp_path), list[str]()
    clock = Clock(0.01)
    page = LivePage(setup, run, seen.append, clock)
    with suppress(Interrupted), page:
        page.on_start(Progress(0, 4, 4.0))
        assert "step 0 of 4" in text_of(run)
        clock.time += LEAST_PAUSE + 0.5
        page.on_step(step_report(1), Progress(1, 4, 30.0, 10.0, step_report(1).throughput))
        text = text_of(run)
        raise Interrupted
    for part in (
        "step 1 of 4",
        "20 s to 40 s",
        "75% of a step computes, 25% waits",
        "1.0 GB",
        "planned",
        'aria-valuenow="25"',
    ):
        assert part in text, part
    assert f"<script>{SCRIPT}</script>" in text
    assert not seen


def test_readers_never_see_half_a_page(setup: TrainSetup, tmp_path: Path) -> None:
    run, is_over, broken = new_run(tmp_path), threading.Event(), list[str]()
    page = page_for(setup, run)
    page.on_start(Progress(0, 10**6, 1.0))

    def read() -> None:
        while not is_over.is_set():
            text = text_of(run)
            if not (text.startswith("<!DOCTYPE html>") and text.endswith("</html>\n")):
                broken.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 40):
        page.on_step(step_report(step), Progress(step, 10**6, 1e6))
        page._write()
    is_over.set()
    reader.join()
    assert not broken


@pytest.mark.parametrize("last", range(1, 5))
def test_killed_writer_leaves_a_whole_page(last: int, setup: TrainSetup, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    page = page_for(setup, run)
    page.on_start(Progress(0, 4, 4.0))
    with pytest.MonkeyPatch.context() as patch, suppress(PowerCut):
        Power(patch, last)
        page._write()
    text = text_of(run)
    assert text.endswith("</html>\n")
    assert "Last written " in text


def test_resumed_page_keeps_its_history(setup: TrainSetup, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    (run.folder / "samples").mkdir()
    (run.folder / "samples" / "step-000000.jsonl").write_text('{"prediction": "an early one", "references": ["r"]}\n')
    with suppress(Interrupted):
        train_watched(setup, run, page_for(setup, run), interrupt_at(2))
    stopped = text_of(run)
    assert "stopped at step 2 of 4" in stopped
    assert "data-refresh" not in stopped
    assert "<script" not in stopped
    with suppress(Interrupted):
        train_watched(setup, run, page_for(setup, run), interrupt_at(4))
    text = text_of(run)
    assert "Loss by step, 0 to 4: training from" in text
    assert "an early one" in text


def test_finished_run_gets_its_report(shell, rows_file: Path) -> None:
    pages = list[str]()

    class Keep(LivePage):
        def _write(self) -> None:
            super()._write()
            pages.append(text_of(self._run))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gptj_ft.cli.html.live_page.LivePage", Keep)
        done = shell(f"{FINETUNE} --output run --set sample_rows=2")
    assert done.code == 0, done.err
    assert all("data-refresh" in page for page in pages)
    report = text_of(Run(Path("run")))
    assert ": trained, validation loss" in report
    assert "<script" not in report
    assert 'http-equiv="refresh"' not in report
    assert "Answers to the first sampled row" not in report


def test_answers_are_on_the_live_page_only(shell, rows_file: Path, setup: TrainSetup) -> None:
    assert shell(f"{FINETUNE} --output run").code == 0
    run = Run(Path("run"))
    page = page_for(setup, run, 3.0)
    page.on_start(Progress(0, 4, 4.0))
    page.on_validation(0, 3.0, ValidationSample({"rougeL": 1.0}, "a secret <b>", "one guess"))
    page.on_validation(2, 2.0, ValidationSample({"rougeL": 2.0}, "a secret <b>", "secret guess"))
    page._write()
    text = text_of(run)
    for part in ("before training", "after step 2", "guess", "Do not share this page", "report run --output FILE.html"):
        assert part in text
    assert "<b>" not in text.replace('<b class="', "")
    with locked(run.folder, "training"):
        refused = shell("report run")
        assert refused.code == 2
        assert "--output" in refused.said
        assert shell("report run --output shared.html").code == 0
    assert "secret" not in Path("shared.html").read_text(encoding="utf-8")
    assert shell("report run").code == 0
    assert "secret" not in text_of(run)


def test_killed_at_its_end_run_gets_its_report(shell, rows_file: Path, setup: TrainSetup) -> None:
    assert shell(f"{FINETUNE} --output run").code == 0
    run = Run(Path("run"))
    page_for(setup, run).on_start(Progress(2, 2, 0.0))
    assert "data-refresh" in text_of(run)
    assert shell("finetune --resume run").code == 2
    assert "data-refresh" not in text_of(run)


def test_writing_costs_a_bounded_share(setup: TrainSetup, tmp_path: Path) -> None:
    run, clock, writings, last = new_run(tmp_path), Clock(0.05), 0, 0
    page = LivePage(setup, run, print, clock)
    page.on_start(Progress(0, 10**6, 1e6))
    start = clock.time
    for step in range(1, 3000):
        page.on_step(step_report(step, 0.05), Progress(step, 10**6, 5e4))
        if (now := (run.folder / "report.html").stat().st_ino) != last:
            writings, last = writings + 1, now
    elapsed = clock.time - start
    assert 0.8 * elapsed / 250 <= (writings - 1) * 0.05 <= elapsed / 200


def test_slow_steps_show_each_event(setup: TrainSetup, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    page = LivePage(setup, run, print, Clock(0.01))
    page.on_start(Progress(0, 10, 6000.0))
    for text in ("computing step 1", "validating on 5,000 rows"):
        page.on_activity(text)
        assert text[1:] in text_of(run)
    assert 'data-stale="3000"' in text_of(run)


def test_failed_writing_does_not_end_the_run(setup: TrainSetup, tmp_path: Path) -> None:
    run, messages = new_run(tmp_path), list[str]()
    (run.folder / "report.html").mkdir()
    steps = list[int]()
    train_watched(setup, run, page_for(setup, run, 3.0, messages), steps.append)
    assert steps == [1, 2, 3, 4]
    assert sum("training continues" in message for message in messages) == 1


def test_page_of_another_process_stays(setup: TrainSetup, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with suppress(Interrupted), page_for(setup, run):
        raise Interrupted("the folder is in use")
    assert not (run.folder / "report.html").exists()


def test_long_curve_keeps_extremes_and_means() -> None:
    curve = Curve()
    for n in range(100_001):
        curve.add(n, -5.0 if n == 51_234 else math.sin(n))
        curve.add(n, math.nan)
    assert len(curve.points) <= 802
    assert curve.count == 100_001
    assert curve.lowest == (51_234, -5.0)
    assert (51_234, -5.0) in curve.points
    assert (curve.points[0][0], curve.points[-1][0]) == (0, 100_000)
    assert sum(each.count for each in curve._stretches) == 100_001
    assert curve.means[3][1] == pytest.approx(sum(math.sin(n) for n in range(768, 1024)) / 256)


def test_time_left_has_a_spread() -> None:
    for seconds, spread in (((2.0, 2.0, 2.0), 0.0), ((1.0, 2.0, 3.0), 2 * math.sqrt(97 + 97**2 / 3))):
        recent = RecentSteps(100, 0, 9.0)
        assert recent.progress.seconds_spread == 0.0
        for step, each in enumerate(seconds, start=1):
            progress = recent.add(step_report(step, each))
        assert progress.seconds_left == pytest.approx(194)
        assert progress.seconds_spread == pytest.approx(spread)
    assert replace(progress, step=3).step == 3
