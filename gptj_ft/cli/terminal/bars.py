"""Show progress: a bar on a terminal; in a log a line now and then, with time and percent."""

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
from gptj_ft.system.units import clock, gigabytes

LOG_SECONDS = 10.0  # between lines of a log at first; the longer something takes, the fewer there are
LOG_SECONDS_AT_MOST = 600.0
BAR_WIDTH = 30
NOTICED_SECONDS = 2.0  # what takes less is not timed
Advance = Callable[[int, int | None], None]
Doing = Callable[[str], None]


@contextmanager
def bar(console: Console, what: str, unit: str = "bytes", then: str = "") -> Iterator[Advance]:
    """Show how far something is.

    Args:
        console: terminal or log; a quiet one shows nothing.
        what: activity, as a participle.
        unit: ``bytes``, or the name of what is counted.
        then: activity when counting starts over; default: the same.

    Yields: callback for (done, total if that is known).
    """
    amount, times = _Amount(what, unit, then or what), LogTimes()
    if is_live(console) and not console.quiet:

        def line() -> RenderableType:
            return drawn(console, amount.what, amount.share, amount.text)

        with Live(get_renderable=line, console=console, refresh_per_second=4, transient=True):
            yield amount.advance
        return

    def advance(done: int, total: int | None) -> None:
        amount.advance(done, total)
        if times.is_due():
            print_log_line(console, f"{amount.what}: {amount.text}")

    yield advance


@contextmanager
def activity(console: Console, what: str) -> Iterator[Doing]:
    """Show what is being done, and for how long, where nothing can be counted: a line of a terminal that goes away.

    A log shows nothing of it.

    Args:
        console: terminal or log; a quiet one shows nothing.
        what: first activity, as a participle.

    Yields: callback for the next activity.
    """
    since = time.monotonic()

    def doing(next_: str) -> None:
        nonlocal what, since
        what, since = next_, time.monotonic()
        live.refresh()

    def line() -> RenderableType:
        taken = time.monotonic() - since
        return Text(f"{what} ..." + (f" {clock(taken)}" if taken > NOTICED_SECONDS else ""))

    if not is_live(console) or console.quiet:
        yield lambda next_: None
        return
    live = Live(
        get_renderable=line,
        console=console,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,  # what libraries keep of the streams while they load must be the streams themselves
        redirect_stderr=False,
    )
    with live:
        live.refresh()
        yield doing


def print_log_line(console: Console, text: str) -> None:
    """Print a line with the time."""
    console.print(Text(f"{datetime.now():%H:%M:%S}{GAP}{text}"), soft_wrap=True)


def drawn(console: Console, head: str, share: float | None, tail: str) -> RenderableType:
    """Return a line with a bar in its middle, if there is room for one and it is known how long it should be."""
    room = width_of(console) - cell_len(head) - cell_len(tail) - 3
    if share is None or room < 8:
        return Text(f"{head}  {tail}")
    line = Table.grid(padding=(0, 1))
    line.add_row(Text(head), ProgressBar(total=1.0, completed=share, width=min(room, BAR_WIDTH)), Text(tail))
    return line


class LogTimes:
    """When a log is due for another line: after ten seconds at first, and less and less often."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()

    def is_due(self) -> bool:
        """Tell whether it is; if so, the next one is due later."""
        now = time.monotonic()
        if now - self._last < min(max(LOG_SECONDS, (now - self._began) / 10), LOG_SECONDS_AT_MOST):
            return False
        self._last = now
        return True


class ItemRate:
    """How fast something goes, from what has been done since it began, or began again."""

    def __init__(self) -> None:
        self._began, self._from, self._done = time.monotonic(), 0, -1

    def left(self, done: int, total: int) -> float | None:
        """Return the seconds that the rest will take; ``None`` while nobody knows."""
        now = time.monotonic()
        if done < self._done or (self._done < 0 and now - self._began < 1.0):  # what was there already took no time
            self._began, self._from = now, done
        self._done = done
        made = done - self._from
        return (total - done) * (now - self._began) / made if made > 0 else None


class _Amount:
    """How much is done, as a share and in words."""

    def __init__(self, what: str, unit: str, then: str) -> None:
        self.what, self._unit, self._then, self._rate, self._done = what, unit, then, ItemRate(), 0
        self.share: float | None = None
        self.text = "..."

    def advance(self, done: int, total: int | None) -> None:
        if done < self._done:
            self.what = self._then
        self._done = done
        left = self._rate.left(done, total) if total else None
        self.share = min(done / total, 1.0) if total else None
        percent = f"{self.share:.0%}, " if self.share is not None else ""
        about = f", {clock(left)} left" if left is not None and total and done < total else ""
        self.text = f"{percent}{self._said(done, total)}{about}"

    def _said(self, done: int, total: int | None) -> str:
        if self._unit == "bytes":
            return f"{gigabytes(done)} of {gigabytes(total)}" if total else gigabytes(done)
        return f"{done:,} of {total:,} {self._unit}" if total else f"{done:,} {self._unit}"
