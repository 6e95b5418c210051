"""Write the page of a run while it trains: ``report.html``, with answers to the sampled row."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gptj_ft.cli.html import fill_template
from gptj_ft.cli.html.differences import marked
from gptj_ft.cli.html.history import VALIDATION, History
from gptj_ft.cli.html.names import model_name, portable, subject_of
from gptj_ft.cli.html.refresh import LIVE, PAGE, is_made_by, refresh_facts
from gptj_ft.cli.html.run_charts import DEVICE, learning_charts, machine_charts
from gptj_ft.config.run_folder import Run
from gptj_ft.errors import GptjFtError, Interrupted
from gptj_ft.evaluation.metrics import main_score
from gptj_ft.system.files import read_text, replace_text
from gptj_ft.system.plain_text import one_line
from gptj_ft.system.units import clock, gigabytes
from gptj_ft.training.reporter import Progress, Reporter, StepReport

if TYPE_CHECKING:
    from gptj_ft.training.finetune import PreparedRun
    from gptj_ft.training.setup import TrainSetup
    from gptj_ft.training.throughput import Throughput
    from gptj_ft.training.validation import ValidationSample

LEAST_PAUSE = 5.0  # seconds between two writings
COST_SHARE = 1 / 250  # of the time at most, for writing
EVENTS = 5  # of a step: computing, saving, validating and their ends
STALE_SECONDS = 600.0  # a page that is older, and older than several steps, stops refreshing
LONGEST_REFRESH = 60.0
MOST_ANSWERS = 12  # the first, and the newest
LONGEST_ANSWER = 2000
NOTICED, BOUND = 0.02, 0.3  # shares of waiting: one worth a remark; one at which the stores limit a step


class LivePage(Reporter):
    """Write the page of a run while it trains, ``report.html`` in its folder, and its report at the end.

    A failure to write is reported once; the run continues. `LivePage.of` makes the page of a planned run; to pass it
    together with another reporter, use `Reporters`.

    >>> run = gptj_ft.prepare_run("summarization", data="my.jsonl", model="tiny")
    >>> with gptj_ft.LivePage.of(run, print) as page:
    ...     result = run.train(page)

    Args:
        setup: the planned run.
        run: its folder.
        say: receives the message about a failure.
        now: clock, in seconds.
    """

    def __init__(
        self, setup: TrainSetup, run: Run, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._setup, self._run, self._say, self._now = setup, run, say, now
        self._history = History()
        self._answers: list[dict[str, Any]] = []  # to the first sampled row, see `marked`
        self._expected = ""
        # The cost of drawing limits how often the page is written, so all work waits until then.
        self._new_lines: list[Mapping[str, Any] | StepReport] = []
        self._new_answers: list[tuple[int, str]] = []  # step and text
        self._progress: Progress | None = None  # None before training starts
        self._step: StepReport | None = None
        self._activity, self._ended = "", ""
        self._step_seconds = 0.0  # mean
        self._written_at, self._cost, self._longest_pause = -math.inf, 0.0, 0.0
        self._has_failed = False

    @classmethod
    def of(cls, prepared: PreparedRun, say: Callable[[str], None]) -> LivePage:
        """Return the page of a planned run; ``say`` receives the message about a failure."""
        setup = prepared.setup
        return cls(setup, prepared.run or Run(Path(setup.recipe.output or "")), say)

    def __enter__(self) -> LivePage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is None:  # the folder may be another process's
            return
        if error is None:
            with self._forgiven():
                from gptj_ft.cli.html.run_page import write_page

                write_page(self._run, self._say)
            return
        reason = "" if isinstance(error, Interrupted) else one_line(str(error).partition("\n")[0])
        self._ended = f"ended by an error: {reason}" if reason else "stopped"
        self._write()

    def on_activity(self, text: str) -> None:
        self._activity = text
        self._write_if_due()

    def on_start(self, progress: Progress) -> None:
        self._progress = progress
        self._step_seconds = progress.seconds_left / max(1, progress.num_steps - progress.step)
        with self._forgiven():
            self._history = History.of(self._run.iter_metrics())
            self._read_answers()
        # The first writing compiles the templates: the second one measures the cost of the next ones.
        self._write()
        self._write()

    def on_step(self, step: StepReport, progress: Progress) -> None:
        self._step, self._progress = step, progress
        self._new_lines.append(step)
        if progress.step < progress.num_steps:
            self._step_seconds = progress.seconds_left / (progress.num_steps - progress.step)
        self._write_if_due()

    def on_validation(self, step: int, loss: float, sample: ValidationSample | None) -> None:
        self._activity = f"validated after step {step:,}"
        self._new_lines.append({"step": step, VALIDATION: loss, "scores": sample.scores if sample else {}})
        if sample is not None:
            self._expected = sample.expected
            self._new_answers.append((step, sample.answer))
        self._write_if_due()

    def _read_answers(self) -> None:
        """Read the answers of earlier sessions, up to the step that this one starts from."""
        assert self._progress is not None
        for path in sorted((self._run.folder / "samples").glob("step-*.jsonl")):
            step = int(path.stem.removeprefix("step-"))
            if step < self._progress.step:
                first = json.loads(read_text(path).partition("\n")[0])
                self._expected = " | ".join(first["references"])
                self._new_answers.append((step, first["prediction"]))

    def _write_if_due(self) -> None:
        if self._progress is None:
            return
        paused = self._now() - self._written_at
        # Between slow steps, every event is shown: validating may take hours.
        is_slow = self._step_seconds * COST_SHARE >= EVENTS * self._cost > 0
        if is_slow or paused >= max(LEAST_PAUSE, self._cost / COST_SHARE):
            self._write()

    def _write(self) -> None:
        start = self._now()
        if math.isfinite(self._written_at):
            self._longest_pause = max(self._longest_pause, start - self._written_at)
        with self._forgiven():
            replace_text(self._run.folder / PAGE, fill_template("live.html", self._facts()))
        self._written_at = self._now()
        self._cost = self._written_at - start

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        """Report the first failure in the block; a page must not end a run."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                reason = str(error) if isinstance(error, GptjFtError) else f"{type(error).__name__}: {error}"
                self._say(f"could not write {self._run.folder / PAGE}: {one_line(reason)}; training continues")
            self._has_failed = True

    def _facts(self) -> dict[str, Any]:
        self._take_new()
        assert self._progress is not None
        setup, progress, history = self._setup, self._progress, self._history
        planned = {f"planned {name}".strip(): size for name, size in _planned_memory(setup).items()}
        position = f"step {progress.step:,} of {progress.num_steps:,}"
        pause = max(LEAST_PAUSE, self._cost / COST_SHARE, self._step_seconds / 4)
        loss, *scores = learning_charts(history, main_score(history.scores))
        scores = scores if history.validation.count > 1 else []
        stale = max(STALE_SECONDS, 5 * self._step_seconds, 3 * self._longest_pause)
        return {
            **refresh_facts(0.0 if self._ended else min(LONGEST_REFRESH, pause), stale, LIVE),
            "subject": subject_of(setup.recipe, self._run),
            "state": self._ended or f"{progress.step / progress.num_steps:.0%}",
            "headline": f"{self._ended} at {position}" if self._ended else position,
            "share": progress.step / progress.num_steps,
            "ended": self._ended,
            "activity": f"{self._activity[:1].upper()}{self._activity[1:]}" or "Starting",
            "resume": portable(["finetune", "--resume", str(self._run.folder)]),
            "share_command": portable(["report", str(self._run.folder), "--output", "FILE.html"]),
            "about": setup.recipe.about,
            "tiles": list(_tiles(setup, progress, self._step, history)),
            "charts": [loss, *scores[:1], *machine_charts(history, planned)],
            "scores": scores[1:],
            "answers": self._answers,
            "run": {
                "Run": self._run.folder.resolve().name,
                "Model": model_name(str(setup.model)),
                "Method": setup.recipe.method,
                "Rows": f"{len(setup.train):,} to train on, {len(setup.validation):,} to validate",
                "Placement": str(setup.plan.placement),
                "Precision": setup.plan.precision,
                "Device": str(setup.device),
            },
        }

    def _take_new(self) -> None:
        """Add new lines to the history and new answers to the marked ones."""
        for line in self._new_lines:
            self._history.add(_values(line) if isinstance(line, StepReport) else line)
        for step, text in [*self._new_answers[:1], *self._new_answers[1:][-MOST_ANSWERS:]]:
            texts = {"expected": self._expected, "model": text[:LONGEST_ANSWER]}
            self._answers += marked([{"place": f"after step {step:,}" if step else "before training", "texts": texts}])
            if len(self._answers) > MOST_ANSWERS:
                del self._answers[1]
        self._new_lines.clear()
        self._new_answers.clear()


