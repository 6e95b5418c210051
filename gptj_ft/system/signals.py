"""Signals that ask the command to stop. The first lets it save what it has done; a person's second ends it at once.

Ctrl-C (SIGINT), SIGTERM, SIGHUP (the terminal is gone) and SIGUSR1 (what Slurm's ``--signal`` sends ahead of its time
limit) ask alike: the command says what is kept and exits with 130. Imported before everything else, so it is light.

Python runs the handler of a signal in the middle of whatever the main thread does. Where that is a ``__del__``, the
callback of a weak reference or a library's ``except: pass``, the error that the handler raises gets lost, and the
command would run on to its end. So a timer asks again until the error is on its way to those who wait for it. A library
may also make another error of it: what leaves `StopRequest` then is a `Stopping` again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn

from gptj_ft.errors import GptjFtError, Interrupted

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
]  # Windows has the first two
FROM_PEOPLE = (signal.SIGINT, signal.SIGTERM)
# `timeout` signals its child and then its group, a launcher hands on the Ctrl-C that the whole group has got: one wish.
SAME_WISH_SECONDS = 0.5
ASK_AGAIN_SECONDS = 0.1
_TIMER: int | None = getattr(signal, "SIGALRM", None)  # Windows has no timer
_STDERR = 2


class Stopping(KeyboardInterrupt):
    """Raised by a signal.

    A class of its own, for Python notes when a plain KeyboardInterrupt leaves the `exec` of a text, as dataclasses use
    it while libraries load, and ends the process by SIGINT instead of its exit code, though the error was caught.
    """


def interrupt() -> None:
    """Stop what is being done: there is nothing that has to be brought to an end first."""
    raise Stopping


def nothing_more() -> str:
    """Say nothing about what is saved."""
    return ""


class StopRequest:
    """Takes the signals that ask to stop while it is entered; what took them before has them again afterwards.

    SIGHUP stays ignored where it was: that is what `nohup` is for.

    Args:
        on_first: called by the first; the default raises `Stopping`. Where it returns, `requested` tells.
        saved: says what is saved and how to go on, for the case that a second one ends the process.
        owns_process: whether this is a command of its own. Else, in somebody's notebook or program, only SIGINT is
            taken, in the main thread alone, and a second one raises `Stopping` instead of ending the process.
    """

    def __init__(
        self,
        on_first: Callable[[], None] = interrupt,
        saved: Callable[[], str] = nothing_more,
        owns_process: bool = True,
    ) -> None:
        self._on_first, self._saved, self._owns_process = on_first, saved, owns_process
        self._first: tuple[int, float] | None = None
        self._previous: dict[int, Any] = {}
        self._previous_hook: Any = None

    @property
    def requested(self) -> bool:
        return self._first is not None

    def take(self) -> None:
        """Take the signals from now on."""
        if not self._owns_process and threading.current_thread() is not threading.main_thread():
            return  # Python lets no other thread take signals
        for number in SIGNALS if self._owns_process else (signal.SIGINT,):
            if number in FROM_PEOPLE or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        if self._owns_process:
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._report_lost
            if _TIMER is not None:
                self._previous[_TIMER] = signal.signal(_TIMER, self._ask_again)

    def __enter__(self) -> StopRequest:
        self.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # One that was lost just before goes on to whoever takes the signals outside this.
        if _TIMER in self._previous and (_is_on_its_way() or self._previous[_TIMER] == signal.SIG_DFL):
            _set_timer(0.0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._owns_process:
            sys.unraisablehook = self._previous_hook
        if self.has_become(error):
            raise Stopping from error

    def has_become(self, error: BaseException | None) -> bool:
        """Tell whether an error may be what a library has made of a `Stopping`: pydantic keeps but its name."""
        is_odd = isinstance(error, Exception) and not isinstance(error, GptjFtError | OSError | MemoryError)
        return is_odd and self.requested and self._on_first is interrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._ask(number)
        elif now - self._first[1] >= SAME_WISH_SECONDS and _insists(self._first[0], number):
            if not self._owns_process:
                interrupt()
            end_at_once(self._saved())

    def _ask(self, number: int) -> None:
        self._first = self._first or (number, time.monotonic())
        if self._owns_process:
            _set_timer(ASK_AGAIN_SECONDS)
        self._on_first()
        if self._owns_process:
            _set_timer(0.0)  # nothing was raised that could get lost

    def _ask_again(self, number: int, frame: FrameType | None) -> None:
        if not _is_on_its_way():  # else it would end what cleans up
            self._ask(number)

    def _report_lost(self, lost: sys.UnraisableHookArgs) -> None:
        """Say nothing of a `Stopping` that Python cannot raise: it is raised again."""
        if not isinstance(lost.exc_value, Stopping):
            self._previous_hook(lost)


def _set_timer(seconds: float) -> None:
    if _TIMER is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


def _is_on_its_way() -> bool:
    """Tell whether a `Stopping`, or an error that has come of it, ends what is being done.

    For as long as it passes through ``finally``, ``except`` and ``with``, it is the error that they handle, or the
    context of that: no clean-up on its way is disturbed.
    """
    error = sys.exception()
    while error is not None and not isinstance(error, Stopping):
        error = error.__context__
    return error is not None


def _insists(first: int, number: int) -> bool:
    """Tell whether a later signal says more than the first.

    A terminal that closes sends SIGHUP from the shell and from the kernel; a batch system sends SIGTERM after SIGUSR1,
    with time left until it kills: to end at once then would lose what is just being saved.
    """
    return number == signal.SIGINT or (number == signal.SIGTERM and first in FROM_PEOPLE)


def end_at_once(saved: str) -> NoReturn:
    """End the process here and now, threads and all; what is on the disk is as a kill would leave it: whole.

    Raising an error instead would wait for the stores to end their transfers, or for ever for a disk that hangs.
    """
    shown = "\x1b[?25h" if os.isatty(_STDERR) else ""  # the cursor, which a progress bar hides
    with suppress(OSError):
        os.write(_STDERR, f"{shown}\ngptj-ft: stopped at once{'; ' if saved else ''}{saved}\n".encode())
    os._exit(Interrupted.exit_code)


@contextmanager
def stop_says(stopped: Callable[[], str]) -> Iterator[None]:
    """Say what is kept, and how to go on, when a signal ends what is done inside."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(stopped()) from None
    except RuntimeError as error:
        if not isinstance(error.__context__, Stopping):
            raise
        raise Interrupted(stopped()) from None  # torch's own clean-up has failed on the way out: its stack of modes


@contextmanager
def every_ctrl_c() -> Iterator[None]:
    """Have each Ctrl-C raise `KeyboardInterrupt`, for a conversation in which it stops one answer after the other."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def ignore_signals() -> None:
    """Take no notice any more: everything is done and said, and the exit code is to tell so."""
    _set_timer(0.0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
