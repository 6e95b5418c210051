"""Report the progress of a run as events for a terminal, a notebook or a program."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from gptj_ft.system.units import clock
from gptj_ft.training.throughput import StepCounts, Throughput, describe_throughput

if TYPE_CHECKING:
    from gptj_ft.training.validation import ValidationSample

_GAP = "  "
RECENT_STEPS = 20


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as written to ``metrics.jsonl``."""

    step: int  # from 1
    loss: float  # cross-entropy in nats, mean over the step's target tokens, before the update
    z_loss: float  # weighted z-loss, which is added to the loss
    lr: float  # learning rate
    grad_norm: float  # global norm before clipping
    counts: StepCounts
    throughput: Throughput
    loss_scale: float | None = None  # fp16 only

    @property
    def is_skipped(self) -> bool:
        """Whether gradients overflowed fp16, so that the step changed nothing."""
        return self.loss_scale is not None and not math.isfinite(self.grad_norm)

    def to_dict(self) -> dict[str, Any]:
        """Return the line of ``metrics.jsonl``; numbers that overflowed fp16 are ``None``."""
        names = ("step", "loss", "z_loss", "lr", "grad_norm")
        own = {name: value if math.isfinite(value := getattr(self, name)) else None for name in names}
        scaling = {} if self.loss_scale is None else {"loss_scale": self.loss_scale, "skipped": self.is_skipped}
        return {**own, **scaling, **asdict(self.counts), **asdict(self.throughput)}


@dataclass(frozen=True)
class Progress:
    """Position in a run."""

    step: int  # optimizer steps done
    num_steps: int  # of the whole run
    seconds_left: float  # estimate, to the last step
    seconds_spread: float = 0.0  # two standard deviations of the estimate, from the latest steps; 0 before two steps
    throughput: Throughput | None = None  # mean rates of the latest steps; None before the session's first step


class RecentSteps:
    """Means over the latest steps.

    Args:
        step: optimizer steps done before this session.
        seconds_per_step: forecast, used until a step is measured.
    """

    def __init__(self, num_steps: int, step: int, seconds_per_step: float) -> None:
        self._num_steps, self._recent = num_steps, deque[StepReport](maxlen=RECENT_STEPS)
        self.progress = Progress(step, num_steps, (num_steps - step) * seconds_per_step)

    def add(self, report: StepReport) -> Progress:
        self._recent.append(report)
        seconds = [each.counts.seconds for each in self._recent]
        steps = self._num_steps - report.step
        mean = Throughput.mean([each.throughput for each in self._recent], seconds)
        # The sum of the steps left varies, and so does the mean that it is estimated from.
        spread = 2 * stdev(seconds) * math.sqrt(steps + steps**2 / len(seconds)) if len(seconds) > 1 else 0.0
        self.progress = Progress(report.step, self._num_steps, steps * fmean(seconds), spread, mean)
        return self.progress


class Reporter:
    """Receive the events of preparing, training and evaluating; override the methods of interest.

    The training thread calls them, so the next step waits until they return. Only `on_stop_request` may interrupt
    another method.
    """

    def on_activity(self, text: str) -> None:
        """Report the start of an activity that takes time, in a few words."""

    def on_count(self, what: str, done: int, total: int | None, unit: str) -> None:
        """Report the progress of an activity.

        Args:
            what: the activity: ``rows``, ``downloading``, ``model``, ``baseline``.
            total: ``None`` if unknown.
            unit: ``bytes``, ``rows``, ``questions``.
        """

    def on_message(self, message: str) -> None:
        """Report a fact in a sentence."""

    def on_warning(self, warning: str) -> None:
        """Report something that needs attention."""

    def on_start(self, progress: Progress) -> None:
        """Report that training starts or resumes."""

    def on_step(self, step: StepReport, progress: Progress) -> None:
        """Report an optimizer step."""

    def on_validation(self, step: int, loss: float, sample: ValidationSample | None) -> None:
        """Report a validation.

        Args:
            step: optimizer steps done.
            loss: nats per target token.
            sample: scores and an answer, if the recipe has ``sample_rows``.
        """

    def on_stop_request(self) -> None:
        """Report a stop signal, from its handler; the run ends when its state is saved."""

    def on_end(self) -> None:
        """Report that training has ended, complete or not."""


class Reporters(Reporter):
    """Pass each event to several reporters, in order."""

    def __init__(self, *reporters: Reporter) -> None:
        self._reporters = reporters

    def on_activity(self, text: str) -> None:
        for each in self._reporters:
            each.on_activity(text)

    def on_count(self, what: str, done: int, total: int | None, unit: str) -> None:
        for each in self._reporters:
            each.on_count(what, done, total, unit)

    def on_message(self, message: str) -> None:
        for each in self._reporters:
            each.on_message(message)

    def on_warning(self, warning: str) -> None:
        for each in self._reporters:
            each.on_warning(warning)

    def on_start(self, progress: Progress) -> None:
        for each in self._reporters:
            each.on_start(progress)

    def on_step(self, step: StepReport, progress: Progress) -> None:
        for each in self._reporters:
            each.on_step(step, progress)

    def on_validation(self, step: int, loss: float, sample: ValidationSample | None) -> None:
        for each in self._reporters:
            each.on_validation(step, loss, sample)

    def on_stop_request(self) -> None:
        for each in self._reporters:
            each.on_stop_request()

    def on_end(self) -> None:
        for each in self._reporters:
            each.on_end()


@contextmanager
def reporting(reporter: Reporter, progress: Progress) -> Iterator[None]:
    """Report start and end of training."""
    reporter.on_start(progress)
    try:
        yield
    finally:
        reporter.on_end()


def describe_losses(report: StepReport) -> str:
    """Format loss, learning rate and gradient norm of a step."""
    z_loss = f"{_GAP}z-loss {report.z_loss:.2g}" if report.z_loss else ""
    scale = "" if report.loss_scale is None else f"{_GAP}loss scale {report.loss_scale:g}"
    skipped = f"{_GAP}overflow: skipped, and the scale halved" if report.is_skipped else ""
    norm = f"{_GAP}norm {report.grad_norm:.2f}"
    return f"loss {report.loss:.4f}{_GAP}lr {report.lr:.2e}{norm}{z_loss}{scale}{skipped}"


def step_log_line(report: StepReport, progress: Progress) -> str:
    """Format the line of ``log.txt`` for a step."""
    assert progress.throughput is not None
    step, left = f"step {report.step}/{progress.num_steps}", f"{clock(progress.seconds_left)} left"
    rates = describe_throughput(report.counts, progress.throughput, verbose=True)
    return _GAP.join([step, describe_losses(report), left, *rates])
