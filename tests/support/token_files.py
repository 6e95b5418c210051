"""Write token files of other systems: HDF5 samples, and TFRecords from their format definition."""

from __future__ import annotations

import struct
from pathlib import Path

import h5py
import numpy as np

PAD, EOS, SEP = 50256, 50256, 50300


def sample(tokens: list[int], trained: set[int], length: int, pad: int = PAD) -> list[list[int]]:
    """Return three rows of a document whose ``trained`` token indices are targets."""
    padding = length - (len(tokens) - 1)
    mask = [int(index + 1 in trained) for index in range(len(tokens) - 1)]
    return [tokens[:-1] + [pad] * padding, mask + [0] * padding, tokens[1:] + [pad] * padding]


def write_hdf5(path: Path, data: object, stated: object = None, dtype: str = "int32", **options: object) -> Path:
    array = np.array(data, dtype)
    if array.ndim == 3:
        options = {"chunks": (1, *array.shape[1:]), "compression": "gzip"} | options
    with h5py.File(path, "w") as opened:
        opened.create_dataset("data", data=array, **options)
        if stated is not None:
            opened.attrs["n_examples"] = stated
    return path


def slow_crc32c(data: bytes) -> int:
    """Compute CRC-32C by definition, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = slow_crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32)


def varint(value: int) -> bytes:
    value %= 2**64  # int64 as protobuf writes it: a negative one takes ten bytes
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features: dict[str, bytes]) -> bytes:
    entries = [field(1, field(1, name.encode()) + field(2, feature)) for name, feature in features.items()]
    return field(1, b"".join(entries))


def packed(tokens: list[int]) -> bytes:
    return field(3, field(1, b"".join(map(varint, tokens))))


def record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + masked(length) + payload + masked(payload)


def text_record(tokens: list[int]) -> bytes:
    return record(example({"text": packed(tokens)}))
