"""What kind a file is: told by its name, unless its first bytes say otherwise."""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from gptj_ft.data.readers.compression import PACKED, begins_zlib, packing_of, suffixes_of
from gptj_ft.data.readers.encodings import AUTO, NAMES, encoding_by_head
from gptj_ft.data.readers.framing import record_length
from gptj_ft.errors import DataError

# Suffix -> format. Those of one format are read by the same reader.
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".xlsx": "xlsx",
    ".xlsm": "xlsx",
    ".parquet": "parquet",
    ".txt": "txt",
    ".tar": "tar",
    ".tfrecords": "tfrecords",
    ".tfrecord": "tfrecords",
    ".index": "tfindex",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
}
TOKEN_FORMATS = ("tfrecords", "tfindex", "hdf5")  # whose rows are tokens already
# What a file may begin with, and what it is then.
MAGIC = {b"PAR1": "parquet", b"\x89HDF\r\n\x1a\n": "hdf5"}
TAR_MAGIC, TAR_MAGIC_AT = b"ustar", 257
ZIP_MAGIC, OLE_MAGIC = b"PK\x03\x04", b"\xd0\xcf\x11\xe0"
# Suffix -> what such a file is, and how to make rows of it.
ADVICE = {
    ".docx": "a Word document: save it as plain text (.txt)",
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
    ".zip": "a zip archive: unpack it, and name the folder",
}
FOREIGN = {b"%PDF": ".pdf", b"{\\rtf": ".rtf"}
# What the parts of an archive say that it is; the first bytes of one of OpenDocument say it in words.
PARTS = {"xl/workbook.xml": ".xlsx", "xl/workbook.bin": ".xlsb", "word/document.xml": ".docx",
         "ppt/presentation.xml": ".pptx", "META-INF/container.xml": ".epub"}  # fmt: skip
OPEN_DOCUMENT = {b"opendocument.spreadsheet": ".ods", b"opendocument.text": ".odt"}


class UnknownFormat(DataError):
    """Neither name nor content is of a kind that is read here."""


def packing_by_content(path: Path, head: bytes) -> str:
    """Return how a file is packed, by its first bytes."""
    if record_length(head):
        return ""  # the length of a record may look like anything
    if SUFFIXES.get(suffixes_of(path)[1]) == "tfrecords" and begins_zlib(head):
        return "zlib"  # as that system packs them, where their name holds "zstd"
    return packing_of(head)


@dataclass(frozen=True)
class Kind:
    """What a file is: its format, its encoding if the first bytes tell, and what is odd about it, in sentences."""

    format: str
    encoding: str
    notes: tuple[str, ...]


def kind_of(path: Path, packing: str, head: bytes, encoding: str, parts: Collection[str] = ()) -> Kind:
    """Return what kind of file begins with ``head``, unpacked.

    Args:
        path: its name.
        packing: how it is packed.
        head: the first bytes.
        encoding: of a text, as the user named it, or `AUTO`.
        parts: names in it, of a zip archive.

    Raises:
        UnknownFormat: neither name nor content is of a kind that is read here.
    """
    notes = []
    named, suffix = suffixes_of(path)
    if packing and packing != named:
        notes.append(f"{path} is packed by {packing}, which its name does not say")
    if named and not packing and head:
        notes.append(f"{path} is not packed by {named} as its name says")
    by_content = _format_by_content(head)
    if not by_content and (meant := _foreign(suffix, head, parts)):
        by_content = SUFFIXES.get(meant, "")
        if not by_content:
            raise UnknownFormat(f"{path} is {ADVICE[meant]}")
    by_name = SUFFIXES.get(suffix, "")
    told = encoding_by_head(head)
    encoding = told if encoding == AUTO or (told and encoding in ("utf-16", "utf-32")) else encoding
    format_ = by_content or _format_of(_recoded(head, encoding), by_name)
    if not format_:
        if suffix in ADVICE:
            raise UnknownFormat(f"{path} is by its name {ADVICE[suffix]}")
        raise UnknownFormat(
            f"{path}: unknown suffix '{suffix}'; rows are read from {', '.join(SUFFIXES)}, also packed as "
            f"{', '.join(PACKED)}"
        )
    if by_name and format_ != by_name:
        notes.append(f"{path} is read as {format_}, which it is, not as the {by_name} of its name")
    if told and told == encoding and not by_content:
        notes.append(f"{path} is in {NAMES[told]}")
    return Kind(format_, encoding, tuple(notes))


def _foreign(suffix: str, head: bytes, parts: Collection[str]) -> str:
    """Return the suffix that an office's file should have, by its content; empty if it is none."""
    if head.startswith(ZIP_MAGIC):
        by_parts = [kind for name, kind in PARTS.items() if name in parts]
        by_head = [kind for words, kind in OPEN_DOCUMENT.items() if words in head[:128]]
        return next(iter(by_parts + by_head), suffix if suffix in ADVICE or SUFFIXES.get(suffix) == "xlsx" else ".zip")
    if head.startswith(OLE_MAGIC):
        return ".doc" if suffix == ".doc" else ".xlsx with a password" if suffix in (".xlsx", ".xlsm") else ".xls"
    return next((kind for magic, kind in FOREIGN.items() if head.startswith(magic)), "")


def _recoded(head: bytes, encoding: str) -> bytes:
    """Return the first bytes of a text as they would be in UTF-8."""
    try:
        return (
            codecs.getincrementaldecoder(encoding)("replace").decode(head).encode(errors="replace")
            if encoding
            else head
        )
    except UnicodeError:  # some take no other way with errors than to raise them
        return head


def _format_by_content(head: bytes) -> str:
    """Return the format that bytes are in beyond doubt, or nothing."""
    if record_length(head):
        return "tfrecords"
    if head.startswith(TAR_MAGIC, TAR_MAGIC_AT):
        return "tar"
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "")


def _format_of(head: bytes, by_name: str) -> str:
    """Return the format of a text by its beginning, where that leaves no doubt; else what its name says."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    line = head.partition(b"\n")[0]
    if by_name == "jsonl" and start == b"[" and _begins_a_list_of_objects(line):
        return "json"
    if not by_name:
        return {b"[": "json", b"{": "jsonl"}.get(start, "")
    return by_name


def _begins_a_list_of_objects(line: bytes) -> bool:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return True  # it goes on in the next lines, or the reader will say what is wrong with it
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
