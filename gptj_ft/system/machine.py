"""Query this machine: devices, free memory, free disk space. Its speed is measured by `planning.probe`."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gptj_ft.errors import UsageError

if TYPE_CHECKING:  # rows are prepared without it
    import torch

KERNELS_KEPT = 64


def bound_kernel_caches() -> None:
    """Bound the memory of compiled kernels; to be called before torch multiplies for the first time.

    In bf16 on a CPU, oneDNN and torch's layer above it each keep the last 1,024 kernels that they compiled, at some 0.7
    MB. Steps without padding ask for new shapes each time: a run's memory grew by a gigabyte. With 64 it stays below
    what a plan counts for the process; a small model compiles more often, at GPT-J's width that hardly counts.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNELS_KEPT))


def choose_device(name: str) -> torch.device:
    """Return the device of a run; a CUDA device with its number, which `torch.cuda.set_device` asks for.

    Raises:
        UsageError: unknown, or not on this machine.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"unknown device '{name}': auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu, or install torch for CUDA")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device '{name}': auto, cpu or cuda") from error
    if device.type == "cpu":
        return device
    index, count = torch.cuda.current_device() if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        there = ", ".join(f"cuda:{number}" for number in range(count))
        raise UsageError(f"--device {name}: there is no such device here; there are {there}")
    return torch.device("cuda", index)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device; for the CPU, RAM."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    import psutil  # the engine alone does without

    available = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:  # a container may have less than its machine
        return min(available, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):
        return available


def free_disk(folder: Path) -> int:
    """Return the free bytes of the file system that a folder is, or will be, on."""
    return shutil.disk_usage(existing_folder(folder)).free


def existing_folder(folder: Path) -> Path:
    """Return a folder, or the nearest above it that exists."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    return existing


def peak_memory() -> int:
    """Return the most bytes that this process has had resident."""
    try:  # Linux: getrusage would also count what the parent had when it started this process
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
