"""Simulate a device in virtual time: a program, compute streams, copy engines, a disk, and stores that use them.

The program is the real engine on the meta device. As on a real device it runs ahead of the engines, asks whether a
transfer has ended, and waits for it. Nothing is computed or moved.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Literal, cast

from torch import Tensor

from gptj_ft.planning.constants import COPY_SECONDS
from gptj_ft.planning.probe import DiskRates
from gptj_ft.streaming.moments import num_elements
from gptj_ft.streaming.stores.base import LayerStore, Span, chunks

Direction = Literal["in", "out"]
Stream = Literal["compute", "update"]
Action = Callable[[], None]


class Clock:
    """Virtual time in seconds, and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._order = count()

    def at(self, when: float, call: Action) -> None:
        """Call at a time."""
        # The counter keeps simultaneous events in the order of their calls, so that a replay is deterministic.
        heapq.heappush(self._events, (when, next(self._order), call))

    def advance(self, seconds: float) -> None:
        """Let the program run for some seconds."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self._next()
        self.now = end

    def wait(self, work: Work) -> None:
        """Let time pass until the work has ended."""
        while not work.ended:
            assert self._events, "the program waits, but no event is left"
            self._next()

    def _next(self) -> None:
        when, _, call = heapq.heappop(self._events)
        self.now = max(self.now, when)
        call()

    def after(self, earlier: Iterable[Work], call: Action) -> None:
        """Call as soon as all of this work has ended."""
        pending = [work for work in earlier if not work.ended]
        if not pending:
            call()
            return
        # Counts down by one for each work that ends; 0 is the last.
        remaining = count(len(pending) - 1, -1)

        def ended() -> None:
            if not next(remaining):
                call()

        for work in pending:
            work.calls.append(ended)


class Work:
    """A piece of work that takes time; to its users, the future of a transfer."""

    __slots__ = ("_clock", "calls", "ended")

    def __init__(self, clock: Clock, ended: bool = False) -> None:
        self._clock, self.ended = clock, ended
        self.calls: list[Action] = []  # when it ends

    def end(self) -> None:
        self.ended = True
        for call in self.calls:
            call()
        self.calls.clear()

    def result(self) -> None:
        """Have the program wait for it."""
        self._clock.wait(self)

    def done(self) -> bool:
        return self.ended

    def exception(self) -> None:
        """Return None: virtual transfers do not fail."""


class Workers:
    """A queue of tasks for a number of threads; each thread runs one task at a time.

    A task gets the function that ends it.
    """

    def __init__(self, number: int) -> None:
        self._number, self._free = number, number
        self._queue = deque[Callable[[Action], None]]()

    @property
    def are_busy(self) -> bool:
        return self._free < self._number

    def submit(self, task: Callable[[Action], None]) -> None:
        self._queue.append(task)
        self._start()

    def _start(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            self._queue.popleft()(self._end)

    def _end(self) -> None:
        self._free += 1
        self._start()


class Engine(Workers):
    """A part of the machine that does one thing at a time, in order."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(1)
        self._clock = clock
        self.busy_seconds = 0.0

    def run(self, seconds: Callable[[], float], ended: Action) -> None:
        """Queue work; its seconds are known when it starts."""

        def task(end: Action) -> None:
            took = seconds()
            self.busy_seconds += took

            def finish() -> None:
                # First `ended`: work that it submits must queue before the engine picks its next task.
                ended()
                end()

            self._clock.at(self._clock.now + took, finish)

        self.submit(task)


