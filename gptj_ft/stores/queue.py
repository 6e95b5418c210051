"""The two threads behind a store that moves bytes: one reads ahead, one writes behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class TransferQueue:
    """Runs reads in order and writes in order, beside each other; a read waits for earlier writes of its layer.

    After a write has failed none is done any more: what would follow it (a layer's commit, the gradient that replaces
    the one an update still needs) relies on it.
    """

    def __init__(self, name: str) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-write")
        self._last_write: dict[int, Future[None]] = {}
        self._failure: BaseException | None = None

    def read(self, layer: int, after: Sequence[Future[None]], task: Callable[[], T]) -> Future[T]:
        """Run ``task`` once the layer's writes so far and the transfers in ``after`` have ended."""
        earlier = [*after, *([self._last_write[layer]] if layer in self._last_write else [])]

        def run() -> T:
            for transfer in earlier:
                transfer.result()
            return task()

        return self._reader.submit(run)

    def write(self, layer: int, task: Callable[[], None]) -> Future[None]:
        """Run ``task`` after every write submitted before it, unless one of them failed: then raise what it raised."""

        def run() -> None:
            if self._failure is not None:
                raise self._failure
            try:
                task()
            except BaseException as error:
                self._failure = error
                raise

        self._last_write[layer] = self._writer.submit(run)
        return self._last_write[layer]

    def drain(self) -> None:
        """Wait for everything submitted; raise what a write raised."""
        self._reader.submit(lambda: None).result()
        self._writer.submit(lambda: None).result()
        for transfer in self._last_write.values():
            transfer.result()

    def close(self) -> None:
        """Stop both threads when their work is done."""
        self._reader.shutdown()
        self._writer.shutdown()
