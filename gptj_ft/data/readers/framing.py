"""TFRecord frames: a length and a payload, each with its checksum.

A record is a uint64 length, the masked CRC-32C of these eight bytes, the payload, and its masked CRC-32C; numbers are
little-endian (https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 12
FOOTER_BYTES = 4
POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed
BLOCK_BYTES = 2048


def record_length(header: bytes) -> int | None:
    """Return the payload's length from the `HEADER_BYTES` before it; None if they are no such header."""
    if len(header) < HEADER_BYTES or not is_checksum(header[:8], header[8:HEADER_BYTES]):
        return None
    return int.from_bytes(header[:8], "little")


def is_checksum(data: bytes, stored: bytes) -> bool:
    """Tell whether four bytes of a file are the masked checksum of ``data``."""
    return masked_crc32c(data) == int.from_bytes(stored, "little")


def masked_crc32c(data: bytes) -> int:
    """Return CRC-32C as TFRecords store it: rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of bytes (RFC 3720, appendix B.4).

    A CRC is linear: what a byte adds depends on itself and on how many bytes follow. So a block's is the exclusive or
    of as many table entries, which NumPy takes at once; what came before joins in the first four bytes of the next.
    """
    values = np.frombuffer(data, np.uint8)
    table, rows = _table()
    crc = 0xFFFFFFFF
    for start in range(0, len(values), BLOCK_BYTES):
        block = values[start : start + BLOCK_BYTES].astype(np.intp)
        joined = min(4, len(block))
        block[:joined] ^= [crc >> shift & 0xFF for shift in range(0, 8 * joined, 8)]
        block += rows[BLOCK_BYTES - len(block) :]
        crc = int(np.bitwise_xor.reduce(table.take(block))) ^ crc >> 8 * joined
    return crc ^ 0xFFFFFFFF


@cache
def _table() -> tuple[NDArray[np.uint32], NDArray[np.intp]]:
    """Return what each byte adds to the checksum, and where that stands for each position in a block.

    Entry 256 k + b is for the byte b when k more bytes of its block follow.
    """
    row: NDArray[np.uint32] = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = row >> np.uint32(1) ^ (row & np.uint32(1)) * np.uint32(POLYNOMIAL)
    rows = [row]
    while len(rows) < BLOCK_BYTES:
        rows.append(rows[-1] >> 8 ^ row[rows[-1] & 0xFF])
    return np.concatenate(rows), np.arange(BLOCK_BYTES - 1, -1, -1) * 256
