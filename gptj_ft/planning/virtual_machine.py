"""Virtual time: engines that work beside each other, a program that gives them work, stores whose transfers take time.

The program is the real one (`prefetch.Prefetcher` on the ``meta`` device). It runs ahead of the engines, asks whether a
transfer has ended, and waits for it, as on a real device; only nothing is computed and nothing is moved.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal, cast

from torch import Tensor

from gptj_ft.planning.probe import DiskRates
from gptj_ft.streaming.stores.base import LayerStore, Span, chunks

COPY_SECONDS = 10e-6  # to begin one
Direction = Literal["in", "out"]


class Work:
    """Something that takes time, after other work; like the future of a transfer for those who wait for it.

    Attributes:
        ended: whether it has.
    """

    __slots__ = ("_clock", "_then", "ended")

    def __init__(self, clock: Clock) -> None:
        self._clock, self.ended = clock, False
        self._then: list[Callable[[], None]] = []

    def then(self, call: Callable[[], None]) -> None:
        """Call when it has ended, which may be now."""
        if self.ended:
            call()
        else:
            self._then.append(call)

    def end(self) -> None:
        """End it now."""
        self.ended = True
        for call in self._then:
            call()
        self._then.clear()

    def result(self) -> None:
        """Have the program wait for it."""
        self._clock.wait(self)

    def done(self) -> bool:
        """Tell whether the program would not wait."""
        return self.ended

    def exception(self) -> None:
        """Return nothing: it does not fail."""


@dataclass
class Clock:
    """Virtual time, in seconds, and what is going to happen.

    Attributes:
        now: the program's time.
        waited: seconds that the program has waited for the stores.
    """

    now: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: Any = field(default_factory=count)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at a time."""
        heapq.heappush(self._events, (when, next(self._order), call))

    def advance(self, seconds: float) -> None:
        """Let the program work for so long."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self._next()
        self.now = end

    def wait(self, work: Work) -> None:
        """Let time pass until work has ended."""
        while not work.ended:
            assert self._events, "nothing is going to happen, and the program waits"
            self._next()

    def _next(self) -> None:
        when, _, call = heapq.heappop(self._events)
        self.now = max(self.now, when)
        call()

    def after(self, earlier: Iterable[Work], call: Callable[[], None]) -> None:
        """Call as soon as all work has ended."""
        left = [work for work in earlier if not work.ended]
        if not left:
            call()
            return
        remaining = count(len(left) - 1, -1)

        def ended() -> None:
            if not next(remaining):
                call()

        for work in left:
            work.then(ended)


class Engine:
    """Does one thing at a time, in the order in which it could be begun.

    Attributes:
        busy: seconds that it has worked.
        num_bytes: bytes that it has moved.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: deque[tuple[Callable[[], float], Callable[[], None]]] = deque()
        self._works = False
        self.busy, self.num_bytes = 0.0, 0

    @property
    def works(self) -> bool:
        return self._works

    def do(self, seconds: Callable[[], float], ended: Callable[[], None]) -> None:
        """Do something that takes so many seconds, known when it begins."""
        self._queue.append((seconds, ended))
        if not self._works:
            self._begin()

    def _begin(self) -> None:
        seconds, ended = self._queue.popleft()
        self._works, took = True, seconds()
        self.busy += took

        def finish() -> None:
            self._works = False
            ended()
            if self._queue and not self._works:
                self._begin()

        self._clock.at(self._clock.now + took, finish)


