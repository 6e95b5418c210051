"""A group whose ranks are threads; tensors pass through queues."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from gptj_ft.distributed.control import PeerFailed, is_alike
from gptj_ft.system.group import Group, Link, WaitTimer

T = TypeVar("T")


class Hub:
    """The queues and facts that all ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.wires: dict[tuple[int, int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
        self.facts: dict[tuple[str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
        self.changed = threading.Condition()
        self.failed: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failed = self.failed or error
            self.changed.notify_all()


class Member(Group):
    """One rank; counts sent bytes and unfinished sends."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank, self.size, self.local_size = rank, hub.size, hub.size
        self.local_rank: int | None = rank
        self.threads_alone: int | None = None
        self.names, self.waited = [f"process {number + 1}" for number in range(hub.size)], WaitTimer()
        self.hub, self._turns = hub, defaultdict[str, int](int)
        self.bytes_sent, self.topics = 0, list[str]()
        self.unwaited = self.most_unwaited = 0  # tensors that are kept until they have left

    def connect(self, device: torch.device, links: Sequence[Link]) -> str:
        return "through queues"

    def wire(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def send(self, to: int, values: Tensor, tag: int = 0) -> Sent:
        self.bytes_sent += values.nbytes
        self.hub.wires[self.rank, to, tag].put(values.clone())
        self.unwaited += 1
        self.most_unwaited = max(self.most_unwaited, self.unwaited)
        return Sent(self)

    def recv(self, source: int, out: Tensor, tag: int = 0) -> Coming:
        return Coming(self.hub, self.hub.wires[source, self.rank, tag], out, self.waited)

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        ranks = list(among) or list(range(self.size))
        with self.waited.measure(), self.hub.changed:
            self.topics.append(topic)
            topic = f"{topic} of {ranks}"
            key = topic, self._turns[topic]
            self._turns[topic] += 1
            found = self.hub.facts[key]
            found[self.rank] = dict(facts)
            self.hub.changed.notify_all()
            self.hub.changed.wait_for(lambda: len(found) == len(ranks) or self.hub.failed, 60)
            if len(found) < len(ranks):
                raise PeerFailed(f"{topic}: {self.hub.failed or 'not all have come'}", 1, -1)
            assert all(is_alike(json.loads(json.dumps(found[rank])), facts) for rank in ranks), topic
            return [found[rank] for rank in ranks]

    def fail(self, error: BaseException) -> None:
        self.hub.fail(error)

    def close(self, error: BaseException | None = None) -> None:
        pass


M = TypeVar("M", bound=Member)


class Sent:
    def __init__(self, member: Member) -> None:
        self._member = member

    def wait(self) -> None:
        self._member.unwaited -= 1


class Coming:
    def __init__(self, hub: Hub, wire: SimpleQueue[Tensor], out: Tensor, waited: WaitTimer) -> None:
        self._hub, self._wire, self._out, self._waited = hub, wire, out, waited

    def wait(self) -> None:
        for _ in range(600):
            if self._hub.failed:
                break
            try:
                with self._waited.measure():
                    values = self._wire.get(timeout=0.1)
            except Empty:
                continue
            assert values.shape == self._out.shape
            assert values.dtype == self._out.dtype
            with torch.no_grad():
                self._out.copy_(values)
            return
        raise PeerFailed(f"nothing has come: {self._hub.failed}", 1, -1)


def together(size: int, work: Callable[[M], T], kind: Callable[[Hub, int], M] = Member) -> list[T]:  # type: ignore[assignment]
    """Run a function on every rank at once; return the results, or raise the first error that is no PeerFailed."""
    hub = Hub(size)

    def run(rank: int) -> T:
        try:
            return work(kind(hub, rank))
        except BaseException as error:
            hub.fail(error)
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, PeerFailed)):
        raise error
    return [future.result() for future in futures]
