"""Read weight files, whole or a few rows at a time: safetensors and PyTorch's ``.bin``. Write safetensors.

safetensors (https://huggingface.co/docs/safetensors): 8 bytes, the little-endian length of the header; a JSON header
``{name: {dtype, shape, data_offsets}}``; the data. A ``.bin`` is a zip file with a pickle; nothing but tensors is ever
unpickled.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from gptj_ft.errors import DataError
from gptj_ft.system.direct_io import PAGE, drop_from_cache, open_direct, read_range
from gptj_ft.system.dtypes import FROM_SAFETENSORS, SAFETENSORS_CODES
from gptj_ft.system.memory import borrow

PIECE_BYTES = 32 << 20  # read at a time, if the file format allows partial reads
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
ALIGNMENT = 64  # of the first data byte in the safetensors files written here


@dataclass(frozen=True)
class TensorInfo:
    """Type, shape and offset of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0  # first byte in the file; 0 if the tensor is not contiguous there

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Return the length of the first axis; a scalar counts as one row."""
        return self.shape[0] if self.shape else 1

    def rows_in(self, num_bytes: int) -> int:
        """Count the rows that fit into a number of bytes, at least one."""
        return max(1, num_bytes * self.rows // max(1, self.num_bytes))


def dtype_name(entries: Iterable[TensorInfo]) -> str:
    """Return the name of the type that all tensors have in common; ``mixed`` if they differ."""
    types = {str(entry.dtype).removeprefix("torch.") for entry in entries}
    return types.pop() if len(types) == 1 else "mixed"


class Shard(Protocol):
    """Open weight file, or several files that hold the same tensors in parts."""

    path: Path
    entries: Mapping[str, TensorInfo]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows ``start`` to ``stop`` of a tensor, by default all, in CPU memory that nothing else uses."""

    def rows_at_once(self, name: str) -> int:
        """Return the number of rows to read at a time: few enough for little memory, with no row read twice."""
        return self.entries[name].rows_in(PIECE_BYTES)


