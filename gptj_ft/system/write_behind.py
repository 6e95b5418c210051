"""Write files asynchronously: page-aligned, with several requests in flight, bypassing the page cache."""

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
    drop_from_cache,
    open_direct,
    write_range,
)
from gptj_ft.system.files import SHARED_FILE
from gptj_ft.system.memory import borrow

BUFFER_BYTES = 8 * 2**20  # of one request


class Digest(Protocol):
    """Hash object of `hashlib` or `xxhash`."""

    def update(self, data: memoryview, /) -> None: ...


class WriteBehind:
    """Share buffers and threads between several files, in a ``with`` block that flushes all files at its end.

    A write error is raised by the next call, or at the end of the block.

    Args:
        num_files: files open at the same time; each uses a buffer.
        buffer_bytes: size of a request, a multiple of `PAGE`; default 8 MiB.
    """

    def __init__(self, num_files: int = 1, buffer_bytes: int | None = None) -> None:
        self.buffer_bytes = buffer_bytes or BUFFER_BYTES
        self._writers = ThreadPoolExecutor(REQUESTS_IN_FLIGHT, "write-behind")
        self._finisher = ThreadPoolExecutor(1, "finish-file")
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(REQUESTS_IN_FLIGHT + num_files):
            self._free.put(borrow(self.buffer_bytes))
        self._open: set[int] = set()
        self._error: BaseException | None = None

    def open(self, path: Path) -> PageWriter:
        """Open a file for writing, and overwrite its content."""
        descriptor = open_direct(path, os.O_RDWR | os.O_CREAT, SHARED_FILE)
        self._open.add(descriptor)
        return PageWriter(self, descriptor)

    def take(self) -> Tensor:
        """Wait for a free buffer; raise the error of an earlier write."""
        buffer = self._free.get()
        if self._error is not None:
            raise self._error
        return buffer

    def write(self, descriptor: int, buffer: Tensor, num_bytes: int, at: int) -> Future[None]:
        """Write whole pages of a buffer, then free it."""

        def write() -> None:
            try:
                write_range(descriptor, buffer[:num_bytes].numpy().data, at)
            except BaseException as error:
                self._error = self._error or error
                raise
            finally:
                # Also after an error, or `take` would wait forever.
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

    def close_file(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        os.close(descriptor)

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._finisher.shutdown(cancel_futures=error is not None)
        # Wait for the writers after an error, too: they use the descriptors closed below.
        self._writers.shutdown()
        for descriptor in self._open:
            os.close(descriptor)
        if error is None and self._error is not None:
            raise self._error


class PageWriter:
    """File being written, from `WriteBehind.open`."""

    def __init__(self, behind: WriteBehind, descriptor: int) -> None:
        self._behind, self._descriptor = behind, descriptor
        self.size = self._filled = 0  # bytes of the file, and of the current buffer
        self._writes: list[Future[None]] = []
        self._buffer: Tensor | None = None

    def put(self, values: Tensor, dtype: torch.dtype, digest: Digest) -> None:
        """Append numbers, converted to a type, and add their bytes to a digest."""
        flat = values.reshape(-1)
        if self.size % dtype.itemsize:  # misaligned after a tensor of a narrower type
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
        """Append bytes; return their number."""
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
            # Cut the padding of the last page, and the rest of an overwritten longer file.
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
            # Only after fsync: the kernel does not drop pages that are still to be written.
            drop_from_cache(descriptor)
            self._behind.close_file(descriptor)
            then()

        self._behind.then(self._writes, finish)

    def _room(self) -> Tensor:
        """Return the free part of the buffer, at least one byte."""
        if self._buffer is None:
            self._buffer = self._behind.take()
        return self._buffer[self._filled :]

    def _add(self, count: int) -> None:
        self._filled, self.size = self._filled + count, self.size + count
        if self._filled == self._behind.buffer_bytes:
            self._send()

    def _send(self) -> None:
        assert self._buffer is not None
        padded = -(-self._filled // PAGE) * PAGE  # direct I/O writes whole pages; `finish` truncates the file
        self._buffer[self._filled : padded] = 0
        at = self.size - self._filled
        self._writes.append(self._behind.write(self._descriptor, self._buffer, padded, at))
        self._buffer, self._filled = None, 0
