"""Find the files of a path, detect their format, compression and encoding, and open them decompressed."""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import BinaryIO

from gptj_ft.config.options import MOST_RECORD_BYTES, Recipe
from gptj_ft.data.readers.cells import is_guarded
from gptj_ft.data.readers.encodings import DETECT, ENCODING_NAMES, encoding_by_head
from gptj_ft.errors import DataError, UsageError, did_you_mean, listed
from gptj_ft.system.compression import COMPRESSIONS, SNIFFED_BYTES, compression_of, decompressed, has_checksum
from gptj_ft.system.plain_text import shortened

HEADER_BYTES = 12  # of a TFRecord
# A zip archive ends with its central directory, then a record of the directory's size with a comment of up to 64 KiB.
# Before it, ZIP64 has a record with larger fields, and that record's place.
END_BYTES, MOST_LIST_BYTES, RECORD_64, PLACE_64 = 2**16 + 22 + 76, 2**22, 56, 20


def record_length(header: bytes) -> int | None:
    """Return the payload length in a TFRecord header; ``None`` if the bytes are no such header.

    A record is a uint64 length, the masked CRC-32C of these eight bytes, the payload, and its masked CRC-32C; numbers
    are little-endian (https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details).
    """
    header = header[:HEADER_BYTES]
    if len(header) < HEADER_BYTES or not has_checksum(header[:8], header[8:]):
        return None
    return int.from_bytes(header[:8], "little")


def _begins_zlib(head: bytes) -> bool:
    """Tell whether bytes begin with a zlib header (RFC 1950) of the usual 32 KiB window."""
    # 0x78: deflate with this window. The two header bytes, read as a number, are a multiple of 31.
    return len(head) >= 2 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0


