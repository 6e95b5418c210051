"""Run tasks in threads ahead of their consumer and return their results in order, within a memory limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
SizedTask = tuple[int, Callable[[], T]]  # bytes of the result, and the function that makes it
AHEAD_TASKS = 8  # running, or done before the consumer needs them
AHEAD_BYTES = 256 << 20


def run_ordered(tasks: Iterable[SizedTask[T]], num_bytes: int = AHEAD_BYTES) -> Generator[T, None, None]:
    """Yield results in the order of the tasks, while threads work ahead.

    Args:
        num_bytes: memory limit of all pending results; a single result may take more.
    """
    waiting: deque[tuple[int, Future[T]]] = deque()
    remaining, held = iter(tasks), 0
    upcoming = next(remaining, None)
    with ThreadPoolExecutor(AHEAD_TASKS, "ahead") as pool:
        try:
            while waiting or upcoming is not None:
                # Submit ahead while both limits allow; with an empty queue always, or one large result would block
                # forever.
                while upcoming is not None and (
                    not waiting or (len(waiting) < AHEAD_TASKS and held + upcoming[0] <= num_bytes)
                ):
                    held += upcoming[0]
                    waiting.append((upcoming[0], pool.submit(upcoming[1])))
                    upcoming = next(remaining, None)
                size, future = waiting.popleft()
                item = future.result()
                del future  # else it keeps the item in memory while the next ones are made
                yield item
                del item
                held -= size
        finally:
            for _, future in waiting:
                future.cancel()
