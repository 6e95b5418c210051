"""Write files asynchronously: page-aligned, several requests in flight, past the page cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from gptj_ft.system.direct_io import (
    PAGE,
    REQUESTS_IN_FLIGHT,
    let_go,
    open_direct,
    write_range,
)
from gptj_ft.system.files import SHARED_FILE
from gptj_ft.system.memory import borrow

BUFFER_BYTES = 8 * 2**20  # that are filled, and then written as one request


class Digest(Protocol):
    """Hash of bytes, as in `hashlib` and `xxhash`."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes."""


class WriteBehind:
    """Buffers and threads that several files share; use it in a ``with`` block, at whose end all files are flushed.

    Errors are raised at the next call, or at the end of the block.
    """

    def __init__(self, num_files: int = 1) -> None:
        """Start the threads.

        Args:
            num_files: files open at a time, each of which holds a buffer; default 1.
        """
        self._writers = ThreadPoolExecutor(REQUESTS_IN_FLIGHT, "write-behind")
        self._finisher = ThreadPoolExecutor(1, "finish-file")
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(REQUESTS_IN_FLIGHT + num_files):
            self._free.put(borrow(BUFFER_BYTES))
        self._open: set[int] = set()
        self._error: BaseException | None = None

    def open(self, path: Path) -> PageWriter:
        """Open a file to be written; what it held is lost.

        Raises:
            OSError: the disk's own.
        """
        descriptor = open_direct(path, os.O_RDWR | os.O_CREAT, SHARED_FILE)
        self._open.add(descriptor)
        return PageWriter(self, descriptor)

    def take(self) -> Tensor:
        """Wait for a buffer that is free.

        Raises:
            OSError: the disk's own, of an earlier write.
        """
        buffer = self._free.get()
        if self._error is not None:
            raise self._error
        return buffer

    def write(self, descriptor: int, buffer: Tensor, num_bytes: int, at: int) -> Future[None]:
        """Write whole pages of a buffer, which is free then."""

        def write() -> None:
            try:
                write_range(descriptor, buffer[:num_bytes].numpy().data, at)
            except BaseException as error:
                self._error = self._error or error
                raise
            finally:
                self._free.put(buffer)

        return self._writers.submit(write)

    def then(self, writes: Sequence[Future[None]], task: Callable[[], None]) -> None:
        """Run a task after some writes have succeeded, and after all earlier tasks."""

        def run() -> None:
            try:
                for write in writes:
                    write.result()
                if self._error is None:
                    task()
            except BaseException as error:
                self._error = self._error or error

        self._finisher.submit(run)

    def forget(self, descriptor: int) -> None:
        """Close a file."""
        self._open.discard(descriptor)
        os.close(descriptor)

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._finisher.shutdown(cancel_futures=error is not None)
        self._writers.shutdown()
        for descriptor in self._open:
            os.close(descriptor)
        if error is None and self._error is not None:
            raise self._error


class PageWriter:
    """File being written, from `WriteBehind.open`.

    Attributes:
        size: bytes written so far.
    """

    def __init__(self, behind: WriteBehind, descriptor: int) -> None:
        self._behind, self._descriptor = behind, descriptor
        self.size = self._filled = 0
        self._writes: list[Future[None]] = []
        self._buffer: Tensor | None = None

    def put(self, values: Tensor, dtype: torch.dtype, digest: Digest) -> None:
        """Add numbers, converted to a type, and their bytes to a digest."""
        flat = values.reshape(-1)
        if self.size % dtype.itemsize:  # behind a tensor of a narrower type
            data = flat.to(dtype).view(torch.uint8).numpy().data
            digest.update(data)
            self.write(data)
            return
        while len(flat):
            room = self._room()
            count = min(len(flat), len(room) // dtype.itemsize)
            out = room[: count * dtype.itemsize]
            out.view(dtype).copy_(flat[:count])
            digest.update(out.numpy().data)
            self._add(len(out))
            flat = flat[count:]

    def write(self, data: bytes | memoryview) -> int:
        """Add bytes; return how many."""
        left = memoryview(data).cast("B")
        num_bytes = len(left)
        while left:
            room = self._room().numpy().data
            count = min(len(left), len(room))
            room[:count] = left[:count]
            self._add(count)
            left = left[count:]
        return num_bytes

    def flush(self) -> None:
        """Do nothing: `zipfile` calls it."""

    def finish(self, then: Callable[[], object]) -> None:
        """Truncate, flush and close the file, then call ``then``, all in a thread."""
        descriptor, size = self._descriptor, self.size
        if self._filled:
            self._send()

        def finish() -> None:
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
            let_go(descriptor)
            self._behind.forget(descriptor)
            then()

        self._behind.then(self._writes, finish)

    def _room(self) -> Tensor:
        """Return the rest of the buffer: where the next byte goes, at least."""
        if self._buffer is None:
            self._buffer = self._behind.take()
        return self._buffer[self._filled :]

    def _add(self, count: int) -> None:
        self._filled, self.size = self._filled + count, self.size + count
        if self._filled == BUFFER_BYTES:
            self._send()

    def _send(self) -> None:
        assert self._buffer is not None
        padded = -(-self._filled // PAGE) * PAGE
        self._buffer[self._filled : padded] = 0
        at = self.size - self._filled
        self._writes.append(self._behind.write(self._descriptor, self._buffer, padded, at))
        self._buffer, self._filled = None, 0