def suffixes_of(path: PurePath) -> tuple[str, str]:
    """Return the compression that a file name ends in, or "", and the suffix before it."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        return COMPRESSIONS[suffix], PurePath(path.stem).suffix.lower()
    return "", suffix


def names_in_zip(raw: BinaryIO) -> frozenset[str]:
    """List the names in a zip archive; empty if it is damaged, or has more entries than any document."""
    raw.seek(0, io.SEEK_END)
    raw.seek(max(0, raw.tell() - END_BYTES))
    # zipfile reads the whole directory into memory: check its size (bytes 12 to 16 of the end record) first.
    end = raw.read()
    at = end.rfind(b"PK\5\6")
    size = end[at + 12 : at + 16]
    if b"PK\6\7" in end:  # ZIP64, which some programs write for small archives too
        record = end[: max(at - PLACE_64, 0)][-RECORD_64:]
        if end[: max(at, 0)][-PLACE_64:][:4] != b"PK\6\7" or record[:4] != b"PK\6\6":
            return frozenset()
        size = record[40:48]
    if at < 0 or int.from_bytes(size, "little") > MOST_LIST_BYTES:
        return frozenset()
    try:
        with zipfile.ZipFile(raw) as archive:
            return frozenset(archive.namelist())
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, struct.error):
        return frozenset()


SUFFIXES = {  # suffix -> format; each format has one reader
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".xlsx": "xlsx",
    ".xlsm": "xlsx",
    ".docx": "docx",
    ".parquet": "parquet",
    ".txt": "txt",
    ".story": "story",
    ".conll": "conll",
    ".iob": "conll",
    ".bio": "conll",
    ".tfrecords": "tfrecords",
    ".tfrecord": "tfrecords",
    ".index": "tfindex",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
}
# Task -> suffix -> format: suffixes that mean another format for this task, whatever the file begins with.
TASK_SUFFIXES = {
    "token-labels": dict.fromkeys((".txt", ".train", ".dev", ".test", ".testa", ".testb"), "conll"),
    "sentences": {".pt": "presumm"},
}
TOKEN_FORMATS = ("tfrecords", "tfindex", "hdf5")  # rows are token ids
FORMAT_MAGIC = {b"PAR1": "parquet", b"\x89HDF\r\n\x1a\n": "hdf5"}
OFFICE = ("xlsx", "docx")  # formats that are zip archives
ZIP_MAGIC, OLE_MAGIC = b"PK\x03\x04", b"\xd0\xcf\x11\xe0"
ADVICE = {  # suffix of an unsupported file -> its kind, and how to convert it
    ".doc": "an old Word document: save it as plain text (.txt)",
    ".odt": "an OpenDocument text: save it as plain text (.txt)",
    ".rtf": "a document in rich text: save it as plain text (.txt)",
    ".pptx": "a presentation: save its outline as plain text (.txt)",
    ".pdf": "a PDF: convert it to plain text first, e.g. with `pdftotext`",
    ".epub": "an e-book: convert it to plain text (.txt) first",
    ".xls": "an old Excel workbook: save it as .xlsx, or the sheet as CSV UTF-8",
    ".xlsb": "a binary Excel workbook: save it as .xlsx, or the sheet as CSV UTF-8",
    ".ods": "an OpenDocument spreadsheet: save it as .xlsx, or the sheet as CSV UTF-8",
    ".numbers": "a spreadsheet of Numbers: export it as .xlsx or CSV",
    ".xlsx with a password": "a workbook with a password, or an old one: save it as .xlsx without a password",
    ".docx with a password": "a document with a password, or an old one: save it as .docx without a password",
    ".zip": "a zip archive: unpack it, and name the folder",
    ".tar": "a tar archive: unpack it, and name the folder",
}
_FOREIGN = {b"%PDF": ".pdf", b"{\\rtf": ".rtf"}
TAR_MAGIC, TAR_MAGIC_AT = b"ustar", 257
# Office documents are zip archives: a member's name tells the kind. OpenDocument has its MIME type in the first bytes.
PARTS = {"xl/workbook.xml": ".xlsx", "xl/workbook.bin": ".xlsb", "word/document.xml": ".docx",
         "ppt/presentation.xml": ".pptx", "META-INF/container.xml": ".epub"}  # fmt: skip
OPEN_DOCUMENT = {b"opendocument.spreadsheet": ".ods", b"opendocument.text": ".odt"}


DATASET_FILES = ("dataset_dict.json", "dataset_info.json")  # written by `datasets.save_to_disk`
ROWS_MANIFEST = "manifest.json"  # in a folder of prepared data
NOT_ROWS_IN_FOLDER = (".index", "data_params.json")  # an index repeats the other files' names
MOST_LINES = 0.8  # share of the lines with the same number of columns, in a file of words and tags
WORD_TAG = re.compile(r"[A-Z]-.+|[^a-z]+")  # B-PER, O, NNP
ABOUT = ("readme", "license", "licence")  # names, without suffix, of files about the rows


@dataclass(frozen=True)
class ReadLimits:
    """Sizes that readers hold in memory at once; most of them are limits against decompression bombs."""

    text_chunk: int = 2**20  # bytes of a JSON text
    samples: int = 2**24  # bytes of HDF5 samples
    hdf5_chunk: int = 2**28  # bytes; larger HDF5 chunks are read in parts, each of which decompresses the whole chunk
    corpus_row: int = 2**20  # tokens of a row that is part of an HDF5 corpus
    sheet_rows: int = 2**20  # Excel's limit
    # Sheets and shared strings of a workbook are streamed, one row or text at a time; styles and the other parts are
    # held in memory.
    sheets: int = 2**30  # bytes of all sheets and shared strings
    sheet_piece: int = 2**24  # bytes of a row or text
    other_parts: int = 2**26  # bytes of all other parts
    document: int = 2**28  # bytes of a Word document with its pictures
    blank_lines: int = 2**22  # in succession, a second or two
    parquet: int = 2**30  # bytes of a compressed Parquet file, which is decompressed in memory


@dataclass(frozen=True)
class FileOptions:
    """Options of the readers; the recipe's options of the same names."""

    documents: str = "paragraph"
    quotes: str = DETECT
    delimiter: str = DETECT
    encoding: str = DETECT
    sheet: str = ""
    header: tuple[str, ...] = ()
    task: str = "language-model"
    max_record: int = MOST_RECORD_BYTES
    limits: ReadLimits = ReadLimits()  # no option of the recipe

    @classmethod
    def of(cls, recipe: Recipe) -> FileOptions:
        return cls(**{name: getattr(recipe, name) for name in cls.__dataclass_fields__ if name != "limits"})


