"""Copy between the host and a simulated device, and on it, with CUDA's semantics."""

from __future__ import annotations

from typing import Any

import torch
from support.accelerator.memory import find_locked, lock
from support.accelerator.simulation import NAME, Operation, now, show, site


def copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copy on the current stream; blocks unless it is non-blocking and the host memory is pinned."""
    from support.accelerator.tensor import SimTensor, access

    if isinstance(target, SimTensor) and isinstance(source, SimTensor):
        return _inside(target, source)
    if non_blocking and source.dtype != target.dtype and source.ndim:
        return _converted(target, source)
    to_device = isinstance(target, SimTensor)
    host, device = (source, target) if to_device else (target, source)
    simulation, stream = now(), now().stream(device.block.device_index)
    kind = "h2d" if to_device else "d2h"
    is_number = to_device and host.ndim == 0  # it travels with the kernel
    locked = None if host.is_meta else find_locked(host)
    is_locked = is_number or host.is_meta or locked is not None  # a ghost's host memory is locked
    accesses = [access(device, to_device)]
    if locked is not None:
        region, low = locked
        accesses.append((region, low, low + host.nbytes, not to_device))
    elif non_blocking and not is_locked:
        simulation.pageable[kind, show(site())] += host.nbytes
    data = device.data_cpu
    staged = host if host.is_meta or (is_locked and not is_number) else host.detach().clone()  # the driver's buffer
    run = None
    if not (data.is_meta or host.is_meta):
        run = (lambda: data.copy_(staged)) if to_device else (lambda: host.copy_(data))
    made = Operation(f"copy {kind}", run, tuple(a for a in accesses if a), kind + ("" if is_locked else " pageable"))
    made.num_bytes = host.nbytes
    stream.put(made)
    if not is_number and not (non_blocking and is_locked):
        simulation.note_wait(f"copy {kind}{'' if is_locked else ', pageable'}{', non-blocking' * non_blocking}")
        stream.finish()
    return target


def _inside(target: Any, source: Any) -> Any:
    from support.accelerator.tensor import access

    to, what = target.data_cpu, source.data_cpu
    index = source.block.device_index
    if index != target.block.device_index:
        raise NotImplementedError("copies from device to device are not simulated")
    now().check_launch()
    run = None if to.is_meta or what.is_meta else lambda: to.copy_(what)
    accesses = tuple(a for a in (access(source, False), access(target, True)) if a)
    made = Operation("copy", run, accesses)
    made.num_bytes = sum(high - low for _, low, high, _ in accesses)
    now().stream(index).put(made)
    return target


def _converted(target: Any, source: Any) -> Any:
    """Convert and copy; a non-blocking copy converts on the device, in new memory."""
    from support.accelerator.tensor import SimTensor, new

    index = (target if isinstance(target, SimTensor) else source).block.device_index
    like = torch.empty(source.shape, device="meta")
    if isinstance(target, SimTensor):
        between = new(like.shape, like.stride(), source.dtype, index)
        copy(between, source, non_blocking=True)
        return _inside(target, between)
    between = new(like.shape, like.stride(), target.dtype, index)
    _inside(between, source)
    return copy(target, between, non_blocking=True)


def to_copy(x: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
            non_blocking: bool = False, memory_format: Any = None) -> Any:  # fmt: skip
    """Return a copy of another dtype or on another device."""
    from support.accelerator.tensor import SimTensor, new

    dtype = dtype or x.dtype
    goes_to = torch.device(device) if device is not None else x.device
    kept = memory_format or torch.preserve_format
    like = torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta"), memory_format=kept)
    if goes_to.type == NAME:
        index = x.block.device_index if device is None and isinstance(x, SimTensor) else now().index_of(goes_to)
        return copy(new(like.shape, like.stride(), dtype, index), x, non_blocking)
    where = "meta" if x.data_cpu.is_meta else "cpu"
    out = torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=where)
    if non_blocking and not out.is_meta and out.numel():  # torch makes it of locked memory of its own
        lock(out)
    return copy(out, x, non_blocking).to(dtype)
