"""Limit the threads that torch computes with in one thread of the program."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


def compute_in_one_thread() -> None:
    """Have operations that the calling thread starts run in it alone; other threads of the program are as before.

    On a CPU, torch divides each operation among OpenMP threads, a team for every thread of the program. Two teams on
    the same cores wait for each other at the end of each operation, which can take many times as long.
    """
    # `torch.set_num_threads` would also set the number for threads that start later. torch sets a thread's number at
    # its first use of it, so that this call must come before.
    torch.get_num_threads()
    if limit := _omp_set_num_threads():
        limit(1)


@contextmanager
def computing_in(threads: int | None) -> Iterator[None]:
    """Compute in this number of threads inside the block; ``None``: in the current number."""
    if threads is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache
def _omp_set_num_threads() -> Any:
    """Return OpenMP's function in the library that torch uses; ``None``: it is not found."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        try:
            return ctypes.CDLL(str(folder / name)).omp_set_num_threads
        except (OSError, AttributeError):  # another system, or a build without OpenMP
            continue
    return None
