"""Open, write and remove the files of a run, a model and the home folder.

Nothing leads out of these folders, and a power cut leaves them as they were or as they were to be.

Such a folder may have been received from somebody else. So what is opened is a regular file of that very name, never
what a symbolic link there leads to; a predictable temporary name is removed and then created exclusively; and
`require_plain` refuses a folder that holds a link to elsewhere, a pipe or a device. Files that belong to a run are for
their owner alone (`PRIVATE_FILE`); what users name to hand it on has the modes that their umask gives (`SHARED_FILE`).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from gptj_ft.errors import DataError, GptjFtError, ResourceError

# What file systems answer that have no hard links (FAT, some network and FUSE file systems), or have no room for one.
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EACCES}
PRIVATE_FILE, PRIVATE_FOLDER, SHARED_FILE, SHARED_FOLDER = 0o600, 0o700, 0o666, 0o777
# No symbolic link is followed, and opening a pipe does not wait for its other end. Other systems lack them.
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
# Every name of something that is not whole yet, or half removed: see `new_name`, `hidden_name` and `doomed_name`.
_LEFTOVER = re.compile(
    r".+\.(new|tmp|part|mark|partial)"
    r"|\..+\.(writing|starting|converting|unmerged|sorted|partial-\d+|unpacked-\w+)"
    r"|\.direct|\.measure-\w+"
)


def new_name(path: Path) -> Path:
    """Return the name under which the new content of a file is written, ``metrics.new``."""
    return path.with_suffix(".new")


def hidden_name(path: Path, state: str) -> Path:
    """Return the hidden name of what is to become a file or folder: ``.NAME.starting``."""
    return path.with_name(f".{path.name}.{state}")


def doomed_name(folder: Path) -> Path:
    """Return the name of a folder that is not whole yet, or not any more: ``step-000120.tmp``."""
    return folder.with_name(folder.name + ".tmp")


def is_leftover(name: str) -> bool:
    """Tell whether a name is one that only something unfinished has."""
    return _LEFTOVER.fullmatch(name) is not None


def open_file(path: Path, flags: int, mode: int = PRIVATE_FILE) -> int:
    """Open a regular file; a symbolic link is not followed, and nothing waits for the other end of a pipe.

    Args:
        path: the file.
        flags: as `os.open` takes them.
        mode: permissions of a new file, before the umask; default: for its owner alone.

    Raises:
        DataError: there is something else under this name.
        OSError: the system's own.
    """
    try:
        descriptor = os.open(path, flags | _SAFELY, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO) and os.path.lexists(path):
            raise DataError(_not_a_file(path)) from error
        raise
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise DataError(_not_a_file(path))
    return descriptor


def _not_a_file(path: Path) -> str:
    return f"{path} is {_kind_of(path)}, not a file: it was not opened; remove it if you do not know what it is for"


def _kind_of(path: Path) -> str:
    kind = path.lstat().st_mode
    if stat.S_ISLNK(kind):
        return f"a link to {path.readlink()}"
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(kind), "a device")


def inside(path: Path, folder: Path | None = None) -> Path:
    """Check that a file lies in its folder, or in one above it, and is no link to elsewhere on this machine.

    The cache of Hugging Face keeps ``snapshots/COMMIT/NAME`` as links to ``blobs/DIGEST``.

    Raises:
        DataError: it is one.
    """
    folder = (folder or path.parent).resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise DataError(f"{path} is a link that leads nowhere; put the file itself there") from error
    cache = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    if not any(target.is_relative_to(place) for place in (folder, *cache)):
        raise DataError(f"{path} is a link to {target}, out of the folder; put the file itself there")
    return path


def require_plain(folder: Path) -> None:
    """Check that a folder, which may itself be named by a link, holds files and folders alone, at any depth.

    Links that stay inside are let pass: trackers make such, and the cache of Hugging Face.

    Raises:
        DataError: a link leads out of it, or it holds a pipe, a socket or a device.
    """
    top = folder.resolve()
    for parent, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(parent, name)
            try:
                kind = path.lstat().st_mode
            except FileNotFoundError:  # removed meanwhile
                continue
            if stat.S_ISLNK(kind):
                inside(path, top)
            elif not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise DataError(_not_a_file(path))


def read_bytes(path: Path) -> bytes:
    """Read a small file of a folder that may have been received; see `inside`.

    Raises:
        DataError: a link out of the folder, a pipe, a device.
        OSError: the system's own.
    """
    with os.fdopen(open_file(inside(path).resolve(), os.O_RDONLY), "rb") as file:
        return file.read()


def read_text(path: Path) -> str:
    """Read a small file as UTF-8, as `read_bytes` does.

    Raises:
        UnicodeDecodeError: it is not; a `ValueError`.
    """
    return read_bytes(path).decode("utf-8")


def create_file(path: Path, mode: int = PRIVATE_FILE) -> int:
    """Create a file and open it, in place of whatever has this name.

    Raises:
        OSError: the system's own.
    """
    remove(path)
    return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)


def create_folder(folder: Path, mode: int = PRIVATE_FOLDER) -> None:
    """Create a folder, and missing ones above it, in place of whatever has its name.

    Raises:
        OSError: the system's own.
    """
    remove(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode)


def keep_folder(folder: Path, mode: int = PRIVATE_FOLDER) -> None:
    """Create a folder, and missing ones above it, unless it exists; replace a link of its name.

    Raises:
        OSError: the system's own.
    """
    if folder.is_symlink():
        folder.unlink()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode, exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it; of a link, the link.

    Raises:
        OSError: the system's own; not if there is nothing.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass


def discard(path: Path) -> None:
    """Remove a path as far as possible, without errors: it would only take space."""
    try:
        remove(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, content: bytes | str, mode: int = PRIVATE_FILE) -> None:
    """Write a small file durably, in place of whatever has its name."""
    with os.fdopen(create_file(path, mode), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":
        return  # other systems cannot open a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder to the disk, with all that is in it and its own name."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)
    sync_path(folder.parent)


def replace_text(path: Path, text: str, mode: int = PRIVATE_FILE) -> None:
    """Replace a small file, atomically and durably."""
    new = new_name(path)
    write_file(new, text, mode)
    os.replace(new, path)
    sync_path(path.parent)


def disk_error(
    error: OSError, what: object, advice: str = "make room and repeat", other: type[GptjFtError] = ResourceError
) -> GptjFtError:
    """Return the error to raise for a failed write.

    Args:
        error: the system's.
        what: file, folder or thing that was being written.
        advice: next step of the user if the disk, or the quota, is full.
        other: type of the error for any other reason; default `ResourceError`.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"no space left on the disk while writing {what}; {advice}")
    return other(f"cannot write {what}: {error.strerror or error}")


