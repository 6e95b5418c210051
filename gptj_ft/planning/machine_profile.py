"""Cache the measured rates of this machine in ``machine.json`` of the home folder.

Measuring takes some seconds per device and per file system. A cache that is missing, damaged or not writable only costs
these seconds again.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from gptj_ft.errors import DataError, ResourceError
from gptj_ft.models.products import Libraries, Products, products_for
from gptj_ft.planning import layer_times, probe, product_times
from gptj_ft.planning.layer_times import BYTES_PER_ELEMENT, LayerKind, Seconds, Timing
from gptj_ft.planning.probe import ASSUMED_DISK, FILE_BYTES, ComputeRates, DiskRates, Rates
from gptj_ft.planning.product_times import Choice, ProductKind
from gptj_ft.planning.workload import Workload
from gptj_ft.system.accelerator import device_name, is_accelerator, supports_bf16
from gptj_ft.system.atomic import replace_shared
from gptj_ft.system.digests import read_sealed, sealed
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.machine import cpu_kernels, emulates_bf16, existing_folder, free_disk
from gptj_ft.system.paths import home, make_home

METHOD = 14  # version of the measurements; others are not used
SLOWEST, FASTEST = 1e3, 1e21  # plausible FLOP or bytes a second
LEAST_SECONDS, MOST_SECONDS = 1e-7, 1e4  # plausible for a layer
MOST_LAYERS = 500  # cached per device
QUIET = 0.5  # load per core; measurements under more load are repeated when the machine is quiet
BF16_GAIN = 1.3  # speed-up that is worth the rounding of bf16

T = TypeVar("T", ComputeRates, DiskRates)


class MachineProbe:
    """Measure this machine."""

    def compute(self, device: torch.device) -> ComputeRates:
        return probe.measure_compute(device)

    def disk(self, folder: Path) -> DiskRates:
        return probe.measure_disk(folder)

    def fill_write_cache(self, folder: Path, seconds: float) -> None:
        probe.fill_write_cache(folder, seconds)

    def layers(self, kinds: Sequence[LayerKind]) -> list[Seconds]:
        return layer_times.time_kinds(kinds)

    def products(self, kinds: Sequence[ProductKind]) -> list[Choice]:
        return product_times.time_products(kinds)

    def core_load(self) -> float:
        return probe.core_load()

    def meter_others(self) -> Callable[[], float]:
        return probe.meter_others()

    def free_disk(self, folder: Path) -> int:
        return free_disk(folder)

    def supports_bf16(self, device: torch.device) -> bool:
        return supports_bf16(device)

    def emulates_bf16(self) -> bool:
        return emulates_bf16()


MACHINE = MachineProbe()
_unsaved: dict[tuple[Path, str, str], Any] = {}  # measurements that could not be written, by file, part and key


def rates(
    device: torch.device, folder: Path, again: bool = False, machine: MachineProbe = MACHINE, filled: float = 0.0
) -> Rates:
    """Return the rates of a device and of a folder's file system, from the cache or measured now.

    Args:
        again: measure again, and forget the times of layers and products.
        filled: seconds of writing before the disk is measured again, see `probe.fill_write_cache`.
    """
    if again:
        for part in ("layers", "products"):
            _keep(part, _device_key(device), {})
    return Rates(
        compute_rates(device, again, machine), disk_rates(folder, again, machine, filled), device.type == "cpu"
    )


def is_known(device: torch.device) -> bool:
    """Tell whether a device has been measured."""
    return _recall("compute", _device_key(device), ComputeRates) is not None


def are_known(device: torch.device, folder: Path) -> bool:
    """Tell whether `rates` would measure nothing."""
    folder = existing_folder(folder)
    is_disk_known = _recall("disk", _file_system(folder), DiskRates) or free_disk(folder) < 3 * FILE_BYTES
    return is_known(device) and bool(is_disk_known)


def compute_rates(device: torch.device, again: bool = False, machine: MachineProbe = MACHINE) -> ComputeRates:
    """Return the rates of a device, from the cache or measured now."""
    key = _device_key(device)
    known = None if again else _recall("compute", key, ComputeRates)
    if known is None or _is_outdated(known.load, machine):
        others = machine.meter_others()
        known = machine.compute(device)
        known = replace(known, load=max(known.load, others()))
        _keep("compute", key, asdict(known))
    return known


def _device_key(device: torch.device) -> str:
    name = device_name(device) if is_accelerator(device) else f"{cpu_name()}, {cpu_kernels()}"
    return f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def disk_rates(folder: Path, again: bool = False, machine: MachineProbe = MACHINE, filled: float = 0.0) -> DiskRates:
    """Return the rates of a folder's file system: cached, measured now, or `ASSUMED_DISK` without room to measure."""
    folder = existing_folder(folder)
    key = _file_system(folder)
    known = None if again else _recall("disk", key, DiskRates)
    if known and (known.filled or not _is_outdated(known.load, machine)):
        return known
    if machine.free_disk(folder) < 3 * FILE_BYTES:
        return ASSUMED_DISK
    try:
        if filled:
            machine.fill_write_cache(folder, filled)
        others = machine.meter_others()
        measured = machine.disk(folder)
        known = replace(measured, load=others(), filled=filled)
    except (OSError, ResourceError):  # writing the run will fail with a better message
        return ASSUMED_DISK
    _keep("disk", key, asdict(known))
    return known


