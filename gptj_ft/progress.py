"""What a run shows while it works: a live line on a terminal, plain lines elsewhere. All of it goes to stderr."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from gptj_ft.machine import gigabytes
from gptj_ft.meters import Meters, Tally

PLAIN_SECONDS = 5.0  # between plain lines


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, as written to ``metrics.jsonl``.

    Attributes:
        step: from 1.
        loss: cross-entropy, mean over the step's target tokens, before the update.
        z_loss: what the z-loss adds to it, with its weight.
        lr: learning rate.
        grad_norm: global, before clipping.
        tally: what was done and what it took.
        meters: its rates.
    """

    step: int
    loss: float
    z_loss: float
    lr: float
    grad_norm: float
    tally: Tally
    meters: Meters

    def to_dict(self) -> dict[str, Any]:
        """Return the line of ``metrics.jsonl``: all figures side by side."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("tally", "meters")}
        return {**own, **asdict(self.tally), **asdict(self.meters)}


class StepProgress:
    """Shows steps as they finish; use it in a ``with`` block."""

    def __init__(self, console: Console, num_steps: int, done: int, quiet: bool = False) -> None:
        self._console, self._num_steps, self._quiet = console, num_steps, quiet
        self._recent: deque[StepReport] = deque(maxlen=20)
        self._last_line = 0.0
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}")
        )  # fmt: skip
        self._task = self._bar.add_task("", total=num_steps, completed=done)
        # On a terminal: the bar, and under it the figures of the last step.
        self._panel = Live(self._bar, console=console) if console.is_terminal and not quiet else None

    def __enter__(self) -> StepProgress:
        if self._panel:
            self._panel.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._panel:
            self._panel.stop()

    def show(self, report: StepReport) -> str:
        """Show a step; return its line, for the log."""
        self._recent.append(report)
        seconds = [each.tally.seconds for each in self._recent]
        remaining = (self._num_steps - report.step) * sum(seconds) / len(seconds)
        learning = f"loss {report.loss:.4f}  lr {report.lr:.2e}  norm {report.grad_norm:.2f}"
        learning += f"  z-loss {report.z_loss:.2g}" if report.z_loss else ""
        speed = "  ".join(meter_texts(report.tally, Meters.mean([each.meters for each in self._recent], seconds)))
        left = f"{clock(remaining)} left"
        whole = f"step {report.step}/{self._num_steps}  {learning}  {left}  {speed}"
        if self._panel:
            self._bar.update(self._task, completed=report.step, description=left)
            self._panel.update(Group(self._bar, Text(learning), Text(speed, no_wrap=False, overflow="fold")))
        elif not self._quiet and self._is_due(report.step):
            self._console.print(whole, highlight=False)
        return whole

    def _is_due(self, step: int) -> bool:
        now = time.monotonic()
        if step in (1, self._num_steps) or now - self._last_line >= PLAIN_SECONDS:
            self._last_line = now
            return True
        return False


def meter_texts(tally: Tally, meters: Meters) -> list[str]:
    """Return the rates of a step as people read them; what does not apply is left out."""
    texts = [
        f"{meters.target_tokens_per_second:,.1f} target tokens/s of {meters.tokens_per_second:,.1f}",
        f"{meters.hardware_gflops:,.1f} GFLOP/s, {meters.hfu:.0%} of matmul",
    ]
    if meters.stall >= 0.005:
        texts.append(f"waiting {meters.stall:.0%}")
    if tally.bytes_read or tally.bytes_written:
        texts.append(f"read {gigabytes(tally.bytes_read)}, wrote {gigabytes(tally.bytes_written)}")
    if tally.device_memory_bytes:
        texts.append(f"{gigabytes(tally.device_memory_bytes)} on the device")
    return [*texts, f"{gigabytes(tally.memory_bytes)} of memory"]


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
