"""Compute seconds from a trace: replay the operations of a simulated run at a real device's rates.

A discrete event simulation. Program threads issue operations and wait for streams and futures; streams are queues;
kernels share one engine, and each link direction has one. Rates are data sheet values times the usual efficiency. The
result shows where a schedule leaves the link or the device idle; it is no measurement.

Not modelled: the interpreter lock, interference between link directions, changing clocks.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Action = Literal["put", "wait", "submit", "start", "done", "join"]


class TraceEvent(NamedTuple):
    """An action of a thread: it queued an operation, handled a future, or waited.

    Attributes:
        flops, num_bytes: size of the operation.
    """

    thread: str
    action: Action
    """``put``: into a stream; ``wait``: for an operation; ``submit`` and ``start``: of a task of a pool; ``done`` and
    ``join``: of a future."""
    what: int  # number of the operation or the future
    stream: int = 0
    kind: str = ""  # kind of the operation, see `simulation.Operation`
    label: str = ""
    flops: int = 0
    num_bytes: int = 0
    after: int = 0  # operation of another stream that must end first; 0: none
    priority: int = 0  # of the stream; lower goes first


Trace = Sequence[TraceEvent]


def read_trace(recorded: Sequence[tuple[str, str, Any]]) -> Trace:
    """Return a simulation's record as plain values."""
    events, numbers = [], dict[int, int]()
    for thread, action, what in recorded:
        if action == "put":
            events.append(
                TraceEvent(
                    thread, "put", what.number, what.stream.id, what.kind, what.label, what.flops, what.num_bytes,
                    what.after, what.stream.priority,
                )
            )  # fmt: skip
        elif action == "wait":
            if what is not None:
                events.append(TraceEvent(thread, "wait", what.number))
        else:  # futures and tasks have no numbers of their own
            number = -numbers.setdefault(id(what), len(numbers) + 1)
            events.append(TraceEvent(thread, action, number))  # type: ignore[arg-type]
    return events


@dataclass(frozen=True)
class DeviceRates:
    """Rates of a device: FLOP/s of half precision products with fp32 sums, bytes/s of memory and of the link each way.

    Attributes:
        launch, copy: fixed seconds of a kernel and of a copy.
    """

    flops: float
    memory: float
    link: float
    reached: float = 0.7  # share of the FLOP/s that products reach
    memory_reached: float = 0.85  # share of the memory's rate
    pageable: float = 0.4
    issue: float = 30e-6  # the program's seconds for an operation
    launch: float = 3e-6
    copy: float = 10e-6

    def seconds(self, event: TraceEvent) -> float:
        """Return the duration of one operation alone."""
        if event.kind.startswith(("h2d", "d2h")):
            share = self.pageable if "pageable" in event.kind else 1.0
            return event.num_bytes / (self.link * share) + self.copy
        work = max(event.flops / (self.flops * self.reached), event.num_bytes / (self.memory * self.memory_reached))
        return work + self.launch


RATES = {  # data sheets: FLOP/s without sparsity; links as measured with PCIe 4.0 x8, x16 and 5.0 x16
    "RTX 4060 8GB": DeviceRates(30.2e12, 272e9, 12.5e9),
    "RTX 4090 24GB": DeviceRates(165e12, 1008e9, 25e9),
    "H100 80GB": DeviceRates(989e12, 3350e9, 50e9, reached=0.65),
    "H200 141GB": DeviceRates(989e12, 4800e9, 50e9, reached=0.65),
}


@dataclass(frozen=True)
class Replay:
    """Result of a replay."""

    seconds: float  # from the first operation to the last
    busy: dict[str, float]  # seconds that each engine worked: ``compute``, ``h2d``, ``d2h``
    moved: dict[str, int]  # bytes in each direction
    flops: float  # FLOPs of products

    @property
    def share_of_bound(self) -> float:
        """Return the busiest engine's seconds as a share of the step."""
        return max(self.busy.values()) / self.seconds


