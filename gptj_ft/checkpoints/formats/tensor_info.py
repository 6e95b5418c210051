"""Describe and read the named tensors of a weight file, whole or a few rows at a time."""

from __future__ import annotations

import math
import os
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from gptj_ft.errors import DataError
from gptj_ft.system.direct_io import PAGE, let_go, open_direct, read_range
from gptj_ft.system.memory import borrow

PIECE_BYTES = 32 << 20  # of what is read at a time where a file leaves the choice


@dataclass(frozen=True)
class TensorInfo:
    """Type, shape and place of a tensor in a file.

    Attributes:
        dtype: number type.
        shape: shape in the model.
        offset: first byte in the file, in bytes, if the tensor is contiguous there; else 0.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Return the length of the first axis; a scalar counts as one row."""
        return self.shape[0] if self.shape else 1

    def rows_in(self, num_bytes: int) -> int:
        """Count the rows that fit into so many bytes, one at least."""
        return max(1, num_bytes * self.rows // max(1, self.num_bytes))


def dtype_name(entries: Iterable[TensorInfo]) -> str:
    """Return the name of the type that all tensors have; ``mixed`` if they have several."""
    types = {str(entry.dtype).removeprefix("torch.") for entry in entries}
    return types.pop() if len(types) == 1 else "mixed"


class Shard(Protocol):
    """Opened weight file, or several that hold the same tensors in parts."""

    path: Path
    entries: Mapping[str, TensorInfo]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a tensor, or its rows from ``start`` to ``stop``, on the CPU, in memory of its own."""

    def rows_at_once(self, name: str) -> int:
        """Return the number of rows to read at a time: few enough for little memory, and none read twice."""
        return self.entries[name].rows_in(PIECE_BYTES)


def stored_members(path: Path) -> list[zipfile.ZipInfo]:
    """Return the members of a zip file of weights, stored as they are: nothing in it unfolds to more than the file.

    Raises:
        DataError: it is damaged, a member is compressed, or members say that they are larger than the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, EOFError) as error:
        raise DataError(f"{path}: truncated or corrupt ({error}); get the file again") from error
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise DataError(
                f"{path}: {member.filename} in it is compressed, which weights never are; it was not unpacked. Get the "
                "file again"
            )
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise DataError(f"{path}: its members say that they are larger than the file; get the file again")
    return members


def read_tensor_rows(path: Path, entry: TensorInfo, start: int = 0, stop: int | None = None) -> Tensor:
    """Read rows of a tensor that a file has in one piece.

    It is done past the page cache, which nothing of this size is read from twice, and not by a memory map: its touched
    pages count as used memory, and its errors kill the process.

    Raises:
        DataError: the file has become shorter, or cannot be read.
    """
    stop = entry.rows if stop is None else min(stop, entry.rows)
    shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
    row_bytes = entry.num_bytes // entry.rows if entry.rows else 0
    num_bytes = math.prod(shape) * entry.dtype.itemsize
    begin = entry.offset + start * row_bytes
    before = begin % PAGE  # a transfer past the cache starts and ends on pages
    pages = borrow(-(-(before + num_bytes) // PAGE) * PAGE)
    try:
        descriptor = open_direct(path, os.O_RDONLY)
        try:
            count = read_range(descriptor, pages.numpy().data, begin - before)
        finally:
            let_go(descriptor)
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if count < before + num_bytes:
        raise DataError(f"{path}: truncated while it was being read")
    data = pages[before : before + num_bytes]
    is_aligned = before % entry.dtype.itemsize == 0
    return (data if is_aligned else data.clone()).view(entry.dtype).reshape(shape)
