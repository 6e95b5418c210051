"""Count processor time of this process, by kind of thread, and of the whole machine.

A thread of Python's is told by the name of its pool (``disk-read_0`` is of ``disk-read``); the main thread and those
that OpenMP starts compute.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

COMPUTING = "computation"
NANOSECONDS = 1e9


@dataclass(frozen=True)
class ProcessorTime:
    """Processor time so far, or between two points.

    Attributes:
        user: seconds of this process, outside the kernel.
        system: seconds of this process, in the kernel.
        machine: seconds of the whole machine, on anything; the kernel does much of a transfer outside the process.
        page_faults: pages of this process that had to be mapped, without reading them from a disk.
        by_threads: seconds by what threads do, of those that live.
    """

    user: float
    system: float
    machine: float
    page_faults: int
    by_threads: dict[str, float]

    @classmethod
    def now(cls) -> ProcessorTime:
        """Return the processor time so far."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(usage.ru_utime, usage.ru_stime, busy_seconds(), usage.ru_minflt, _thread_seconds())

    def since(self, before: ProcessorTime) -> ProcessorTime:
        """Return the processor time since an earlier point."""
        return ProcessorTime(
            self.user - before.user,
            self.system - before.system,
            self.machine - before.machine,
            self.page_faults - before.page_faults,
            {name: spent - before.by_threads.get(name, 0.0) for name, spent in self.by_threads.items()},
        )

    @property
    def total(self) -> float:
        """Seconds of this process."""
        return self.user + self.system


def busy_seconds() -> float:
    """Return the processor seconds of the whole machine so far."""
    columns = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(columns[:3]) + sum(columns[5:7])) / os.sysconf("SC_CLK_TCK")


def _thread_seconds() -> dict[str, float]:
    names = {thread.native_id: thread.name.rpartition("_")[0] for thread in threading.enumerate()}
    seconds: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        # The main thread's name has no number behind an underscore, and OpenMP's threads have none that Python knows.
        name = names.get(int(task.name)) or COMPUTING
        with suppress(OSError):  # it has just ended
            seconds[name] += int((task / "schedstat").read_text().split()[0]) / NANOSECONDS
    return dict(seconds)
