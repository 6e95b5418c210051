"""Cache the measured rates of this machine in ``machine.json`` of the home folder.

Measuring takes some seconds, for each device and each file system. A file that is missing, damaged or cannot be
written costs the seconds again and nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from gptj_ft.errors import DataError, ResourceError
from gptj_ft.planning import layer_times, probe
from gptj_ft.planning.layer_times import BYTES_PER_ELEMENT, LayerKind, Seconds, Timing
from gptj_ft.planning.probe import ASSUMED_DISK, FILE_BYTES, ComputeRates, DiskRates, Rates
from gptj_ft.planning.workload import Workload
from gptj_ft.system.accelerator import device_name, is_accelerator, supports_bf16
from gptj_ft.system.digests import read_sealed, sealed
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.files import write_file
from gptj_ft.system.machine import cpu_kernels, existing_folder, free_disk
from gptj_ft.system.paths import home, make_home

METHOD = 11  # of measuring: figures from another one are not used
SLOWEST, FASTEST = 1e3, 1e21  # FLOP or bytes a second
LEAST_SECONDS, MOST_SECONDS = 1e-7, 1e4  # of a layer
MOST_LAYERS = 500  # that are remembered of a device
QUIET = 0.5  # load of each core; what is measured while it is higher is measured again when it is not
BF16_GAIN = 1.3  # how much faster bf16 must be to be worth its rounding

T = TypeVar("T", ComputeRates, DiskRates)
_unsaved: dict[tuple[Path, str, str], Any] = {}  # by file: what could not be written to it


def rates(device: torch.device, folder: Path, again: bool = False) -> Rates:
    """Return the rates of a device and of a folder's file system, measured if unknown.

    Args:
        device: device that computes.
        folder: folder of the run.
        again: measure, whatever is known; what is known of layers is forgotten.
    """
    if again:
        _keep("layers", _device_key(device), {})
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
    if known is None or _was_busy(known.load):
        known = probe.measure_compute(device)
        _keep("compute", key, asdict(known))
    return known


def _device_key(device: torch.device) -> str:
    name = device_name(device) if is_accelerator(device) else f"{cpu_name()}, {cpu_kernels()}"
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
        known = probe.measure_disk(folder)
    except (OSError, ResourceError):  # a folder that cannot be written is refused elsewhere, in better words
        return ASSUMED_DISK
    _keep("disk", key, asdict(known))
    return known


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Choose the data type by products: ``auto`` is bf16, or for want of it fp16, where `BF16_GAIN` times as fast."""
    if precision == "auto":
        half = "bf16" if supports_bf16(device) else "fp16"
        precision = half if compute_rates(device).gain >= BF16_GAIN else "fp32"
    return PRECISIONS[precision]


def with_times(workload: Workload, precision: str, device: torch.device, free_bytes: int) -> Workload:
    """Choose the data type of a workload by its own layers, and return it with their times; measured if unknown.

    On an accelerator, and where memory does not suffice to run a layer, the choice is that of `choose_dtype`, and
    without times.

    Args:
        workload: workload, with its layers.
        precision: name of the data type, or ``auto``: bf16 where a step's layers are `BF16_GAIN` times as fast in it.
        device: device that computes.
        free_bytes: memory that may be used.
    """
    largest = max((sum(layout.numel for layout in whole) for whole in workload.whole_layers[1:]), default=0)
    if device.type != "cpu" or not workload.layers or BYTES_PER_ELEMENT * largest > free_bytes:
        return replace(workload, dtype=choose_dtype(precision, device))
    names = ("fp32", "bf16") if precision == "auto" else (precision,)
    rates = compute_rates(device)
    timings = {name: Timing(workload, PRECISIONS[name], rates.matmul(PRECISIONS[name])) for name in names}
    found = layer_seconds([kind for timing in timings.values() for kind in timing.kinds], device)
    loads = {
        name: replace(workload, dtype=PRECISIONS[name], times=timing.times(found)) for name, timing in timings.items()
    }
    if precision != "auto":
        return loads[precision]
    gain = loads["fp32"].layer_seconds / loads["bf16"].layer_seconds
    chosen = loads["bf16" if gain >= BF16_GAIN else "fp32"]
    return replace(chosen, times=chosen.times._replace(gain=gain))


def layer_seconds(kinds: Sequence[LayerKind], device: torch.device) -> Mapping[str, Seconds]:
    """Return the seconds of layers by their names, from the cache or measured now, all that are missing together."""
    key = _device_key(device)
    entry = _entry("layers", key)
    known = entry if isinstance(entry, dict) else {}
    found = {kind.name: _seconds_of(known.get(kind.name)) for kind in kinds}
    missing = {kind.name: kind for kind in kinds if found[kind.name] is None}
    if missing:
        load = probe.core_load()
        measured = dict(zip(missing, layer_times.time_kinds(list(missing.values())), strict=True))
        newest = list({**known, **{name: [*each, load] for name, each in measured.items()}}.items())[-MOST_LAYERS:]
        _keep("layers", key, dict(newest))
        found |= measured
    return {name: each for name, each in found.items() if each is not None}


def _seconds_of(entry: object) -> Seconds | None:
    """Read seconds of a layer; none, if they make no sense, or are of a busy machine that is quiet now."""
    if not isinstance(entry, list) or len(entry) != 3 or not all(isinstance(each, float) for each in entry):
        return None
    found, load = Seconds(*entry[:2]), entry[2]
    if _was_busy(load):
        return None
    return found if LEAST_SECONDS <= found.forward <= MOST_SECONDS and 0.0 <= found.backward <= MOST_SECONDS else None


def _was_busy(load: float) -> bool:
    """Tell whether the machine was busy, by its load then, when something was measured, and is quiet now."""
    return load > QUIET >= probe.core_load()


def reason_for(precision: str, workload: Workload, measured: ComputeRates) -> str:
    """Explain the choice of `with_times`."""
    if precision == "auto" and workload.times.gain:
        return f"its layers are {workload.times.gain:.2g} times as fast in bf16 here"
    if precision == "auto" and workload.dtype == torch.float16:
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


def _entries(part: str) -> dict[str, Any]:
    """Return a part of the file, by device or file system."""
    entries = _read_cache().get(part)
    return entries if isinstance(entries, dict) else {}


def _entry(part: str, key: str) -> Any:
    """Return the figures of a device or file system: those of the file, or newer ones."""
    return _unsaved.get((_cache(), part, key)) or _entries(part).get(key)


def _recall(part: str, key: str, form: type[T]) -> T | None:
    """Look up cached rates; damaged or implausible ones are ignored."""
    try:
        known = form(**_entry(part, key))
    except TypeError:
        return None
    values = {field: getattr(known, field.name) for field in fields(known)}
    # What has a default can be nothing. Nothing else is that slow, nor as fast: a plan would divide by it.
    makes_sense = all(
        isinstance(value, float) and (0.0 if field.default == 0.0 else SLOWEST) <= value <= FASTEST
        for field, value in values.items()
    )
    return known if makes_sense else None


def _keep(part: str, key: str, measured: dict[str, Any]) -> None:
    """Store what was measured in the file, or in memory if it cannot be written."""
    known = _read_cache()
    known[part] = {**_entries(part), key: measured}
    new = _cache().with_suffix(f".{os.getpid()}")
    try:
        make_home()
        write_file(new, json.dumps(sealed(known), indent=2) + "\n")
        os.replace(new, _cache())
    except OSError:
        _unsaved[_cache(), part, key] = measured
    else:
        _unsaved.pop((_cache(), part, key), None)
