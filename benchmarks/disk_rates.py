"""Measure disk rates: new files, preallocated files, overwritten files, and reads.

The stores replace a layer's file by writing a new one and renaming it over the old. Whether the new one gets fresh
blocks or those of a file replaced before is the difference between the first and the third line. Processor time is that
of the whole machine, less what it uses when idle: the kernel does much of the work outside the process.

    python benchmarks/disk_rates.py --work /tmp/bench --request-mib 8
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from processor_time import busy_seconds

from gptj_ft.system import direct_io
from gptj_ft.system.direct_io import open_direct, read_direct, write_bytes
from gptj_ft.system.memory import allocate

SIZE = 800 * 2**20  # of a file: a block of GPT-J in fp32
FILES = 4


def write(path: Path, data: memoryview, flags: int, is_allocated: bool = False) -> None:
    """Write a file, durably."""
    descriptor = open_direct(path, os.O_RDWR | flags)
    try:
        if is_allocated:
            os.posix_fallocate(descriptor, 0, SIZE)
        elif flags:
            os.truncate(descriptor, SIZE)
        write_bytes(descriptor, data, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: memoryview, is_allocated: bool) -> None:
    """Write a new file and rename it over the old."""
    new = path.with_suffix(".new")
    write(new, data, os.O_CREAT | os.O_TRUNC, is_allocated)
    os.replace(new, path)


def read(path: Path, data: memoryview) -> None:
    """Read a file past the page cache."""
    descriptor = open_direct(path, os.O_RDONLY)
    try:
        read_direct(descriptor, data, 0)
    finally:
        os.close(descriptor)


def measure(task: Callable[[Path], None], paths: list[Path], idle: float) -> str:
    """Apply an operation to each file; print its rate and processor time."""
    start, busy = time.perf_counter(), busy_seconds()
    for path in paths:
        task(path)
    seconds = time.perf_counter() - start
    gigabytes = len(paths) * SIZE / 1e9
    processor = (busy_seconds() - busy - idle * seconds) / gigabytes
    return f"{gigabytes / seconds:5.2f} GB/s, {processor:5.3f} processor seconds a GB"


def main() -> None:
    """Measure each operation twice and report the second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--request-mib", type=int, default=direct_io.REQUEST_BYTES // 2**20)
    arguments = parser.parse_args()
    direct_io.REQUEST_BYTES = arguments.request_mib * 2**20
    arguments.work.mkdir(parents=True, exist_ok=True)
    paths = [arguments.work / f"rate-{number}" for number in range(FILES)]
    flat = allocate(SIZE, torch.uint8, torch.device("cpu")).fill_(7)
    data = memoryview(flat.numpy())  # type: ignore[arg-type]
    before = busy_seconds()
    time.sleep(2)
    idle = (busy_seconds() - before) / 2
    tasks: dict[str, Callable[[Path], None]] = {
        "new blocks, renamed over the old file": lambda path: replace(path, data, is_allocated=False),
        "the same, allocated beforehand": lambda path: replace(path, data, is_allocated=True),
        "over a file that is there": lambda path: write(path, data, 0),
        "read": lambda path: read(path, data),
    }
    try:
        for turn in range(2):
            for name, task in tasks.items():
                result = measure(task, paths, idle)
                if turn:
                    print(f"{name:40} {result}", flush=True)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
            path.with_suffix(".new").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
