"""The threads behind a store that moves bytes: some read ahead, some write behind, one commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from gptj_ft.system.accelerator import CPU, StreamEvent, Transfer, ended, use_own_stream

T = TypeVar("T")
Events = Sequence[StreamEvent]


class TransferQueue:
    """Runs transfers beside each other and commits in the order of the calls, each after every write before it.

    A layer's reads and writes wait for its last commit. After a write has failed nothing is committed any more: what
    would follow it (a layer's state, the gradient that replaces the one an update still needs) relies on it.

    Args:
        name: name of the threads.
        transfers: number that run at a time in each direction; one is enough where no disk is involved.
        device: device of the transfers.
    """

    def __init__(self, name: str, transfers: int = 1, device: torch.device = CPU) -> None:
        begin = partial(use_own_stream, device)
        self._reader = ThreadPoolExecutor(transfers, f"{name}-read", begin)
        self._writer = ThreadPoolExecutor(transfers, f"{name}-write", begin)
        self._committer = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-commit")
        self._commits: dict[int, Future[None]] = {}
        self._writes: list[Future[None]] = []  # since the last commit
        self._failure: BaseException | None = None

    def read(self, layer: int, after: Sequence[Transfer], task: Callable[[Events], T]) -> Future[T]:
        """Run ``task`` once the layer's last commit and the transfers in ``after`` have ended.

        It is given the events in ``after``: its copies wait for them, on the streams that they are made on.
        """
        return self._reader.submit(_run_after, [*after, *self._last_commit(layer)], task)

    def write(self, layer: int, after: Sequence[Transfer], task: Callable[[Events], None]) -> Future[None]:
        """Run ``task`` likewise."""
        self._writes.append(self._writer.submit(_run_after, [*after, *self._last_commit(layer)], task))
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
                ended(writes)
                task()
            except BaseException as error:
                self._failure = error
                raise

        return self._committer.submit(run)

    def drain(self) -> None:
        """Wait for every write and commit; raise the first error."""
        self.then(lambda: None).result()

    def close(self) -> None:
        """Stop the threads when their work is done."""
        for pool in (self._reader, self._writer, self._committer):
            pool.shutdown()

    def _last_commit(self, layer: int) -> list[Future[None]]:
        return [self._commits[layer]] if layer in self._commits else []


def _run_after(earlier: Sequence[Transfer], task: Callable[[Events], T]) -> T:
    return task(ended(earlier))
