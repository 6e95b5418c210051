"""Show a run while it trains, on stderr: a live line on a terminal, plain lines in a log."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gptj_ft.cli.terminal.bars import NOTICED_SECONDS, Advance, Doing, LogTimes, activity, bar, drawn, print_log_line
from gptj_ft.cli.terminal.screen import GAP, is_live, panel, time_after, width_of, wrapped
from gptj_ft.system.units import clock
from gptj_ft.training.reporter import Progress, Reporter, StepReport, describe_losses
from gptj_ft.training.throughput import describe_throughput

if TYPE_CHECKING:
    from gptj_ft.training.validation import ValidationSample

STDERR = 2
ANSWER_CHARACTERS = 300


class TerminalReporter(Reporter):
    """Show the events of a run.

    Args:
        console: terminal or log; a quiet one shows nothing.
        verbose: also show FLOPs and moved bytes.
        display: class of the live display.
    """

    def __init__(self, console: Console, verbose: bool = False, display: type[Live] = Live) -> None:
        self._console, self._verbose, self._display = console, verbose, display
        self._progress: Progress | None = None
        self._step: StepReport | None = None
        self._times, self._activity, self._since, self._stopping = LogTimes(), "", time.monotonic(), ""
        self._live: Live | None = None
        self._before_training = ExitStack()
        self._show_activity: Doing | None = None
        self._show_count: Advance | None = None
        self._counted = ""

    def __enter__(self) -> TerminalReporter:
        return self

    def __exit__(self, *error: object) -> None:
        self.end_activity()

    def on_activity(self, text: str) -> None:
        self._activity, self._since = text, time.monotonic()
        if self._counted:
            self.end_activity()
        if self._progress is None and self._show_activity is None:
            self._show_activity = self._before_training.enter_context(activity(self._console, text))
        elif self._show_activity is not None:
            self._show_activity(text)

    def on_count(self, what: str, done: int, total: int | None, unit: str) -> None:
        if self._counted != what:
            self.end_activity()
            self._counted = what
            self._show_count = self._before_training.enter_context(bar(self._console, what, unit))
        if self._show_count:
            self._show_count(done, total)

    def end_activity(self) -> None:
        """Remove the line of an activity or a count, so that other lines can be printed."""
        self._before_training.close()
        self._show_activity, self._show_count, self._counted = None, None, ""

    def on_message(self, message: str) -> None:
        self.end_activity()
        self._console.print(message, highlight=False)

    def on_warning(self, warning: str) -> None:
        self.end_activity()
        self._console.print(f"warning: {warning}", highlight=False, markup=False)

    def on_start(self, progress: Progress) -> None:
        self.end_activity()
        self._progress, self._times = progress, LogTimes()
        if is_live(self._console) and not self._console.quiet:
            self._live = self._display(get_renderable=self._drawn, console=self._console, transient=True)
            self._live.start()

    def on_step(self, step: StepReport, progress: Progress) -> None:
        is_first = self._step is None
        self._step, self._progress = step, progress
        is_worth_a_line = is_first or step.step == progress.num_steps or self._times.is_due()
        if self._live is None and is_worth_a_line:
            position = f"step {step.step}/{progress.num_steps}", f"{step.step / progress.num_steps:.0%}"
            speed = f"{step.throughput.tokens_per_second:,.0f} tokens/s"
            left = f"{clock(progress.seconds_left)} left"
            print_log_line(self._console, GAP.join([*position, f"loss {step.loss:.4f}", speed, left]))

    def on_validation(self, step: int, loss: float, sample: ValidationSample | None) -> None:
        """Show loss and scores, and one answer on a terminal; a log gets no text of rows."""
        self._console.print(f"validation loss after {step} steps: {loss:.4f}", highlight=False)
        if sample is not None:
            rows = [("scores", "  ".join(f"{name} {value:.2f}" for name, value in sample.scores.items()))]
            if self._console.is_terminal:
                texts = {"expected": sample.expected, "answer": sample.answer}
                rows += [(name, text[:ANSWER_CHARACTERS]) for name, text in texts.items()]
            panel(self._console, "", rows)

    def on_stop_request(self) -> None:
        """Announce that the run stops after the current step. Runs in a signal handler, so it bypasses buffers."""
        current = f" ({self._activity})" if self._activity else ""
        self._stopping = f"stopping after this step{current} is saved; Ctrl-C again stops at once, unsaved"
        if self._live is None and not self._console.quiet:
            with suppress(OSError):
                os.write(STDERR, f"{self._stopping}\n".encode())  # the signal may have interrupted a buffered write

    def on_end(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _drawn(self) -> RenderableType:
        """Return the bar with the numbers of the last step and the current activity under it."""
        progress = self._progress
        assert progress is not None
        share, left = progress.step / progress.num_steps, progress.seconds_left
        ends = f"{share:.0%}, {clock(left)} left, done at {time_after(left)}"
        lines = []
        if self._step and progress.throughput:
            rates = describe_throughput(self._step.counts, progress.throughput, self._verbose)
            lines = [describe_losses(self._step), GAP.join(rates)]
        taken = time.monotonic() - self._since
        lines += [f"{self._activity}, {clock(taken)}"] if self._activity and taken > NOTICED_SECONDS else []
        lines += [self._stopping] if self._stopping else []
        texts = [line for text in lines for line in wrapped(text, width_of(self._console))]
        head = f"step {progress.step}/{progress.num_steps}"
        return Group(drawn(self._console, head, share, ends), Text("\n".join(texts)))
