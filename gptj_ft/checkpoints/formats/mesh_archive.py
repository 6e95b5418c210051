"""A mesh-transformer-jax checkpoint in a tar archive (also packed as zst, xz, gz), unpacked to files of known names."""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import zlib
from lzma import LZMAError
from pathlib import Path

from gptj_ft.checkpoints.writer import writing
from gptj_ft.data.readers.compression import SNIFFED_BYTES, packing_of, unpacked
from gptj_ft.errors import DataError, ResourceError
from gptj_ft.system.files import create_file
from gptj_ft.system.machine import free_disk

SUFFIXES = (".tar", ".tar.zst", ".tar.zstd", ".tar.gz", ".tgz", ".tar.xz", ".txz")
MEMBER = re.compile(r"(?:\./)?(?:[^/]+/)*?(?:(step_\d+)[^/]*/)?(shard_\d{1,3}/\d{1,3}\.npz)")
COPY_BYTES = 1 << 20


def is_archive(path: Path) -> bool:
    """Tell whether a file is an archive by its name."""
    return path.is_file() and path.name.lower().endswith(SUFFIXES)


def unpack(path: Path, folder: Path) -> None:
    """Put the ``shard_I/J.npz`` of an archive into a folder; what is there already, whole, is passed over.

    No name of the archive is used: a member is known by the end of its name, and links are refused.

    Raises:
        DataError: damaged, several checkpoints in one archive, or none.
        ResourceError: the disk is full.
    """
    steps, count = set(), 0
    try:
        with path.open("rb") as raw:
            packing = packing_of(head := raw.read(SNIFFED_BYTES))
            raw.seek(0)
            _check_space(path, folder, _least_bytes(path, head) if packing else _bytes_in(path))
            with tarfile.open(fileobj=unpacked(raw, packing), mode="r|") as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # it would remember all
                    found = MEMBER.fullmatch(member.name)
                    if found is None:
                        continue
                    if not member.isfile():
                        raise DataError(f"{path}: {member.name} in it is no file but a link; it was not followed")
                    steps.add(found[1])
                    count += 1
                    if len(steps) > 1:
                        raise DataError(f"{path} holds several checkpoints; unpack it and name one of its folders")
                    _save(archive, member, folder / found[2], path)
    except (tarfile.TarError, EOFError, zlib.error, LZMAError) as error:
        raise DataError(f"{path}: truncated or corrupt; get the file again") from error
    except OSError as error:  # pyarrow's, of damaged zstandard, has no number
        raise DataError(f"{path}: cannot be read: {error.strerror or error}; get the file again") from error
    if not count:
        raise DataError(f"{path} holds no checkpoint of mesh-transformer-jax: no shard_0/0.npz in it")


def _check_space(path: Path, folder: Path, num_bytes: int) -> None:
    """Check that there is room for what an archive holds, with what has been unpacked of it already."""
    there = sum(file.stat().st_size for file in folder.rglob("*.npz"))
    if (free := free_disk(folder)) < num_bytes - there:
        raise ResourceError(
            f"{path} unpacks to {num_bytes / 1e9:.1f} GB, but {folder.parent} has {free / 1e9:.1f} GB free, and the "
            "result needs room, too; name a target on another disk"
        )


def _bytes_in(path: Path) -> int:
    """Return the size of what `unpack` takes from an archive that is not packed."""
    with tarfile.open(path, "r:") as archive:
        return sum(member.size for member in archive if member.isfile() and MEMBER.fullmatch(member.name))


def _least_bytes(path: Path, head: bytes) -> int:
    """Return what a packed archive unpacks to at least: its size (weights hardly get smaller), or what zstandard says.

    That is in a frame's header (https://www.rfc-editor.org/rfc/rfc8878#section-3.1.1.1), if who packed it knew.
    """
    said = 0
    if packing_of(head) == "zstandard":
        is_single, width = bool(head[4] & 0x20), (0, 2, 4, 8)[head[4] >> 6]
        width = width or is_single  # a single segment has a byte at least
        begin = 5 + (not is_single) + (0, 1, 2, 4)[head[4] & 3]
        said = int.from_bytes(head[begin : begin + width], "little") + (256 if width == 2 else 0)
    return max(path.stat().st_size, said)


def _save(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path, path: Path) -> None:
    if target.is_file() and target.stat().st_size == member.size:
        return
    part = target.with_suffix(".part")
    with writing(target.parent.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(target.parent).free) < member.size:
            raise ResourceError(
                f"{path}: {member.name} unpacks to {member.size / 1e9:.1f} GB, but {target.parent} has "
                f"{free / 1e9:.1f} GB free; make room, or name a target on another disk"
            )
        content = archive.extractfile(member)
        assert content is not None
    with os.fdopen(create_file(part), "wb") as file:
        while True:
            data = content.read(COPY_BYTES)  # outside `writing`: what fails here is the archive
            if not data:
                break
            with writing(target.parent.parent):
                file.write(data)
    if part.stat().st_size != member.size:
        raise DataError(f"{path}: truncated inside {member.name}; get the file again")
    part.replace(target)
