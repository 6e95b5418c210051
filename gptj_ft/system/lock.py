"""Lock a run folder: one process at a time.

The lock is the operating system's, on ``run.lock`` in the folder. It ends with the process that holds it, however that
ends: a process that was killed leaves no stale lock. The content of the file is for people only.

`filelock` does not serve here: `holder` asks with a shared lock, in a folder that it may only read and leaves as it is.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from gptj_ft.errors import UsageError
from gptj_ft.system.files import open_file

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"
HOLDER_SECONDS = 0.5  # for `holder`, which takes the lock for an instant


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock: number, host name, and what it does."""

    process: int | None
    host: str
    work: str

    def __str__(self) -> str:
        return f"process {self.process or 'unknown'} on host {self.host} is {self.work} it"


@contextmanager
def locked(folder: Path, work: str) -> Iterator[None]:
    """Lock a run folder inside the block.

    Where the folder cannot be written, or its file system has no locks, nothing is locked.

    Args:
        folder: the run folder.
        work: activity, for others' messages: "training".

    Raises:
        UsageError: another process is at work there; says which, and what to do.
        DataError: ``run.lock`` is a link, or no file.
    """
    descriptor = _open(folder, os.O_RDWR | os.O_CREAT)
    if descriptor is None:
        yield
        return
    try:
        deadline = time.monotonic() + HOLDER_SECONDS
        while not _take(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{folder} is in use: {_holder(descriptor)}; wait until it ends, or stop it with "
                    "Ctrl-C or SIGTERM, and it saves first"
                )
            time.sleep(0.01)
        note = asdict(Holder(os.getpid(), platform.node(), work))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(note) + "\n").encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)  # the folder may be handed on: the host has no place in it
    finally:
        os.close(descriptor)


def take(descriptor: int) -> bool:
    """Take the lock of an open file, if no other process has it; it goes when the descriptor is closed."""
    return fcntl is None or _take(descriptor, fcntl.LOCK_EX)


def holder(folder: Path) -> Holder | None:
    """Return the holder of a run folder's lock; ``None`` if nobody holds it."""
    descriptor = _open(folder, os.O_RDONLY)
    if descriptor is None:
        return None
    try:
        return None if _take(descriptor, fcntl.LOCK_SH) else _holder(descriptor)
    finally:
        os.close(descriptor)


def _open(folder: Path, flags: int) -> int | None:
    if fcntl is None:
        return None
    try:
        return open_file(folder / LOCK, flags)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EACCES, errno.EROFS):
            return None
        raise


def _take(descriptor: int, kind: int) -> bool:
    """Take the lock if it is free; it goes when the descriptor is closed."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def _holder(descriptor: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):  # it has only just taken the lock
        return Holder(None, platform.node(), "using")
