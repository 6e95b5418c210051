"""Cache the measured rates of this machine in ``machine.json`` of the home folder.

Measuring takes some seconds, for each device and each file system. A file that is missing, damaged or cannot be
written costs the seconds again and nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from gptj_ft.errors import DataError, ResourceError
from gptj_ft.planning import probe
from gptj_ft.planning.probe import ASSUMED_DISK, FILE_BYTES, ComputeRates, DiskRates, Rates
from gptj_ft.system.accelerator import device_name, is_accelerator, supports_bf16
from gptj_ft.system.digests import read_sealed, sealed
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.files import write_file
from gptj_ft.system.machine import existing_folder, free_disk
from gptj_ft.system.paths import home, make_home

METHOD = 8  # of measuring: figures from another one are not used
SLOWEST, FASTEST = 1e3, 1e21  # FLOP or bytes a second
BF16_GAIN = 1.3  # how much faster bf16 must be to be worth its rounding

T = TypeVar("T", ComputeRates, DiskRates)
_unsaved: dict[tuple[str, str], dict[str, float]] = {}  # what could not be written to the file


def rates(device: torch.device, folder: Path, again: bool = False) -> Rates:
    """Return the rates of a device and of a folder's file system, measured if unknown.

    Args:
        device: device that computes.
        folder: folder of the run.
        again: measure, whatever is known.
    """
    return Rates(compute_rates(device, again), disk_rates(folder, again), device.type == "cpu")


def is_known(device: torch.device) -> bool:
    """Tell whether a device has been measured."""
    return _recall("compute", _device_key(device), ComputeRates) is not None


def are_known(device: torch.device, folder: Path) -> bool:
    """Tell whether `rates` would measure nothing."""
    folder = existing_folder(folder)
    is_disk_known = _recall("disk", _file_system(folder), DiskRates) or free_disk(folder) < 3 * FILE_BYTES
    return is_known(device) and bool(is_disk_known)


def compute_rates(device: torch.device, again: bool = False) -> ComputeRates:
    """Return the rates of a device, from the cache or measured now."""
    key = _device_key(device)
    known = None if again else _recall("compute", key, ComputeRates)
    return known or _keep("compute", key, probe.measure_compute(device))


def _device_key(device: torch.device) -> str:
    name = device_name(device) if is_accelerator(device) else cpu_name()
    return f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def disk_rates(folder: Path, again: bool = False) -> DiskRates:
    """Return the rates of a folder's file system: cached, measured now, or `ASSUMED_DISK` without room."""
    folder = existing_folder(folder)
    key = _file_system(folder)
    known = None if again else _recall("disk", key, DiskRates)
    if known:
        return known
    if free_disk(folder) < 3 * FILE_BYTES:
        return ASSUMED_DISK
    try:
        return _keep("disk", key, probe.measure_disk(folder))
    except (OSError, ResourceError):  # a folder that cannot be written is refused elsewhere, in better words
        return ASSUMED_DISK


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Choose the data type: ``auto`` is bf16, or for want of it fp16, where `BF16_GAIN` times as fast, else fp32."""
    if precision == "auto":
        half = "bf16" if supports_bf16(device) else "fp16"
        precision = half if compute_rates(device).gain >= BF16_GAIN else "fp32"
    return PRECISIONS[precision]


def reason_for(precision: str, dtype: torch.dtype, measured: ComputeRates) -> str:
    """Explain the choice of `choose_dtype`."""
    if precision == "auto" and dtype == torch.float16:
        return f"fp16 products are {measured.gain:.2g} times as fast here, and this device has no bf16"
    return f"bf16 products are {measured.gain:.2g} times as fast here" if precision == "auto" else "as asked for"


def cpu_name() -> str:
    """Return the name of the processor, as its maker calls it."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> str:
    """Name the file system of a folder: device number, size and the topmost folder on it."""
    device, top = folder.stat().st_dev, folder.resolve()
    while top.parent != top and top.parent.stat().st_dev == device:
        top = top.parent
    return f"{top}, device {device}, {shutil.disk_usage(folder).total} bytes"


def _cache() -> Path:
    return home() / "machine.json"


def _read_cache() -> dict[str, Any]:
    try:
        known = read_sealed(_cache())
    except DataError:
        known = {}
    return known if known.get("method") == METHOD else {"method": METHOD}


def _recall(part: str, key: str, form: type[T]) -> T | None:
    """Look up cached rates; damaged or implausible ones are ignored."""
    entries = _read_cache().get(part)
    entry = _unsaved.get((part, key)) or (entries.get(key) if isinstance(entries, dict) else None)
    try:
        known = form(**entry)  # type: ignore[arg-type]
    except TypeError:
        return None
    values = {field: getattr(known, field.name) for field in fields(known)}
    # What has a default can be nothing. Nothing else is that slow, nor as fast: a plan would divide by it.
    makes_sense = all(
        isinstance(value, float) and (0.0 if field.default == 0.0 else SLOWEST) <= value <= FASTEST
        for field, value in values.items()
    )
    return known if makes_sense else None


def _keep(part: str, key: str, measured: T) -> T:
    """Store measured rates in the file, or in memory if it cannot be written."""
    known = _read_cache()
    entries = known.get(part)
    known[part] = {**(entries if isinstance(entries, dict) else {}), key: asdict(measured)}
    new = _cache().with_suffix(f".{os.getpid()}")
    try:
        make_home()
        write_file(new, json.dumps(sealed(known), indent=2) + "\n")
        os.replace(new, _cache())
    except OSError:
        _unsaved[part, key] = asdict(measured)
    return measured