class Processor:
    """Computes what streams give it: of one stream in order, of several at a time, which slow each other down.

    What the update stream gives is short and bound by memory. It runs beside a product at once, and the product takes
    as much longer.

    Args:
        clock: virtual time.
        at_work: tells what works while nothing is computed.

    Attributes:
        busy: seconds that it has worked.
        idle: seconds that the compute stream has stood still, by what worked when that began.
        last: work that was given last, by stream.
    """

    def __init__(self, clock: Clock, at_work: Callable[[], str]) -> None:
        self._clock, self._at_work = clock, at_work
        self.busy, self.idle = 0.0, dict[str, float]()
        self._idle_since, self._idle_for = 0.0, "program"
        self.last = {name: _ended(clock) for name in ("compute", "update")}
        self._ends = 0.0  # when what computes would end
        self._running: Work | None = None
        self._updates_until = 0.0

    def give(self, stream: Literal["compute", "update"], seconds: float, after: Sequence[Work] = ()) -> Work:
        """Give a stream work that takes so long; return it."""
        work = Work(self._clock)
        earlier = [self.last[stream], *after]
        self.last[stream] = work
        begin = self._compute if stream == "compute" else self._update
        self._clock.after(earlier, partial(begin, work, seconds))
        return work

    def _compute(self, work: Work, seconds: float) -> None:
        self.busy += seconds
        self.idle[self._idle_for] = self.idle.get(self._idle_for, 0.0) + self._clock.now - self._idle_since
        self._running, self._ends = work, max(self._clock.now, self._updates_until) + seconds
        self._clock.at(self._ends, partial(self._end_compute, work))

    def delay(self, seconds: float) -> None:
        """Take so many seconds from what computes just now, if anything does."""
        if self._running is not None:
            self.busy += seconds
            self._ends += seconds

    def _end_compute(self, work: Work) -> None:
        if self._clock.now + 1e-12 < self._ends:  # an update came between, or a transfer took its time
            self._clock.at(self._ends, partial(self._end_compute, work))
            return
        self._running, self._idle_since, self._idle_for = None, self._clock.now, self._at_work()
        work.end()

    def _update(self, work: Work, seconds: float) -> None:
        self.busy += seconds
        if self._running is not None:
            self._ends += seconds
        self._updates_until = self._clock.now + seconds
        self._clock.at(self._updates_until, work.end)


def _ended(clock: Clock) -> Work:
    work = Work(clock)
    work.end()
    return work


class Hazards:
    """Which work last wrote and read each part of the device's buffers, so that new work comes after it.

    That is what the events of streams are for: here it follows from the memory itself.
    """

    def __init__(self, cell: int) -> None:
        self._cell = cell
        self._written: dict[tuple[int, int], Work] = {}
        self._read: dict[tuple[int, int], list[Work]] = {}

    def earlier(self, tensor: Tensor, writes: bool) -> list[Work]:
        """Return the work that has to end before this memory is read, or written."""
        found = []
        for cell in self._cells(tensor):
            if cell in self._written:
                found.append(self._written[cell])
            if writes:
                found += self._read.get(cell, ())
        return [work for work in dict.fromkeys(found) if not work.ended]

    def note(self, tensor: Tensor, work: Work, writes: bool) -> None:
        """Note that work reads this memory, or writes it."""
        for cell in self._cells(tensor):
            if writes:
                self._written[cell] = work
                self._read.pop(cell, None)
            else:
                readers = [reader for reader in self._read.get(cell, ()) if not reader.ended]
                self._read[cell] = [*readers, work]

    def _cells(self, tensor: Tensor) -> list[tuple[int, int]]:
        if not tensor.numel():
            return []
        storage, size = tensor.untyped_storage()._cdata, tensor.element_size()
        start, width = tensor.storage_offset() * size, self._cell * size
        first, last = start // width, (start + tensor.numel() * size - 1) // width
        return [(storage, number) for number in range(first, last + 1)]