def replay(trace: Trace, rates: DeviceRates) -> Replay:
    """Return the duration of a trace on a device."""
    return _Replay(trace, rates).run()


class _Replay:
    def __init__(self, trace: Trace, rates: DeviceRates) -> None:
        self._rates = rates
        self._programs: dict[str, deque[TraceEvent]] = defaultdict(deque)
        for event in trace:
            self._programs[event.thread].append(event)
        # What began before the trace is not waited for.
        self._begun = {event.what for event in trace if event.action in ("put", "submit", "done")}
        self._ended: set[tuple[str, int]] = set()
        self._waiting: dict[tuple[str, int], list[Callable[[], None]]] = defaultdict(list)
        self._queues: dict[int, deque[TraceEvent]] = defaultdict(deque)
        self._engines: dict[str, list[TraceEvent]] = defaultdict(list)
        self._working: set[str] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now, self._flops = 0.0, 0.0
        self._busy: dict[str, float] = defaultdict(float)
        self._moved: dict[str, int] = defaultdict(int)

    def run(self) -> Replay:
        for thread in list(self._programs):
            self._at(0.0, lambda thread=thread: self._go_on(thread))  # type: ignore[misc]
        while self._events:
            self._now, _, call = heapq.heappop(self._events)
            call()
        left = {thread: len(program) for thread, program in self._programs.items() if program}
        if left:
            raise RuntimeError(f"the trace does not end: {left}")
        return Replay(self._now, dict(self._busy), dict(self._moved), self._flops)

    def _at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), call))

    def _end(self, key: tuple[str, int]) -> None:
        self._ended.add(key)
        for call in self._waiting.pop(key, ()):
            call()

    def _go_on(self, thread: str) -> None:
        """Advance a thread until it has to wait."""
        program = self._programs[thread]
        while program:
            event = program[0]
            if event.action == "put":
                program.popleft()
                queue = self._queues[event.stream]
                queue.append(event)
                if len(queue) == 1:
                    self._begin(event.stream)
                if event.kind not in ("wait", "record"):
                    self._at(self._now + self._rates.issue, lambda: self._go_on(thread))
                    return
                continue
            if event.action in ("done", "submit"):
                program.popleft()
                self._end((event.action, event.what))
                continue
            cause = {"wait": "put", "start": "submit", "join": "done"}[event.action]
            key = cause, event.what
            if key in self._ended or event.what not in self._begun:
                program.popleft()
                continue
            self._waiting[key].append(lambda: self._go_on(thread))
            return

    def _begin(self, stream: int) -> None:
        """Start the first operation of a stream's queue if its dependencies are done."""
        event = self._queues[stream][0]
        if event.kind == "wait" and event.after in self._begun and ("put", event.after) not in self._ended:
            self._waiting["put", event.after].append(lambda: self._begin(stream))
            return
        if event.kind in ("wait", "record", "alloc"):
            self._complete(event)
            return
        engine = event.kind[:3] if event.kind.startswith(("h2d", "d2h")) else "compute"
        self._engines[engine].append(event)
        self._serve(engine)

    def _serve(self, engine: str) -> None:
        if engine in self._working or not self._engines[engine]:
            return
        event = min(self._engines[engine], key=lambda event: event.priority)  # of the first, the one that came first
        self._engines[engine].remove(event)
        self._working.add(engine)
        took = self._rates.seconds(event)
        self._busy[engine] += took
        if engine == "compute":
            self._flops += event.flops
        else:
            self._moved[engine] += event.num_bytes

        def ended() -> None:
            self._working.discard(engine)
            self._complete(event)
            self._serve(engine)

        self._at(self._now + took, ended)

    def _complete(self, event: TraceEvent) -> None:
        queue = self._queues[event.stream]
        queue.popleft()
        if queue:
            self._begin(event.stream)
        self._end(("put", event.what))
