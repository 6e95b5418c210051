"""Use accelerators: streams, events, pinned memory and memory limits.

Only this module knows accelerators. It uses the functions that torch's modules of device types have in common
(`torch.cuda` for CUDA and ROCm, `torch.xpu`, ...), with fallbacks where one lacks them. `torch.mps` has no streams: it
shares the host's memory, so models stay in place and nothing is copied.

Kernels run asynchronously to the Python thread. The computation, the updates, and each thread that moves bytes have
their own streams. Three rules prevent data races between them:

- a wait names the stream that waits, never "the current stream";
- a copy gets the events that it must wait for, and waits for them on the stream that it copies on;
- fresh memory comes with the event of its zeroing, and memory shared by streams comes from a `BufferPool`.

On a CPU there are no streams and events, and these functions do nothing.
"""

from __future__ import annotations

import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptj_ft.system.memory import allocate

CPU, META = torch.device("cpu"), torch.device("meta")
Stream = Any  # torch.cuda.Stream or its equivalent in another module; None on a device without streams
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not only for the current one
NARROW_SUMS = (
    "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation",
)  # fmt: skip
ALLOCATOR_VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
WORKSPACES, REPRODUCIBLE_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def is_accelerator(device: torch.device) -> bool:
    """Tell whether a device is neither the CPU nor ``meta``."""
    return device.type not in ("cpu", "meta")


def has_streams(device: torch.device) -> bool:
    """Tell whether a device has streams, and so can compute and copy at the same time."""
    return is_accelerator(device) and hasattr(module_of(device), "Stream")


def shares_memory(device: torch.device) -> bool:
    """Tell whether a device uses the host's memory: the CPU, and Apple's GPUs."""
    return device.type in ("cpu", "mps")


def module_of(device: torch.device) -> Any:
    """Return torch's module of an accelerator: ``torch.cuda``, ``torch.xpu``, ..."""
    return torch.get_device_module(device)


# ---------------------------------------------------------------- streams and events


class StreamEvent:
    """A point in the work of the stream that was current when the event was recorded."""

    def __init__(self, device: torch.device) -> None:
        self._event = module_of(device).Event()
        self._event.record(current_stream(device))

    def wait(self, stream: Stream) -> None:
        """Make a stream wait for the event; the program does not wait."""
        stream.wait_event(self._event)

    def done(self) -> bool:
        """Tell whether the device has reached the event."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Make the program wait until the device has reached the event."""
        self._event.synchronize()

    def exception(self) -> None:
        """Return None, as a future without an error does: an event cannot fail."""


Transfer = Future[Any] | StreamEvent
"""A transfer by another thread, or an event of a stream."""


def current_stream(device: torch.device) -> Stream:
    """Return the calling thread's current stream."""
    return module_of(device).current_stream(device) if has_streams(device) else None


def new_stream(device: torch.device, priority: int = 0) -> Stream:
    """Make a stream; kernels of the stream with the lowest priority number start first."""
    return module_of(device).Stream(device, priority=priority) if has_streams(device) else None


def on_stream(stream: Stream) -> AbstractContextManager[None]:
    """Launch the block's work on a stream."""
    return nullcontext() if stream is None else module_of(stream.device).stream(stream)


def use_own_stream(device: torch.device) -> None:
    """Give the calling thread its own stream."""
    if has_streams(device):
        # The current device belongs to the thread, too, and each new thread starts with device 0.
        module_of(device).set_device(device)
        module_of(device).set_stream(new_stream(device))


def record_event(device: torch.device) -> list[StreamEvent]:
    """Record an event in the current stream; return no event on a synchronous device."""
    return [StreamEvent(device)] if has_streams(device) else []


def wait_for(transfers: Iterable[Transfer], stream: Stream) -> None:
    """Make the program wait for transfers of other threads, and the stream for events of other streams."""
    for event in ended(transfers):
        event.wait(stream)


def ended(transfers: Iterable[Transfer]) -> list[StreamEvent]:
    """Wait for transfers of other threads and raise their errors; return the events, which a stream must wait for."""
    events = []
    for transfer in transfers:
        if isinstance(transfer, StreamEvent):
            events.append(transfer)
        else:
            transfer.result()
    return events


def copy(source: Tensor, target: Tensor, after: Iterable[StreamEvent] = ()) -> None:
    """Copy between or within host and device on this thread's stream; return when the copy is complete.

    Args:
        target: same shape, any type.
        after: work of other streams that uses the target or produces the source.
    """
    device = next((x.device for x in (source, target) if has_streams(x.device)), None)
    if device is None:
        target.copy_(source)
        return
    stream = current_stream(device)
    for event in after:
        event.wait(stream)
    target.copy_(source, non_blocking=True)
    wait_for_stream(device)


