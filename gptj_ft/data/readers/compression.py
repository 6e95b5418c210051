"""gzip, xz, zstandard, zlib: known by their first bytes, unpacked as they are read."""

from __future__ import annotations

import gzip
import io
import lzma
import struct
import zipfile
from pathlib import PurePath
from typing import BinaryIO, cast

SNIFFED_BYTES = 4096
# At the end of a zip archive is the list of what is in it, and at the end of that a record with its size.
END_BYTES, MOST_LIST_BYTES = 2**16 + 22, 2**22
# Suffix -> packing, as in rows.jsonl.gz, and what short names stand for.
PACKED = {".gz": "gzip", ".xz": "xz", ".zst": "zstandard"}
SHORT = {".tgz": ("gzip", ".tar"), ".txz": ("xz", ".tar")}
MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstandard"}


def packing_of(head: bytes) -> str:
    """Return how something that begins with ``head`` is packed; empty if it is not.

    zlib is left out: its two bytes may begin a text.
    """
    return next((packing for magic, packing in MAGIC.items() if head.startswith(magic)), "")


def begins_zlib(head: bytes) -> bool:
    """Tell whether bytes are a header of zlib (RFC 1950), with a window of 32 KiB as everybody writes it."""
    return len(head) >= 2 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0


def suffixes_of(path: PurePath) -> tuple[str, str]:
    """Return the packing that a name promises, or nothing, and the suffix of what is packed."""
    suffix = path.suffix.lower()
    if suffix in PACKED:
        return PACKED[suffix], PurePath(path.stem).suffix.lower()
    return SHORT.get(suffix, ("", suffix))


def names_in_zip(raw: BinaryIO) -> frozenset[str]:
    """Return the names in a zip archive; none if it is damaged, or lists more than any document has."""
    raw.seek(0, io.SEEK_END)
    raw.seek(max(0, raw.tell() - END_BYTES))
    end = raw.read()
    at = end.rfind(b"PK\5\6")
    if at < 0 or b"PK\6\7" in end or int.from_bytes(end[at + 12 : at + 16], "little") > MOST_LIST_BYTES:
        return frozenset()
    try:
        with zipfile.ZipFile(raw) as archive:
            return frozenset(archive.namelist())
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, struct.error):
        return frozenset()


def unpacked(raw: BinaryIO, packing: str) -> BinaryIO:
    """Return a stream of what is packed in ``raw``, or ``raw`` itself.

    Reading raises EOFError, zlib.error, lzma.LZMAError, or an OSError without a number, where it is damaged.
    """
    if packing == "gzip":
        return cast(BinaryIO, gzip.open(raw))
    if packing == "xz":
        return cast(BinaryIO, lzma.open(raw))
    if packing in ("zstandard", "zlib"):
        import pyarrow

        # What inflates gzip there takes the header of zlib too.
        stream = pyarrow.CompressedInputStream(raw, "zstd" if packing == "zstandard" else "gzip")
        return cast(BinaryIO, io.BufferedReader(stream))
    return raw


def peeked(raw: BinaryIO) -> tuple[bytes, BinaryIO]:
    """Return the first bytes of a stream that cannot go back, and a stream that has them still."""
    head = raw.read(SNIFFED_BYTES)
    return head, io.BufferedReader(_Rejoined(head, raw))


class _Rejoined(io.RawIOBase):
    """Bytes, then the stream that they were taken from."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        super().__init__()
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)
