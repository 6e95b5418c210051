"""The seam to accelerators: streams, events, pinned memory and limits, through torch's own module of a device type.

This is the only module that knows accelerators. It asks `torch.get_device_module` for what `torch.cuda` (CUDA, ROCm),
`torch.xpu` and the modules of other backends have in common; what one of them lacks is done otherwise, or not at all.
`torch.mps` has no streams: its memory is the host's, models stay in it, and nothing is copied.

Kernels run asynchronously to the Python thread. The computation has the thread's own stream, updates have one of their
own, and so has every thread that moves bytes. Three rules keep one from reading what another is still writing:

- a wait names the stream that waits: there is none for "whatever stream is current here";
- a copy takes the events that it must come after, and waits for them on the stream that it copies on;
- fresh memory comes with the event of its zeros, and memory that several streams touch comes from a `BufferPool`.

On a CPU there are no streams and no events, and nothing here does anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptj_ft.system.memory import allocate

CPU, META = torch.device("cpu"), torch.device("meta")
Stream = Any  # torch.cuda.Stream, or what another module has in its place; ``None`` on a device without streams
PORTABLE = 1  # cudaHostRegisterPortable: locked for every device, not only for the current one
NARROW_SUMS = (
    "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation",
)  # fmt: skip


def is_accelerator(device: torch.device) -> bool:
    """Tell whether a device is neither the CPU nor ``meta``."""
    return device.type not in ("cpu", "meta")


def has_streams(device: torch.device) -> bool:
    """Tell whether a device has streams, so that it computes and copies at the same time."""
    return is_accelerator(device) and hasattr(module_of(device), "Stream")


def shares_memory(device: torch.device) -> bool:
    """Tell whether a device's memory is the host's: the CPU itself, and Apple's GPUs."""
    return device.type in ("cpu", "mps")


def module_of(device: torch.device) -> Any:
    """Return torch's module of an accelerator: ``torch.cuda``, ``torch.xpu``, ..."""
    return torch.get_device_module(device)


# ---------------------------------------------------------------- streams and events


class StreamEvent:
    """A point in the work of the stream that was current when it was recorded."""

    def __init__(self, device: torch.device) -> None:
        self._event = module_of(device).Event()
        self._event.record(current_stream(device))

    def wait(self, stream: Stream) -> None:
        """Have a stream wait for it; the program goes on."""
        stream.wait_event(self._event)

    def done(self) -> bool:
        """Tell whether the device has passed it."""
        return bool(self._event.query())

    def exception(self) -> None:
        """Return nothing: an event does not fail."""


Transfer = Future[Any] | StreamEvent
"""Bytes on their way, or work of a stream that one may have to wait for."""


def current_stream(device: torch.device) -> Stream:
    """Return the stream that the calling thread gives its work to."""
    return module_of(device).current_stream(device) if has_streams(device) else None


def new_stream(device: torch.device, priority: int = 0) -> Stream:
    """Make a stream; of kernels that wait in several, those of the lowest number are begun first."""
    return module_of(device).Stream(device, priority=priority) if has_streams(device) else None


def on_stream(stream: Stream) -> AbstractContextManager[None]:
    """Give the work inside to a stream."""
    return nullcontext() if stream is None else module_of(stream.device).stream(stream)


def use_own_stream(device: torch.device) -> None:
    """Give the thread that calls this a stream of its own."""
    if has_streams(device):
        module_of(device).set_device(device)
        module_of(device).set_stream(new_stream(device))


def record_event(device: torch.device) -> list[StreamEvent]:
    """Record an event in the current stream; none where work is done when the program goes on."""
    return [StreamEvent(device)] if has_streams(device) else []


def wait_for(transfers: Iterable[Transfer], stream: Stream) -> None:
    """Wait for transfers: the program for those of other threads, a stream for work of other streams."""
    for event in ended(transfers):
        event.wait(stream)


def ended(transfers: Iterable[Transfer]) -> list[StreamEvent]:
    """Wait for the transfers of other threads; return the events, for which a stream has yet to wait.

    Raises:
        Exception: what went wrong in one of them.
    """
    events = []
    for transfer in transfers:
        if isinstance(transfer, StreamEvent):
            events.append(transfer)
        else:
            transfer.result()
    return events


def copy(source: Tensor, target: Tensor, after: Iterable[StreamEvent] = ()) -> None:
    """Copy between host and device, or inside one of them, on this thread's stream; return when the bytes are there.

    Args:
        source: values to copy.
        target: tensor to fill, of the same shape and any type.
        after: work of other streams that must end first: what still uses the target, or makes the source.
    """
    device = next((x.device for x in (source, target) if has_streams(x.device)), None)
    if device is None:
        target.copy_(source)
        return
    stream = current_stream(device)
    for event in after:
        event.wait(stream)
    target.copy_(source, non_blocking=True)
    copied = _blocking_event(module_of(device))
    copied.record(stream)
    copied.synchronize()


def _blocking_event(module: Any) -> Any:
    """Make an event whose waiting thread sleeps: one that spins takes a core from the thread that launches kernels."""
    try:
        return module.Event(blocking=True)
    except TypeError:  # torch.xpu knows no such thing
        return module.Event()


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device."""
    if is_accelerator(device):
        args = (device,) if has_streams(device) else ()
        module_of(device).synchronize(*args)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that work takes: by a device's own clock, which does not count how the program gets there."""
    synchronize(device)
    start = time.perf_counter()
    if not has_streams(device):
        work()
        synchronize(device)
        return time.perf_counter() - start
    before, after = (module_of(device).Event(enable_timing=True) for _ in range(2))
    before.record(current_stream(device))
    work()
    after.record(current_stream(device))
    synchronize(device)
    return float(before.elapsed_time(after)) / 1e3 or time.perf_counter() - start


