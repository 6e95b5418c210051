"""The threads behind a store that moves bytes: some read ahead, one writes behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class TransferQueue:
    """Runs writes in the order of the calls, and reads beside them; a read waits for its layer's last commit.

    After a write has failed none is done any more: what would follow it (a layer's commit, the gradient that replaces
    the one an update still needs) relies on it.
    """

    def __init__(self, name: str, readers: int = 1) -> None:
        self._reader = ThreadPoolExecutor(readers, thread_name_prefix=f"{name}-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-write")
        self._commits: dict[int, Future[None]] = {}
        self._failure: BaseException | None = None

    def read(self, layer: int, after: Sequence[Future[Any]], task: Callable[[], T]) -> Future[T]:
        """Run ``task`` once the layer's last commit and the transfers in ``after`` have ended."""
        earlier = [*after, *([self._commits[layer]] if layer in self._commits else [])]

        def run() -> T:
            for transfer in earlier:
                transfer.result()
            return task()

        return self._reader.submit(run)

    def write(self, task: Callable[[], None]) -> Future[None]:
        """Run ``task`` after every write submitted before it, unless one of them failed: then raise what it raised."""

        def run() -> None:
            if self._failure is not None:
                raise self._failure
            try:
                task()
            except BaseException as error:
                self._failure = error
                raise

        return self._writer.submit(run)

    def commit(self, layer: int, task: Callable[[], None]) -> None:
        """Run ``task`` as a write that later reads of the layer wait for."""
        self._commits[layer] = self.write(task)

    def drain(self) -> None:
        """Wait for every write submitted; raise what one of them raised."""
        self.write(lambda: None).result()

    def close(self) -> None:
        """Stop the threads when their work is done."""
        self._reader.shutdown()
        self._writer.shutdown()
