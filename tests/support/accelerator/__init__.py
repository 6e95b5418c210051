"""Simulate an accelerator: tensors on a device ``sim`` whose work is queued on streams and executed late.

`install` registers the device with torch as a PrivateUse1 backend, in pure Python, in a separate process. `start`
begins a simulation. A program then finds the device like any other, by `torch.get_device_module`; see `module`.

Modelled: streams, events and host threads; threads of stores that lag behind; a caching allocator that reuses memory at
once; adversarial kernel schedules; races by byte range, in device memory and registered host memory; the program's
waits, with their source lines; several devices; registration of host memory and its failure; out of memory; a lost
device; a signal after so many operations; random numbers drawn on the device.

Not modelled: rounding of kernels (the CPU computes), time, drivers, copies between devices, CPU writes to host memory
during a copy (visible only as wrong numbers), and interleavings of other threads that did not occur in the run. The
bytes of a view are its hull. Autograd's device thread uses the default stream. torch's Python backends support one
device, so backward on ``sim:1`` needs `torch.autograd.set_multithreading_enabled(False)`.
"""

from __future__ import annotations

from typing import Any

from support.accelerator.simulation import (
    NAME,
    SCHEDULES,
    Faults,
    Schedule,
    Simulation,
    is_running,
    now,
    start,
)

__all__ = ["NAME", "SCHEDULES", "Faults", "Schedule", "Simulation", "install", "is_running", "now", "start"]

_kept: list[Any] = []


def install() -> None:
    """Register the device with torch and start a simulation if none is running."""
    if not is_running():
        start()
    if _kept:
        return
    from support.accelerator.module import Module
    from support.accelerator.tensor import register_kernels
    from support.accelerator.threads import carry_clocks
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    _kept.append(register_kernels())
    carry_clocks()