@dataclass(frozen=True)
class File:
    """A file of rows."""

    path: Path  # path as the user named it; a saved dataset is a folder
    format: str  # selects the reader
    compression: str = ""  # gzip, xz, zstandard, zlib, or "" for none
    notes: tuple[str, ...] = ()  # warnings about the file, as sentences
    encoding: str = ""  # text encoding; "" if the first bytes do not tell
    options: FileOptions = FileOptions()
    is_guarded: bool = False  # whether its texts are those of `cells.guarded`

    @property
    def name(self) -> str:
        r"""Return the path as valid Unicode, with bytes of another encoding written as ``\xfc``."""
        return os.fsencode(self.path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Source:
    """The rows of a path: its files with their formats, and their digest."""

    path: Path  # a file, a folder or a glob pattern
    files: tuple[File, ...]  # sorted by name
    notes: tuple[str, ...] = ()  # warnings about the path

    @property
    def is_prepared(self) -> bool:
        return self.files[0].format == "prepared"

    @cached_property
    def sha256(self) -> str:
        """Digest of one file's bytes, or of several files' names and digests. Reads every file on first use."""
        if len(self.files) == 1 and self.files[0].path.is_file():
            return _sha256_of(self.files[0].path)
        whole = hashlib.sha256()
        for file in self.files:
            for path in [file.path] if file.path.is_file() else sorted(file.path.rglob("*")):
                if path.is_file():
                    # Names without folders: the same data in another place has the same digest.
                    whole.update(f"{path.name}\0{_sha256_of(path)}\n".encode(errors="surrogateescape"))
        return whole.hexdigest()


def _sha256_of(path: Path) -> str:
    with opened_file(File(path, "")) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()  # type: ignore[arg-type]


def is_prepared(folder: Path) -> bool:
    """Tell whether a folder contains prepared data."""
    return (folder / ROWS_MANIFEST).is_file()


def identify(path: Path, options: FileOptions = FileOptions()) -> Source:
    """Find the files of a path, a folder or a glob pattern, and detect their formats.

    Call this once, where a command receives the path: everything below takes the `Source`.
    """
    notes: tuple[str, ...] = ()
    if path.is_dir():
        if is_prepared(path):
            return Source(path, (File(path, "prepared"),))
        if any((path / name).is_file() for name in DATASET_FILES):
            return Source(path, (File(path, "dataset"),))
        paths, notes = _files_in(path, options)
        files = [identify_file(file, options) for file in paths]
    elif not path.exists() and glob.has_magic(str(path)):
        names = [name for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not names:
            raise UsageError(f"no file matches {path}")
        files = [file for name in names for file in _with_index(Path(name), options)]
    else:
        _require_file(path)
        files = _with_index(path, options)
    # A folder with both token files and text files: the tokens were probably made from the texts.
    tokens = next((file.path for file in files if file.format in TOKEN_FORMATS), None)
    texts = next((file.path for file in files if file.format not in TOKEN_FORMATS), None)
    if tokens and texts:
        raise UsageError(
            f"{path} has both tokens ({tokens.name}) and texts ({texts.name}), perhaps of the same rows\n"
            f"name the files to train on, e.g. '{tokens.parent}/*{tokens.suffix}'"
        )
    return Source(path, tuple(files), notes)


def identify_file(path: Path, options: FileOptions = FileOptions()) -> File:
    """Detect a file's format and compression from its name; its content takes precedence."""
    with opened_file(File(path, "")) as raw:
        head = raw.read(SNIFFED_BYTES)
        parts = names_in_zip(raw) if head.startswith(ZIP_MAGIC) else frozenset()
    compression = _compression_by_content(path, head)
    if compression:
        with opened_file(File(path, "", compression)) as opened:
            head = opened.read(SNIFFED_BYTES)
    notes = []
    named, suffix = suffixes_of(path)
    if compression and compression != named:
        notes.append(f"{path} is compressed with {compression}, although its name does not say so")
    if named and not compression and head:
        notes.append(f"{path} is not compressed with {named}, although its name says so")
    by_task = TASK_SUFFIXES.get(options.task, {}).get(suffix, "")
    if by_task and suffix == ".txt" and not _has_columns(_recoded(head, encoding_by_head(head))):
        by_task = ""
    by_content = by_task or _format_by_content(head)
    if not by_content and (foreign := _foreign(suffix, head, parts)):
        by_content = SUFFIXES.get(foreign, "")
        if not by_content:
            raise DataError(f"{path} is {ADVICE[foreign]}")
    by_name, detected, encoding = SUFFIXES.get(suffix, ""), encoding_by_head(head), options.encoding
    # "utf-16" does not name a byte order: use the detected one.
    encoding = detected if encoding == DETECT or (detected and encoding in ("utf-16", "utf-32")) else encoding
    format_ = by_content or _format_of(_recoded(head, encoding), by_name)
    if not format_ and suffix in ADVICE:
        raise DataError(f"{path}, by its name, is {ADVICE[suffix]}")
    if not format_:
        raise DataError(
            f"{path}: unknown suffix '{suffix}'; supported are {', '.join(SUFFIXES)}, each also compressed as "
            f"{', '.join(COMPRESSIONS)}"
        )
    if by_name and format_ != by_name and not by_task:
        notes.append(f"{path} contains {format_} and is read as such, although its name says {by_name}")
    if detected and detected == encoding and not by_content:
        notes.append(f"{path} is encoded in {ENCODING_NAMES[detected]}")
    return File(path, format_, compression, tuple(notes), encoding, options, format_ == "csv" and is_guarded(path))


def _with_index(path: Path, options: FileOptions) -> list[File]:
    """Return a file with its format; for an index, the files that it lists."""
    file = identify_file(path, options)
    return _files_of_index(file) if file.format == "tfindex" else [file]


@contextmanager
def opened_file(file: File) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed."""
    try:
        with file.path.open("rb") as raw, decompressed(raw, file.compression) as opened:
            yield opened
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{file.path}: damaged or truncated: {error}") from error
    except OSError as error:
        if error.errno is None:  # pyarrow reports damaged content so
            raise DataError(f"{file.path}: damaged or truncated: {error}") from error
        raise UsageError(f"cannot read {file.path}: {error.strerror or error}") from error


def _require_file(path: Path) -> None:
    """Check that a path exists; if not, suggest the nearest name, or a dataset on the Hub."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(
            f"{path} is a pipe, a device or a socket; rows are read more than once: save them to a file first"
        )
    if not path.exists():
        if path.is_symlink():
            raise UsageError(f"{path} is a link to a file that does not exist")
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings)
        if (
            not hint
            and path.suffix.lower() not in (*SUFFIXES, *COMPRESSIONS)
            and re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path))
        ):
            hint = f"; for a dataset on the Hugging Face Hub write hub:{path}"
        raise UsageError(f"no such file: {path}{hint}")


