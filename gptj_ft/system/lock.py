"""Lock a run folder for one process at a time.

The operating system locks the file ``run.lock`` and releases it when the process ends, so a killed process leaves no
stale lock. The content of the file is only for messages.

The package `filelock` does not fit: `holder` tests with a shared lock, in a folder that may be read-only.
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
HOLDER_SECONDS = 0.5  # retry time: `holder` of another process takes the lock for a moment


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock."""

    process: int | None  # process id
    host: str
    work: str  # activity, as in "training"

    def __str__(self) -> str:
        return f"process {self.process or 'unknown'} on host {self.host} is {self.work} it"


@contextmanager
def locked(folder: Path, work: str) -> Iterator[None]:
    """Lock a run folder inside the block; do nothing if it is read-only or its file system has no locks.

    Args:
        work: activity for the messages of other processes, as in "training".

    Raises:
        UsageError: another process holds the lock, or has renamed or removed the folder meanwhile.
        DataError: ``run.lock`` is not a regular file.
    """
    descriptor = _open(folder, os.O_RDWR | os.O_CREAT)
    if descriptor is None:
        yield
        return
    try:
        # flock belongs to the open file: closing the descriptor, also by a kill, releases it.
        deadline = time.monotonic() + HOLDER_SECONDS
        while not _take(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{folder} is in use: {_holder(descriptor)}; wait until it ends, or stop it with "
                    "Ctrl-C or SIGTERM, and it saves first"
                )
            time.sleep(0.01)
        if not _is_still(descriptor, folder / LOCK):
            raise UsageError(f"another process has finished or removed {folder} meanwhile; try again")
        note = asdict(Holder(os.getpid(), platform.node(), work))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(note) + "\n").encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)  # the folder may be published: remove the host name
    finally:
        os.close(descriptor)


def _is_still(descriptor: int, path: Path) -> bool:
    """Tell whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def take(descriptor: int) -> bool:
    """Lock an open file if no other process has; closing the descriptor releases it."""
    return fcntl is None or _take(descriptor, fcntl.LOCK_EX)


def holder(folder: Path) -> Holder | None:
    """Return the holder of a run folder's lock, if any."""
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
    """Lock an open file if it is free, or if its file system has no locks."""
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
    except (ValueError, TypeError):  # it has locked the file but not written it yet
        return Holder(None, platform.node(), "using")