@contextmanager
def disk_errors(
    what: object, advice: str = "make room and repeat", other: type[GptjFtError] = ResourceError
) -> Iterator[None]:
    """Translate the system's errors inside the block, see `disk_error`.

    Raises:
        ResourceError: the disk is full.
        GptjFtError: the type ``other``, for any other reason.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(error, what, advice, other) from error


def appending(path: Path) -> TextIO:
    """Open a text file to add to it; it is made if it is not there.

    Raises:
        DataError, OSError: as `open_file`.
    """
    descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def link_or_copy(source: Path, target: Path) -> bool:
    """Hard-link a file that never changes; copy it durably where the file system has no links.

    Returns: whether it is a link, which takes no space.
    """
    try:
        os.link(source, target)
        return True
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    copy_file(source, target)
    sync_path(target)
    return False


def copy_file(source: Path, target: Path, mode: int = PRIVATE_FILE) -> None:
    """Copy the content of a file, in place of whatever has the copy's name."""
    os.close(create_file(target, mode))
    shutil.copyfile(source, target)


def remove_folder(folder: Path) -> None:
    """Remove a folder atomically: no part of it is ever found under its name."""
    doomed = doomed_name(folder)
    discard(doomed)
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    sync_path(folder.parent)
    discard(doomed)


def leftovers_in(folder: Path) -> Iterator[Path]:
    """Yield the unfinished files and folders below a folder."""
    for parent, folders, files in os.walk(folder):
        found = [name for name in (*folders, *files) if is_leftover(name)]
        yield from (Path(parent, name) for name in sorted(found))
        folders[:] = [name for name in folders if name not in found and not Path(parent, name).is_symlink()]


def files_in(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder, which may be changing meanwhile."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def disk_bytes(paths: Iterable[Path]) -> int:
    """Return the disk space that files take, each counted once however many names it has."""
    found = {}
    for path in paths:
        try:
            status = path.lstat()
        except FileNotFoundError:  # replaced or removed meanwhile
            continue
        found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())