@dataclass
class CopyEngines:
    """The copy engines, one each way, and the disk.

    Attributes:
        clock: virtual time.
        to_device, from_device: bytes/s of each direction.
        rates: rates of the disk.
        delays: is told of bytes that were moved, where that delays what is computed; files are then read into the
            device's own memory.
    """

    clock: Clock
    to_device: float
    from_device: float
    rates: DiskRates
    delays: Callable[[Direction, int], None] | None = None
    engines: dict[str, Engine] = field(default_factory=dict)
    _disk_waits: dict[str, int] = field(default_factory=lambda: {"in": 0, "out": 0})

    def __post_init__(self) -> None:
        self.engines = {name: Engine(self.clock) for name in ("in", "out", "disk")}

    def copy(self, direction: Direction, num_bytes: int, ended: Callable[[], None]) -> None:
        """Copy bytes over the link."""
        rate = self.to_device if direction == "in" else self.from_device
        self.engines[direction].num_bytes += num_bytes
        self.engines[direction].do(lambda: num_bytes / rate + COPY_SECONDS, ended)

    def at_work(self) -> str:
        """Name the work that the computation would wait for."""
        if self.delays or self.engines["disk"].works:
            return "disk"
        return "link" if self.engines["in"].works or self.engines["out"].works else "program"

    def use_disk(self, direction: Direction, num_bytes: int, ended: Callable[[], None]) -> None:
        """Read (``in``) or write bytes of the disk; slower while the other is waiting, too."""
        self._disk_waits[direction] += 1
        self.engines["disk"].num_bytes += num_bytes

        def seconds() -> float:
            other = self._disk_waits["out" if direction == "in" else "in"]
            alone = self.rates.read if direction == "in" else self.rates.write
            return num_bytes / (self.rates.mixed if other else alone)

        def done() -> None:
            self._disk_waits[direction] -= 1
            if self.delays:
                self.delays(direction, num_bytes)
            ended()

        self.engines["disk"].do(seconds, done)


class _Lanes:
    """Threads of a store: each does one task at a time, in the order in which they were given."""

    def __init__(self, number: int) -> None:
        self._free, self._waiting = number, deque[Callable[[Callable[[], None]], None]]()

    def give(self, task: Callable[[Callable[[], None]], None]) -> None:
        """Give a task; it calls what it is given when it ends."""
        self._waiting.append(task)
        self._begin()

    def _begin(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            self._waiting.popleft()(self._end)

    def _end(self) -> None:
        self._free += 1
        self._begin()


class VirtualQueue:
    """The threads behind stores, as `queue.TransferQueue` has them, and the commits that they wait for."""

    def __init__(self, clock: Clock, transfers: int) -> None:
        self.clock = clock
        self.lanes = {"in": _Lanes(transfers), "out": _Lanes(transfers)}
        self.commits: dict[int, Work] = {}
        self.writes: list[Work] = []
        self._last = _ended(clock)

    def commit(self, layer: int) -> None:
        """End a layer's writes; what is asked for of the layer later waits for that."""
        work, earlier = Work(self.clock), [*self.writes, self._last]
        self.writes, self._last = [], work
        self.commits[layer] = work
        self.clock.after(earlier, work.end)


class VirtualStore(LayerStore):
    """A store in the host's memory or on its disk, whose transfers take virtual time.

    Args:
        queue: its threads.
        link: link that they use.
        hazards: the device's memory.
        chunk_numel: elements of a part that passes through host memory on its way from or to a disk; 0: host memory.
        events: returns the work that transfers of layer inputs come after.
    """

    def __init__(
        self,
        queue: VirtualQueue,
        link: CopyEngines,
        hazards: Hazards,
        chunk_numel: int,
        events: Callable[[], list[Work]],
    ) -> None:
        self._queue, self._link, self._hazards, self._part, self._events = queue, link, hazards, chunk_numel, events

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
        sizes = [(part.stop - part.start) * tensor.element_size() for part in self._parts(tensor)]

        def task(end_thread: Callable[[], None]) -> None:
            def end() -> None:
                work.end()
                end_thread()

            queue.clock.after(first, lambda: self._move(direction, deque(sizes), before, end))

        queue.lanes[direction].give(task)
        return work

    def _move(self, direction: Direction, sizes: deque[int], before: list[Work], end: Callable[[], None]) -> None:
        """Move parts one after the other: over the link, and to or from the disk."""
        if not sizes:
            end()
            return
        size, link = sizes.popleft(), self._link
        go_on = partial(self._move, direction, sizes, before, end)
        if not self._part:
            link.clock.after(before, lambda: link.copy(direction, size, go_on))
        elif link.delays:
            link.clock.after(before, lambda: link.use_disk(direction, size, go_on))
        elif direction == "in":
            link.use_disk("in", size, lambda: link.clock.after(before, lambda: link.copy("in", size, go_on)))
        else:
            link.clock.after(before, lambda: link.copy("out", size, lambda: link.use_disk("out", size, go_on)))

    def _parts(self, tensor: Tensor) -> list[slice]:
        return chunks(tensor.numel(), self._part) if self._part else [slice(0, tensor.numel())]
