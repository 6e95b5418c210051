"""What a user names -> the files that are read: their format, by name and by content, and how they are packed."""

from __future__ import annotations

import glob
import gzip
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO

from gptj_ft.config.options import MOST_RECORD_BYTES, Recipe
from gptj_ft.data.readers.compression import PACKED, SNIFFED_BYTES, names_in_zip, peeked, suffixes_of, unpacked
from gptj_ft.data.readers.detect import SUFFIXES, TOKEN_FORMATS, ZIP_MAGIC, kind_of, packing_by_content
from gptj_ft.data.readers.encodings import AUTO
from gptj_ft.errors import DataError, UsageError, did_you_mean
from gptj_ft.system.plain_text import shortened

DATASET_FILES = ("dataset_dict.json", "dataset_info.json")  # of a folder that `datasets` has saved
# What may lie beside files of rows and is none: an index only repeats them, the other says how they were made.
BESIDE_ROWS = (".index", "data_params.json")


@dataclass(frozen=True)
class FileOptions:
    """How files are to be read: the recipe's options of the same names."""

    documents: str = "paragraph"
    quotes: str = AUTO
    delimiter: str = AUTO
    encoding: str = AUTO
    sheet: str = ""
    max_record: int = MOST_RECORD_BYTES

    @classmethod
    def of(cls, recipe: Recipe) -> FileOptions:
        return cls(**{name: getattr(recipe, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class File:
    """A file of rows.

    Attributes:
        path: as the user named it, or a folder that `datasets` has saved.
        format: which reader takes it.
        packing: gzip, xz, zstandard or zlib; empty if it is not packed.
        notes: what is odd about it, in sentences.
        content: of a member of an archive: the stream to read it from, once, unpacked.
        encoding: of a text; empty if the first bytes do not tell.
        options: how it is to be read.
    """

    path: Path
    format: str
    packing: str = ""
    notes: tuple[str, ...] = ()
    content: BinaryIO | None = None
    encoding: str = ""
    options: FileOptions = FileOptions()


def find_files(source: Path, options: FileOptions = FileOptions()) -> list[File]:
    """Return the files that a path, a folder or a pattern stands for, in the order of their names.

    Raises:
        UsageError: there is nothing (with the nearest name), or nothing in the folder that could be rows.
        DataError: a file that cannot be rows.
    """
    if source.is_dir():
        return [File(source, "dataset")] if is_saved_dataset(source) else _files_in(source, options)
    if not source.exists() and glob.has_magic(str(source)):
        found = [Path(name) for name in sorted(glob.glob(str(source), recursive=True)) if Path(name).is_file()]
        if not found:
            raise UsageError(f"no file matches {source}")
        return _of_one_kind(source, [file for path in found for file in _identified(path, options)])
    require_file(source)
    return _identified(source, options)


def is_saved_dataset(folder: Path) -> bool:
    """Tell whether a folder is one that `datasets` has saved."""
    return any((folder / name).is_file() for name in DATASET_FILES)


def _identified(path: Path, options: FileOptions) -> list[File]:
    """Return a file with its format, or the files that it is an index of."""
    file = identify(path, options)
    return _files_of_index(file) if file.format == "tfindex" else [file]


def identify(path: Path, options: FileOptions = FileOptions()) -> File:
    """Return a file with its format: what its name says, unless its content says otherwise.

    Raises:
        UsageError: not readable.
        UnknownFormat: neither name nor content is of a kind that is read here.
    """
    with opened_file(File(path, "")) as raw:
        head = raw.read(SNIFFED_BYTES)
        parts = names_in_zip(raw) if head.startswith(ZIP_MAGIC) else frozenset()
    packing = packing_by_content(path, head)
    if packing:
        with opened_file(File(path, "", packing)) as opened:
            head = opened.read(SNIFFED_BYTES)
    kind = kind_of(path, packing, head, options.encoding, parts)
    return File(path, kind.format, packing, kind.notes, None, kind.encoding, options)


def identify_stream(path: Path, raw: BinaryIO, options: FileOptions) -> File:
    """Return a member of an archive with its format, and the stream to read it from.

    Raises:
        UnknownFormat: as `identify`.
    """
    with opened_file(File(path, "", content=raw)):
        head, content = peeked(raw)
        packing = packing_by_content(path, head)
        if packing:
            head, content = peeked(unpacked(content, packing))
    kind = kind_of(path, packing, head, options.encoding)
    return File(path, kind.format, "", kind.notes, content, kind.encoding, options)


@contextmanager
def opened_file(file: File) -> Iterator[BinaryIO]:
    """Open a file for reading, unpacked.

    Raises:
        UsageError: it cannot be read.
        DataError: what it is packed by is damaged, or it is cut short.
    """
    try:
        if file.content is not None:
            yield file.content
            return
        with file.path.open("rb") as raw, unpacked(raw, file.packing) as opened:
            yield opened
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{file.path}: damaged or cut short: {error}") from error
    except OSError as error:
        if error.errno is None:  # pyarrow's way to say the same
            raise DataError(f"{file.path}: damaged or cut short: {error}") from error
        raise UsageError(f"cannot read {file.path}: {error.strerror or error}") from error


def require_file(path: Path) -> None:
    """Check that a path exists.

    Raises:
        UsageError: it does not; names the nearest, or the data set on the Hub that may be meant.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(
            f"{path} is a pipe, a device or a socket, and rows are read more than once: save them to a file first"
        )
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


def is_hidden(path: PurePath) -> bool:
    """Tell whether a file, or a folder it is in, is hidden, or is what Excel leaves beside an open workbook."""
    return any(part.startswith((".", "~$")) and part != ".." for part in path.parts)


def _files_in(folder: Path, options: FileOptions) -> list[File]:
    """Return the files of rows in a folder and below; hidden ones, and what is of no known kind, are left out."""
    found: list[Path] = []
    for path in sorted(folder.rglob("*")):
        suffix = suffixes_of(path)[1]
        is_rows = suffix in SUFFIXES and suffix not in BESIDE_ROWS and path.name not in BESIDE_ROWS
        if is_rows and path.is_file() and not is_hidden(path.relative_to(folder)):
            found.append(path)
    if not found:
        raise UsageError(
            f"{folder} is a folder, and not prepared data (no manifest.json in it), nor are there files of rows in it "
            f"({', '.join(SUFFIXES)})"
        )
    return _of_one_kind(folder, [identify(path, options) for path in found])


def _of_one_kind(source: Path, files: list[File]) -> list[File]:
    """Refuse tokens together with texts: the first may well be made from the second."""
    tokens = next((file.path for file in files if file.format in TOKEN_FORMATS), None)
    texts = next((file.path for file in files if file.format not in TOKEN_FORMATS), None)
    if tokens and texts:
        raise UsageError(
            f"{source} is tokens ({tokens.name}) and texts ({texts.name}), perhaps the same ones\n"
            f"name those to train on, e.g. '{tokens.parent}/*{tokens.suffix}'"
        )
    return files


def _files_of_index(index: File) -> list[File]:
    """Return the TFRecords files that an index names, one a line, relative to its folder.

    Raises:
        DataError: one is not there; with file:line.
    """
    files = []
    with opened_file(index) as opened:
        for number, line in enumerate(opened, 1):
            name = line.decode("utf-8", "replace").strip()
            if not name:
                continue
            path = index.path.parent / name
            if not os.path.isfile(path):  # asks without minding what may not be in a path
                hint = "copy it here first" if "://" in name else "paths are relative to the folder of the index"
                raise DataError(f"{index.path}:{number}: no such file: '{shortened(name, 100)}'; {hint}")
            file = identify(path)
            if file.format != "tfrecords":
                raise DataError(f"{index.path}:{number}: {path} is {file.format}, and an index is of TFRecords")
            files.append(file)
    if not files:
        raise DataError(f"{index.path}: the index names no files")
    return files