class Processor:
    """Compute streams that share one processor.

    Work of a stream runs in order. Updates are short and bound by memory bandwidth: an update starts during a
    matrix product, which takes as much longer.

    Args:
        blocker: names the part of the machine that works while nothing is computed.
    """

    def __init__(self, clock: Clock, blocker: Callable[[], str]) -> None:
        self._clock, self._blocker = clock, blocker
        self.busy_seconds = 0.0
        self.idle = dict[str, float]()  # idle seconds of the compute stream, by the part that it waited for
        self.last = {name: Work(clock, ended=True) for name in ("compute", "update")}  # last work of each stream
        self._idle_since, self._idle_for = 0.0, "program"
        self._running: Work | None = None
        self._ends = 0.0  # time at which the running work ends
        self._updates_until = 0.0

    def submit(self, stream: Stream, seconds: float, after: Sequence[Work] = (), issued: float = 0.0) -> Work:
        """Queue work on a stream, after other work.

        Args:
            issued: time at which the program has submitted all of its kernels; the work ends no earlier.
        """
        work = Work(self._clock)
        # A stream is in order: its previous work is a dependency, too.
        earlier = [self.last[stream], *after]
        self.last[stream] = work
        begin = self._compute if stream == "compute" else self._update
        self._clock.after(earlier, lambda: begin(work, max(seconds, issued - self._clock.now)))
        return work

    def delay(self, seconds: float) -> None:
        """Make the running work take longer."""
        if self._running is not None:
            self.busy_seconds += seconds
            self._ends += seconds

    def _compute(self, work: Work, seconds: float) -> None:
        self.busy_seconds += seconds
        self.idle[self._idle_for] = self.idle.get(self._idle_for, 0.0) + self._clock.now - self._idle_since
        self._running, self._ends = work, max(self._clock.now, self._updates_until) + seconds
        self._clock.at(self._ends, partial(self._end_compute, work))

    def _end_compute(self, work: Work) -> None:
        if self._clock.now + 1e-12 < self._ends:  # delayed meanwhile, by an update or a transfer
            self._clock.at(self._ends, partial(self._end_compute, work))
            return
        self._running, self._idle_since, self._idle_for = None, self._clock.now, self._blocker()
        work.end()

    def _update(self, work: Work, seconds: float) -> None:
        self.busy_seconds += seconds
        if self._running is not None:
            self._ends += seconds
        self._updates_until = self._clock.now + seconds
        self._clock.at(self._updates_until, work.end)


class Hazards:
    """Order work by the memory that it touches, as the events of real streams do.

    It notes the last writer and the readers of each cell of the device's buffers.
    """

    def __init__(self, cell_numel: int) -> None:
        self._cell_numel = cell_numel
        self._writers: dict[tuple[int, int], Work] = {}
        self._readers: dict[tuple[int, int], list[Work]] = {}

    def earlier(self, tensor: Tensor, writes: bool) -> list[Work]:
        """Return the work that must end before this memory is read, or written."""
        earlier = []
        for cell in self._cells(tensor):
            if cell in self._writers:
                earlier.append(self._writers[cell])
            if writes:
                earlier += self._readers.get(cell, ())
        return [work for work in dict.fromkeys(earlier) if not work.ended]

    def note(self, tensor: Tensor, work: Work, writes: bool) -> None:
        """Note that work reads this memory, or writes it."""
        for cell in self._cells(tensor):
            if writes:
                self._writers[cell] = work
                self._readers.pop(cell, None)
            else:
                self._readers[cell] = [*(each for each in self._readers.get(cell, ()) if not each.ended), work]

    def _cells(self, tensor: Tensor) -> list[tuple[int, int]]:
        if not tensor.numel():
            return []
        # Meta tensors have no address: the storage object identifies the buffer.
        storage, size = tensor.untyped_storage()._cdata, tensor.element_size()
        start, width = tensor.storage_offset() * size, self._cell_numel * size
        first, last = start // width, (start + tensor.numel() * size - 1) // width
        return [(storage, number) for number in range(first, last + 1)]


class CopyEngines:
    """One copy engine per direction of the link, and the disk.

    Args:
        to_device, from_device: bytes/s of the link.
        delays: called with the bytes of each disk transfer if it slows the computation down: on a CPU, where files are
            read into the device's own memory.
    """

    def __init__(
        self,
        clock: Clock,
        to_device: float,
        from_device: float,
        rates: DiskRates,
        delays: Callable[[Direction, int], None] | None = None,
    ) -> None:
        self.clock, self._rates, self.delays = clock, rates, delays
        self._link = {"in": to_device, "out": from_device}
        self.engines = {name: Engine(clock) for name in ("in", "out", "disk")}
        self._disk_waits = {"in": 0, "out": 0}

    def copy(self, direction: Direction, num_bytes: int, ended: Action) -> None:
        """Copy bytes over the link."""
        seconds = num_bytes / self._link[direction] + COPY_SECONDS
        self.engines[direction].run(lambda: seconds, ended)

    def blocker(self) -> str:
        """Name the part of the machine that the computation waits for."""
        if self.delays or self.engines["disk"].are_busy:
            return "disk"
        return "link" if self.engines["in"].are_busy or self.engines["out"].are_busy else "program"

    def use_disk(self, direction: Direction, num_bytes: int, ended: Action) -> None:
        """Read (``in``) or write bytes; at the mixed rate while transfers of the other direction wait."""
        self._disk_waits[direction] += 1

        # The rate depends on the queue at the start of the transfer, not at its submission.
        def seconds() -> float:
            other = self._disk_waits["out" if direction == "in" else "in"]
            alone = self._rates.read if direction == "in" else self._rates.write
            return num_bytes / (self._rates.mixed if other else alone)

        def done() -> None:
            self._disk_waits[direction] -= 1
            if self.delays:
                self.delays(direction, num_bytes)
            ended()

        self.engines["disk"].run(seconds, done)


