"""Query this machine: devices, free memory, free disk space. Its speed is measured by `planning.probe`."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gptj_ft.errors import ResourceError, UsageError
from gptj_ft.system.units import gigabytes

if TYPE_CHECKING:  # rows are prepared without it
    import torch

log = logging.getLogger(__name__)
KERNELS_KEPT = 64


def bound_kernel_caches() -> None:
    """Bound the memory of compiled kernels; to be called before torch multiplies for the first time.

    In bf16 on a CPU, oneDNN and torch's layer above it each keep the last 1,024 kernels that they compiled, at some 0.7
    MB. Steps without padding ask for new shapes each time: a run's memory grew by a gigabyte. With 64 it stays below
    what a plan counts for the process; a small model compiles more often, at GPT-J's width that hardly counts.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNELS_KEPT))


def bf16_unit() -> str:
    """Name the unit that multiplies in bf16 on this CPU, as far as oneDNN may use it: AMX, AVX-512, or none."""
    import torch

    limit = _onednn_limit()
    if torch.cpu._is_amx_tile_supported() and (not limit or "AMX" in limit):
        return "AMX"
    is_allowed = not limit or any(name in limit for name in ("BF16", "FP16", "AMX", "AVX10"))
    return "AVX-512" if torch.cpu._is_avx512_bf16_supported() and is_allowed else ""


def cpu_kernels() -> str:
    """Return the kernels that compute on this machine's CPU, on which the last bits of results depend."""
    import torch

    half, limit = bf16_unit(), _onednn_limit()
    return (
        f"{torch.backends.cpu.get_cpu_capability()}{f', bf16 by {half}' if half else ''}{f', {limit}' if limit else ''}"
    )


def _onednn_limit() -> str:
    """Return the instruction set that oneDNN is limited to, under its own name for it; empty: it is not."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return "" if limit in ("ALL", "DEFAULT") else limit


def choose_device(name: str, cap: int | None = None, local_rank: int | None = None) -> torch.device:
    """Return the device of a run, an accelerator with its number, and make it torch's current one.

    Like the current device, the sums of its products are torch's state, of the whole process: they are in fp32 from
    here on, for training, scores and answers alike (`accelerator.sum_in_fp32`).

    Args:
        name: ``auto``, ``cpu``, or the type of an accelerator, with or without a number.
        cap: most bytes of its memory that are to be used; default: what is free.
        local_rank: number of this process among those of its run on this machine, which take the accelerators in turn
            if the name has no number; default: there are no others, and it takes torch's current one.

    Raises:
        UsageError: unknown, not on this machine, or a cap above its memory.
    """
    import torch

    from gptj_ft.system.accelerator import (
        default_accelerator,
        free_and_total,
        has_streams,
        module_of,
        shares_memory,
        sum_in_fp32,
    )

    if name == "auto":
        with _torch_warnings() as reasons:
            name = default_accelerator() or "cpu"
        if reasons and name == "cpu":
            log.warning("--device auto takes the CPU: %s", reasons[0])
    try:
        device = torch.device(name)
        module = None if device.type == "cpu" else module_of(device)
    except RuntimeError as error:
        raise UsageError(f"unknown device '{name}': auto, cpu, or an accelerator as cuda, cuda:1, xpu, mps") from error
    if module is None:
        return torch.device("cpu")
    with _torch_warnings() as reasons:
        is_there = hasattr(module, "is_available") and module.is_available()
    if not is_there:
        why = f" ({reasons[0]})" if reasons else ""
        advice = "update its driver" if reasons else "install torch for it"
        raise UsageError(f"--device {name}: torch sees no such device here{why}; use --device cpu, or {advice}")
    index, count = device.index, int(module.device_count())
    if index is None and local_rank is not None:
        index = local_rank % max(1, count)
    elif index is None:
        index = module.current_device() if hasattr(module, "current_device") else 0
    if index >= count:
        there = ", ".join(f"{device.type}:{number}" for number in range(count))
        raise UsageError(f"--device {name}: there is no such device here; there are {there}")
    device = torch.device(device.type, index)
    try:
        if has_streams(device):
            module.set_device(device)  # or what torch does without being told a device would be done on the first one
        total = None if cap is None or shares_memory(device) else free_and_total(device)[1]
    except RuntimeError as error:  # busy in exclusive mode, lost, or a driver that breaks off
        reason = str(error).partition("\n")[0]
        raise ResourceError(
            f"--device {name}: {device} cannot be used: {reason}; use --device cpu, or mend it"
        ) from error
    if cap is not None and total is not None and cap > total:
        raise UsageError(
            f"--device-memory {gigabytes(cap)}: {device} has {gigabytes(total)}; name less, or leave it out to use "
            "what is free"
        )
    sum_in_fp32(device)
    return device


def processes_on(device: torch.device, name: str, processes: int) -> int:
    """Count the processes of a run on this machine that compute with a device which each chose by this name."""
    import torch

    from gptj_ft.system.accelerator import is_accelerator, module_of

    if not is_accelerator(device) or (name != "auto" and torch.device(name).index is not None):
        return processes
    return len(range(device.index, processes, int(module_of(device).device_count())))


@contextmanager
def _torch_warnings() -> Iterator[list[str]]:
    """Yield a list that the first sentences of torch's warnings are put into at the end, instead of being printed.

    A driver too old for the build is such a warning: "CUDA initialization: The NVIDIA driver on your system is too old
    (found version 11040). Please update your GPU driver by ..."
    """
    reasons: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield reasons
    texts = (str(warning.message).partition("\n")[0] for warning in caught)
    reasons += [text.removeprefix("CUDA initialization: ").partition(". ")[0].rstrip(".") for text in texts]


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device; for the CPU, RAM."""
    if device.type != "cpu":
        from gptj_ft.system.accelerator import free_and_total

        return free_and_total(device)[0]
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
