"""Handle the signals that stop a command: the first saves and exits, a user's second exits immediately.

Ctrl-C (SIGINT), SIGTERM, SIGHUP (closed terminal) and SIGUSR1 (from Slurm's ``--signal``, before its time limit) have
the same effect: the command says what is saved and exits with 130. This module is imported first, so it must be light.

Python runs a signal handler between two instructions of the main thread. Inside a ``__del__``, a weak reference's
callback or a library's ``except: pass``, the handler's exception is lost, and the command would continue. So a timer
raises it again until it propagates. A library may also replace it by another exception; `StopRequest` then turns that
back into `Stopping`.
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
# `timeout` signals its child and then the group; a launcher forwards a Ctrl-C that the group received already. Signals
# within this time count as one.
SAME_REQUEST_SECONDS = 0.5
RAISE_AGAIN_SECONDS = 0.1
_TIMER: int | None = getattr(signal, "SIGALRM", None)  # Windows has no timer
_STDERR = 2


class Stopping(KeyboardInterrupt):
    """Raised by a stop signal.

    A subclass, because a plain KeyboardInterrupt that leaves an `exec` (which dataclasses use while libraries load)
    makes Python end the process by SIGINT instead of its exit code, even if the exception was caught.
    """


def interrupt() -> None:
    """Raise `Stopping`."""
    raise Stopping


class StopRequest:
    """Handle stop signals in a block, and restore the previous handlers after it.

    SIGHUP stays ignored if it was, as under `nohup`.

    Args:
        on_first: called for the first signal. The default raises `Stopping`; otherwise poll `requested`.
        saved: describes the saved state and how to resume, for the message of an immediate exit.
        owns_process: True for a command. Inside a notebook or another program, only SIGINT is handled, only in the main
            thread, and the second one raises `Stopping` instead of ending the process.
    """

    def __init__(
        self,
        on_first: Callable[[], None] = interrupt,
        saved: Callable[[], str] = lambda: "",
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
        """Install the handlers."""
        if not self._owns_process and threading.current_thread() is not threading.main_thread():
            return  # Python allows signal handlers in the main thread only
        for number in SIGNALS if self._owns_process else (signal.SIGINT,):
            if number in FROM_PEOPLE or signal.getsignal(number) != signal.SIG_IGN:
                # Keep the handler of the outer block, to restore it.
                self._previous[number] = signal.signal(number, self._receive)
        if self._owns_process:
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._report_lost
            if _TIMER is not None:
                self._previous[_TIMER] = signal.signal(_TIMER, self._raise_again)

    def __enter__(self) -> StopRequest:
        self.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Keep the timer running if an exception was just lost and an outer StopRequest can raise it again.
        if _TIMER in self._previous and (_is_propagating() or self._previous[_TIMER] == signal.SIG_DFL):
            _set_timer(0.0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._owns_process:
            sys.unraisablehook = self._previous_hook
        if self.has_become(error):
            raise Stopping from error

    def has_become(self, error: BaseException | None) -> bool:
        """Tell whether a library may have replaced `Stopping` by this error, as pydantic does."""
        is_odd = isinstance(error, Exception) and not isinstance(error, GptjFtError | OSError | MemoryError)
        return is_odd and self.requested and self._on_first is interrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._request(number)
        elif now - self._first[1] >= SAME_REQUEST_SECONDS and _demands_exit(self._first[0], number):
            if not self._owns_process:
                interrupt()
            exit_immediately(self._saved())

    def _request(self, number: int) -> None:
        self._first = self._first or (number, time.monotonic())
        if self._owns_process:
            _set_timer(RAISE_AGAIN_SECONDS)  # before `on_first`, whose exception may be lost
        self._on_first()
        if self._owns_process:
            _set_timer(0.0)  # no exception was raised

    def _raise_again(self, number: int, frame: FrameType | None) -> None:
        if not _is_propagating():  # a second exception would interrupt the clean-up of the first
            self._request(number)

    def _report_lost(self, lost: sys.UnraisableHookArgs) -> None:
        """Ignore a `Stopping` that Python could not raise: the timer raises it again."""
        if not isinstance(lost.exc_value, Stopping):
            self._previous_hook(lost)


def _set_timer(seconds: float) -> None:
    if _TIMER is not None:
        # The second number makes it periodic: the raised exception may be lost again.
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


def _is_propagating() -> bool:
    """Tell whether a `Stopping`, or an error caused by it, is being handled now.

    While it passes through ``finally``, ``except`` and ``with`` blocks, it is the handled error or its context.
    """
    error = sys.exception()
    while error is not None and not isinstance(error, Stopping):
        error = error.__context__
    return error is not None


def _demands_exit(first: int, number: int) -> bool:
    """Tell whether a later signal demands an immediate exit.

    A closing terminal sends SIGHUP twice, from shell and kernel. A batch system sends SIGTERM after SIGUSR1, with time
    left before the kill. An immediate exit would then lose the state that is being saved.
    """
    return number == signal.SIGINT or (number == signal.SIGTERM and first in FROM_PEOPLE)


def exit_immediately(saved: str) -> NoReturn:
    """End the process with all its threads; the files are as consistent as after a kill.

    An exception would wait for the transfers of the stores, and forever for a hanging disk.
    """
    show_cursor = "\x1b[?25h" if os.isatty(_STDERR) else ""  # a progress bar hides it
    with suppress(OSError):
        os.write(_STDERR, f"{show_cursor}\ngptj-ft: stopped at once{'; ' if saved else ''}{saved}\n".encode())
    os._exit(Interrupted.exit_code)


@contextmanager
def stop_message(stopped: Callable[[], str]) -> Iterator[None]:
    """Turn a `Stopping` that leaves the block into `Interrupted` with a message about saved state and resuming."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(stopped()) from None
    except RuntimeError as error:
        if not isinstance(error.__context__, Stopping):
            raise
        raise Interrupted(stopped()) from None  # torch's clean-up of its mode stack failed after the interruption


@contextmanager
def every_ctrl_c() -> Iterator[None]:
    """Make each Ctrl-C raise `KeyboardInterrupt`; in a chat it stops one answer."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def ignore_signals() -> None:
    """Ignore stop signals at the end of a command, so that they cannot change its exit code."""
    _set_timer(0.0)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
