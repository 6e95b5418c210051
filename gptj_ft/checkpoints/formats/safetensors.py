"""Read and write safetensors (https://huggingface.co/docs/safetensors): checked when opened, read a few rows at a time.

8 bytes, the header's length, little-endian; a JSON header ``{name: {dtype, shape, data_offsets}}``; then the data.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from gptj_ft.checkpoints.formats.tensor_info import Shard, TensorInfo, read_tensor_rows
from gptj_ft.errors import DataError
from gptj_ft.system.dtypes import FROM_SAFETENSORS, SAFETENSORS_CODES

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
ALIGNMENT = 64  # where the data starts


class SafetensorsShard(Shard):
    """Safetensors file, checked against its size when opened, and opened anew for each tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: Mapping[str, TensorInfo] = _read_header(path)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return read_tensor_rows(self.path, self.entries[name], start, stop)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[int, str]:
    """Write a safetensors file, one tensor in memory at a time, and wait until the disk has it.

    Args:
        path: the file, which must not exist.
        tensors: tensors by name, on any device.
        dtype: the type to store; ``None`` keeps each tensor's own.

    Returns: bytes of tensor data, and the digest of the file.

    Raises:
        OSError: the disk's own.
    """
    digest = xxhash.xxh3_128()
    entries = {name: TensorInfo(dtype or tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with path.open("xb") as file:
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
    """Build the header of a safetensors file of these tensors, in this order."""
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
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _read_header(path: Path) -> dict[str, TensorInfo]:
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


def _entry(value: Mapping[str, Any], start: int) -> TensorInfo:
    begin, end = value["data_offsets"]
    entry = TensorInfo(FROM_SAFETENSORS[value["dtype"]], tuple(value["shape"]), start + begin)
    if any(type(length) is not int or length < 0 for length in entry.shape) or entry.num_bytes != end - begin:
        raise ValueError(f"{end - begin} bytes for {value['dtype']} of shape {value['shape']}")
    return entry
