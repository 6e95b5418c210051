"""Allocate page-aligned buffers and recycle them: a fresh page costs more than reading 4 KiB from a disk.

Converting a model of 480 MB took 0.2 s of system time with recycled buffers and 0.8 s without.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import platform
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # smaller buffers are not recycled
MOST_IDLE_BYTES = 256 << 20  # of recycled buffers

_idle: list[mmap.mmap] = []
_lock = threading.RLock()  # reentrant: garbage collection may return a buffer while its thread takes one


def borrow(num_bytes: int) -> Tensor:
    """Return an uninitialized page-aligned buffer; it is recycled when no tensor uses its storage any more."""
    if num_bytes < LEAST_BYTES:
        return allocate(num_bytes, torch.uint8, torch.device("cpu"))
    buffer = _taken(num_bytes) or pages(num_bytes)
    view = memoryview(buffer)  # lives as long as the tensor's storage, which refers to it
    # The buffer returns when the last tensor dies. Not at exit: the interpreter may be gone by then.
    weakref.finalize(view, _give_back, buffer).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes)


def borrow_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized contiguous tensor."""
    return borrow(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor converted to a type, or itself if it has that type."""
    return tensor if tensor.dtype is dtype else borrow_tensor(tensor.shape, dtype).copy_(tensor)


def contiguous(tensor: Tensor) -> Tensor:
    """Return a contiguous copy, or the tensor itself if it is contiguous."""
    return tensor if tensor.is_contiguous() else borrow_tensor(tensor.shape, tensor.dtype).copy_(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _taken(num_bytes: int) -> mmap.mmap | None:
    """Take the smallest idle buffer that is large enough and at most twice as large."""
    with _lock:
        # At most twice the size, so that a small tensor does not hold a large buffer.
        fitting = [buffer for buffer in _idle.copy() if num_bytes <= len(buffer) <= 2 * num_bytes]
        if not fitting:
            return None
        best = min(fitting, key=len)
        _idle.remove(best)
        return best


def _give_back(buffer: mmap.mmap) -> None:
    with _lock:
        _idle.append(buffer)
        while sum(map(len, _idle)) > MOST_IDLE_BYTES:
            _idle.pop(0)  # idle for longest


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat page-aligned tensor of zeros."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(pages(numel * dtype.itemsize), dtype=dtype, count=numel)


def pages(num_bytes: int) -> mmap.mmap:
    """Return page-aligned zeroed memory of at least one byte."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, max(num_bytes, 1))
    # Private, because Linux rarely gives huge pages to shared memory, which is mmap's default.
    buffer = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults and TLB misses on gigabytes
    return buffer


def return_freed_memory() -> None:
    """Return idle buffers and glibc's free heap to the system.

    Call it between phases with buffers of different sizes: loading, training, export.
    """
    with _lock:
        _idle.clear()
    return_free_heap()


def return_free_heap(above: int = 0) -> None:
    """Return glibc's free heap pages to the system; using such a page again costs a page fault.

    Args:
        above: do nothing if the process has at most this many bytes resident.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    # The second field of statm is the number of resident pages.
    if int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE > above:
        ctypes.CDLL(None).malloc_trim(0)
