"""Query this machine: devices, free memory, free disk space. `planning.probe` measures its speed."""

from __future__ import annotations

import logging
import os
import platform
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

if TYPE_CHECKING:  # `prepare-data` does not import torch
    import torch

log = logging.getLogger(__name__)
MAX_CACHED_KERNELS = 64


def bound_kernel_caches() -> None:
    """Bound the memory of compiled CPU kernels; call this before torch's first matrix product.

    In bf16, oneDNN and torch's layer above it each cache the last 1,024 compiled kernels, 0.7 MB each. Unpadded steps
    need new shapes all the time, and a run's memory grew by a gigabyte. With 64 kernels it stays below the plan's
    estimate. Small models compile more often then; at GPT-J's width the time does not matter.
    """
    # The libraries read these variables once, at the first product.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(MAX_CACHED_KERNELS))


def bf16_unit() -> str:
    """Name the CPU's bf16 matrix unit that oneDNN may use: ``AMX``, ``AVX-512``, or empty."""
    import torch

    limit = _onednn_limit()
    if torch.cpu._is_amx_tile_supported() and (not limit or "AMX" in limit):
        return "AMX"
    is_allowed = not limit or any(name in limit for name in ("BF16", "FP16", "AMX", "AVX10"))
    return "AVX-512" if torch.cpu._is_avx512_bf16_supported() and is_allowed else ""


def emulates_bf16() -> bool:
    """Tell whether torch's libraries emulate bf16 products on this CPU, slower than they compute in fp32."""
    return platform.machine().lower() in ("x86_64", "amd64") and not bf16_unit()


def cpu_kernels() -> str:
    """Name the instruction sets of the CPU kernels; the last bits of results depend on them."""
    import torch

    half, limit = bf16_unit(), _onednn_limit()
    return (
        f"{torch.backends.cpu.get_cpu_capability()}{f', bf16 by {half}' if half else ''}{f', {limit}' if limit else ''}"
    )


def _onednn_limit() -> str:
    """Return the instruction set that the environment limits oneDNN to; empty if unlimited."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return "" if limit in ("ALL", "DEFAULT") else limit


def choose_device(name: str, cap: int | None = None, local_rank: int | None = None) -> torch.device:
    """Return the device of a run, with its number, and make it torch's current device.

    Also makes its matrix products accumulate in fp32, and deterministic, and its memory's segments expandable, for the
    whole process (`accelerator.sum_in_fp32`, `allow_deterministic_products`, `use_expandable_segments`).

    Args:
        name: ``auto``, ``cpu``, or the type of an accelerator, with or without a number.
        cap: limit on its memory in bytes.
        local_rank: local rank on this machine; processes alternate over the accelerators if the name has no number.
            Default: a single process on torch's current device.

    Raises:
        UsageError: unknown, not on this machine, or a cap above its memory.
    """
    import torch

    from gptj_ft.system.accelerator import (
        allow_deterministic_products,
        default_accelerator,
        free_and_total,
        has_streams,
        missing_kernels,
        module_of,
        shares_memory,
        sum_in_fp32,
        use_expandable_segments,
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
        is_available = hasattr(module, "is_available") and module.is_available()
    if not is_available:
        why = f" ({reasons[0]})" if reasons else ""
        advice = "update its driver" if reasons else "install torch for it"
        raise UsageError(f"--device {name}: torch sees no such device here{why}; use --device cpu, or {advice}")
    index, count = device.index, int(module.device_count())
    if index is None and local_rank is not None:
        index = local_rank % max(1, count)
    elif index is None:
        index = module.current_device() if hasattr(module, "current_device") else 0
    if index >= count:
        existing = ", ".join(f"{device.type}:{number}" for number in range(count))
        raise UsageError(f"--device {name}: this machine has no such device, only {existing}")
    device = torch.device(device.type, index)
    try:
        if has_streams(device):
            module.set_device(device)  # else operations without an explicit device would run on the first one
        total = None if cap is None or shares_memory(device) else free_and_total(device)[1]
    except RuntimeError as error:  # the device is busy in exclusive mode, or lost, or its driver fails
        reason = str(error).partition("\n")[0]
        raise ResourceError(
            f"--device {name}: {device} cannot be used: {reason}; use --device cpu, or repair it"
        ) from error
    if lacking := missing_kernels(device):
        raise UsageError(
            f"--device {name}: this build of torch has no kernels for {device}, whose compute capability is {lacking}; "
            "use --device cpu, or install a build that supports it"
        )
    if cap is not None and total is not None and cap > total:
        raise UsageError(
            f"--device-memory {gigabytes(cap)}: {device} has {gigabytes(total)}; use a lower limit, or omit it to use "
            "all free memory"
        )
    sum_in_fp32(device)
    allow_deterministic_products(device)
    use_expandable_segments(device)
    return device


def processes_on(device: torch.device, name: str, processes: int) -> int:
    """Count the local processes of a run that share a device after each called `choose_device` with this name."""
    import torch

    from gptj_ft.system.accelerator import is_accelerator, module_of

    if not is_accelerator(device) or (name != "auto" and torch.device(name).index is not None):
        return processes
    # `choose_device` gives rank r the device r modulo their number.
    return len(range(device.index, processes, int(module_of(device).device_count())))


@contextmanager
def _torch_warnings() -> Iterator[list[str]]:
    """Suppress torch's warnings; yield a list that receives their first sentences at the end of the block.

    Example: "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your
    GPU driver by ..."
    """
    reasons: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield reasons
    texts = (str(warning.message).partition("\n")[0] for warning in caught)
    reasons += [text.removeprefix("CUDA initialization: ").partition(". ")[0].rstrip(".") for text in texts]


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device's memory; for the CPU, of RAM within the limits of its control groups."""
    if device.type != "cpu":
        from gptj_ft.system.accelerator import free_and_total

        return free_and_total(device)[0]
    import psutil

    from gptj_ft.system.cgroup import memory_limits

    # A container, a batch system or a service may have less than the machine.
    return min([int(psutil.virtual_memory().available), *(each.free for each in memory_limits())])


def free_disk(folder: Path) -> int:
    """Return the free bytes of the file system of an existing or future folder."""
    return shutil.disk_usage(existing_folder(folder)).free


def existing_folder(folder: Path) -> Path:
    """Return a folder, or its nearest existing parent."""
    existing = folder.resolve()
    while not existing.exists():
        existing = existing.parent
    return existing


def peak_memory() -> int:
    """Return the peak resident bytes of this process."""
    try:  # on Linux, getrusage would include the parent's memory at the time of the fork
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