def wait_for_stream(device: torch.device) -> None:
    """Make the program wait for the work that this thread's stream has so far."""
    if has_streams(device):
        # By an event: a stream synchronization would spin, and wait for later work, too.
        reached = _blocking_event(module_of(device))
        reached.record(current_stream(device))
        reached.synchronize()


def _blocking_event(module: Any) -> Any:
    """Make an event whose waiting thread sleeps; a spinning thread takes a core from the one that launches kernels."""
    try:
        return module.Event(blocking=True)
    except TypeError:  # torch.xpu has no such argument
        return module.Event()


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device."""
    if is_accelerator(device):
        args = (device,) if has_streams(device) else ()
        module_of(device).synchronize(*args)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that work takes, by the device's clock if it has one: that excludes Python's overhead."""
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
    # Callers divide by the result, and two close events may have the same time.
    return float(before.elapsed_time(after)) / 1e3 or time.perf_counter() - start


class StallTimer:
    """Measure how long the current stream idles while the program waits, by the device's clock.

    The program may wait for data long before the device needs it, so the program's own waiting time would be too long.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = current_stream(device)
        self._event = module_of(device).Event
        self._pairs: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the idle time of the stream in the block."""
        before, after = (self._event(enable_timing=True) for _ in range(2))
        before.record(self._stream)
        try:
            yield
        finally:
            after.record(self._stream)
            self._pairs.append((before, after))
            while self._pairs and self._pairs[0][1].query():  # bound the list even if nobody reads `seconds`
                self._fold()

    @property
    def seconds(self) -> float:
        """Total idle seconds; waits until the device has passed the last block."""
        while self._pairs:
            self._pairs[0][1].synchronize()
            self._fold()
        return self._seconds

    def _fold(self) -> None:
        before, after = self._pairs.pop(0)
        self._seconds += before.elapsed_time(after) / 1e3


# ---------------------------------------------------------------- memory


def fresh(numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[StreamEvent]]:
    """Allocate zeros; also return the events that another stream must wait for before it uses them."""
    return allocate(numel, dtype, device), record_event(device)


def pin(values: Tensor, device: torch.device) -> Callable[[], object] | None:
    """Pin a host tensor's pages, so that the device copies at the full rate of the link.

    torch's own pinned memory would round up to powers of two, which can double it.

    Returns: the function that unpins; ``None`` if the system's limit is reached or the device needs no pinning. The
        pages are unpinned before their memory is freed, if nothing has called it until then.
    """
    if not hasattr(module_of(device), "cudart") or not values.nbytes:
        return None
    cudart = module_of(device).cudart()
    address = values.data_ptr()
    if int(cudart.cudaHostRegister(address, values.nbytes, PORTABLE)) == 0:
        # Freed memory must not stay pinned: CUDA refuses to pin the next memory at its address, and to copy from there.
        unpin = weakref.finalize(values.untyped_storage(), cudart.cudaHostUnregister, address)
        unpin.atexit = False  # CUDA may be gone by then
        return unpin
    # The CUDA runtime keeps the error and would report it for the next kernel. torch cannot clear it, but a dummy
    # kernel launch does.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
    return None


class DeviceMemory(NamedTuple):
    """Memory of a process on a device in bytes."""

    allocated: int  # by tensors
    reserved: int  # by torch's allocator, for present and future tensors


def peak_device_memory(device: torch.device) -> DeviceMemory:
    """Return this process's peak memory on a device; zeros on the CPU."""
    if not is_accelerator(device):
        return DeviceMemory(0, 0)
    module = module_of(device)
    if not hasattr(module, "max_memory_allocated"):  # torch.mps has no peak, only the current value
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
    """Limit the memory that torch allocates on a device."""
    if is_accelerator(device) and hasattr(module_of(device), "set_per_process_memory_fraction"):
        fraction = min(1.0, num_bytes / free_and_total(device)[1])
        # torch.mps, which has no streams, takes no device.
        args = (device,) if has_streams(device) else ()
        module_of(device).set_per_process_memory_fraction(fraction, *args)


def use_expandable_segments(device: torch.device) -> None:
    """Have torch's allocator extend its segments, unless the user configured it; call this before other allocations.

    Otherwise free memory between tensors of other sizes is lost: micro-batches have any number of tokens.
    """
    # https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
    # torch supports them on Linux with CUDA only.
    is_configured = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    if is_configured or device.type != "cuda" or torch.version.hip is not None or sys.platform != "linux":
        return
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:  # a private function
        return
    configure("expandable_segments:True")
    try:
        allocate(1, torch.uint8, device)
    except RuntimeError:  # no virtual memory management, as on some virtual GPUs and under WSL
        configure("expandable_segments:False")


