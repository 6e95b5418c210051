"""Open, write and remove files of run, model and home folders, safely and durably.

A power cut leaves the old or the new state. And a folder may come from a stranger, so no access leads out of it: files
are opened without following symbolic links, temporary files are removed and then created exclusively, and
`require_plain` rejects folders with pipes, devices or links out of them. Files of a run and outputs with texts are
readable for their owner only (`PRIVATE_FILE`); the umask decides about models (`SHARED_FILE`).
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
from gptj_ft.system.plain_text import quoted

# Errors of file systems without hard links (FAT, some network and FUSE file systems), or with no room for one more.
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EACCES}
PRIVATE_FILE, PRIVATE_FOLDER, SHARED_FILE, SHARED_FOLDER = 0o600, 0o700, 0o666, 0o777
# Do not follow symbolic links, and do not wait for the other end of a pipe. Some systems lack these flags.
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
# All names of incomplete or half-removed files and folders: see `new_name`, `hidden_name` and `doomed_name`.
_LEFTOVER = re.compile(
    r".+\.(new|tmp|part|mark|partial)"
    r"|\..+\.(writing|starting|converting|unmerged|sorted|partial-\d+|unpacked-\w+)"
    r"|\.direct|\.measure-\w+"
)


def new_name(path: Path) -> Path:
    """Return the temporary name for the new content of a file: ``metrics.new``."""
    return path.with_suffix(".new")


def hidden_name(path: Path, state: str) -> Path:
    """Return the hidden name of an incomplete file or folder: ``.NAME.starting``."""
    return path.with_name(f".{path.name}.{state}")


def doomed_name(folder: Path) -> Path:
    """Return the name of a folder that is incomplete or being removed: ``step-000120.tmp``."""
    return folder.with_name(folder.name + ".tmp")


def is_leftover(name: str) -> bool:
    """Tell whether a name marks an incomplete file or folder."""
    return _LEFTOVER.fullmatch(name) is not None


def open_file(path: Path, flags: int, mode: int = PRIVATE_FILE) -> int:
    """Open a regular file without following a symbolic link; raise `DataError` if it is anything else.

    A file with other hard links is opened for reading only.

    Args:
        flags: flags of `os.open`.
        mode: permissions of a new file, before the umask.
    """
    try:
        descriptor = os.open(path, flags | _SAFELY, mode)
    except OSError as error:
        # ELOOP or EMLINK (FreeBSD): a symbolic link. ENXIO: a socket, or a pipe without a reader.
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO) and os.path.lexists(path):
            raise DataError(_not_a_file(path)) from error
        raise
    # Check the open file, not its name, which may mean another file by now.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise DataError(_not_a_file(path))
    if status.st_nlink > 1 and flags & os.O_ACCMODE != os.O_RDONLY:
        os.close(descriptor)
        raise DataError(
            f"{path} is hard-linked: writing to it would change a file elsewhere, and nothing was written; replace it "
            f"by a copy: cp -p {quoted(path)} copy && mv copy {quoted(path)}"
        )
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
    """Return a path; raise `DataError` if it is a link that leads out of its folder.

    Links from ``snapshots/COMMIT/NAME`` to ``blobs/DIGEST`` are allowed: they form the cache of Hugging Face.
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
    """Raise `DataError` if a folder contains a pipe, a socket, a device or a link out of it, at any depth.

    Links inside the folder are allowed: trackers and the cache of Hugging Face make them. The folder itself may be one.
    """
    top = folder.resolve()
    for parent, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(parent, name)
            try:
                kind = path.lstat().st_mode
            except FileNotFoundError:  # removed concurrently
                continue
            if stat.S_ISLNK(kind):
                inside(path, top)
            elif not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise DataError(_not_a_file(path))


def read_bytes(path: Path) -> bytes:
    """Read a small file of an untrusted folder; see `inside`."""
    with os.fdopen(open_file(inside(path).resolve(), os.O_RDONLY), "rb") as file:
        return file.read()


def read_text(path: Path) -> str:
    """Read a small UTF-8 file like `read_bytes`; invalid text raises `ValueError`."""
    return read_bytes(path).decode("utf-8")


