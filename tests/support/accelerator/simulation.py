"""Simulate streams, events and schedules of an accelerator, and record faults of the program.

Vector clocks: a `Clock` counts, per stream, the operations known to have ended. Streams, events, program threads and
futures (see `threads`) each have one. An operation *happens after* another if its stream's clock covers it. Two
accesses to the same bytes race if neither happens after the other and one writes, even if the numbers come out right.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

NAME = "sim"
LOCK = threading.RLock()
Clock = dict[int, int]
Site = tuple[tuple[str, int, str], ...]  # file, line and function
Schedule = Literal["late", "eager", "random", "compute late", "others late"]
SCHEDULES: tuple[Schedule, ...] = ("late", "eager", "random", "compute late", "others late")
SITE_FRAMES = 3


def without_modes() -> AbstractContextManager[Any]:
    """Disable the thread's dispatch modes; torch's own context manager costs as much as a small operation."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def merge(into: Clock, other: Clock) -> None:
    """Merge another clock."""
    for key, value in other.items():
        if into.get(key, 0) < value:
            into[key] = value


class Operation:
    """An operation in a stream's queue.

    Attributes:
        run: the computation; ``None`` in ghost mode.
        waits_for: operation of another stream that must end first.
        accesses: memory accesses: region, first byte, end, whether it writes.
        kind: ``op``, ``h2d``, ``d2h``, ``wait``, ``record`` or ``sleep``; the suffix ``pageable`` marks unpinned
            host memory.
        flops, num_bytes: arithmetic and bytes, for the replay.
    """

    __slots__ = (
        "accesses", "after", "done", "ended", "flops", "kind", "label", "num_bytes", "number", "run", "seq", "site",
        "stream", "waits_for",
    )  # fmt: skip

    def __init__(
        self,
        label: str,
        run: Callable[[], object] | None = None,
        accesses: tuple[Any, ...] = (),
        kind: str = "op",
        waits_for: Operation | None = None,
    ) -> None:
        self.label, self.run, self.accesses, self.kind, self.waits_for = label, run, accesses, kind, waits_for
        self.done, self.ended, self.seq, self.number, self.flops = False, 0.0, 0, 0, 0
        self.num_bytes, self.after = 0, 0 if waits_for is None else waits_for.number
        """Number of the operation that must end first; 0: none."""
        self.site: Site = ()
        self.stream: Stream

    def __str__(self) -> str:
        return f"{self.label} at {show(self.site)}"


