"""Tar archives -> rows: members are read as files, in the order in which they lie there, never unpacked to disk."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from gptj_ft.data.readers.detect import UnknownFormat
from gptj_ft.data.readers.files import File, identify_stream, is_hidden, opened_file
from gptj_ft.data.readers.rows import Findings, Row
from gptj_ft.errors import DataError

# Formats that are read from their end, or that name other files.
NOT_STREAMED = ("parquet", "hdf5", "tfindex", "xlsx")
NAMED = 3  # of what is left out


def read_archive(
    file: File, findings: Findings, readers: Mapping[str, Callable[[File, Findings], Iterator[Row]]]
) -> Iterator[Row]:
    """Yield the rows of an archive's members; the source of a row is archive/member.

    Hidden members are passed over as in folders. Links, empty members and those of no kind that is read are left out,
    and that is noted. An archive in an archive is read; one in that is not.

    Raises:
        DataError: the archive is damaged or cut short, or one of its members cannot be read.
    """
    left_out: list[str] = []
    try:
        with opened_file(file) as opened, _Archive.open(fileobj=opened, mode="r|", ignore_zeros=True) as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # it would remember all
                # Only ever a name: nothing is written, so it may be as odd as it likes.
                path = PurePosixPath(member.name)
                if member.isdir() or is_hidden(path):
                    continue
                content = archive.extractfile(member) if member.isreg() and member.size else None
                try:
                    name = Path(f"{file.path}/{path}")
                    found = identify_stream(name, cast(BinaryIO, content), file.options) if content else None
                except UnknownFormat:
                    found = None
                nested_twice = found and found.format == "tar" and file.content is not None
                if not found or found.format in NOT_STREAMED or nested_twice:
                    left_out.append(str(path))
                    continue
                for note in found.notes:
                    findings.note(note)
                yield from readers[found.format](found, findings)
    except tarfile.TarError as error:
        raise DataError(f"{file.path}: damaged or cut short: {error}") from error
    if left_out:
        more = f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
        findings.note(
            f"{file.path}: left out, as they are empty, links, or of no kind that is read from an archive: "
            f"{', '.join(left_out[:NAMED])}{more}"
        )


class _Member(tarfile.TarInfo):
    """A header, of which tarfile would take a damaged one for the end of the archive, and say nothing."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        assert isinstance(archive, _Archive)
        try:
            header = super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            archive.is_ended = True
            raise
        except tarfile.EmptyHeaderError as error:  # type: ignore[attr-defined]
            if archive.is_ended:
                raise
            raise tarfile.ReadError("it ends without an end mark") from error
        except (tarfile.HeaderError, ValueError, IndexError, OverflowError) as error:
            raise tarfile.ReadError(str(error) or "a header that cannot be read") from error
        archive.is_ended = False
        return header


class _Archive(tarfile.TarFile):
    """An archive, read on to the last byte: what was appended is found, and the checksum of what packs it verified."""

    tarinfo = _Member
    is_ended = False
