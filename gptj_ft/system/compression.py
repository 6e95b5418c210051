"""Decompress files and verify masked CRC-32C checksums."""

from __future__ import annotations

import gzip
import io
import lzma
from typing import BinaryIO, cast

import google_crc32c

COMPRESSIONS = {".gz": "gzip", ".xz": "xz", ".zst": "zstandard"}  # by suffix, as in rows.jsonl.gz
# zlib is missing: a text may begin with its two magic bytes.
COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstandard"}
SNIFFED_BYTES = 4096  # enough to detect a file's format and compression


def compression_of(head: bytes) -> str:
    """Detect the compression of a file by its first bytes; empty if there is none."""
    return next((compression for magic, compression in COMPRESSION_MAGIC.items() if head.startswith(magic)), "")


def decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    """Return a stream that decompresses ``raw``; without compression, ``raw`` itself.

    Reading damaged content raises EOFError, zlib.error, lzma.LZMAError, or an OSError without errno.
    """
    if compression == "gzip":
        return cast(BinaryIO, gzip.open(raw))
    if compression == "xz":
        return cast(BinaryIO, lzma.open(raw))
    if compression in ("zstandard", "zlib"):
        import pyarrow

        # pyarrow's gzip codec also accepts zlib headers.
        stream = pyarrow.CompressedInputStream(raw, "zstd" if compression == "zstandard" else "gzip")
        return cast(BinaryIO, io.BufferedReader(stream))
    return raw


def has_checksum(data: bytes, stored: bytes) -> bool:
    """Tell whether four stored bytes are the masked CRC-32C of ``data``.

    TensorFlow's mask rotates the CRC by 15 bits and adds a constant.
    """
    crc = int(google_crc32c.value(data))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == int.from_bytes(stored, "little")
