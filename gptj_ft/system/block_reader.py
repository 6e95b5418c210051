"""Read numbers from files into tensors of any type, in blocks, several in flight, past the page cache."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.errors import DataError
from gptj_ft.system.accelerator import StreamEvent, copy, has_streams, pin, use_own_stream
from gptj_ft.system.direct_io import PAGE, let_go, open_direct, read_range
from gptj_ft.system.memory import allocate

BLOCK_BYTES = 2**20
_READERS = 8
MARGIN = 2 * PAGE  # beside a block, for the pages that it begins and ends in
STAGING_BYTES = _READERS * (BLOCK_BYTES + MARGIN)


@dataclass(frozen=True)
class Extent:
    """Contiguous numbers in a file.

    Attributes:
        path: the file.
        offset: first byte.
        dtype: number type.
    """

    path: Path
    offset: int
    dtype: torch.dtype

    def to(self, out: Tensor, start: int = 0) -> ReadRequest:
        """Return the request that fills a contiguous tensor of any type, from number ``start`` on."""
        return ReadRequest(self.path, self.offset + start * self.dtype.itemsize, self.dtype, out.view(-1))


@dataclass(frozen=True)
class ReadRequest:
    """Numbers of a file, and the flat tensor to fill."""

    path: Path
    offset: int
    dtype: torch.dtype
    out: Tensor

    @property
    def end(self) -> int:
        """First byte behind them in the file."""
        return self.offset + len(self.out) * self.dtype.itemsize


class BlockReader:
    """Threads that read files block by block into staging buffers, and copy from there.

    Blocks are small, so that the staging buffers stay in the processor's cache: a virtual disk fills them faster than
    the tensors (measured: 1.2 and 1.0 GB/s), and they may lie anywhere, and be of any type.

    Args:
        device: device of the tensors.
        block_bytes: size of a request, counted from the start of the file; default 1 MiB.
        num_threads: requests in flight; default 8.
    """

    def __init__(self, device: torch.device, block_bytes: int = BLOCK_BYTES, num_threads: int = _READERS) -> None:
        self._block_bytes = block_bytes
        self._threads = ThreadPoolExecutor(num_threads, "block", partial(use_own_stream, device))
        memory = allocate(num_threads * (block_bytes + MARGIN), torch.uint8, torch.device("cpu"))
        self._staging = list(memory.view(num_threads, -1))  # as many as can be in use
        self._unpin = pin(memory, device) if has_streams(device) else None

    def read(self, pieces: Iterable[ReadRequest], after: Sequence[StreamEvent] = ()) -> None:
        """Fill the tensors of all pieces; they are filled when this returns.

        Args:
            pieces: ranges of files, and the tensors to fill.
            after: work that may still use these tensors; each thread's copies wait for it, on its own stream.

        Raises:
            DataError: a file has become shorter, or cannot be read.
        """
        tasks = [self._threads.submit(self._bring, block, after) for block in in_blocks(pieces, self._block_bytes)]
        failed = [error for task in tasks if (error := task.exception())]  # waits for all: they write to the places
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Stop the threads when their work is done."""
        self._threads.shutdown(cancel_futures=True)
        if self._unpin:
            self._unpin()

    def _bring(self, block: Sequence[ReadRequest], after: Sequence[StreamEvent]) -> None:
        path = block[0].path
        begin, end = min(piece.offset for piece in block) // PAGE * PAGE, max(piece.end for piece in block)
        staging = self._staging.pop()
        try:
            descriptor = open_direct(path, os.O_RDONLY)
            try:
                count = read_range(descriptor, staging.numpy().data[: -(-(end - begin) // PAGE) * PAGE], begin)
            finally:
                let_go(descriptor)
                os.close(descriptor)
            if count < end - begin:
                raise DataError(f"{path}: truncated while it was being read")
            for piece in block:
                found = staging[piece.offset - begin : piece.end - begin]
                is_aligned = (piece.offset - begin) % piece.dtype.itemsize == 0
                copy((found if is_aligned else found.clone()).view(piece.dtype), piece.out, after)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        finally:
            self._staging.append(staging)


def in_blocks(pieces: Iterable[ReadRequest], block_bytes: int) -> list[list[ReadRequest]]:
    """Split pieces at block boundaries; return those of each block, in the order of the files."""
    blocks: dict[tuple[Path, int], list[ReadRequest]] = {}
    for piece in pieces:
        path, size, out = piece.path, piece.dtype.itemsize, piece.out
        start = 0
        while start < len(out):
            offset = piece.offset + start * size
            block = offset // block_bytes
            # A number that lies across the end belongs to the block that it begins in.
            stop = start + -(-((block + 1) * block_bytes - offset) // size)
            blocks.setdefault((path, block), []).append(ReadRequest(path, offset, piece.dtype, out[start:stop]))
            start = stop
    return [blocks[key] for key in sorted(blocks)]
