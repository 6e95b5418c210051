"""Read and write large files: page-aligned, with several requests in flight, bypassing the page cache if possible.

A disk behind a virtual machine or a flash controller needs several requests in flight to reach its rate. The page cache
costs a copy and does not help with gigabytes that are read once per step.
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
REQUEST_BYTES = 16 * 2**20  # a chunk of the stores is one request and needs no second thread
REQUESTS_IN_FLIGHT = 8
RESUME = "free some and resume the run"
TRANSFERS = 4  # transfers that are split into requests at the same time

_readers = ThreadPoolExecutor(REQUESTS_IN_FLIGHT, thread_name_prefix="read")
_writers = ThreadPoolExecutor(REQUESTS_IN_FLIGHT, thread_name_prefix="write")


def open_direct(path: Path, flags: int, mode: int = PRIVATE_FILE) -> int:
    """Open a file with O_DIRECT, or without it if file system or platform do not support it.

    Transfers must then start and end on page boundaries, in the file and in memory. Only reading follows a symbolic
    link, see `files.inside`.

    Args:
        flags: flags of `os.open`.
        mode: permissions of a new file, before the umask.
    """
    direct = getattr(os, "O_DIRECT", 0)
    opener = os.open if flags & os.O_ACCMODE == os.O_RDONLY else open_file
    try:
        return opener(path, flags | direct, mode)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:  # tmpfs and others reject O_DIRECT with EINVAL
            raise
        return opener(path, flags, mode)


def drop_from_cache(descriptor: int) -> None:
    """Drop a file from the page cache if it was opened without O_DIRECT."""
    if not hasattr(os, "posix_fadvise"):
        return
    import fcntl  # missing on systems without posix_fadvise

    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def takes_direct(folder: Path) -> bool:
    """Tell whether the file system of a folder supports O_DIRECT."""
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
    """Read into a buffer, up to the end of the file; return the number of bytes."""
    try:
        return read_range(descriptor, view, offset)
    except OSError as error:
        raise ResourceError(f"cannot read the state of the run: {error.strerror or error}; check the disk") from error


def write_bytes(descriptor: int, view: memoryview, offset: int) -> None:
    """Write a whole buffer."""
    with disk_errors("the state of the run", RESUME):
        write_range(descriptor, view, offset)


def read_range(descriptor: int, view: memoryview, offset: int) -> int:
    """Read like `read_direct`, but raise `OSError`."""

    def read(part: memoryview, at: int) -> int:
        done = 0
        while done < len(part):
            # A read may be shorter than requested; only zero bytes mean the end of the file.
            count = os.preadv(descriptor, [part[done:]], at + done)
            if count == 0:
                break
            done += count
        return done

    return sum(_in_requests(_readers, read, view, offset))


def write_range(descriptor: int, view: memoryview, offset: int) -> None:
    """Write like `write_bytes`, but raise `OSError`."""

    def write(part: memoryview, at: int) -> int:
        done = 0
        while done < len(part):
            done += os.pwritev(descriptor, [part[done:]], at + done)
        return done

    _in_requests(_writers, write, view, offset)


def sync(descriptor: int, path: Path) -> None:
    """Flush a file to disk."""
    with disk_errors(path, RESUME):
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush created, renamed and removed names of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor, folder)
    finally:
        os.close(descriptor)


def _in_requests(
    pool: ThreadPoolExecutor, transfer: Callable[[memoryview, int], int], view: memoryview, offset: int
) -> list[int]:
    """Split a transfer into concurrent requests; raise the first error when all have ended."""
    starts = range(0, len(view), REQUEST_BYTES)
    if len(starts) <= 1:
        return [transfer(view, offset)]
    requests = [pool.submit(transfer, view[start : start + REQUEST_BYTES], offset + start) for start in starts]
    failed = [error for request in requests if (error := request.exception())]  # waits for all: they use the buffer
    if failed:
        raise failed[0]
    return [request.result() for request in requests]
