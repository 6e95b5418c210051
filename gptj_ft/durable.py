"""Files and folders that a power cut leaves as they were or as they were to be; links instead of copies."""

from __future__ import annotations

import errno
import glob
import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from gptj_ft.errors import ResourceError, UsageError

# What file systems answer that have no hard links (FAT, some network and FUSE file systems), or have no room for one.
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EACCES}


def sync_path(path: Path) -> None:
    """Have a file's content, or the names in a folder, on the disk before anything that follows."""
    if path.is_dir() and os.name != "posix":
        return  # other systems cannot open a folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Have a folder on the disk, with all that is in it and its own name."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)
    sync_path(folder.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace a small file: afterwards it has its old content or the new, whole."""
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_path(path.parent)


def require_new(*paths: Path) -> None:
    """Check that none of some files exists.

    Raises:
        UsageError: one does.
    """
    for path in paths:
        if path.exists():
            raise UsageError(f"{path} exists already, and nothing is overwritten; name another, or remove it")


@contextmanager
def new_files(*paths: Path) -> Iterator[list[TextIO]]:
    """Open new text files, which are there when all of them are whole, or not at all.

    Raises:
        UsageError: one exists, or cannot be written.
        ResourceError: the disk is full.
    """
    require_new(*paths)
    temporary = [path.with_name(f".{path.name}.writing") for path in paths]
    named: list[Path] = []
    try:
        with ExitStack() as stack:
            files: list[TextIO] = [
                stack.enter_context(path.open("w", encoding="utf-8", newline="\n")) for path in temporary
            ]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        require_new(*paths)
        for path, whole in zip(paths, temporary, strict=True):
            whole.rename(path)
            named.append(path)
            sync_path(path.parent)
    except OSError as error:
        for path in named:
            path.unlink(missing_ok=True)
        names = " and ".join(map(str, paths))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"no space left for {names}; free some, or write to another disk") from error
        raise UsageError(f"cannot write {names}: {error.strerror or error}") from error
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def append_text(path: Path, text: str) -> None:
    """Add to a small file, and wait until the disk has it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def link_or_copy(source: Path, target: Path) -> bool:
    """Give a file that nobody changes a second name; copy it, onto the disk, where that cannot be done.

    Returns: whether it is a link, which takes no space.
    """
    try:
        os.link(source, target)
        return True
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    shutil.copyfile(source, target)
    sync_path(target)
    return False


def remove_folder(folder: Path) -> None:
    """Remove a folder such that no part of it is ever found under its name."""
    doomed = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    sync_path(folder.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def draft_of(folder: Path) -> Path:
    """Return the hidden name, of this process alone, under which a folder is made before it gets its own.

    What processes of this machine that have ended left under such names is removed; of what is on another machine that
    shares the disk nothing is known, so it stays.
    """
    import psutil

    start = f".{folder.name}.{platform.node()}."
    for draft in folder.parent.glob(f"{glob.escape(start)}*.writing"):
        process = draft.name.removeprefix(start).removesuffix(".writing")
        if process.isdigit() and (int(process) == os.getpid() or not psutil.pid_exists(int(process))):
            shutil.rmtree(draft, ignore_errors=True)
    return folder.with_name(f"{start}{os.getpid()}.writing")


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