def _values(step: StepReport) -> dict[str, Any]:
    """Return the line of a step; unlike `StepReport.to_dict` without copies, since steps may take milliseconds."""
    return {**vars(step), **vars(step.counts), **vars(step.throughput)}


def _planned_memory(setup: TrainSetup) -> dict[str, int]:
    """Return the planned bytes by name of the line: of the process, and on an accelerator."""
    names = {"memory": "", "host memory": "", "device memory": DEVICE}
    return {names[need.resource]: need.need for need in setup.plan.needs if need.resource in names}


Tile = tuple[str, str, str]  # name, value, remark


def _tiles(setup: TrainSetup, progress: Progress, step: StepReport | None, history: History) -> Iterator[Tile]:
    """Yield the facts at the top of the page."""
    left, spread = progress.seconds_left, progress.seconds_spread
    done = time.strftime("%a %H:%M", time.localtime(time.time() + left))
    between = f"{clock(max(0.0, left - spread))} to {clock(left + spread)}; " if spread >= 1 else ""
    yield "Time left", clock(left), f"{between}done {done}, validations and saving not counted"
    if history.validation.count:
        (at, lowest), (first_at, first) = history.validation.lowest, history.validation.first
        texts = [f"lowest {lowest:.4f} after step {at:,}"] if history.validation.count > 1 else []
        texts += [f"{first:.4f} before training"] if not first_at else []
        yield "Validation loss", f"{history.validation.last[1]:.4f}", "; ".join(texts)
    if step is None or progress.throughput is None:
        return
    counts, throughput = step.counts, progress.throughput
    yield "Loss", f"{step.loss:.4f}", f"{history.curve('loss').first[1]:.4f} at first"
    yield "Learning rate", f"{step.lr:.2e}", ""
    yield "Gradient norm", f"{step.grad_norm:.3g}", "before clipping"
    trained = f"{_rate(throughput.target_tokens_per_second)} of them trained on"
    yield "Tokens per second", _rate(throughput.tokens_per_second), trained
    seconds, forecast = counts.seconds, setup.plan.costs.seconds_per_step
    yield "A step", f"{seconds:.2g} s" if seconds < 10 else clock(seconds), f"forecast: {forecast:.2g} s"
    yield "Limited by", *_limit(setup, throughput)
    planned = _planned_memory(setup)
    for name, used in (("", counts.memory_bytes), (DEVICE, counts.device_memory_bytes)):
        if used:
            of = f"{gigabytes(planned[name])} planned" if name in planned else ""
            yield f"Peak memory{' of the device' if name else ''}", gigabytes(used), of


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def _limit(setup: TrainSetup, throughput: Throughput) -> tuple[str, str]:
    """Return the resource that limits a step, and its shares."""
    shares = f"{1 - throughput.stall:.0%} of a step computes, {throughput.stall:.0%} waits"
    placement = setup.plan.placement
    places = {placement.weights, placement.optimizer_state, placement.frozen or placement.weights}
    store = "the disk" if "disk" in places else "RAM"
    texts = [shares] if throughput.stall >= NOTICED else []
    texts += [f"matrix products at {throughput.hfu:.0%} of their measured rate"] if throughput.hfu >= NOTICED else []
    return store if throughput.stall >= BOUND else "computing", "; ".join(texts)


def finish_page(run: Run, say: Callable[[str], None]) -> None:
    """Write the report of a finished run that was killed before it could: the page is missing or still a live one."""
    path = run.folder / PAGE
    if not path.is_file() or is_made_by(LIVE, path):
        from gptj_ft.cli.html.run_page import write_page

        write_page(run, say)