class Stream:
    """A queue of operations that run in order; stands for `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None) -> None:
        with LOCK:
            self.simulation = simulation = now()
            self.device_index = simulation.index_of(device)
            simulation.touch(self.device_index)
            self.id, self.seq, self.clock = len(simulation.streams), 0, Clock()
            self.queue: deque[Operation] = deque()
            self.last: Operation | None = None
            self.name = name or threading.current_thread().name
            self.is_default = name is not None
            self.priority = priority  # lower is first
            simulation.streams.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, self.device_index)

    def put(self, operation: Operation) -> Operation:
        """Append an operation; the schedule may run some of the queue now."""
        with LOCK:
            simulation = self.simulation
            simulation.count_operation()
            if simulation.ghost:  # at once, in no order that could be wrong
                operation.stream, operation.number, operation.done = self, simulation.num_operations, True
                self.last, operation.accesses = operation, ()
                if operation.run is not None:
                    operation.run()
                simulation.note("put", operation)
                return operation
            merge(self.clock, simulation.clock())
            self.seq += 1
            self.clock[self.id] = operation.seq = self.seq
            operation.stream, operation.number = self, simulation.num_operations
            operation.site = site()
            for region, low, high, writes in operation.accesses:
                region.note(low, high, writes, operation)
            operation.accesses = ()
            self.queue.append(operation)
            self.last = operation
            simulation.note("put", operation)
            simulation.step()
            return operation

    def run_until(self, operation: Operation | None) -> None:
        """Run the queue up to an operation or to the end, with its dependencies on other streams."""
        while self.queue and not (operation is not None and operation.done):
            first = self.queue[0]
            other = first.waits_for
            if other is not None and not other.done:
                other.stream.run_until(other)
            if not self.queue or self.queue[0] is not first:
                continue
            self.queue.popleft()
            if first.run is not None:
                try:
                    # The thread that waits runs the kernel: its modes must not apply to it. A dispatch mode that queues
                    # operations, as `diagnostics.streams.Shaker` does, would let later kernels run before this one.
                    with torch.inference_mode(False), torch.no_grad(), without_modes():
                        first.run()
                except Exception as error:
                    self.simulation.lose(f"device-side assert triggered by {first}: {error}")
            first.run, first.done, first.ended = None, True, time.perf_counter()
            first.waits_for = None

    def is_ready(self) -> bool:
        if not self.queue:
            return False
        other = self.queue[0].waits_for
        return other is None or other.done

    def synchronize(self) -> None:
        with LOCK:
            self.simulation.check()
            if self.queue:
                self.simulation.note_wait("Stream.synchronize, spinning")
            self.finish()

    def finish(self, operation: Operation | None = None) -> None:
        """Block the thread until the stream has passed an operation, or all of them."""
        with LOCK:
            self.simulation.note("wait", operation or self.last)
            self.run_until(operation)
            self.simulation.check()
            if operation is None:
                merge(self.simulation.clock(), self.clock)

    def wait_event(self, event: Event) -> None:
        with LOCK:
            if event.operation is not None:
                merge(self.clock, event.clock)
                self.put(Operation("wait", kind="wait", waits_for=event.operation))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        with LOCK:
            self.simulation.check()
            return not self.queue


class Event:
    """A point in a stream; stands for `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._timed, self._blocking = enable_timing, blocking
        self.operation: Operation | None = None
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        with LOCK:
            stream = stream or now().stream()
            before = self.operation
            if before is not None and before.stream.device_index != stream.device_index:
                raise RuntimeError(
                    f"Event device {before.stream.device_index} does not match recording stream's device "
                    f"{stream.device_index}."
                )
            self.operation = stream.put(Operation("record", kind="record"))
            self.clock = dict(stream.clock)

    def query(self) -> bool:
        with LOCK:
            now().check()
            done = self.operation is None or self.operation.done
            if done:
                merge(now().clock(), self.clock)
            return done

    def synchronize(self) -> None:
        with LOCK:
            simulation = now()
            simulation.check()
            if self.operation is not None:
                if not self.operation.done:
                    simulation.note_wait(f"Event.synchronize, {'blocking' if self._blocking else 'spinning'}")
                self.operation.stream.finish(self.operation)
                merge(simulation.clock(), self.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or now().stream()).wait_event(self)

    def elapsed_time(self, other: Event) -> float:
        """Return milliseconds between two passed events, by this machine's clock."""
        if not (self._timed and other._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        first, second = self.operation, other.operation
        if first is None or second is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (first.done and second.done):
            raise RuntimeError("CUDA error: device not ready")
        return max(second.ended - first.ended, 1e-9) * 1e3


@dataclass(frozen=True)
class Faults:
    """Faults of the device; ``None``: no fault of this kind."""

    lockable_bytes: int | None = None
    """Host memory that `cudaHostRegister` pins. It rejects more, and the thread's next kernel raises "CUDA error: out
    of memory": the runtime reports its last error late."""
    failing_allocation: int | None = None  # number of the allocation that finds no memory, counted from 1
    lost_after: int | None = None  # operations after which every call to the device raises
    taken: tuple[int, int] | None = None  # number of an allocation, and the bytes that another process takes before it
    signal: tuple[int, int] | None = None  # number of an operation, and the signal that the process gets before it


@dataclass
class Device:
    """State of one device: its memory (see `memory`) and the generator of its random numbers, a counter as Philox is.

    Attributes:
        allocated, peak, reserved: bytes.
    """

    index: int
    total_bytes: int  # memory of the device
    limit: float = 1.0  # share of it that may be allocated
    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    peak_reserved: int = 0
    seed: int = 0
    offset: int = 0
    taken: int = 0
    regions: dict[tuple[int, int], list[Any]] = field(default_factory=lambda: defaultdict(list))
    """Free memory by stream and size."""

    def draw(self) -> int:
        """Return the seed of a random operation, fixed when it is issued."""
        self.offset += 1
        found = hashlib.blake2b(f"{self.seed} {self.offset}".encode(), digest_size=7).digest()
        return int.from_bytes(found, "little")


class Simulation:
    """The simulated devices and the recorded faults; one at a time, see `start`.

    Args:
        schedule: order in which queued operations run. ``late``: each as late as waits allow, and no future of the
            program is ever done before it is waited for. ``eager``: at once. ``random``: some, by the seed.
            ``compute late``: the default streams late and the others at once; ``others late``: the reverse.
        seed: seed of ``random``.
        num_devices: number of devices.
        total_bytes: memory of each.
        ghost: whether floating point tensors have no data; see `ghost`.
        faults: what goes wrong.
        supports_bf16: whether the devices say that they compute in bf16.
        package: the program's package, whose lines are reported.
    """

    def __init__(
        self,
        schedule: Schedule = "late",
        seed: int = 0,
        *,
        num_devices: int = 1,
        total_bytes: int = 80 << 30,
        ghost: bool = False,
        faults: Faults = Faults(),
        supports_bf16: bool = True,
        package: str = "gptj_ft",
    ) -> None:
        self.schedule, self.ghost, self.faults, self.supports_bf16 = schedule, ghost, faults, supports_bf16
        self.package = package
        self.is_late = schedule == "late"
        self.devices = [Device(index, total_bytes) for index in range(num_devices)]
        self.streams: list[Stream] = []
        self.defaults: list[Stream] = []
        self.locked: dict[int, Any] = {}  # address -> region of registered host memory
        self.races: Counter[tuple[str, str]] = Counter()
        """Pairs of racing places with their counts; ``examples`` has the streams of each pair."""
        self.examples: dict[tuple[str, str], str] = {}
        self.waits: Counter[tuple[str, str, str]] = Counter()
        """Waits of the program for the device: operation, thread, place."""
        self.pageable: Counter[tuple[str, str]] = Counter()
        """Bytes of non-blocking copies from or to unpinned host memory, by place."""
        self.touched: set[int] = set()  # devices on which the program has made a context
        self.trace: list[tuple[str, str, Any]] | None = None
        """Actions of the threads, for `replay`; ``None``: not recorded."""
        self.by_site: Counter[Site] = Counter()
        self.at_peak: Counter[Site] = Counter()
        self.num_operations = self.num_allocations = 0
        self.lost: str | None = None
        self._failed: Exception | None = None
        self._random = random.Random(seed)
        self._local = threading.local()
        self.codes: dict[CodeType, str | None] = {}

    # -------------------------------------------------------------- the thread's device, stream and clock

    @property
    def device_index(self) -> int:
        """Return the thread's current device."""
        return getattr(self._local, "device", 0)

    @device_index.setter
    def device_index(self, index: int) -> None:
        self._local.device = index

    def index_of(self, device: Any) -> int:
        """Return the index of a device given as device, string, number or None."""
        if device is None:
            return self.device_index
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != NAME:
                raise ValueError(f"Expected a {NAME} device, but got: {device}")
            index = self.device_index if device.index is None else device.index
        else:
            index = int(device)
        if not 0 <= index < len(self.devices):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return index

    def stream(self, index: int | None = None) -> Stream:
        """Return the thread's current stream of a device."""
        index = self.device_index if index is None else index
        streams: dict[int, Stream] = getattr(self._local, "streams", {})
        return streams.get(index) or self.defaults[index]

    def set_stream(self, stream: Stream) -> None:
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        self._local.streams[stream.device_index] = stream
        self.device_index = stream.device_index

    def clock(self) -> Clock:
        """Return the current thread's clock."""
        if not hasattr(self._local, "clock"):
            self._local.clock = {}
        clock: Clock = self._local.clock
        return clock

    def touch(self, index: int) -> None:
        """Record that the program uses a device; a real device creates a context of some 0.5 GB."""
        self.touched.add(index)

    # -------------------------------------------------------------- schedule

    def step(self) -> None:
        """Run some of the queued operations; called after each enqueue."""
        schedule = self.schedule
        if schedule == "late":
            return
        if schedule == "random":
            while self._random.random() < 0.5:
                stream = self._random.choice(self.streams)
                for _ in range(self._random.randint(1, 6)):
                    if stream.is_ready():
                        stream.run_until(stream.queue[0])
            return
        skipped = {"eager": None, "compute late": True, "others late": False}[schedule]
        again = True
        while again:
            again = False
            for stream in self.streams:
                while stream.is_default is not skipped and stream.is_ready():
                    stream.run_until(stream.queue[0])
                    again = True

    def delays_task(self) -> bool:
        """Tell whether a store's thread does its next task only when somebody waits for it."""
        if self.ghost or self.schedule in ("eager", "compute late"):
            return False
        return self.schedule != "random" or self._random.random() < 0.5

    # -------------------------------------------------------------- faults

    def count_operation(self) -> None:
        self.num_operations += 1
        sent = self.faults.signal
        if sent is not None and self.num_operations == sent[0]:
            os.kill(os.getpid(), sent[1])
        limit = self.faults.lost_after
        if limit is not None and self.num_operations > limit:
            self.lost = self.lost or "unspecified launch failure"
        self.check()

    def lose(self, reason: str) -> None:
        """Lose the device: every later call fails."""
        self.lost = self.lost or reason

    def check(self) -> None:
        """Raise if the device is lost or backward failed."""
        if self._failed is not None or self.lost:
            error, self._failed = self._failed, None
            self.fail(error or torch.AcceleratorError(f"CUDA error: {self.lost}"))

    def fail(self, error: Exception) -> None:
        """Raise an error; inside backward, from the next call after it.

        In backward, torch calls Python again while it unwinds, for the device guard, and that would end the process.
        """
        if torch._C._current_graph_task_id() == -1:
            raise error
        self._failed = self._failed or error

    def set_last_error(self, message: str | None) -> None:
        """Leave an error in the runtime, like a failed call."""
        self._local.last_error = message

    def check_launch(self) -> None:
        """Raise and clear the thread's last error, like the check behind a kernel launch."""
        error = getattr(self._local, "last_error", None)
        if error is not None:
            self._local.last_error = None
            self.fail(torch.AcceleratorError(f"CUDA error: {error}"))

    # -------------------------------------------------------------- findings

    def note(self, action: str, what: Any) -> None:
        """Record an action of a program thread, for `replay`."""
        if self.trace is not None:
            self.trace.append((threading.current_thread().name, action, what))

    def note_wait(self, what: str) -> None:
        """Record that the program waits for the device."""
        self.waits[what, thread_name(), show(site())] += 1

    def report(self, limit: int = 30) -> str:
        """Describe the findings."""
        lines = [f"races: {len(self.races)} pairs of places, {sum(self.races.values())} times"]
        for (a, b), count in self.races.most_common(limit):
            lines += [f"  {count:5d} x {self.examples[a, b]}", f"        {a}", f"        {b}"]
        lines.append(f"waits of the program for the device: {sum(self.waits.values())}")
        lines += [f"  {count:5d} x {what} [{who}] {at}" for (what, who, at), count in self.waits.most_common(limit)]
        lines.append("non-blocking copies from or to host memory that is not locked:")
        lines += [f"  {size:10d} bytes {what} {at}" for (what, at), size in self.pageable.most_common(limit)]
        return "\n".join(lines)

    def program_name(self, code: CodeType) -> str | None:
        """Return a source file's name inside the program's package; ``None``: another package."""
        try:
            return self.codes[code]
        except KeyError:
            marker = f"/{self.package}/"
            at = code.co_filename.rfind(marker)
            name = self.codes[code] = code.co_filename[at + len(marker) :] if at >= 0 else None
            return name


_now: Simulation | None = None


def start(*args: Any, **options: Any) -> Simulation:
    """Start a new simulation; arguments as for `Simulation`."""
    global _now
    with LOCK:
        _now = simulation = Simulation(*args, **options)
        simulation.defaults = [Stream(index, name=f"default {index}") for index in range(len(simulation.devices))]
        simulation.touched.clear()
        return simulation


def now() -> Simulation:
    """Return the running simulation."""
    assert _now is not None, "no simulation was started"
    return _now


def is_running() -> bool:
    return _now is not None


def thread_name() -> str:
    """Return the thread's name without pool numbers."""
    return threading.current_thread().name.rstrip("0123456789_-")


def site() -> Site:
    """Return the innermost frames of the program's own source."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[str, int, str]] = []
    simulation = now()
    known = simulation.codes
    while frame is not None:
        code = frame.f_code
        name = known[code] if code in known else simulation.program_name(code)
        if name is not None:
            found.append((name, frame.f_lineno, code.co_name))
            if len(found) == SITE_FRAMES:
                break
        frame = frame.f_back
    return tuple(found)


def show(at: Site) -> str:
    """Format a site; outside the program it is the thread's name."""
    return " < ".join(f"{name}:{line} {function}" for name, line, function in at) or thread_name()