def _files_in(folder: Path, options: FileOptions) -> tuple[list[Path], tuple[str, ...]]:
    """List the files of rows in a folder and its subfolders, except hidden files; note those with unknown suffixes."""
    files: list[Path] = []
    others = Counter[str]()  # by suffix
    known = SUFFIXES.keys() | TASK_SUFFIXES.get(options.task, {}).keys()
    for path in sorted(folder.rglob("*")):
        suffix = suffixes_of(path)[1]
        # "~$": Excel's lock file of an open workbook
        is_hidden = any(part.startswith((".", "~$")) for part in path.relative_to(folder).parts)
        if is_hidden or not path.is_file() or suffix in NOT_ROWS_IN_FOLDER or path.name in NOT_ROWS_IN_FOLDER:
            continue
        if suffix in known:
            files.append(path)
        elif path.stem.casefold() not in ABOUT:
            others[suffix] += 1
    if not files:
        raise UsageError(
            f"the folder {folder} has no files of rows ({', '.join(SUFFIXES)}), and is not prepared data (it has no "
            "manifest.json)"
        )
    return files, (_not_read(folder, others),) if others else ()


def _not_read(folder: Path, others: Counter[str]) -> str:
    """Return the note about files that are not read."""
    kinds = []
    for suffix, count in others.most_common():
        advice = ADVICE.get(suffix, "").partition(": ")[2]
        kinds.append(f"{count:,} {shortened(suffix) or 'without suffix'}{advice and f' ({advice})'}")
    number = others.total()
    return f"{folder}: {number:,} {'file is' if number == 1 else 'files are'} not read: {listed(kinds)}"


