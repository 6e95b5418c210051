"""Show progress: a bar on a terminal, a line with time and percent now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gptj_ft.cli.terminal.screen import GAP, is_live, width_of
from gptj_ft.system.units import clock as format_seconds
from gptj_ft.system.units import gigabytes

LOG_SECONDS = 10.0  # between the first lines of a log; later lines are rarer
LOG_SECONDS_AT_MOST = 600.0
BAR_WIDTH = 30
NOTICED_SECONDS = 2.0  # shorter activities show no time
Advance = Callable[[int, int | None], None]
Doing = Callable[[str], None]
Clock = Callable[[], float]


@contextmanager
def bar(
    console: Console, name: str, unit: str = "bytes", then: str = "", clock: Clock = time.monotonic
) -> Iterator[Advance]:
    """Show progress.

    Args:
        console: terminal or log; a quiet one shows nothing.
        name: activity, as a participle.
        unit: ``bytes``, or the plural of the counted things.
        then: activity when the count restarts; default: the same.
        clock: source of seconds.

    Yields: callback for (done, total or ``None``).
    """
    amount, times = _Amount(name, unit, then or name, ItemRate(clock)), LogTimes(clock)
    if is_live(console) and not console.quiet:

        def line() -> RenderableType:
            return drawn(console, amount.name, amount.share, amount.text)

        with Live(get_renderable=line, console=console, refresh_per_second=4, transient=True):
            yield amount.advance
        return

    def advance(done: int, total: int | None) -> None:
        amount.advance(done, total)
        if times.is_due():
            print_log_line(console, f"{amount.name}: {amount.text}")

    yield advance


@contextmanager
def activity(console: Console, name: str) -> Iterator[Doing]:
    """Show an activity without a count and its duration on a terminal; logs show nothing.

    Args:
        name: first activity, as a participle.

    Yields: callback for the next activity.
    """
    since = time.monotonic()

    def doing(next_: str) -> None:
        nonlocal name, since
        name, since = next_, time.monotonic()
        live.refresh()

    def line() -> RenderableType:
        taken = time.monotonic() - since
        return Text(f"{name} ..." + (f" {format_seconds(taken)}" if taken > NOTICED_SECONDS else ""))

    if not is_live(console) or console.quiet:
        yield lambda next_: None
        return
    live = Live(
        get_renderable=line,
        console=console,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,  # libraries keep references to the streams while they load
        redirect_stderr=False,
    )
    with live:
        live.refresh()
        yield doing


def print_log_line(console: Console, text: str) -> None:
    """Print a line with the time."""
    console.print(Text(f"{datetime.now():%H:%M:%S}{GAP}{text}"), soft_wrap=True)


def drawn(console: Console, head: str, share: float | None, tail: str) -> RenderableType:
    """Return a line with a bar in the middle, if the share is known and the line has room."""
    room = width_of(console) - cell_len(head) - cell_len(tail) - 3
    if share is None or room < 8:
        return Text(f"{head}  {tail}")
    line = Table.grid(padding=(0, 1))
    line.add_row(Text(head), ProgressBar(total=1.0, completed=share, width=min(room, BAR_WIDTH)), Text(tail))
    return line


class LogTimes:
    """Schedule of log lines: after ten seconds at first, then at growing intervals."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began = self._last = clock()

    def is_due(self) -> bool:
        """Tell whether a line is due; if so, schedule the next one."""
        now = self._clock()
        if now - self._last < min(max(LOG_SECONDS, (now - self._began) / 10), LOG_SECONDS_AT_MOST):
            return False
        self._last = now
        return True


class ItemRate:
    """Rate of a count since it started or restarted."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began, self._from, self._done = clock(), 0, -1

    def left(self, done: int, total: int) -> float | None:
        """Estimate the remaining seconds; ``None`` while unknown."""
        now = self._clock()
        if done < self._done or (self._done < 0 and now - self._began < 1.0):  # items of an earlier session
            self._began, self._from = now, done
        self._done = done
        made = done - self._from
        return (total - done) * (now - self._began) / made if made > 0 else None


class _Amount:
    """Progress as a share and in words."""

    def __init__(self, name: str, unit: str, then: str, rate: ItemRate) -> None:
        self.name, self._unit, self._then, self._rate, self._done = name, unit, then, rate, 0
        self.share: float | None = None
        self.text = "..."

    def advance(self, done: int, total: int | None) -> None:
        if done < self._done:
            self.name = self._then
        self._done = done
        left = self._rate.left(done, total) if total else None
        self.share = min(done / total, 1.0) if total else None
        percent = f"{self.share:.0%}, " if self.share is not None else ""
        about = f", {format_seconds(left)} left" if left is not None and total and done < total else ""
        self.text = f"{percent}{self._count_text(done, total)}{about}"

    def _count_text(self, done: int, total: int | None) -> str:
        if self._unit == "bytes":
            return f"{gigabytes(done)} of {gigabytes(total)}" if total else gigabytes(done)
        return f"{done:,} of {total:,} {self._unit}" if total else f"{done:,} {self._unit}"