def choose_dtype(precision: str, device: torch.device, machine: MachineProbe = MACHINE) -> torch.dtype:
    """Choose the data type by the rates of products: ``auto`` is bf16 (else fp16) if it is `BF16_GAIN` as fast."""
    if precision == "auto":
        half = "bf16" if machine.supports_bf16(device) else "fp16"
        precision = half if compute_rates(device, machine=machine).gain >= BF16_GAIN else "fp32"
    return PRECISIONS[precision]


def with_times(
    workload: Workload, precision: str, device: torch.device, free_bytes: int, machine: MachineProbe = MACHINE
) -> Workload:
    """Choose the data type of a workload by the times of its layers; return the workload with them.

    On an accelerator, or if the memory is too small to run a layer, choose as `choose_dtype` does, without times.

    Args:
        precision: name of the data type, or ``auto``: bf16 if it makes the layers `BF16_GAIN` as fast.
        free_bytes: memory for timing.

    The libraries of its products are chosen first, unless the workload has them.
    """
    largest = max((sum(layout.numel for layout in whole) for whole in workload.whole_layers[1:]), default=0)
    if device.type != "cpu" or not workload.layers or BYTES_PER_ELEMENT * largest > free_bytes:
        dtype = choose_dtype(precision, device, machine)
        untimed = products_for(dtype, device, machine.emulates_bf16())
        return replace(workload, dtype=dtype, products=workload.products or untimed)
    names, typical = ("fp32", "bf16") if precision == "auto" else (precision,), workload.typical_steps[0].workload
    rates = {name: compute_rates(device, machine=machine).matmul(PRECISIONS[name]) for name in names}
    products = {name: choose_products(typical, PRECISIONS[name], rates[name], device, machine) for name in names}
    timings = {name: Timing(typical, PRECISIONS[name], rates[name], products[name][0]) for name in names}
    timed = layer_seconds([kind for timing in timings.values() for kind in timing.kinds], device, machine)
    workloads = {}
    for name, timing in timings.items():
        times = timing.times(timed)._replace(products_gain=products[name][1])
        workloads[name] = replace(workload, dtype=PRECISIONS[name], times=times, products=timing.products)
    if precision != "auto":
        return workloads[precision]
    # Whole steps are compared: a layer that is faster in bf16 may be rare.
    gain = workloads["fp32"].layer_seconds / workloads["bf16"].layer_seconds
    chosen = workloads["bf16" if gain >= BF16_GAIN else "fp32"]
    return replace(chosen, times=chosen.times._replace(gain=gain))


def choose_products(
    workload: Workload, dtype: torch.dtype, rate: float, device: torch.device, machine: MachineProbe = MACHINE
) -> tuple[Products, float]:
    """Choose the libraries of a workload's products by time, cached or measured now; widen bf16 without a bf16 unit.

    Args:
        rate: FLOP/s of large products.

    Returns:
        The libraries, and the speed of backward's products relative to oneDNN's alone.
    """
    if workload.products is not None:
        return workload.products, 1.0
    key, widens = _device_key(device), products_for(dtype, device, machine.emulates_bf16()).widens
    counts = product_times.kinds_of(workload, torch.float32 if widens else dtype, rate)
    entry = _entry("products", key)
    known = entry if isinstance(entry, dict) else {}
    choices = {kind.name: _read_choice(known.get(kind.name)) for kind in counts}
    missing = [kind for kind in counts if choices[kind.name] is None]
    if missing:
        load, others = machine.core_load(), machine.meter_others()
        measured = machine.products(missing)
        load = max(load, others())
        found = {kind.name: each._replace(load=load) for kind, each in zip(missing, measured, strict=True)}
        written = {name: [str(each.libraries), *each[1:]] for name, each in found.items()}
        _keep("products", key, dict(list({**known, **written}.items())[-MOST_LAYERS:]))
        choices |= found
    chosen, gain = product_times.products_of(counts, {name: each for name, each in choices.items() if each is not None})
    return replace(chosen, widens=widens), gain


