"""Make scratch folders that outlive a kill only until the next one is made.

The process holds a lock on its folder, which the system releases when the process ends, however it ends. Process ids
would not do: containers that share a temporary folder number their processes alike.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_PREFIX = "gptj-ft-scratch-"
_NAME = re.compile(re.escape(_PREFIX) + r"\w{8}")  # see `tempfile.mkdtemp`


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a private folder, removed at the end of the block; first remove those of killed processes.

    Args:
        parent: default: the system's folder for temporary files.
    """
    parent = parent or Path(tempfile.gettempdir())
    remove_abandoned(parent)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        descriptor = _lock(folder, waits=True)
        # Until it is locked, another process may take it for an abandoned one, lock and remove it.
        if folder.is_dir():
            break
        if descriptor is not None:
            os.close(descriptor)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def remove_abandoned(parent: Path) -> None:
    """Remove this user's scratch folders whose processes have ended."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            is_scratch = _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            if is_scratch and (descriptor := _lock(Path(entry.path), waits=False)) is not None:
                shutil.rmtree(entry.path, ignore_errors=True)  # follows no links
                os.close(descriptor)


def _lock(folder: Path, waits: bool) -> int | None:
    """Lock a folder of this user; return None if another process has, or if there are no locks.

    Args:
        waits: wait until another process unlocks it.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
