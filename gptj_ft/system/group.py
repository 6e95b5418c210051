"""Let the processes of a run exchange facts and tensors; a single process is `ALONE`.

`gptj_ft.distributed` implements `Group` for several processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Link = tuple[int, int, int]  # source, target, and whether on the way down: 0 or 1


class Handover(Protocol):
    """A tensor on its way to or from another process."""

    def wait(self) -> None:
        """Wait until it has arrived, or has left; of a tensor on a device, the current stream waits.

        Raises:
            PeerFailed: the other process is gone.
        """


class Waited(threading.local):
    """Seconds that a thread has waited for other processes; of each thread its own."""

    seconds: float = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the seconds inside the block."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - start


class Group(Protocol):
    """The processes of a run, by rank.

    Attributes:
        rank: number of this process, from 0; process 0 has the console.
        size: number of processes.
        on_this_machine: number of them that share this machine's memory and cores.
        number_here: number of this process among those, from 0; ``None``: there are no others anywhere.
        threads_alone: CPU threads that this process would have if there were no others; ``None``: there are none.
        names: name of each process for messages, by rank.
        waited: seconds that the calling thread has waited for other processes.
    """

    rank: int
    size: int
    on_this_machine: int
    number_here: int | None
    threads_alone: int | None
    names: Sequence[str]
    waited: Waited

    def connect(self, device: torch.device, links: Sequence[Link]) -> str:
        """Agree on the way of hidden states, in all processes of a run at once; return its name for the log.

        Args:
            device: device that computes.
            links: links between processes that they go over, in the same order in all of these.
        """

    def wire(self, device: torch.device) -> torch.device:
        """Return the device that hidden states are sent from and received on: that device, or the host."""

    def send(self, to: int, values: Tensor, tag: int = 0) -> Handover:
        """Hand a tensor to another process; it must not change until it has left."""

    def receive(self, source: int, out: Tensor, tag: int = 0) -> Handover:
        """Take a tensor from another process: of those with this tag, in the order in which they were sent.

        Into a device's memory: of all whose tag is even, or odd, as this one is.
        """

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return the facts of every process on a topic, by rank; waits until all have come to it.

        Args:
            topic: subject, the same in all processes; a topic may come again.
            facts: JSON values by name.
            among: ranks of the processes that come to it, this one too; default: all.

        Raises:
            PeerFailed: another process has failed, or is gone.
        """

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group; with an error, so that the others end with it, too."""


class Alone:
    """A run of one process."""

    rank, size, on_this_machine = 0, 1, 1
    number_here: int | None = None
    threads_alone: int | None = None
    names: Sequence[str] = ("process 1",)
    waited = Waited()

    def __repr__(self) -> str:
        return "ALONE"  # without an address: it is a default in the documentation

    def connect(self, device: torch.device, links: Sequence[Link]) -> str:
        return "nowhere"

    def wire(self, device: torch.device) -> torch.device:
        return device

    def send(self, to: int, values: Tensor, tag: int = 0) -> Handover:
        raise AssertionError("there is nobody to send to")

    def receive(self, source: int, out: Tensor, tag: int = 0) -> Handover:
        raise AssertionError("there is nobody to receive from")

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        return [dict(facts)]

    def close(self, error: BaseException | None = None) -> None:
        pass


ALONE = Alone()


class Subgroup:
    """Some of the processes of a group, by their places among these.

    Args:
        group: all of them.
        ranks: ranks in the group of those meant, this process too.
    """

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, tuple(ranks)
        self.rank, self.size = self._ranks.index(group.rank), len(ranks)
        self.on_this_machine, self.threads_alone = group.on_this_machine, group.threads_alone
        self.number_here = group.number_here
        self.names: Sequence[str] = [group.names[rank] for rank in ranks]
        self.waited = group.waited

    def connect(self, device: torch.device, links: Sequence[Link]) -> str:
        return self._group.connect(device, [(self._ranks[a], self._ranks[b], down) for a, b, down in links])

    def wire(self, device: torch.device) -> torch.device:
        return self._group.wire(device)

    def send(self, to: int, values: Tensor, tag: int = 0) -> Handover:
        return self._group.send(self._ranks[to], values, tag)

    def receive(self, source: int, out: Tensor, tag: int = 0) -> Handover:
        return self._group.receive(self._ranks[source], out, tag)

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        return self._group.gather(topic, facts, [self._ranks[rank] for rank in among or range(self.size)])

    def close(self, error: BaseException | None = None) -> None:
        self._group.close(error)


def subgroup(group: Group, ranks: Sequence[int]) -> Group:
    """Return some of the processes of a group, this one too."""
    return group if len(ranks) == group.size else ALONE if len(ranks) == 1 else Subgroup(group, ranks)


def agreed(group: Group, topic: str, wish: bool) -> bool:
    """Tell whether any process of a group wishes something."""
    return (group.size > 1 and any(each["wish"] for each in group.gather(topic, {"wish": wish}))) or wish


def from_first(group: Group, topic: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Broadcast the values of process 0 on a topic."""
    return group.gather(topic, values if group.rank == 0 else {})[0]
