"""Carry clocks between threads through futures; under the schedule ``late`` no future is done early."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from support.accelerator import simulation as sim


def carry_clocks() -> None:
    """Patch `Future` and `ThreadPoolExecutor` to carry clocks, for the rest of the process.

    Locks, lists and queues carry none: ordering by them alone would count as a race.
    """
    future: Any = Future
    pool: Any = ThreadPoolExecutor
    set_result, set_exception, submit = future.set_result, future.set_exception, pool.submit
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

        def run(*a: Any, **k: Any) -> Any:
            sim.merge(sim.now().clock(), clock)
            sim.now().note("start", token)
            return fn(*a, **k)

        return submit(self, run, *args, **kwargs)

    known_done = after(done, bool)

    def patched_done(self: Any) -> Any:
        # A late transfer is never done before somebody waits for it: so missing waits show.
        if sim.is_running() and sim.now().is_late and _is_asked_by_program():
            return False
        return known_done(self)

    future.set_result, future.set_exception = at_end(set_result), at_end(set_exception)
    future.result, future.exception, future.done = after(result), after(exception), patched_done
    pool.submit = patched_submit


def _is_asked_by_program() -> bool:
    return sim.now().program_name(sys._getframe(2).f_code) is not None