def _read_choice(entry: object) -> Choice | None:
    """Read cached libraries of a matrix; None if they are damaged.

    Unlike rates, they stay when the machine becomes quiet: another choice would change the bits of the next run.
    """
    match entry:
        case [str(text), float(seconds), float(before), float(load)] if seconds >= 0 and before >= 0:
            try:
                return Choice(Libraries.parse(text), seconds, before, load)
            except ValueError:
                return None
    return None


def layer_seconds(
    kinds: Sequence[LayerKind], device: torch.device, machine: MachineProbe = MACHINE
) -> Mapping[str, Seconds]:
    """Return the seconds of layers by name, from the cache or measured now, all missing ones together."""
    key = _device_key(device)
    entry = _entry("layers", key)
    known = entry if isinstance(entry, dict) else {}
    seconds = {kind.name: _read_seconds(known.get(kind.name), machine) for kind in kinds}
    missing = {kind.name: kind for kind in kinds if seconds[kind.name] is None}
    if missing:
        # Before measuring, which itself loads the cores.
        load, others = machine.core_load(), machine.meter_others()
        measured = dict(zip(missing, machine.layers(list(missing.values())), strict=True))
        # Dictionaries keep the order of insertion, so the oldest layers go first.
        load = max(load, others())
        measured = {name: each._replace(load=load) for name, each in measured.items()}
        newest = list({**known, **{name: [*each] for name, each in measured.items()}}.items())[-MOST_LAYERS:]
        _keep("layers", key, dict(newest))
        seconds |= measured
    return {name: each for name, each in seconds.items() if each is not None}


def _read_seconds(entry: object, machine: MachineProbe) -> Seconds | None:
    """Read cached seconds of a layer; None if they are implausible or outdated."""
    if not isinstance(entry, list) or len(entry) != 3 or not all(isinstance(each, float) for each in entry):
        return None
    seconds = Seconds(*entry)
    if _is_outdated(seconds.load, machine):
        return None
    is_plausible = LEAST_SECONDS <= seconds.forward <= MOST_SECONDS and 0.0 <= seconds.backward <= MOST_SECONDS
    return seconds if is_plausible else None


def _is_outdated(load: float, machine: MachineProbe) -> bool:
    """Tell whether a measurement was made on a busy machine that is quiet now."""
    return load > QUIET >= machine.core_load()


def reason_for(precision: str, workload: Workload, measured: ComputeRates) -> str:
    """Explain the choice of `with_times`."""
    if precision == "auto" and workload.times.gain:
        return f"its layers are {workload.times.gain:.2g} times as fast in bf16 here"
    if precision == "auto" and workload.dtype == torch.float16:
        return f"fp16 products are {measured.gain:.2g} times as fast here, and this device has no bf16"
    return f"bf16 products are {measured.gain:.2g} times as fast here" if precision == "auto" else "as asked for"


def cpu_name() -> str:
    """Return the maker's name of the processor."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> str:
    """Name a folder's file system: its topmost folder, device number and size."""
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
    """Return a part of the cache, by device or file system."""
    entries = _read_cache().get(part)
    return entries if isinstance(entries, dict) else {}


def _entry(part: str, key: str) -> Any:
    """Return a cached measurement; unsaved ones are newer than the file."""
    unsaved = _unsaved.get((_cache(), part, key))
    return _entries(part).get(key) if unsaved is None else unsaved


def _recall(part: str, key: str, form: type[T]) -> T | None:
    """Return cached rates; None if they are damaged or implausible."""
    try:
        known = form(**_entry(part, key))
    except TypeError:
        return None
    values = {field: getattr(known, field.name) for field in fields(known)}
    # Fields with a default may be 0. A plan divides by the others.
    is_plausible = all(
        isinstance(value, float) and (0.0 if field.default == 0.0 else SLOWEST) <= value <= FASTEST
        for field, value in values.items()
    )
    return known if is_plausible else None


def _keep(part: str, key: str, measured: dict[str, Any]) -> None:
    """Store a measurement in the file, or in memory if the file cannot be written."""
    known = _read_cache()
    known[part] = {**_entries(part), key: measured}
    try:
        make_home()
        replace_shared(_cache(), json.dumps(sealed(known), indent=2) + "\n")
    except OSError:
        _unsaved[_cache(), part, key] = measured
    else:
        _unsaved.pop((_cache(), part, key), None)
