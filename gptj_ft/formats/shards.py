"""One weight file, safetensors or PyTorch's ``.bin``: checked when it is opened, then read one tensor at a time.

Safetensors (https://huggingface.co/docs/safetensors): 8 bytes, the header's length, little-endian; a JSON header
``{name: {dtype, shape, data_offsets}}``; then the data. It is read and written here with plain file calls: a memory
map's touched pages count as used memory, and an `OSError` says which disk error it was.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from torch import Tensor

from gptj_ft.errors import DataError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
ALIGNMENT = 64  # where the data starts


@dataclass(frozen=True)
class Entry:
    """What a file says about one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shard(Protocol):
    """A weight file that was opened."""

    path: Path
    entries: Mapping[str, Entry]

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, in memory of its own."""


def open_shard(path: Path) -> Shard:
    """Open a weight file by its suffix.

    Raises:
        DataError: unreadable, truncated, corrupt, or holding more than tensors.
    """
    try:
        return SafetensorsShard(path) if path.suffix == ".safetensors" else PickleShard(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


class SafetensorsShard:
    """A safetensors file; checked against its size when opened, opened anew for each tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: Mapping[str, Entry] = _read_header(path)

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        buffer = torch.empty(entry.num_bytes, dtype=torch.uint8)
        view, done = buffer.numpy().data, 0
        with self.path.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            while done < entry.num_bytes:  # one call reads 2 GiB at most
                count = file.readinto(view[done:])
                if not count:
                    raise DataError(f"{self.path}: truncated while it was being read")
                done += count
        return buffer.view(entry.dtype).reshape(entry.shape)


class PickleShard:
    """A ``torch.save`` file of tensors; nothing but tensors is ever unpickled, and the data are memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: Mapping[str, Entry] = {
            name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in self._load().items()
        }

    def read(self, name: str) -> Tensor:
        # Mapped anew for each tensor (milliseconds): a map's touched pages stay in memory until it is closed.
        return self._load()[name].clone(memory_format=torch.contiguous_format)

    def _load(self) -> Mapping[str, Tensor]:
        with self.path.open("rb") as file:
            is_bare_pickle = file.read(1) == b"\x80"  # since PyTorch 1.6 the pickle is in a zip file
        if is_bare_pickle:
            raise DataError(f"{self.path}: saved by PyTorch before 1.6, or no weights; load it there and save it again")
        try:
            loaded = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except UnpicklingError as error:
            raise DataError(
                f"{self.path}: holds more than tensors, and loading it could run code; it was not loaded. "
                "Get the model in safetensors form"
            ) from error
        except Exception as error:  # a damaged file can raise anything
            raise DataError(f"{self.path}: truncated or corrupt; get the file again") from error
        if not isinstance(loaded, dict):
            raise DataError(f"{self.path}: expected tensors by name, found {type(loaded).__name__}")
        for name, value in loaded.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise DataError(f"{self.path}: {name!r} is not a tensor but {type(value).__name__}")
        return loaded


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> int:
    """Write a safetensors file, one tensor in memory at a time, and wait until the disk has it.

    Args:
        path: the file, which must not exist.
        tensors: by name, on any device.
        dtype: the type to store; ``None`` keeps each tensor's own.

    Returns: bytes of tensor data.

    Raises:
        OSError: the disk's own.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        stored = dtype or tensor.dtype
        begin, end = end, end + tensor.numel() * stored.itemsize
        header[name] = {"dtype": DTYPE_NAMES[stored], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            stored_tensor = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
            file.write(stored_tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return end


def _read_header(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise DataError(f"{path}: truncated or not a safetensors file ({size} bytes); get the file again")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: _entry(value, 8 + length) for name, value in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: corrupt safetensors header ({error!r}); get the file again") from error
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != end:
            raise DataError(f"{path}: corrupt safetensors header: {name} does not start where the data before it ends")
        end += entry.num_bytes
    if end != size:
        state = "truncated" if size < end else "longer than its header says"
        raise DataError(f"{path}: {state}: {size} bytes, expected {end}; get the file again")
    return entries


def _entry(value: Mapping[str, Any], start: int) -> Entry:
    begin, end = value["data_offsets"]
    entry = Entry(DTYPES[value["dtype"]], tuple(value["shape"]), start + begin)
    if any(type(length) is not int or length < 0 for length in entry.shape) or entry.num_bytes != end - begin:
        raise ValueError(f"{end - begin} bytes for {value['dtype']} of shape {value['shape']}")
    return entry
