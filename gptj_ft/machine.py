"""What this machine has and can do: memory, disk, and the rate of its matrix products."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from functools import lru_cache
from pathlib import Path

import psutil
import torch

from gptj_ft.errors import UsageError


def choose_device(name: str) -> torch.device:
    """Return the device of a run.

    Raises:
        UsageError: unknown, or not on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"unknown device '{name}': auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu, or install torch for CUDA")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device '{name}': auto, cpu or cuda") from error


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the type of the computation: ``auto`` is bf16 where the device multiplies it fast, else fp32.

    On a CPU with AVX2 only, bf16 products are 6 to 7 times slower than fp32.
    """
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device; for the CPU, RAM."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:  # a container may have less than its machine
        return min(available, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):
        return available


def free_disk(folder: Path) -> int:
    """Return the free bytes of the file system that a folder is, or will be, on."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def peak_memory() -> int:
    """Return the most bytes that this process has had resident."""
    try:  # Linux: getrusage would also count what the parent had when it started this process
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@lru_cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure a matrix product: FLOP/s, the best of a few of a size that fills the machine for some milliseconds."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
