"""Read and write NumPy's ``.npz`` as `numpy.savez` does: a zip of uncompressed arrays, read at their offsets."""

from __future__ import annotations

import struct
import zipfile
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from gptj_ft.checkpoints.weight_file import TensorInfo, read_tensor_rows, stored_members
from gptj_ft.errors import DataError
from gptj_ft.system.dtypes import FROM_NUMPY, NUMPY_CODES
from gptj_ft.system.write_behind import PageWriter

LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip member: the lengths of its name and extra field
_HEADER_BYTES = 1024  # of an array; more is rejected


@dataclass(frozen=True)
class NpzArray:
    """Array in a file."""

    path: Path
    name: str
    entry: TensorInfo  # stored shape
    is_reversed: bool  # stored in Fortran order: `read` transposes it
    head: bytes  # before the data, in the zip's member
    crc: int  # CRC-32 of head and data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape[::-1] if self.is_reversed else self.entry.shape

    def read(self) -> Tensor:
        """Return the array.

        Raises:
            DataError: the checksum differs.
        """
        tensor = read_tensor_rows(self.path, self.entry)
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        if zlib.crc32(data, zlib.crc32(self.head)) != self.crc:
            raise DataError(f"{self.path}: {self.name} is damaged: its checksum differs; get the file again")
        return tensor.permute(*reversed(range(tensor.ndim))) if self.is_reversed else tensor


def arrays_of(path: Path) -> list[NpzArray]:
    """Return the arrays of a file in their saved order: ``arr_0``, ``arr_1``, ...

    Raises:
        DataError: the file is missing, damaged or compressed, or holds Python objects, which are never unpickled.
    """
    try:
        members = {member.filename: member for member in stored_members(path)}
        with path.open("rb") as file:
            return [_array(path, file, members, number) for number in range(len(members))]
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, LookupError, ValueError, EOFError) as error:
        raise DataError(f"{path}: truncated or corrupt ({error}); get the file again") from error


def _array(path: Path, file: BinaryIO, members: dict[str, zipfile.ZipInfo], number: int) -> NpzArray:
    name = f"arr_{number}"
    member = members.get(f"{name}.npy")
    if member is None:
        raise DataError(f"{path}: {len(members)} arrays, but no {name}; get the file again")
    # A member is: local zip header, name, extra field, .npy magic and header, data. The local lengths may differ from
    # those in the directory, so read them here.
    file.seek(member.header_offset)
    lengths = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    begin = file.seek(sum(lengths), 1)
    version = np.lib.format.read_magic(file)
    read_header = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
    shape, is_reversed, dtype = read_header(file, _HEADER_BYTES)
    start = file.tell()
    if dtype.hasobject:
        raise DataError(f"{path}: {name} holds Python objects, and loading them could run code; it was not loaded")
    if dtype.str not in FROM_NUMPY:
        raise DataError(f"{path}: {name} is of type {dtype.str}, which no checkpoint uses")
    entry = TensorInfo(FROM_NUMPY[dtype.str], tuple(shape)[::-1] if is_reversed else tuple(shape), start)
    if start - begin + entry.num_bytes != member.file_size:
        raise DataError(
            f"{path}: {name} has {member.file_size} bytes, its header says {start - begin + entry.num_bytes}"
        )
    file.seek(begin)
    return NpzArray(path, name, entry, is_reversed, file.read(start - begin), member.CRC)


class NpzWriter(AbstractContextManager["NpzWriter"]):
    """Writer of arrays, named as by `numpy.savez`; use it in a ``with`` block."""

    def __init__(self, file: PageWriter) -> None:
        # The file cannot seek, so zipfile writes checksums after the arrays; readers use those in the zip's directory.
        self._archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)  # type: ignore[call-overload]  # no close()
        self._count = 0

    def write(self, tensor: Tensor) -> None:
        member = zipfile.ZipInfo(f"arr_{self._count}.npy")  # dated 1980: the same model gives the same bytes
        self._count += 1
        with self._archive.open(member, "w", force_zip64=True) as out:
            header = {"descr": NUMPY_CODES[tensor.dtype], "fortran_order": False, "shape": tuple(tensor.shape)}
            np.lib.format.write_array_header_1_0(out, header)
            out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __exit__(self, *exception: object) -> None:
        """Write the zip's directory."""
        self._archive.close()
