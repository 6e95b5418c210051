"""Read the header of a GGUF file: metadata, and type, shape and place of each tensor.

The package ``gguf`` reads it through a memory map and without bounds, so a damaged count would fill the memory.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gptj_ft.errors import DataError, UsageError
from gptj_ft.system.files import inside

GGUF_MAGIC = b"GGUF"
VERSIONS = (2, 3)
GGUF_ALIGNMENT = 32  # of tensor data, unless the metadata say otherwise
STRING, ARRAY = 8, 9
# NumPy's code of each number type; the file is little-endian.
NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
MOST_DIMENSIONS = 4
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    kind: int  # ggml's number of the type
    shape: tuple[int, ...]  # in PyTorch's order
    offset: int  # first byte in the file


@dataclass(frozen=True)
class GgufHeader:
    """Headers of a file, or of all parts of a split file."""

    path: Path
    metadata: Mapping[str, Any]  # of the first part
    tensors: Mapping[str, StoredTensor]


def is_gguf(path: Path) -> bool:
    """Recognize a file by its first bytes; an empty or missing file by its suffix."""
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC or path.suffix.lower() == ".gguf"
    except OSError:
        return False


def files_of_gguf(path: Path) -> list[Path]:
    """Return all parts of a split file by the name of one; an unsplit file alone."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    return [path.with_name(f"{match[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def read_header(path: Path) -> GgufHeader:
    """Read a file's header; for a part of a split file, those of all parts.

    Raises:
        DataError: the file is truncated, damaged or big-endian, or a part is missing.
    """
    parts = files_of_gguf(path)
    for part in parts:
        if not part.is_file():
            raise DataError(f"{part} is missing: {path} is one of {len(parts)} parts of a model; get that file as well")
    headers = [_read_part(part) for part in parts]
    count = headers[0].metadata.get("split.count", 1)
    if count not in (0, len(parts)):
        raise DataError(
            f"{parts[0]}: this is a part of a model split into {count} files, whose names must end in "
            f"-00001-of-{count:05d}.gguf and so on; restore the names, or get the other parts"
        )
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        if twice := tensors.keys() & header.tensors.keys():
            raise DataError(f"{header.path}: holds {min(twice)} again; get the file again")
        tensors |= header.tensors
    return GgufHeader(path, headers[0].metadata, tensors)


def _read_part(path: Path) -> GgufHeader:
    try:
        with inside(path).open("rb") as file:
            return _Parser(path, file).header()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: corrupt GGUF header ({error}); get the file again") from error


class _Parser:
    """Reader of one header that never reads beyond the file's end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file, self._size = path, file, path.stat().st_size

    def header(self) -> GgufHeader:
        if self._bytes(4) != GGUF_MAGIC:
            raise DataError(f"{self.path}: no GGUF file: it does not start with the letters GGUF")
        version = self._number("<u4")
        if version and not version & 0xFFFF:
            raise UsageError(f"{self.path}: big-endian GGUF file; only little-endian is supported")
        if version not in VERSIONS:
            raise UsageError(f"{self.path}: GGUF version {version}; supported are {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = self._number("<u8"), self._number("<u8")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._number("<u4"))
        infos = [self._info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", GGUF_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment {alignment!r}")
        start = -(-self._file.tell() // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, kind, shape, offset in infos:
            if name in tensors:
                raise ValueError(f"{name} is listed twice")
            tensors[name] = StoredTensor(self.path, kind, shape, start + offset)
        return GgufHeader(self.path, metadata, tensors)

    def _info(self) -> tuple[str, int, tuple[int, ...], int]:
        name, num_dimensions = self._string(), self._number("<u4")
        if num_dimensions > MOST_DIMENSIONS:
            raise ValueError(f"{name} has {num_dimensions} dimensions")
        shape = tuple(self._number("<u8") for _ in range(num_dimensions))[::-1]  # ggml's fastest dimension comes first
        if math.prod(shape) >= 2**63:
            raise ValueError(f"{name} has shape {list(shape)}")
        kind = self._number("<u4")
        return name, kind, shape, self._number("<u8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._number("<u4"), self._number("<u8")
            if item in NUMBERS:
                return self._numbers(NUMBERS[item], count)
            if item != STRING:
                raise ValueError(f"array of type {item}")
            return [self._string() for _ in range(count)]
        if kind not in NUMBERS:
            raise ValueError(f"value of type {kind}")
        return self._number(NUMBERS[kind])

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> list[Any]:
        values = np.frombuffer(self._bytes(count * np.dtype(code).itemsize), code)
        if code == "<f4":
            return [float(str(value)) for value in values]  # the shortest decimal: 1e-05, not 9.999999747378752e-06
        numbers: list[Any] = values.tolist()
        return numbers

    def _string(self) -> str:
        return self._bytes(self._number("<u8")).decode()

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count) if count <= self._size else b""
        if len(data) < count:
            raise ValueError(f"truncated: it ends after {self._size:,} bytes")
        return data