def _files_of_index(index: File) -> list[File]:
    """Return the TFRecords files that an index names, one per line, relative to its folder."""
    files = []
    with opened_file(index) as opened:
        for number, line in enumerate(opened, 1):
            name = line.decode("utf-8", "replace").strip()
            if not name:
                continue
            path = index.path.parent / name
            if not os.path.isfile(path):  # unlike Path.is_file, accepts characters that no path may have
                hint = "copy it here first" if "://" in name else "paths are relative to the folder of the index"
                raise DataError(f"{index.path}:{number}: no such file: '{shortened(name, 100)}'; {hint}")
            file = identify_file(path)
            if file.format != "tfrecords":
                raise DataError(f"{index.path}:{number}: {path} is {file.format}; an index may list only TFRecords")
            files.append(file)
    if not files:
        raise DataError(f"{index.path}: the index lists no files")
    return files


def _compression_by_content(path: Path, head: bytes) -> str:
    """Detect a file's compression from its first bytes."""
    if record_length(head):
        return ""  # a TFRecord begins with its length, which may equal any magic bytes
    if SUFFIXES.get(suffixes_of(path)[1]) == "tfrecords" and _begins_zlib(head):
        return "zlib"  # mesh-transformer-jax compresses with zlib, even in files whose names contain "zstd"
    return compression_of(head)


def _foreign(suffix: str, head: bytes, parts: Collection[str]) -> str:
    """Detect an unsupported office document or archive by its content; return its suffix, or ""."""
    if head.startswith(ZIP_MAGIC):
        by_parts = [kind for name, kind in PARTS.items() if name in parts]
        by_head = [kind for words, kind in OPEN_DOCUMENT.items() if words in head[:128]]
        return next(iter(by_parts + by_head), suffix if suffix in ADVICE or SUFFIXES.get(suffix) in OFFICE else ".zip")
    if head.startswith(TAR_MAGIC, TAR_MAGIC_AT):
        return ".tar"
    if head.startswith(OLE_MAGIC):
        office = SUFFIXES.get(suffix)
        return f".{office} with a password" if office in OFFICE else ".doc" if suffix == ".doc" else ".xls"
    return next((kind for magic, kind in _FOREIGN.items() if head.startswith(magic)), "")


def _recoded(head: bytes, encoding: str) -> bytes:
    """Convert the first bytes of a text to UTF-8."""
    if not encoding:
        return head
    try:
        return codecs.getincrementaldecoder(encoding)("replace").decode(head).encode(errors="replace")
    except UnicodeError:  # some codecs ignore errors="replace"
        return head


def _format_by_content(head: bytes) -> str:
    """Return the format if the first bytes identify it, else ""."""
    if record_length(head):
        return "tfrecords"
    return next((kind for magic, kind in FORMAT_MAGIC.items() if head.startswith(magic)), "")


def _format_of(head: bytes, by_name: str) -> str:
    """Return a text's format: JSON by its first character, else by the file name."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    line = head.partition(b"\n")[0]
    # No JSON line may be a list. One list of objects is a JSON file with the wrong suffix.
    if by_name == "jsonl" and start == b"[" and _begins_a_list_of_objects(line):
        return "json"
    if not by_name:
        return {b"[": "json", b"{": "jsonl"}.get(start, "")
    return by_name


def _has_columns(head: bytes) -> bool:
    """Tell whether a text has one word per line, with or without tags, rather than sentences."""
    lines = head.decode("utf-8", "replace").splitlines()
    lines = lines[:-1] if len(head) == SNIFFED_BYTES else lines  # the last one may be cut
    rows = [line.split("\t") if "\t" in line else line.split() for line in lines if line.strip()]
    if not rows:
        return True
    columns, number = Counter(map(len, rows)).most_common(1)[0]
    if number < MOST_LINES * len(rows):
        return False
    are_tagged = sum(bool(WORD_TAG.fullmatch(row[-1])) for row in rows) > len(rows) / 2
    has_tabs = sum("\t" in line for line in lines) >= number
    return columns == 1 or has_tabs or (len(rows) > 1 and (are_tagged or columns == 2))


def _begins_a_list_of_objects(line: bytes) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return True  # continues on the next line, or is malformed: the JSON reader reports that
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
