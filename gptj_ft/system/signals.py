"""Signals that ask the command to stop. The first lets it save what it has done; a person's second ends it at once.

Ctrl-C (SIGINT), SIGTERM, SIGHUP (the terminal is gone) and SIGUSR1 (what Slurm's ``--signal`` sends ahead of its time
limit) ask alike: the command says what is kept and exits with 130. Imported before everything else, so it is light.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from gptj_ft.errors import Interrupted

SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
]  # Windows has the first two
FROM_PEOPLE = (signal.SIGINT, signal.SIGTERM)
# `timeout` signals its child and then its group, a launcher hands on the Ctrl-C that the whole group has got: one wish.
SAME_WISH_SECONDS = 0.5
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

    def __enter__(self) -> StopRequest:
        self.take()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = number, now
            self._on_first()
        elif now - self._first[1] >= SAME_WISH_SECONDS and _insists(self._first[0], number):
            if not self._owns_process:
                interrupt()
            end_at_once(self._saved())


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
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