def open_shard(path: Path) -> Shard:
    """Open and check a weight file: safetensors by its suffix, else ``.bin``.

    Raises:
        DataError: the file is unreadable, truncated or corrupt, or holds more than tensors.
    """
    try:
        return SafetensorsShard(path) if path.suffix == ".safetensors" else PickleShard(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


class SafetensorsShard(Shard):
    """Safetensors file. Its header is checked against the file's size; each read opens the file anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: Mapping[str, TensorInfo] = _read_header(path)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return read_tensor_rows(self.path, self.entries[name], start, stop)


class PickleShard(Shard):
    """Weight file written by ``torch.save``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(1) == b"\x80":  # a bare pickle; PyTorch 1.6 and later write a zip file
                raise DataError(f"{path}: saved by PyTorch before 1.6, or no weights; load it there and save it again")
        stored_members(path)
        size = path.stat().st_size
        entries: dict[str, TensorInfo] = {}
        self._strided: set[str] = set()  # views and transposed tensors: not contiguous in the file
        # Loading to the meta device reads no data, but records the offset of each storage in the file.
        for name, tensor in _load(path, "meta").items():
            begin = tensor.untyped_storage()._checkpoint_offset
            assert begin is not None, "PyTorch does not say where the data are"
            at = begin + int(tensor.storage_offset()) * tensor.dtype.itemsize
            entry = TensorInfo(tensor.dtype, tuple(tensor.shape), at if tensor.is_contiguous() else 0)
            if not entry.offset:
                self._strided.add(name)
            elif at + entry.num_bytes > size:
                raise DataError(f"{path}: {name} lies beyond its end ({size} bytes); get the file again")
            entries[name] = entry
        self.entries: Mapping[str, TensorInfo] = entries

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if name not in self._strided:
            return read_tensor_rows(self.path, self.entries[name], start, stop)
        # Map the file for each tensor (milliseconds): a map keeps its touched pages in memory until it is closed.
        tensor = _load(self.path, "cpu")[name]
        rows = tensor[start:stop] if tensor.ndim else tensor
        return rows.clone(memory_format=torch.contiguous_format)


def stored_members(path: Path) -> list[zipfile.ZipInfo]:
    """Return the members of a zip file of weights. All are stored uncompressed, so none unpacks to more than its size.

    Raises:
        DataError: the file is damaged, or a member is compressed or claims to be larger than the file.
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
        raise DataError(f"{path}: its members claim to be larger than the file; get the file again")
    return members


def read_tensor_rows(path: Path, entry: TensorInfo, start: int = 0, stop: int | None = None) -> Tensor:
    """Read rows of a tensor that is contiguous in a file."""
    stop = entry.rows if stop is None else min(stop, entry.rows)
    shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
    row_bytes = entry.num_bytes // entry.rows if entry.rows else 0
    num_bytes = math.prod(shape) * entry.dtype.itemsize
    begin = entry.offset + start * row_bytes
    # Direct I/O, because nothing of this size is read twice. No memory map: its touched pages count as used memory, and
    # an I/O error kills the process. A direct read must start and end on page boundaries.
    before = begin % PAGE
    pages = borrow(-(-(before + num_bytes) // PAGE) * PAGE)
    try:
        descriptor = open_direct(path, os.O_RDONLY)
        try:
            count = read_range(descriptor, pages.numpy().data, begin - before)
        finally:
            drop_from_cache(descriptor)
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if count < before + num_bytes:
        raise DataError(f"{path}: truncated while it was being read")
    data = pages[before : before + num_bytes]
    # Tensor.view needs an aligned address. Offsets in foreign files may be odd; then copy.
    is_aligned = before % entry.dtype.itemsize == 0
    return (data if is_aligned else data.clone()).view(entry.dtype).reshape(shape)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[int, str]:
    """Write a new safetensors file with one tensor in memory at a time, and sync it to disk.

    Args:
        tensors: tensors by name, on any device.
        dtype: type to store; ``None`` keeps each tensor's own.

    Returns:
        Bytes of tensor data, and the XXH3-128 digest of the file.
    """
    digest = xxhash.xxh3_128()
    entries = {name: TensorInfo(dtype or tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with path.open("xb") as file:
        # Hash while writing: the digest of the written file costs no second pass over it.
        file.write(header := header_of(entries))
        digest.update(header)
        for tensor in tensors.values():
            stored_tensor = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
            content = stored_tensor.reshape(-1).view(torch.uint8).numpy().data
            digest.update(content)
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return sum(entry.num_bytes for entry in entries.values()), digest.hexdigest()


def header_of(entries: Mapping[str, TensorInfo]) -> bytes:
    """Build the header of a safetensors file that holds these tensors in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.num_bytes
        header[name] = {
            "dtype": SAFETENSORS_CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # the format allows trailing spaces
    return struct.pack("<Q", len(text)) + text


def _read_header(path: Path) -> dict[str, TensorInfo]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        # Check the length before reading: a damaged prefix could ask for exabytes.
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise DataError(f"{path}: truncated or not a safetensors file ({size} bytes); get the file again")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: _entry(value, 8 + length) for name, value in header.items()}
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: corrupt safetensors header ({error!r}); get the file again") from error
    # The data of all tensors must tile the file: a gap or an overlap means a damaged or hostile header.
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != end:
            raise DataError(f"{path}: corrupt safetensors header: {name} does not start where the data before it ends")
        end += entry.num_bytes
    if end != size:
        state = "truncated" if size < end else "longer than its header says"
        raise DataError(f"{path}: {state}: {size} bytes, expected {end}; get the file again")
    return entries


def _entry(value: Mapping[str, Any], start: int) -> TensorInfo:
    begin, end = value["data_offsets"]
    if (code := value["dtype"]) not in FROM_SAFETENSORS:
        raise DataError(f"tensors of type {code!r:.40} are not supported; get the model in fp32, bf16 or fp16")
    entry = TensorInfo(FROM_SAFETENSORS[code], tuple(value["shape"]), start + begin)
    # JSON may hold floats, booleans or negative lengths where integers belong.
    if any(type(length) is not int or length < 0 for length in entry.shape) or entry.num_bytes != end - begin:
        raise ValueError(f"{end - begin} bytes for {value['dtype']} of shape {value['shape']}")
    return entry


def _load(path: Path, device: str) -> Mapping[str, Tensor]:
    try:
        loaded = torch.load(path, map_location=device, weights_only=True, mmap=device != "meta")
    except UnpicklingError as error:
        raise DataError(
            f"{path}: holds more than tensors, and loading it could run code; it was not loaded. "
            "Get the model in safetensors form"
        ) from error
    except Exception as error:  # a damaged file can raise anything
        raise DataError(f"{path}: truncated or corrupt; get the file again") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: expected tensors by name, found {type(loaded).__name__}")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise DataError(f"{path}: {name!r} is not a tensor but {type(value).__name__}")
    return loaded