def create_file(path: Path, mode: int = PRIVATE_FILE) -> int:
    """Create a file and open it, replacing anything with its name."""
    # Remove and create exclusively: opening an existing file could write through a planted link.
    remove(path)
    return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)


def create_folder(folder: Path) -> None:
    """Create a folder and its parents, replacing anything with its name."""
    remove(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(PRIVATE_FOLDER)


def keep_folder(folder: Path, mode: int = PRIVATE_FOLDER) -> None:
    """Create a folder and its parents if missing, and replace a link by a folder."""
    if folder.is_symlink():
        folder.unlink()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode, exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content, if it exists."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass


def discard(path: Path) -> None:
    """Remove a path as far as possible; ignore errors, since it only takes space."""
    try:
        remove(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, content: bytes | str, mode: int = PRIVATE_FILE) -> None:
    """Write a small file durably, replacing anything with its name."""
    with os.fdopen(create_file(path, mode), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flush a file's content or a folder's names to disk."""
    if path.is_dir() and os.name != "posix":
        return  # other systems cannot open a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder, its content and its name to disk."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)
    sync_path(folder.parent)


def replace_text(path: Path, text: str, mode: int = PRIVATE_FILE) -> None:
    """Replace a small file, atomically and durably."""
    # The new content must be on disk before the rename, and the rename before we return.
    new = new_name(path)
    write_file(new, text, mode)
    os.replace(new, path)
    sync_path(path.parent)


def disk_error(
    error: OSError, target: object, advice: str = "make room and repeat", other: type[GptjFtError] = ResourceError
) -> GptjFtError:
    """Return the error to raise for a failed write.

    Args:
        target: file, folder or thing that was being written.
        advice: next step of the user if disk or quota are full.
        other: type of the error for any other reason.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"no space left on the disk while writing {target}; {advice}")
    return other(f"cannot write {target}: {error.strerror or error}")


@contextmanager
def disk_errors(
    target: object, advice: str = "make room and repeat", other: type[GptjFtError] = ResourceError
) -> Iterator[None]:
    """Translate `OSError` inside the block, see `disk_error`."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, target, advice, other) from error


def appending(path: Path) -> TextIO:
    """Open a text file for appending; create it if missing."""
    descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def link_or_copy(source: Path, target: Path) -> bool:
    """Hard-link an immutable file, or copy it durably if that is not possible; return True for a link."""
    try:
        os.link(source, target)
        return True
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    copy_file(source, target)
    sync_path(target)
    return False


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of a file, replacing anything with the copy's name."""
    # `copyfile` writes through a link at the target, so put an empty plain file there first.
    os.close(create_file(target))
    shutil.copyfile(source, target)


def remove_folder(folder: Path) -> None:
    """Remove a folder atomically: its name disappears before its content."""
    doomed = doomed_name(folder)
    discard(doomed)
    try:
        # A kill during the removal leaves the temporary name, which every reader ignores.
        folder.rename(doomed)
    except FileNotFoundError:
        return
    sync_path(folder.parent)
    # An interrupted removal may have left this name, and `rename` fails on a folder with content.
    discard(doomed)


def leftovers_in(folder: Path) -> Iterator[Path]:
    """Yield the incomplete files and folders below a folder."""
    for parent, folders, files in os.walk(folder):
        leftovers = [name for name in (*folders, *files) if is_leftover(name)]
        yield from (Path(parent, name) for name in sorted(leftovers))
        # `os.walk` descends into the names that remain in this very list.
        folders[:] = [name for name in folders if name not in leftovers and not Path(parent, name).is_symlink()]


def files_in(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder, which may be changing."""
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def disk_bytes(paths: Iterable[Path]) -> int:
    """Return the disk space of files; hard links to one file count once."""
    sizes = {}
    for path in paths:
        try:
            status = path.lstat()
        except FileNotFoundError:  # replaced or removed concurrently
            continue
        # POSIX counts 512-byte blocks, whatever the file system's; st_size would count holes.
        sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())
