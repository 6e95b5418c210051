"""Read and write large files: aligned, several requests in flight, past the page cache where the file system allows it.

A disk behind a virtual machine or a flash controller reaches its rate only with several requests in flight, and the
page cache costs a copy and, on gigabytes that are read once a step, gives nothing back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gptj_ft.errors import ResourceError
from gptj_ft.system.files import PRIVATE_FILE, create_file, disk_errors, open_file

PAGE = 4096
REQUEST_BYTES = 16 * 2**20  # a chunk of the stores is one: it goes through no second thread
REQUESTS_IN_FLIGHT = 8
RESUME = "free some and resume the run"
TRANSFERS = 4  # that are cut into requests at a time

_readers = ThreadPoolExecutor(REQUESTS_IN_FLIGHT, thread_name_prefix="read")
_writers = ThreadPoolExecutor(REQUESTS_IN_FLIGHT, thread_name_prefix="write")


def open_direct(path: Path, flags: int, mode: int = PRIVATE_FILE) -> int:
    """Open a file past the page cache; through it where the file system or the platform does not take that.

    Transfers must start and end on pages, in the file and in memory.

    Args:
        path: the file; a link is read where it leads to, see `files.inside`, and not written.
        flags: as `os.open` takes them.
        mode: permissions of a new file, before the umask; default: for its owner alone.

    Raises:
        DataError: a link that was to be written, a pipe, a device.
        OSError: the system's own.
    """
    direct = getattr(os, "O_DIRECT", 0)
    opener = os.open if flags & os.O_ACCMODE == os.O_RDONLY else open_file
    try:
        return opener(path, flags | direct, mode)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
        return opener(path, flags, mode)


def let_go(descriptor: int) -> None:
    """Drop a file from the page cache if it had to be opened through it."""
    if not hasattr(os, "posix_fadvise"):
        return
    import fcntl  # which systems without the other lack, too

    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def takes_direct(folder: Path) -> bool:
    """Tell whether files in a folder can be opened past the page cache."""
    probe = folder / ".direct"
    try:
        os.close(create_file(probe))
        os.close(open_file(probe, os.O_RDWR | os.O_DIRECT))
    except (OSError, AttributeError):
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def read_direct(descriptor: int, view: memoryview, offset: int) -> int:
    """Read into a buffer; return how many bytes the file had for it.

    Raises:
        ResourceError: the disk fails.
    """
    try:
        return read_range(descriptor, view, offset)
    except OSError as error:
        raise ResourceError(f"cannot read the state of the run: {error.strerror or error}; check the disk") from error


def write_bytes(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of a buffer.

    Raises:
        ResourceError: the disk is full, or fails.
    """
    with disk_errors("the state of the run", RESUME):
        write_range(descriptor, view, offset)


def read_range(descriptor: int, view: memoryview, offset: int) -> int:
    """Read as `read_bytes` does.

    Raises:
        OSError: the disk's own.
    """

    def read(part: memoryview, at: int) -> int:
        done = 0
        while done < len(part):
            count = os.preadv(descriptor, [part[done:]], at + done)
            if count == 0:
                break
            done += count
        return done

    return sum(_in_requests(_readers, read, view, offset))


def write_range(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of a buffer.

    Raises:
        OSError: the disk's own.
    """

    def write(part: memoryview, at: int) -> int:
        done = 0
        while done < len(part):
            done += os.pwritev(descriptor, [part[done:]], at + done)
        return done

    _in_requests(_writers, write, view, offset)


def sync(descriptor: int, path: Path) -> None:
    """Flush a file to the disk.

    Raises:
        ResourceError: the disk is full, or fails.
    """
    with disk_errors(path, RESUME):
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder (created, renamed, removed) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor, folder)
    finally:
        os.close(descriptor)


def _in_requests(
    pool: ThreadPoolExecutor, transfer: Callable[[memoryview, int], int], view: memoryview, offset: int
) -> list[int]:
    """Split a transfer into requests, several in flight; raise the first error after all have ended."""
    starts = range(0, len(view), REQUEST_BYTES)
    if len(starts) <= 1:
        return [transfer(view, offset)]
    requests = [pool.submit(transfer, view[start : start + REQUEST_BYTES], offset + start) for start in starts]
    failed = [error for request in requests if (error := request.exception())]  # waits for all of them
    if failed:
        raise failed[0]
    return [request.result() for request in requests]
