"""Run tasks in threads ahead of their consumer, in order and within a memory limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
SizedTask = tuple[int, Callable[[], T]]  # bytes of memory that its result takes, and what makes it
AHEAD_TASKS = 8  # that are under way, or done before they are asked for
AHEAD_BYTES = 256 << 20


def prefetch(tasks: Iterable[SizedTask[T]], num_bytes: int = AHEAD_BYTES) -> Generator[T, None, None]:
    """Yield the results of tasks in their order, while threads work on those that follow.

    Args:
        tasks: the work.
        num_bytes: memory limit of all pending results; one alone may take more.
    """
    waiting: deque[tuple[int, Future[T]]] = deque()
    coming, held = iter(tasks), 0
    upcoming = next(coming, None)
    with ThreadPoolExecutor(AHEAD_TASKS, "ahead") as pool:
        try:
            while waiting or upcoming is not None:
                while upcoming is not None and (
                    not waiting or (len(waiting) < AHEAD_TASKS and held + upcoming[0] <= num_bytes)
                ):
                    held += upcoming[0]
                    waiting.append((upcoming[0], pool.submit(upcoming[1])))
                    upcoming = next(coming, None)
                size, future = waiting.popleft()
                item = future.result()
                del future  # or the item would stay in memory while the next ones are made
                yield item
                del item
                held -= size
        finally:
            for _, future in waiting:
                future.cancel()
