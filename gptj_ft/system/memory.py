"""Allocate page-aligned buffers, and recycle them: a fresh page costs more than reading 4 KiB from a disk.

Measured when a model of 480 MB is converted: 0.2 s of system time with recycled buffers, 0.8 s without."""

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

LEAST_BYTES = 1 << 20  # what is smaller is not worth it
MOST_IDLE_BYTES = 256 << 20  # that wait to be lent again

_idle: list[mmap.mmap] = []
_lock = threading.RLock()  # a collection of garbage may give memory back while its thread is taking some


def borrow(num_bytes: int) -> Tensor:
    """Return a page-aligned buffer of arbitrary content, recycled when no tensor shares it any more."""
    if num_bytes < LEAST_BYTES:
        return allocate(num_bytes, torch.uint8, torch.device("cpu"))
    buffer = _taken(num_bytes) or pages(num_bytes)
    view = memoryview(buffer)  # which the tensor's storage keeps, and with it the buffer from being lent
    weakref.finalize(view, _give_back, buffer).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes)


def borrow_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor of any content."""
    return borrow(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a type; itself if it is of that type."""
    return tensor if tensor.dtype is dtype else borrow_tensor(tensor.shape, dtype).copy_(tensor)


def contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor whose numbers lie one after the other; itself if they do."""
    return tensor if tensor.is_contiguous() else borrow_tensor(tensor.shape, tensor.dtype).copy_(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, shared with it if its numbers lie one after the other."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _taken(num_bytes: int) -> mmap.mmap | None:
    """Take the smallest idle buffer that is large enough and at most twice as large."""
    with _lock:
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
            _idle.pop(0)  # the longest idle


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat tensor that starts on a page boundary in every place; zeros on the CPU."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(pages(numel * dtype.itemsize), dtype=dtype, count=numel)


def pages(num_bytes: int) -> mmap.mmap:
    """Return memory of so many bytes, one at least, that starts on a page boundary; zeros."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, max(num_bytes, 1))
    # Private, for hardly any system gives huge pages to shared memory, which mmap() makes unless it is told otherwise.
    buffer = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults and TLB misses on gigabytes
    return buffer


def return_freed_memory() -> None:
    """Return to the system the buffers that wait to be lent, and, of glibc, what tensors have freed and it still holds.

    For those who go on with buffers of other sizes: loading, steps and an export have nothing of each other's.
    """
    with _lock:
        _idle.clear()
    return_free_heap()


def return_free_heap(above: int = 0) -> None:
    """Return to the system the pages that tensors have freed and glibc still holds, those between others, too.

    A page that is used again costs a page fault.

    Args:
        above: only if the process has more than so many bytes resident.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    if int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE > above:
        ctypes.CDLL(None).malloc_trim(0)