class VirtualQueue:
    """The threads of a store and its pending commits, as in `stores.queue.TransferQueue`."""

    def __init__(self, clock: Clock, threads: int) -> None:
        self.clock = clock
        self.threads = {"in": Workers(threads), "out": Workers(threads)}
        self.commits: dict[int, Work] = {}
        self.writes: list[Work] = []  # since the last commit
        self._last = Work(clock, ended=True)

    def commit(self, layer: int) -> None:
        """End the writes of a layer; later transfers of the layer wait for it."""
        work, earlier = Work(self.clock), [*self.writes, self._last]
        self.writes, self._last = [], work
        self.commits[layer] = work
        self.clock.after(earlier, work.end)


class VirtualStore(LayerStore):
    """A store in host memory or on disk whose transfers take virtual time.

    Args:
        hazards: memory of the device.
        chunk_numel: elements of the chunks that pass through host memory from or to a disk; 0: host memory.
        events: returns the work that transfers of layer inputs wait for.
        size_of: gives the bytes of a transfer.
    """

    def __init__(
        self,
        queue: VirtualQueue,
        link: CopyEngines,
        hazards: Hazards,
        chunk_numel: int,
        events: Callable[[], list[Work]],
        size_of: Callable[[Span, Tensor], int] = lambda _, values: values.nbytes,
    ) -> None:
        self._queue, self._link, self._hazards = queue, link, hazards
        self._chunk_numel, self._events, self._size_of = chunk_numel, events, size_of

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        return cast("Future[Tensor]", self._transfer("in", span, out))

    def read_rows(self, span: Span, name: str, rows: Sequence[int], out: Tensor) -> None:
        self._transfer("in", span, out.view(-1)).result()

    def write(self, span: Span, values: Tensor, digests: Sequence[str] = ()) -> Future[None]:
        work = self._transfer("out", span, values)
        self._queue.writes.append(work)
        return cast("Future[None]", work)

    def commit(self, layer: int, step: int) -> None:
        self._queue.commit(layer)

    def _transfer(self, direction: Direction, span: Span, tensor: Tensor) -> Work:
        queue, work, writes = self._queue, Work(self._queue.clock), direction == "in"
        before = self._hazards.earlier(tensor, writes) + (self._events() if span.kind == "boundary" else [])
        self._hazards.note(tensor, work, writes)
        first = [cast("Work", transfer) for transfer in span.after]
        if span.layer in queue.commits:
            first.append(queue.commits[span.layer])
        numel = num_elements(tensor)
        parts = chunks(numel, self._chunk_numel) if self._chunk_numel else [slice(0, numel)]
        size = self._size_of(span, tensor)
        sizes = deque(size * (part.stop - part.start) // numel for part in parts if numel)

        def task(end_thread: Action) -> None:
            def end() -> None:
                work.end()
                end_thread()

            queue.clock.after(first, lambda: self._move(direction, sizes, before, end))

        queue.threads[direction].submit(task)
        return work

    def _move(self, direction: Direction, sizes: deque[int], before: list[Work], end: Action) -> None:
        """Move chunks one after the other, over the link and to or from the disk."""
        if not sizes:
            end()
            return
        size, link = sizes.popleft(), self._link
        proceed = partial(self._move, direction, sizes, before, end)
        if not self._chunk_numel:
            link.clock.after(before, lambda: link.copy(direction, size, proceed))
        elif link.delays:  # a CPU: no link between the disk and the device's memory
            link.clock.after(before, lambda: link.use_disk(direction, size, proceed))
        elif direction == "in":  # the disk may read ahead into host memory before the target is free
            link.use_disk("in", size, lambda: link.clock.after(before, lambda: link.copy("in", size, proceed)))
        else:
            link.clock.after(before, lambda: link.copy("out", size, lambda: link.use_disk("out", size, proceed)))
