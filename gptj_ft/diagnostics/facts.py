"""Collect the facts of machine, device and libraries that a bug report needs, and nothing private."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gptj_ft import __version__
from gptj_ft.planning.machine_profile import cpu_name
from gptj_ft.system.accelerator import (
    CPU,
    device_name,
    free_and_total,
    is_accelerator,
    module_of,
    pin,
    runs_on,
    supports_bf16,
)
from gptj_ft.system.cgroup import memory_limits
from gptj_ft.system.direct_io import takes_direct
from gptj_ft.system.machine import existing_folder, free_memory
from gptj_ft.system.memory import allocate

LIBRARIES = ("torch", "transformers", "datasets", "tokenizers", "numpy", "huggingface_hub")
PROBED_BYTES = 64 * 2**20
FIRST_LOCKED, MAX_LOCKED = 256 * 2**20, 16 * 2**30
LOCKED_SHARE = 0.5  # of free RAM, at most
HUGE_PAGE_KEYS = ("AnonHugePages", "ShmemPmdMapped")


def collect(device: torch.device, folder: Path) -> dict[str, Any]:
    """Return the facts of a machine; ``None`` for each fact that cannot be read.

    Args:
        folder: folder on the disk to describe; its name is not among the facts.
    """
    known: Mapping[str, Callable[[], Any]] = {
        "versions": _versions,
        "system": lambda: {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "cpu": _cpu,
        "memory": _memory,
        "disk": lambda: _disk(existing_folder(folder)),
        "device": lambda: _device(device),
    }
    return {name: _if_known(fact) for name, fact in known.items()}


def _if_known(fact: Callable[[], Any]) -> Any:
    try:
        return fact()
    except Exception:
        return None


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"gptj-ft": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        versions[name] = None
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    builds = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    return {**versions, **{f"torch built for {name}": str(build) for name, build in builds.items() if build}}


def _cpu() -> dict[str, Any]:
    is_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": cpu_name(),
        "cores": os.cpu_count(),
        "cores_allowed": allowed,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "has_amx": bool(is_amx()),
    }


def _memory() -> dict[str, Any]:
    import psutil

    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "total": int(psutil.virtual_memory().total),
        "free": free_memory(CPU),
        "container_limit": min((each.limit for each in memory_limits()), default=None),
        "lockable_by_ulimit": None if locked == resource.RLIM_INFINITY else locked,
        "huge_pages_had": _if_known(huge_share),
    }


def huge_share() -> float:
    """Measure the share of fresh memory that the system backs with huge pages."""
    values = allocate(PROBED_BYTES, torch.uint8, CPU).fill_(1)
    address, inside, kilobytes = values.data_ptr(), False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(bound, 16) for bound in span.groups())
            inside = start < address + PROBED_BYTES and address < end
        elif inside and line.startswith(HUGE_PAGE_KEYS):
            kilobytes += int(line.split()[1])
    # The kernel may have merged the mapping with neighbours, whose huge pages count then, too.
    return min(1.0, kilobytes * 1024 / PROBED_BYTES)


def _disk(folder: Path) -> dict[str, Any]:
    used = shutil.disk_usage(folder)
    return {"free": used.free, "total": used.total, "takes_direct_io": takes_direct(folder)}


def _device(device: torch.device) -> dict[str, Any]:
    """Return the facts of an accelerator, or only the type of a CPU."""
    if not is_accelerator(device):
        return {"type": device.type}
    module = module_of(device)
    count = getattr(module, "device_count", lambda: 1)
    free, total = free_and_total(device)
    return {
        "type": device.type,
        "number": device.index,
        "devices": int(count()),
        "name": device_name(device),
        "free": free,
        "total": total,
        "has_bf16": supports_bf16(device),
        "driver": _if_known(_driver),
        **(_if_known(lambda: _architecture(module, device)) or {}),
        "lockable": _if_known(lambda: lockable_bytes(device)),
    }


def _driver() -> str | None:
    """Return the version of NVIDIA's kernel module."""
    text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else None


def _architecture(module: Any, device: torch.device) -> dict[str, Any]:
    """Return a device's compute capability and whether torch was built for it."""
    capability = tuple(module.get_device_capability(device))
    built = list(module.get_arch_list())
    return {"capability": ".".join(map(str, capability)), "built_for": built, "is_in_build": runs_on(capability, built)}


def lockable_bytes(device: torch.device) -> int:
    """Measure how many bytes of host memory can be locked, by doubling; at most half of the free memory."""
    most = min(MAX_LOCKED, LOCKED_SHARE * free_memory(CPU))
    size, done = FIRST_LOCKED, 0
    while size <= most:
        values = allocate(size, torch.uint8, CPU)
        unpin = pin(values, device)
        if unpin is None:
            break
        unpin()
        size, done = 2 * size, size
    return done
