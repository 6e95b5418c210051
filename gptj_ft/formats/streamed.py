"""Tensors from one checkpoint into the files of another, a few megabytes at a time, and on from where it was killed."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from gptj_ft.formats.entries import Entry
from gptj_ft.formats.huggingface import Checkpoint
from gptj_ft.formats.shards import header_of
from gptj_ft.stores import allocate
from gptj_ft.stores.blockio import PAGE, open_direct, read_range, write_range

T = TypeVar("T")
AHEAD = 2  # pieces that are read before they are asked for
BUFFER_BYTES = 64 << 20  # that are written at a time, in several requests
SYNC_BYTES = 256 << 20  # after so many, the disk has to have them, and a later process goes on from there
Convert = Callable[[str, Tensor], Tensor]


def pieces(checkpoint: Checkpoint, name: str, rows: int | None = None) -> Iterator[Tensor]:
    """Yield a tensor a few rows at a time, first to last; ``rows`` at a time, or as many as are best for its file."""
    entry = checkpoint.entry(name)
    if not entry.shape:
        yield checkpoint.read(name)
        return
    rows = rows or checkpoint.rows_at_once(name)
    for start in range(0, entry.rows, rows):
        yield checkpoint.read(name, start, start + rows)


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield what another thread takes from an iterator meanwhile, a little ahead; its errors are raised here."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(AHEAD)
    is_over = threading.Event()

    def put(item: T | None, error: BaseException | None = None) -> None:
        while not is_over.is_set():
            try:
                return ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def take() -> None:
        try:
            for item in items:
                put(item)
                if is_over.is_set():
                    return
                del item  # or it would stay in memory while the next is read
            put(None)
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=take, name="read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
            del item
    finally:
        is_over.set()
        thread.join()


def write_streamed(path: Path, entries: Mapping[str, Entry], checkpoint: Checkpoint, convert: Convert) -> None:
    """Write a safetensors file; if another process has begun it, go on behind the last tensor that the disk has.

    Args:
        path: the file. Until it is whole it has another name.
        entries: its tensors, in this order.
        checkpoint: where they come from, under the same names.
        convert: what to make of each piece of a tensor.

    Raises:
        OSError: the disk's own.
        DataError: what reading and ``convert`` raise.
    """
    part, mark = path.with_name(path.name + ".part"), path.with_name(path.name + ".mark")
    header, names = header_of(entries), list(entries)
    num_done = int(mark.read_text()) if mark.is_file() and part.is_file() else 0
    begin = len(header) + sum(entries[name].num_bytes for name in names[:num_done])
    with PageWriter(part, begin if num_done else 0) as file:
        if not num_done:
            file.write(memoryview(header))
        stream = ((name, piece) for name in names[num_done:] for piece in pieces(checkpoint, name))
        left = {name: entries[name].num_bytes for name in names[num_done:]}
        for name, piece in ahead(stream):
            data = convert(name, piece).contiguous().reshape(-1).view(torch.uint8)
            del piece
            file.write(data.numpy().data)
            left[name] -= len(data)
            if not left[name]:
                num_done += 1
                if file.unsynced >= SYNC_BYTES:
                    file.sync()
                    _set_mark(mark, num_done)
        file.sync()
    assert not any(left.values()), "a tensor had other bytes than its header says"
    part.replace(path)
    mark.unlink(missing_ok=True)


class PageWriter:
    """Writes a file from a place on, past the page cache, in whole pages; use it in a ``with`` block.

    Attributes:
        unsynced: bytes since the last `sync`.
    """

    def __init__(self, path: Path, begin: int) -> None:
        """Open a file; what it has before ``begin`` stays.

        Raises:
            OSError: the disk's own.
        """
        self.unsynced = 0
        self._pages = allocate(BUFFER_BYTES, torch.uint8, torch.device("cpu")).numpy().data
        self._at, self._filled = begin - begin % PAGE, begin % PAGE  # where the buffer goes, and what it holds
        self._descriptor = open_direct(path, os.O_RDWR | os.O_CREAT)
        if self._filled:
            read_range(self._descriptor, self._pages[:PAGE], self._at)

    def write(self, data: memoryview) -> None:
        """Add bytes."""
        self.unsynced += len(data)
        while len(data):
            count = min(len(data), BUFFER_BYTES - self._filled)
            self._pages[self._filled : self._filled + count] = data[:count]
            self._filled, data = self._filled + count, data[count:]
            if self._filled == BUFFER_BYTES:
                write_range(self._descriptor, self._pages, self._at)
                self._at, self._filled = self._at + BUFFER_BYTES, 0

    def sync(self) -> None:
        """Have all of it on the disk, and nothing behind it."""
        whole = self._filled - self._filled % PAGE
        padded = whole + (PAGE if self._filled > whole else 0)
        write_range(self._descriptor, self._pages[:padded], self._at)
        os.ftruncate(self._descriptor, self._at + self._filled)
        os.fsync(self._descriptor)
        self._pages[: self._filled - whole] = bytes(self._pages[whole : self._filled])
        self._at, self._filled, self.unsynced = self._at + whole, self._filled - whole, 0

    def __enter__(self) -> PageWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)


def _set_mark(mark: Path, num_done: int) -> None:
    new = mark.with_name(mark.name + ".new")
    new.write_text(str(num_done))
    new.replace(mark)
