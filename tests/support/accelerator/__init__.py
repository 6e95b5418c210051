"""An accelerator that is not there: tensors of a device ``sim``, whose work is queued on streams and done late.

`install` registers the device with torch as a PrivateUse1 backend, in Python, without a compiler; it is for a process
of its own. `start` begins a simulation. A program then finds the device as it finds any other: by
`torch.get_device_module`, see `module`.

What is modelled: streams, events and host threads; a caching allocator that gives memory to the next at once; kernels'
order by adversarial schedules; races by byte range, on the device and on registered host memory; the program's waits,
with their lines; several devices; registration of host memory and its refusal; memory that runs out; a lost device;
random numbers drawn on the device. What is not: kernels' rounding (it is the CPU's), time, the driver, copies between
devices, host memory that is touched by the CPU while a copy is under way (seen only where numbers differ), and host
interleavings that did not happen in the run. A view's bytes are its hull. Autograd's device thread uses the default
stream; torch's Python backends know one device only, so that backward on ``sim:1`` needs
`torch.autograd.set_multithreading_enabled(False)`.
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
    """Register the device with torch, and start a simulation if there is none."""
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