def empty_cache(device: torch.device) -> None:
    """Return torch's unused memory to the device."""
    if is_accelerator(device):
        module_of(device).empty_cache()


# ---------------------------------------------------------------- properties of a device


def device_name(device: torch.device) -> str:
    """Return the product name of an accelerator."""
    module = module_of(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type.upper()


def device_id(device: torch.device) -> str:
    """Return an accelerator's identity in its machine, which does not depend on the numbering of a process."""
    return str(getattr(module_of(device).get_device_properties(device), "uuid", device))


def sum_in_fp32(device: torch.device) -> None:
    """Make a device accumulate bf16 and fp16 matrix products in fp32, from now on.

    By default, cuBLAS may split a long sum and round the partial sums to the matrices' type. Sums of 16,384 products
    (GPT-J's MLP) would lose bits that fp32 moments cannot restore. XPU and MPS have no such setting.
    """
    products = getattr(getattr(torch.backends, device.type, None), "matmul", None)
    for name in NARROW_SUMS:
        if hasattr(products, name):
            setattr(products, name, False)


def has_deterministic_kernels(device: torch.device) -> bool:
    """Tell whether torch has deterministic kernels for all operations of a step on a device; known of CUDA alone."""
    return device.type == "cuda" and torch.version.hip is None


def allow_deterministic_products(device: torch.device) -> None:
    """Give cuBLAS workspaces that make products deterministic; call this before the first product."""
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility; torch's deterministic mode refuses other values.
    if has_deterministic_kernels(device) and os.environ.get(WORKSPACES) not in REPRODUCIBLE_WORKSPACES:
        os.environ[WORKSPACES] = REPRODUCIBLE_WORKSPACES[0]


@contextmanager
def deterministic_kernels(device: torch.device) -> Iterator[None]:
    """Use torch's deterministic kernels in the block, so that the same step always gives the same bits.

    Attention's usual backward kernels add in the order in which their threads finish. Measured on an H200: a step takes
    as long, attention alone 0.6 to 1.8 times as long.
    """
    if not has_deterministic_kernels(device):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    # Not `warn_only`: attention would then warn, and use its other kernel.
    torch.use_deterministic_algorithms(True)
    torch._C._set_deterministic_fill_uninitialized_memory(False)  # would write all new memory once more
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


def supports_bf16(device: torch.device) -> bool:
    """Tell whether a device computes in bf16 natively, without emulation."""
    if not is_accelerator(device) or not hasattr(module_of(device), "is_bf16_supported"):
        return True
    # CUDA and XPU count emulation by default; other modules may lack the argument.
    with suppress(TypeError):
        return bool(module_of(device).is_bf16_supported(including_emulation=False))
    return bool(module_of(device).is_bf16_supported())


def runs_on(capability: tuple[int, ...], built: list[str]) -> bool | None:
    """Tell whether a torch build has kernels for a compute capability; ``None`` if its targets are not CUDA's.

    Machine code (``sm_86``) runs on the same major version from its minor version on, PTX (``compute_80``) on all later
    devices, and targets with a letter (``sm_90a``) on that device only: CUDA C++ Programming Guide, section Application
    Compatibility.
    """
    targets = [match for name in built if (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name))]
    if not targets:
        return None
    device = (capability[0], capability[1])
    for kind, major, minor, suffix in (match.groups() for match in targets):
        target = int(major), int(minor)
        is_compatible = target <= device and (kind == "compute" or target[0] == device[0])
        if target == device or (is_compatible and not suffix):
            return True
    return False


def missing_kernels(device: torch.device) -> str:
    """Return the compute capability of a device that this build of torch has no kernels for; empty if it has some."""
    module = module_of(device)
    built = list(module.get_arch_list()) if hasattr(module, "get_arch_list") else []
    if not built:
        return ""
    capability = tuple(module.get_device_capability(device))
    return ".".join(map(str, capability)) if runs_on(capability, built) is False else ""


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random generators of the CPU and a device after the block."""
    if not is_accelerator(device):
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device.index or 0], device_type=device.type)


def seeded_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a seeded generator of a device, or of the CPU if the device has none."""
    try:
        generator = torch.Generator(device)
    except RuntimeError:
        generator = torch.Generator()
    return generator.manual_seed(seed)


def default_accelerator() -> str | None:
    """Return the type of this machine's accelerator, as torch chooses it."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return None if current is None else current.type
