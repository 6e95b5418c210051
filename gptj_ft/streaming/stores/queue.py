"""Threads of a store: some read ahead, some write behind, one commits."""

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
    """Run transfers in parallel and commits in order, each commit after all earlier writes.

    A layer's reads and writes wait for its last commit.

    Args:
        transfers: parallel transfers per direction; one is enough without a disk.
    """

    # After a failed write, no commit follows. A later commit may rely on the write: a new gradient replaces the old one
    # only after the update with the old one is stored.

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

        ``task`` gets the stream events in ``after``: its copies must wait for them on their streams.
        """
        # A task may block its thread without deadlock: the work that it awaits was submitted earlier.
        return self._reader.submit(_run_after, [*after, *self._last_commit(layer)], task)

    def write(self, layer: int, after: Sequence[Transfer], task: Callable[[Events], None]) -> Future[None]:
        """Run ``task`` as `read` does, as part of the next commit."""
        self._writes.append(self._writer.submit(_run_after, [*after, *self._last_commit(layer)], task))
        return self._writes[-1]

    def commit(self, layer: int, task: Callable[[], None]) -> None:
        """Run ``task`` after all earlier writes and commits."""
        self._commits[layer] = self.then(task)

    def then(self, task: Callable[[], None]) -> Future[None]:
        """Run ``task`` after all earlier writes and commits; if one of them has failed, raise its error instead."""
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
        """Finish the work and stop the threads."""
        for pool in (self._reader, self._writer, self._committer):
            pool.shutdown()

    def _last_commit(self, layer: int) -> list[Future[None]]:
        return [self._commits[layer]] if layer in self._commits else []


def _run_after(earlier: Sequence[Transfer], task: Callable[[Events], T]) -> T:
    return task(ended(earlier))
