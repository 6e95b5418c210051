"""Read tensors from files in blocks, with several reads in flight, bypassing the page cache."""

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
from gptj_ft.system.direct_io import PAGE, drop_from_cache, open_direct, read_range
from gptj_ft.system.memory import allocate

BLOCK_BYTES = 2**20
_READERS = 8
MARGIN = 2 * PAGE  # per block, for its partial first and last pages
STAGING_BYTES = _READERS * (BLOCK_BYTES + MARGIN)


@dataclass(frozen=True)
class Extent:
    """Contiguous numbers in a file."""

    path: Path
    offset: int  # first byte
    dtype: torch.dtype

    def to(self, out: Tensor, start: int = 0) -> ReadRequest:
        """Return the request that fills a contiguous tensor of any type, starting at number ``start``."""
        return ReadRequest(self.path, self.offset + start * self.dtype.itemsize, self.dtype, out.view(-1))


@dataclass(frozen=True)
class ReadRequest:
    """Numbers in a file, and the flat tensor to fill."""

    path: Path
    offset: int
    dtype: torch.dtype
    out: Tensor

    @property
    def end(self) -> int:
        """First byte after the numbers."""
        return self.offset + len(self.out) * self.dtype.itemsize


class BlockReader:
    """Read files block by block into staging buffers, in threads, and copy from there to the tensors.

    Blocks are small, so that the staging buffers stay in the processor's cache: a virtual disk fills them faster than
    the tensors (measured: 1.2 against 1.0 GB/s). Tensors need no alignment and may have any type.

    Args:
        block_bytes: size of a request; blocks start at multiples of it in the file.
        num_threads: requests in flight.
    """

    def __init__(self, device: torch.device, block_bytes: int = BLOCK_BYTES, num_threads: int = _READERS) -> None:
        self._block_bytes = block_bytes
        self._threads = ThreadPoolExecutor(num_threads, "block", partial(use_own_stream, device))
        memory = allocate(num_threads * (block_bytes + MARGIN), torch.uint8, torch.device("cpu"))
        self._staging = list(memory.view(num_threads, -1))  # one per thread
        self._unpin = pin(memory, device) if has_streams(device) else None

    def read(self, pieces: Iterable[ReadRequest], after: Sequence[StreamEvent] = ()) -> None:
        """Fill the tensors of all pieces, and return when they are filled.

        Args:
            after: work that may still use the tensors; the copies wait for it on their own streams.

        Raises:
            DataError: a file was truncated, or cannot be read.
        """
        tasks = [self._threads.submit(self._read_block, block, after) for block in in_blocks(pieces, self._block_bytes)]
        failed = [error for task in tasks if (error := task.exception())]  # waits for all: they write to the tensors
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Stop the threads when their work is done."""
        self._threads.shutdown(cancel_futures=True)
        if self._unpin:
            self._unpin()

    def _read_block(self, block: Sequence[ReadRequest], after: Sequence[StreamEvent]) -> None:
        path = block[0].path
        # Direct I/O reads whole pages: extend the range to page boundaries on both sides.
        begin, end = min(piece.offset for piece in block) // PAGE * PAGE, max(piece.end for piece in block)
        # There are as many buffers as threads, so one is free; `pop` and `append` are atomic.
        staging = self._staging.pop()
        try:
            descriptor = open_direct(path, os.O_RDONLY)
            try:
                count = read_range(descriptor, staging.numpy().data[: -(-(end - begin) // PAGE) * PAGE], begin)
            finally:
                drop_from_cache(descriptor)
                os.close(descriptor)
            if count < end - begin:
                raise DataError(f"{path}: truncated while it was being read")
            for piece in block:
                source = staging[piece.offset - begin : piece.end - begin]
                # A view in another dtype needs an aligned start; clone a misaligned range.
                is_aligned = (piece.offset - begin) % piece.dtype.itemsize == 0
                copy((source if is_aligned else source.clone()).view(piece.dtype), piece.out, after)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        finally:
            self._staging.append(staging)


def in_blocks(pieces: Iterable[ReadRequest], block_bytes: int) -> list[list[ReadRequest]]:
    """Split pieces at block boundaries; return the pieces of each block, ordered by file and position."""
    blocks: dict[tuple[Path, int], list[ReadRequest]] = {}
    for piece in pieces:
        path, size, out = piece.path, piece.dtype.itemsize, piece.out
        start = 0
        while start < len(out):
            offset = piece.offset + start * size
            block = offset // block_bytes
            # A number across a boundary belongs to the block of its first byte.
            stop = start + -(-((block + 1) * block_bytes - offset) // size)
            blocks.setdefault((path, block), []).append(ReadRequest(path, offset, piece.dtype, out[start:stop]))
            start = stop
    return [blocks[key] for key in sorted(blocks)]
