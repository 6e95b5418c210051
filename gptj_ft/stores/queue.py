"""The threads behind a store that moves bytes: some read ahead, some write behind, one commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class TransferQueue:
    """Runs transfers beside each other and commits in the order of the calls, each after every write before it.

    A layer's reads and writes wait for its last commit. After a write has failed nothing is committed any more: what
    would follow it (a layer's state, the gradient that replaces the one an update still needs) relies on it.

    Args:
        name: of the threads.
        transfers: how many run at a time in each direction. Where the bytes do not come from a disk, one is enough.
    """

    def __init__(self, name: str, transfers: int = 1) -> None:
        self._reader = ThreadPoolExecutor(transfers, thread_name_prefix=f"{name}-read")
        self._writer = ThreadPoolExecutor(transfers, thread_name_prefix=f"{name}-write")
        self._committer = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-commit")
        self._commits: dict[int, Future[None]] = {}
        self._writes: list[Future[None]] = []  # since the last commit
        self._failure: BaseException | None = None

    def read(self, layer: int, after: Sequence[Future[Any]], task: Callable[[], T]) -> Future[T]:
        """Run ``task`` once the layer's last commit and the transfers in ``after`` have ended."""
        return self._reader.submit(_run_after, [*after, *self._last_commit(layer)], task)

    def write(self, layer: int, task: Callable[[], None]) -> Future[None]:
        """Run ``task`` once the layer's last commit has ended."""
        self._writes.append(self._writer.submit(_run_after, self._last_commit(layer), task))
        return self._writes[-1]

    def commit(self, layer: int, task: Callable[[], None]) -> None:
        """Run ``task`` after everything that was submitted before it."""
        self._commits[layer] = self.then(task)

    def then(self, task: Callable[[], None]) -> Future[None]:
        """Run ``task`` after every write and commit so far, unless one of them failed: then raise what it raised."""
        writes, self._writes = self._writes, []

        def run() -> None:
            if self._failure is not None:
                raise self._failure
            try:
                _run_after(writes, task)
            except BaseException as error:
                self._failure = error
                raise

        return self._committer.submit(run)

    def drain(self) -> None:
        """Wait for everything written; raise what a write or a commit raised."""
        self.then(lambda: None).result()

    def close(self) -> None:
        """Stop the threads when their work is done."""
        for pool in (self._reader, self._writer, self._committer):
            pool.shutdown()

    def _last_commit(self, layer: int) -> list[Future[None]]:
        return [self._commits[layer]] if layer in self._commits else []


def _run_after(earlier: Sequence[Future[Any]], task: Callable[[], T]) -> T:
    for transfer in earlier:
        transfer.result()
    return task()
