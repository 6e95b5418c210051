"""Run tasks of a thread pool as late as the program allows: in the thread that waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class LateFuture(Future[Any]):
    """A task that runs when somebody waits for it, after the earlier ones of its pool."""

    def __init__(self, pool: LatePool, task: Callable[[], Any]) -> None:
        super().__init__()
        self._pool, self._task = pool, task

    def run(self) -> None:
        try:
            self.set_result(self._task())
        except Exception as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self._pool.run_until(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._pool.run_until(self)
        return super().exception(timeout)


class LatePool:
    """Replace `ThreadPoolExecutor`: without threads, so that every run takes the same order."""

    def __init__(
        self, max_workers: int, thread_name_prefix: str = "", initializer: Callable[[], Any] | None = None
    ) -> None:
        self._waiting: list[LateFuture] = []

    def submit(self, function: Callable[..., Any], /, *args: Any) -> LateFuture:
        self._waiting.append(LateFuture(self, lambda: function(*args)))
        return self._waiting[-1]

    def run_until(self, future: LateFuture) -> None:
        """Run the waiting tasks, in order, up to this one."""
        while future in self._waiting:
            self._waiting.pop(0).run()

    def shutdown(self) -> None:
        while self._waiting:
            self._waiting.pop(0).run()