class StallTimer:
    """How long a stream stands still while the program waits.

    That is from where it has caught up with the program to the end of the wait, by the device's own clock: the program
    may wait for bytes that the device will not need for long.

    Args:
        device: device whose current stream is watched.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = current_stream(device)
        self._event = module_of(device).Event
        self._pairs: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what the stream stands still inside."""
        before, after = (self._event(enable_timing=True) for _ in range(2))
        before.record(self._stream)
        try:
            yield
        finally:
            after.record(self._stream)
            self._pairs.append((before, after))
            while self._pairs and self._pairs[0][1].query():  # nobody may ever ask for the sum
                self._fold()

    @property
    def seconds(self) -> float:
        """All of them; waits for the device to pass the last one."""
        while self._pairs:
            self._pairs[0][1].synchronize()
            self._fold()
        return self._seconds

    def _fold(self) -> None:
        before, after = self._pairs.pop(0)
        self._seconds += before.elapsed_time(after) / 1e3


# ---------------------------------------------------------------- memory


def fresh(numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[StreamEvent]]:
    """Return zeros as `allocate` does, and what another stream has to wait for before it touches them."""
    return allocate(numel, dtype, device), record_event(device)


def pin(values: Tensor, device: torch.device) -> Callable[[], None] | None:
    """Lock a host tensor's pages in RAM, which the device then reaches at the rate of the link.

    torch's own pinned memory comes in powers of two: up to twice of what is asked for.

    Returns: what unlocks them again; ``None``: the system does not allow so many, or the device needs it not.
    """
    if not hasattr(module_of(device), "cudart") or not values.nbytes:
        return None
    cudart = module_of(device).cudart()
    address = values.data_ptr()
    if int(cudart.cudaHostRegister(address, values.nbytes, PORTABLE)) == 0:
        return lambda: cudart.cudaHostUnregister(address)
    # The runtime keeps the error, and the next kernel to be launched would be said to have failed with it. torch's
    # binding cannot ask for it; a kernel that nobody needs can.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
    return None


class DeviceMemory(NamedTuple):
    """Memory that a process takes on a device, at most, in bytes.

    Attributes:
        allocated: bytes of tensors.
        reserved: bytes that torch's allocator holds, for tensors now and later.
    """

    allocated: int
    reserved: int


def peak_device_memory(device: torch.device) -> DeviceMemory:
    """Return the most memory that this process has taken on a device; zeros on the CPU, or where it is not counted."""
    if not is_accelerator(device):
        return DeviceMemory(0, 0)
    module = module_of(device)
    if not hasattr(module, "max_memory_allocated"):  # torch.mps counts what is taken now
        return DeviceMemory(int(module.current_allocated_memory()), int(module.driver_allocated_memory()))
    return DeviceMemory(int(module.max_memory_allocated(device)), int(module.max_memory_reserved(device)))


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Return an accelerator's free and total memory in bytes."""
    module = module_of(device)
    if hasattr(module, "mem_get_info"):
        free, total = module.mem_get_info(device)
        return int(free), int(total)
    total = int(module.recommended_max_memory())
    return total - int(module.driver_allocated_memory()), total


def limit_memory(device: torch.device, num_bytes: int) -> None:
    """Have torch refuse to take more of a device's memory than so many bytes."""
    if is_accelerator(device) and hasattr(module_of(device), "set_per_process_memory_fraction"):
        fraction = min(1.0, num_bytes / free_and_total(device)[1])
        args = (device,) if has_streams(device) else ()
        module_of(device).set_per_process_memory_fraction(fraction, *args)


def empty_cache(device: torch.device) -> None:
    """Give back what torch keeps of a device's memory for later."""
    if is_accelerator(device):
        module_of(device).empty_cache()


# ---------------------------------------------------------------- what a device is


def device_name(device: torch.device) -> str:
    """Return an accelerator's name, as its maker calls it."""
    module = module_of(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type.upper()


def device_id(device: torch.device) -> str:
    """Return an accelerator's identity in its machine, by whatever number a process knows it."""
    return str(getattr(module_of(device).get_device_properties(device), "uuid", device))


def sum_in_fp32(device: torch.device) -> None:
    """Have a device add up the products of bf16 and fp16 matrices in fp32 alone, from now on.

    cuBLAS may cut a long sum in pieces, and torch lets it round these to the matrices' type before they are added:
    sums of 16,384 products, as in GPT-J's MLP, would lose bits that no moment in fp32 brings back. XPU and MPS have no
    such switch.
    """
    products = getattr(getattr(torch.backends, device.type, None), "matmul", None)
    for name in NARROW_SUMS:
        if hasattr(products, name):
            setattr(products, name, False)


def supports_bf16(device: torch.device) -> bool:
    """Tell whether a device computes in bf16 itself."""
    if not is_accelerator(device) or not hasattr(module_of(device), "is_bf16_supported"):
        return True
    with suppress(TypeError):
        return bool(module_of(device).is_bf16_supported(including_emulation=False))
    return bool(module_of(device).is_bf16_supported())


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Leave the random generators of the CPU and of a device as they are found."""
    if not is_accelerator(device):
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device.index or 0], device_type=device.type)


def seeded_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator of a device with a seed; of the CPU, where the device has none."""
    try:
        generator = torch.Generator(device)
    except RuntimeError:
        generator = torch.Generator()
    return generator.manual_seed(seed)


def default_accelerator() -> str | None:
    """Return the type of this machine's accelerator, as torch chooses among several; ``None``: there is none."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return None if current is None else current.type
