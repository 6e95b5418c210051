"""What a run shows while it works: a live line on a terminal, plain lines elsewhere. All of it goes to stderr."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gptj_ft.cli.terminal.bars import NOTICED_SECONDS, LogTimes, drawn, log_line
from gptj_ft.cli.terminal.screen import GAP, is_live, time_after, width_of, wrapped
from gptj_ft.system.units import clock, gigabytes
from gptj_ft.training.throughput import StepCounts, Throughput

STDERR = 2
WAITING_NOTICED = 0.05  # share of the time


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as written to ``metrics.jsonl``.

    Attributes:
        step: from 1.
        loss: cross-entropy, mean over the step's target tokens, before the update.
        z_loss: what the z-loss adds to it, with its weight.
        lr: learning rate.
        grad_norm: global, before clipping.
        counts: tokens, seconds, bytes and memory.
        throughput: rates.
    """

    step: int
    loss: float
    z_loss: float
    lr: float
    grad_norm: float
    counts: StepCounts
    throughput: Throughput

    def to_dict(self) -> dict[str, Any]:
        """Return the line of ``metrics.jsonl``: all figures side by side."""
        own = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("counts", "throughput")
        }
        return {**own, **asdict(self.counts), **asdict(self.throughput)}


class StepProgress:
    """Shows steps as they finish; use it in a ``with`` block.

    Args:
        console: where to.
        num_steps: of the run.
        done: of them, before this session.
        seconds_per_step: as forecast; taken until a step has been seen.
        verbose: show what the engine does, too.
    """

    def __init__(
        self, console: Console, num_steps: int, done: int, seconds_per_step: float, verbose: bool = False
    ) -> None:
        self._console, self._num_steps, self._verbose = console, num_steps, verbose
        self._done, self._expected = done, seconds_per_step
        self._recent: deque[StepReport] = deque(maxlen=20)
        self._times, self._doing, self._since = LogTimes(), "", time.monotonic()
        self._stopping = ""
        has_live = is_live(console) and not console.quiet
        self._live = Live(get_renderable=self._drawn, console=console, transient=True) if has_live else None

    def __enter__(self) -> StepProgress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def doing(self, what: str) -> None:
        """Show what is being done now, and how long it takes already."""
        self._doing, self._since = what, time.monotonic()

    def stopping(self) -> None:
        """Show that the run stops when it can be saved; called by a signal, so it prints as little as it can."""
        doing = f" ({self._doing})" if self._doing else ""
        self._stopping = f"stopping when this is done{doing} and saved; Ctrl-C again stops at once, unsaved"
        if self._live is None and not self._console.quiet:
            with suppress(OSError):
                os.write(STDERR, f"{self._stopping}\n".encode())  # its buffer may just be in use

    def show(self, report: StepReport) -> str:
        """Show a step; return its line, for the log."""
        self._recent.append(report)
        self._done = report.step
        step, left = f"step {report.step}/{self._num_steps}", f"{clock(self._seconds_left)} left"
        is_worth_a_line = len(self._recent) == 1 or report.step == self._num_steps or self._times.is_due()
        if self._live is None and is_worth_a_line:
            speed = f"{report.throughput.tokens_per_second:,.0f} tokens/s"
            share = f"{report.step / self._num_steps:.0%}"
            log_line(self._console, GAP.join([step, share, f"loss {report.loss:.4f}", speed, left]))
        return GAP.join([step, _learning(report), left, *self._speed(verbose=True)])

    @property
    def _seconds_left(self) -> float:
        seconds = [each.counts.seconds for each in self._recent] or [self._expected]
        return (self._num_steps - self._done) * sum(seconds) / len(seconds)

    def _speed(self, verbose: bool) -> list[str]:
        seconds = [each.counts.seconds for each in self._recent]
        mean = Throughput.mean([each.throughput for each in self._recent], seconds)
        return describe_throughput(self._recent[-1].counts, mean, verbose)

    def _drawn(self) -> RenderableType:
        """Return the bar, and under it the figures of the last step and what is being done."""
        share, left = self._done / self._num_steps, self._seconds_left
        ends = f"{share:.0%}, {clock(left)} left, done at {time_after(left)}"
        lines = [_learning(self._recent[-1]), GAP.join(self._speed(self._verbose))] if self._recent else []
        taken = time.monotonic() - self._since
        lines += [f"{self._doing}, {clock(taken)}"] if self._doing and taken > NOTICED_SECONDS else []
        lines += [self._stopping] if self._stopping else []
        texts = [line for text in lines for line in wrapped(text, width_of(self._console))]
        return Group(drawn(self._console, f"step {self._done}/{self._num_steps}", share, ends), Text("\n".join(texts)))


def _learning(report: StepReport) -> str:
    z_loss = f"{GAP}z-loss {report.z_loss:.2g}" if report.z_loss else ""
    return f"loss {report.loss:.4f}{GAP}lr {report.lr:.2e}{GAP}norm {report.grad_norm:.2f}{z_loss}"


def describe_throughput(counts: StepCounts, throughput: Throughput, verbose: bool = False) -> list[str]:
    """Return the rates of a step as people read them; what does not apply is left out.

    Args:
        counts: of one step or of a whole run.
        throughput: rates of the same.
        verbose: with what the engine does: FLOPs, and bytes moved.
    """
    memory = f"{gigabytes(counts.memory_bytes)} of memory"
    if counts.device_memory_bytes:
        memory = f"{gigabytes(counts.device_memory_bytes)} on the device, {memory}"
    all_tokens, trained = _rate(throughput.tokens_per_second), _rate(throughput.target_tokens_per_second)
    texts = [f"{all_tokens} tokens/s ({trained} trained on), {memory}"]
    if verbose:
        texts.append(f"{throughput.hardware_gflops:,.1f} GFLOP/s, {throughput.hfu:.0%} of matmul")
    if throughput.stall >= (0.005 if verbose else WAITING_NOTICED):
        texts.append(f"waiting for the stores {throughput.stall:.0%}")
    if verbose and (counts.bytes_read or counts.bytes_written):
        texts.append(f"read {gigabytes(counts.bytes_read)}, wrote {gigabytes(counts.bytes_written)}")
    return texts


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"
