"""Unpack a mesh-transformer-jax checkpoint from a tar archive, plain or compressed (zst, xz, gz)."""

from __future__ import annotations

import os
import re
import tarfile
import zlib
from lzma import LZMAError
from pathlib import Path

from gptj_ft.errors import DataError, ResourceError, UsageError
from gptj_ft.system.compression import SNIFFED_BYTES, compression_of, decompressed
from gptj_ft.system.files import create_file, disk_errors
from gptj_ft.system.machine import free_disk

_SUFFIXES = (".tar", ".tar.zst", ".tar.zstd", ".tar.gz", ".tgz", ".tar.xz", ".txz")
MEMBER = re.compile(r"(?:\./)?(?:[^/]+/)*?(?:(step_\d+)[^/]*/)?(shard_\d{1,3}/\d{1,3}\.npz)")
_COPY_BYTES = 1 << 20


def is_archive(path: Path) -> bool:
    """Tell by its name whether a file is a tar archive."""
    return path.is_file() and path.name.lower().endswith(_SUFFIXES)


def unpack(path: Path, folder: Path) -> None:
    """Unpack the ``shard_I/J.npz`` of an archive into a folder; complete files from an earlier call are kept.

    Raises:
        DataError: the archive is damaged, or holds no checkpoint or several.
        ResourceError: the disk is full.
    """
    # Weights hardly compress, so the archive's size is a first estimate; `_save` checks the space for each member.
    _check_space(folder, path.stat().st_size - sum(file.stat().st_size for file in folder.rglob("*.npz")), str(path))
    steps, count = set(), 0
    try:
        with path.open("rb") as raw:
            compression = compression_of(raw.read(SNIFFED_BYTES))
            raw.seek(0)
            # "r|" reads forwards only: a compressed archive cannot seek.
            with tarfile.open(fileobj=decompressed(raw, compression), mode="r|") as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps every header in memory
                    # Only the matched end of a name becomes a path, so no member can be written outside of the folder.
                    match = MEMBER.fullmatch(member.name)
                    if match is None:
                        continue
                    if not member.isfile():
                        raise DataError(f"{path}: {member.name} in it is a link, not a file; it was not followed")
                    steps.add(match[1])
                    count += 1
                    if len(steps) > 1:
                        raise DataError(f"{path} holds several checkpoints; unpack it and name one of its folders")
                    _save(archive, member, folder / match[2], path)
    except (tarfile.TarError, EOFError, zlib.error, LZMAError) as error:
        raise DataError(f"{path}: truncated or corrupt; get the file again") from error
    except OSError as error:  # pyarrow's error for damaged zstandard has no errno
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; get the file again") from error
    if not count:
        raise DataError(f"{path} holds no checkpoint of mesh-transformer-jax: no shard_0/0.npz in it")


def _save(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, path: Path) -> None:
    if target.is_file() and target.stat().st_size == member.size:
        return
    _check_space(target.parent, member.size, f"{path}: {member.name}")
    part, folder = target.with_suffix(".part"), target.parent.parent
    content = archive.extractfile(member)
    assert content is not None
    with disk_errors(folder, other=UsageError):
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = create_file(part)
    with os.fdopen(descriptor, "wb") as file:
        while data := content.read(_COPY_BYTES):  # an error here comes from the archive
            with disk_errors(folder, other=UsageError):
                file.write(data)
    if part.stat().st_size != member.size:
        raise DataError(f"{path}: truncated inside {member.name}; get the file again")
    part.replace(target)  # only a complete file has its final name


def _check_space(folder: Path, num_bytes: int, what: str) -> None:
    if (free := free_disk(folder)) < num_bytes:
        raise ResourceError(
            f"{what} unpacks to {num_bytes / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free, and the result "
            "needs space, too; free some, or name a target on another disk"
        )
