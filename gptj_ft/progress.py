"""What a run shows while it works: a live line on a terminal, plain lines elsewhere. All of it goes to stderr."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

PLAIN_SECONDS = 5.0  # between plain lines


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as written to ``metrics.jsonl``.

    Attributes:
        step: from 1.
        loss: mean over the step's target tokens, before the update.
        lr: learning rate.
        grad_norm: global, before clipping.
        tokens: all tokens of the step.
        target_tokens: those with a loss.
        seconds: wall time of the step.
        waited_seconds: of them, what the computation stood still for the stores.
        memory_bytes: resident memory of the process, or on CUDA the peak on the device.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    target_tokens: int
    seconds: float
    waited_seconds: float
    memory_bytes: int


class StepProgress:
    """Shows steps as they finish; use it in a ``with`` block."""

    def __init__(self, console: Console, num_steps: int, done: int, quiet: bool = False) -> None:
        self._console, self._num_steps, self._quiet = console, num_steps, quiet
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)  # (target tokens, seconds)
        self._last_line = 0.0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"),
                console=console,
            )  # fmt: skip
            self._task = self._bar.add_task("starting", total=num_steps, completed=done)

    def __enter__(self) -> StepProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, report: StepReport) -> str:
        """Show a step; return its line, for the log."""
        self._recent.append((report.target_tokens, report.seconds))
        seconds = sum(seconds for _, seconds in self._recent)
        rate = sum(tokens for tokens, _ in self._recent) / seconds
        remaining = (self._num_steps - report.step) * seconds / len(self._recent)
        stall = report.waited_seconds / report.seconds
        line = (
            f"loss {report.loss:.4f}  lr {report.lr:.2e}  norm {report.grad_norm:.2f}  {rate:,.0f} target tokens/s  "
            f"{clock(remaining)} left  {report.memory_bytes / 1e9:.1f} GB" + (f"  waiting {stall:.0%}" if stall else "")
        )
        whole = f"step {report.step}/{self._num_steps}  {line}"
        if self._bar:
            self._bar.update(self._task, completed=report.step, description=line)
        elif not self._quiet and self._is_due(report.step):
            self._console.print(whole, highlight=False)
        return whole

    def _is_due(self, step: int) -> bool:
        now = time.monotonic()
        if step in (1, self._num_steps) or now - self._last_line >= PLAIN_SECONDS:
            self._last_line = now
            return True
        return False


def clock(seconds: float) -> str:
    """Return a duration as people read it: ``45 s``, ``3 min``, ``2 h 05 min``, ``3 d 4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def gigabytes(size: float) -> str:
    """Return bytes as people read them."""
    if size >= 1e12:
        return f"{size / 1e12:.1f} TB"
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
