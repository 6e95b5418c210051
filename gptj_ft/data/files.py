"""What a user names -> the files that are read: their format, by name and by content, and how they are packed."""

from __future__ import annotations

import glob
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from gptj_ft.errors import DataError, UsageError, did_you_mean

# Suffix -> format. Those of one format are read by the same reader.
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "txt",
}
PACKED = {".gz": "gzip", ".xz": "xz", ".zst": "zstandard"}
SNIFFED_BYTES = 4096
# What a file may begin with, and what it is then.
MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstandard", b"PAR1": "parquet"}
FOREIGN = {
    b"PK\x03\x04": "a zip archive (or a spreadsheet): unpack it, or save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an old Office document: save it as CSV or plain text",
    b"%PDF": "a PDF: convert it to plain text first",
    b"\xff\xfe": "in UTF-16: save it as UTF-8, e.g. `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "in UTF-16: save it as UTF-8, e.g. `iconv -f UTF-16 -t UTF-8`",
}
DATASET_FILES = ("dataset_dict.json", "dataset_info.json")  # of a folder that `datasets` has saved


@dataclass(frozen=True)
class File:
    """A file of rows.

    Attributes:
        path: as the user named it, or a folder that `datasets` has saved.
        format: which reader takes it.
        packing: gzip, xz or zstandard; empty if it is not packed.
        notes: what is odd about it, in sentences.
    """

    path: Path
    format: str
    packing: str = ""
    notes: tuple[str, ...] = ()


def find_files(source: Path) -> list[File]:
    """Return the files that a path, a folder or a pattern stands for, in the order of their names.

    Raises:
        UsageError: there is nothing (with the nearest name), or nothing in the folder that could be rows.
        DataError: a file that cannot be rows.
    """
    if source.is_dir():
        return [File(source, "dataset")] if is_saved_dataset(source) else _files_in(source)
    if not source.exists() and glob.has_magic(str(source)):
        found = [Path(name) for name in sorted(glob.glob(str(source), recursive=True)) if Path(name).is_file()]
        if not found:
            raise UsageError(f"no file matches {source}")
        return [identify(path) for path in found]
    require_file(source)
    return [identify(source)]


def is_saved_dataset(folder: Path) -> bool:
    """Tell whether a folder is one that `datasets` has saved."""
    return any((folder / name).is_file() for name in DATASET_FILES)


def identify(path: Path) -> File:
    """Return a file with its format: what its name says, unless its content says otherwise.

    Raises:
        UsageError: not readable.
        DataError: neither name nor content is of a kind that is read here.
    """
    try:
        with path.open("rb") as opened:
            head = opened.read(SNIFFED_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    by_content = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "")
    notes = []
    named = PACKED.get(path.suffix.lower(), "")
    packing = by_content if by_content in PACKED.values() else ""
    suffix = Path(path.stem).suffix.lower() if named else path.suffix.lower()
    if packing and packing != named:
        notes.append(f"{path} is packed by {packing}, which its name does not say")
    if named and not packing and head:
        notes.append(f"{path} is not packed by {named} as its name says")
    if packing:
        with opened_file(File(path, "", packing)) as unpacked:
            head = unpacked.read(SNIFFED_BYTES)
        by_content = "parquet" if head.startswith(b"PAR1") else ""
    for magic, what in FOREIGN.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {what}")
    by_name = SUFFIXES.get(suffix, "")
    format_ = by_content or _format_of(head, by_name)
    if not format_:
        raise DataError(
            f"{path}: unknown suffix '{suffix}'; rows are read from {', '.join(SUFFIXES)}, also packed as "
            f"{', '.join(PACKED)}"
        )
    if by_name and format_ != by_name:
        notes.append(f"{path} is read as {format_}, which it is, not as the {by_name} of its name")
    return File(path, format_, packing, tuple(notes))


@contextmanager
def opened_file(file: File) -> Iterator[BinaryIO]:
    """Open a file for reading, unpacked.

    Raises:
        UsageError: it cannot be read.
        DataError: what it is packed by is damaged, or it is cut short.
    """
    try:
        with file.path.open("rb") as raw, _unpacked(raw, file.packing) as opened:
            yield opened
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{file.path}: damaged or cut short: {error}") from error
    except OSError as error:
        if file.packing and error.errno is None:  # zstandard's way to say the same
            raise DataError(f"{file.path}: damaged or cut short: {error}") from error
        raise UsageError(f"cannot read {file.path}: {error.strerror or error}") from error


def require_file(path: Path) -> None:
    """Check that a path exists.

    Raises:
        UsageError: it does not; names the nearest, or the data set on the Hub that may be meant.
    """
    if not path.exists():
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings)
        if (
            not hint
            and path.suffix.lower() not in (*SUFFIXES, *PACKED)
            and re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path))
        ):
            hint = f"; if that is a data set on the Hub, write hub:{path}"
        raise UsageError(f"no such file: {path}{hint}")


def _files_in(folder: Path) -> list[File]:
    """Return the files of rows in a folder and below; hidden ones, and what is of no known kind, are left out."""
    found = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        suffix = Path(path.stem).suffix if path.suffix.lower() in PACKED else path.suffix
        if path.is_file() and not hidden and suffix.lower() in SUFFIXES:
            found.append(path)
    if not found:
        raise UsageError(
            f"{folder} is a folder, and not prepared data (no manifest.json in it), nor are there files of rows in it "
            f"({', '.join(SUFFIXES)})"
        )
    return [identify(path) for path in found]


def _format_of(head: bytes, by_name: str) -> str:
    """Return the format of a text by its beginning, where that leaves no doubt; else what its name says."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    line = head.partition(b"\n")[0]
    if by_name == "jsonl" and start == b"[" and _begins_a_list_of_objects(line):
        return "json"
    if by_name == "csv" and b"\t" in line and b"," not in line:
        return "tsv"
    if not by_name:
        return {b"[": "json", b"{": "jsonl"}.get(start, "")
    return by_name


def _begins_a_list_of_objects(line: bytes) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return True  # it goes on in the next lines, or the reader will say what is wrong with it
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


@contextmanager
def _unpacked(raw: BinaryIO, packing: str) -> Iterator[BinaryIO]:
    if packing == "gzip":
        with gzip.open(raw) as opened:
            yield cast(BinaryIO, opened)
    elif packing == "xz":
        with lzma.open(raw) as opened:
            yield cast(BinaryIO, opened)
    elif packing == "zstandard":
        import io

        import pyarrow

        with pyarrow.CompressedInputStream(raw, "zstd") as stream:
            yield cast(BinaryIO, io.BufferedReader(stream))
    else:
        yield raw


def size_of(files: list[File]) -> int:
    """Return the bytes of all files, as they are on the disk."""
    paths = [path for file in files for path in ([file.path] if file.path.is_file() else file.path.rglob("*"))]
    return sum(os.path.getsize(path) for path in paths if path.is_file())
