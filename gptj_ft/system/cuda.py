"""CUDA streams and events: kernels run asynchronously to the Python thread.

The computation has the default stream, updates have one of their own, and so has every thread that moves bytes. A
transfer ends for the program when its bytes are there; but a buffer may be asked for again while the device has not yet
come to what still uses it. A `StreamEvent` says when it has: a transfer into the buffer waits for the event, on its
own stream, and nothing else does. On a CPU there are no events, and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class StreamEvent:
    """A point in the work of the stream that was current when it was made; waits like a transfer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def result(self) -> None:
        """Have the current stream wait; the program goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def done(self) -> bool:
        """Tell whether the device has passed it."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def exception(self) -> None:
        """Return nothing: an event does not fail."""


class StallTimer:
    """How long the computation's stream, current when this is made, stands still while the program waits.

    That is from where it has caught up with the program to the end of the wait, by the device's own clock: the program
    may wait for bytes that the device will not need for long.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._pairs: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what the stream stands still inside."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record(self._stream)
        try:
            yield
        finally:
            after.record(self._stream)
            self._pairs.append((before, after))

    @property
    def seconds(self) -> float:
        """All of them; waits for the device to pass the last one."""
        for before, after in self._pairs:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1e3
        self._pairs.clear()
        return self._seconds


def record_event(device: torch.device) -> list[StreamEvent]:
    """Record an event in the current stream; none on a CPU, where work is done when the program goes on."""
    return [StreamEvent(device)] if device.type == "cuda" else []


def use_own_stream(device: torch.device) -> None:
    """Give the thread that calls this a stream of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def copy(source: Tensor, target: Tensor) -> None:
    """Copy between host and device, or inside one of them, on this thread's stream; return when the bytes are there."""
    target.copy_(source, non_blocking=True)
    device = next((x.device for x in (source, target) if x.device.type == "cuda"), None)
    if device is not None:
        torch.cuda.current_stream(device).synchronize()


def pin(values: Tensor) -> Callable[[], None] | None:
    """Lock a host tensor's pages in RAM, which the device then reaches at the rate of the link.

    torch's own pinned memory comes in powers of two: up to twice of what is asked for.

    Returns: what unlocks them again; ``None``: the system does not allow so many, and copies are slower.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = values.data_ptr()
    if int(cudart.cudaHostRegister(address, values.nbytes, 0)) != 0:
        return None
    return lambda: cudart.cudaHostUnregister(address)


class Transfer(Protocol):
    """Bytes on their way, or other work that one may have to wait for: a `Future`, or a `cuda.StreamEvent`."""

    def result(self) -> Any:
        """Wait for the end; raise what went wrong."""

    def done(self) -> bool:
        """Tell whether it has ended."""

    def exception(self) -> BaseException | None:
        """Return what went wrong, if it has ended."""
