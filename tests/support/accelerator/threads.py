"""Carry clocks between threads through futures, and delay threads as the schedule delays streams.

Under the schedule ``late`` no future is done early. The program's `LATE` pools run a task only when somebody waits for
it or for a later task of the pool; under ``random``, some of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from support.accelerator import simulation as sim

LATE = ("-read", "-write", "-commit")  # threads of a store; the ends of their names
POLL_SECONDS = 0.2  # a delayed task of an earlier simulation runs after this time


class Gate:
    """Hold back a task of a pool, and with it the later ones."""

    def __init__(self, pool: Any) -> None:
        self._simulation, self._is_open = sim.now(), threading.Event()
        with sim.LOCK:
            self._gates: list[Gate] = pool.__dict__.setdefault("_gates", [])  # closed ones of the pool, in order
            self._gates.append(self)

    def open(self) -> None:
        """Let the task run, and all earlier ones of its pool."""
        with sim.LOCK:
            while not self._is_open.is_set():
                self._gates.pop(0)._is_open.set()

    def wait(self) -> None:
        """Wait until the gate is open, or the simulation or the program ends."""
        while not self._is_open.wait(POLL_SECONDS):
            if sim.now() is not self._simulation or not threading.main_thread().is_alive():
                self.open()


def carry_clocks() -> None:
    """Patch `Future` and `ThreadPoolExecutor` to carry clocks, for the rest of the process.

    Locks, lists and queues carry none: ordering by them alone would count as a race.
    """
    future: Any = Future
    pool: Any = ThreadPoolExecutor
    set_result, set_exception, submit, shutdown = future.set_result, future.set_exception, pool.submit, pool.shutdown
    result, exception, done = future.result, future.exception, future.done

    def at_end(plain: Callable[..., Any]) -> Callable[..., Any]:
        def patched(self: Any, value: Any) -> Any:
            if sim.is_running():
                self._clock = dict(sim.now().clock())
                sim.now().note("done", self)
            return plain(self, value)

        return patched

    def after(plain: Callable[..., Any], counts: Callable[[Any], bool] = lambda _: True) -> Callable[..., Any]:
        def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
            if plain is not done and hasattr(self, "_gate"):
                self._gate.open()
            found = plain(self, *args, **kwargs)
            if sim.is_running() and counts(found) and hasattr(self, "_clock"):
                sim.merge(sim.now().clock(), self._clock)
                sim.now().note("join", self)
            return found

        return patched

    def patched_submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not sim.is_running():
            return submit(self, fn, *args, **kwargs)
        clock, token = dict(sim.now().clock()), object()
        sim.now().note("submit", token)
        gate = Gate(self) if self._thread_name_prefix.endswith(LATE) else None
        if gate is not None and not sim.now().delays_task():
            gate.open()

        def run(*a: Any, **k: Any) -> Any:
            if gate is not None:
                gate.wait()
            sim.merge(sim.now().clock(), clock)
            sim.now().note("start", token)
            return fn(*a, **k)

        submitted = submit(self, run, *args, **kwargs)
        if gate is not None:
            submitted._gate = gate
        self._clocks = getattr(self, "_clocks", {})
        submitted.add_done_callback(lambda done: sim.merge(self._clocks, getattr(done, "_clock", {})))
        return submitted

    def patched_shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
        for gate in getattr(self, "_gates", [])[-1:]:
            gate.open()
        shutdown(self, *args, **kwargs)
        if sim.is_running() and kwargs.get("wait", True):
            sim.merge(sim.now().clock(), getattr(self, "_clocks", {}))  # its threads have ended

    known_done = after(done, bool)

    def patched_done(self: Any) -> Any:
        # A late transfer is never done before somebody waits for it: so missing waits show.
        if sim.is_running() and sim.now().is_late and _is_asked_by_program():
            return False
        return known_done(self)

    future.set_result, future.set_exception = at_end(set_result), at_end(set_exception)
    future.result, future.exception, future.done = after(result), after(exception), patched_done
    pool.submit, pool.shutdown = patched_submit, patched_shutdown


def _is_asked_by_program() -> bool:
    return sim.now().program_name(sys._getframe(2).f_code) is not None
