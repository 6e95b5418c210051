"""Simulate device memory: a caching allocator with immediate reuse, and race detection by byte range."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import torch
from support.accelerator.simulation import LOCK, Operation, Simulation, Site, now, site

ROUNDED = 512  # bytes; allocations of a CUDA device are multiples
NAN_BYTE = 0xFF  # NaN in every float type, -1 in the others

Access = tuple["Region", int, int, bool]


class Region:
    """Hold bytes that several blocks use one after another, with the accesses that may still race.

    Args:
        size: bytes.
        has_data: whether bytes exist; not in ghost mode or for host memory.
    """

    def __init__(self, size: int, has_data: bool = True) -> None:
        self.size = size
        self.bytes = torch.full((size,), NAN_BYTE, dtype=torch.uint8) if has_data else None
        self._accesses: list[tuple[int, int, bool, int, int, Operation]] = []
        self._simulation = now()

    def note(self, low: int, high: int, writes: bool, operation: Operation) -> None:
        """Record an access; compare it with earlier accesses that it does not happen after."""
        simulation = operation.stream.simulation
        if self._simulation is not simulation:  # of a tensor that outlived a simulation: a cached one, say
            self._simulation, self._accesses = simulation, []
        stream, clock = operation.stream.id, operation.stream.clock
        kept = []
        for old in self._accesses:
            old_low, old_high, old_writes, old_stream, old_seq, other = old
            is_before = clock.get(old_stream, 0) >= old_seq
            if not is_before and old_low < high and low < old_high and (writes or old_writes):
                self._race(other, old_writes, operation, writes)
            if is_before and writes and low <= old_low and old_high <= high:
                continue
            if is_before and old_low >= low and old_high <= high and old_writes == writes and old_stream == stream:
                continue
            kept.append(old)
        kept.append((low, high, writes, stream, operation.seq, operation))
        self._accesses = kept

    @staticmethod
    def _race(one: Operation, one_writes: bool, other: Operation, other_writes: bool) -> None:
        simulation = other.stream.simulation
        key = str(one), str(other)
        simulation.races[key] += 1
        simulation.examples.setdefault(
            key,
            f"{'write' if one_writes else 'read'} on stream {one.stream.name} and "
            f"{'write' if other_writes else 'read'} on stream {other.stream.name}",
        )


class Block:
    """Hold the memory of a tensor and its views; it returns to its allocation stream with the last reference.

    As with CUDA's caching allocator, that stream can reuse it at once, even while other streams use it.
    """

    def __init__(self, num_bytes: int, index: int) -> None:
        simulation = now()
        self.device_index, self.num_bytes = index, -(-max(num_bytes, 1) // ROUNDED) * ROUNDED
        device, stream = simulation.devices[index], simulation.stream(index)
        size = self.num_bytes if simulation.ghost else 1 << (self.num_bytes - 1).bit_length()
        with LOCK:
            simulation.check()
            simulation.touch(index)
            _fail_if_full(simulation, index, self.num_bytes)
            pool = device.regions[stream.id, size]
            if pool and not simulation.ghost:
                self.region = pool.pop()
            else:
                self.region = Region(size, not simulation.ghost)
                device.reserved += size
                device.peak_reserved = max(device.peak_reserved, device.reserved)
            device.allocated += self.num_bytes
            place: Site = ()
            if simulation.ghost:
                place = site()
                simulation.by_site[place] += self.num_bytes
            if device.allocated > device.peak:
                device.peak = device.allocated
                if simulation.ghost:
                    simulation.at_peak = simulation.by_site.copy()
        weakref.finalize(self, _give_back, simulation, self.region, index, stream.id, size, self.num_bytes, place)


def _fail_if_full(simulation: Simulation, index: int, num_bytes: int) -> None:
    device, faults = simulation.devices[index], simulation.faults
    simulation.num_allocations += 1
    if faults.taken is not None and simulation.num_allocations == faults.taken[0]:
        device.taken = faults.taken[1]
    allowed = min(device.total_bytes * device.limit, device.total_bytes - device.taken)
    is_chosen = simulation.num_allocations == faults.failing_allocation
    if is_chosen or device.allocated + num_bytes > allowed:
        free = device.total_bytes - device.taken - device.allocated
        text = f"CUDA out of memory. Tried to allocate {num_bytes} bytes. GPU {index} has a total capacity of "
        simulation.fail(torch.OutOfMemoryError(f"{text}{device.total_bytes} bytes of which {free} are free."))


def _give_back(
    simulation: Simulation, region: Region, index: int, stream: int, size: int, num_bytes: int, place: Site
) -> None:
    with LOCK:
        device = simulation.devices[index]
        device.allocated -= num_bytes
        if simulation.ghost:
            device.reserved -= size
            simulation.by_site[place] -= num_bytes
        else:
            device.regions[stream, size].append(region)


def find_locked(tensor: torch.Tensor) -> tuple[Region, int] | None:
    """Return the registered host memory of a tensor and the offset in it; ``None``: pageable memory."""
    at = tensor.data_ptr()
    for address, region in now().locked.items():
        if address <= at and at + tensor.nbytes <= address + region.size:
            return region, at - address
    return None


def is_mapped(address: int) -> bool:
    """Tell whether an address is memory of this process."""
    resident = ctypes.create_string_buffer(1)
    page = ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE)
    return ctypes.CDLL(None).mincore(page, ctypes.c_size_t(1), resident) == 0


def lock(tensor: torch.Tensor) -> None:
    """Register the memory of a host tensor for its lifetime."""
    locked, address = now().locked, tensor.data_ptr()
    locked[address] = Region(tensor.nbytes, has_data=False)
    weakref.finalize(tensor.untyped_storage(), locked.pop, address, None)


def hull(shape: Any, stride: Any) -> int:
    """Count the elements from the first to the last of a strided tensor."""
    if 0 in shape:
        return 0
    last = 0
    for size, step in zip(shape, stride, strict=True):
        last += (size - 1) * step
    return last + 1
