"""Processes that work on one run: what they tell each other, and the tensors that they hand on.

`Alone` is a run of one process: everything that asks the group is answered at once. `Processes` are several, here or on
other machines: facts go as lines of JSON over a star of connections through process 0 (`system.processes.control`),
tensors as raw bytes from one process to another through torch's gloo, or from one GPU to another through NCCL. Nothing
on the wire is ever unpickled.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from gptj_ft.system.processes.control import Control

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SLOW = timedelta(hours=24)  # slow is not dead: that is for `control` to tell
NCCL = "GPTJ_FT_NCCL"  # 1: hidden states go from GPU to GPU, where that can be done
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


class Processes:
    """Several processes, connected.

    Args:
        control: connection for facts, liveness and errors.
        on_this_machine: processes on this machine.
        number_here: number of this process among those.
        threads_alone: CPU threads that this process would have if there were no others.
    """

    def __init__(
        self, control: Control, on_this_machine: int, number_here: int, threads_alone: int | None = None
    ) -> None:
        self.rank, self.size, self.on_this_machine = control.rank, control.size, on_this_machine
        self.number_here: int | None = number_here
        self.threads_alone, self.waited = threads_alone, Waited()
        self.names: Sequence[str] = control.names
        self._control = control
        self._direct: list[Any] = []  # communicators of NCCL

    def connect(self, device: torch.device, links: Sequence[Link]) -> str:
        import torch
        import torch.distributed as dist

        from gptj_ft.system.accelerator import device_id

        can = os.environ.get(NCCL) == "1" and device.type == "cuda" and dist.is_nccl_available()
        own = f"{platform.node()} {device_id(device)}" if can else ""
        if len({each["device"] for each in self.gather("devices", {"device": own})} - {""}) < self.size:
            return "through host memory (gloo)"
        # NCCL has no tags: in the communicator of two processes, a transfer waits for the one before it, whichever
        # direction that has. A receive is asked for long before its time, and those for the way down while the way up
        # goes on: a send behind it, which the other process needs first, would never leave. So each way and each
        # direction has communicators, in which both ends have the same order: that of the layers and micro-batches.
        self._direct = [dist.new_group(backend="nccl", timeout=SLOW) for _ in range(4)]
        # torch makes them at the first transfer, where each end waits for the other's: now, while nothing else does.
        for source, to, down in links:
            if self.rank == source:
                self.send(to, torch.zeros(1, device=device), down).wait()
            elif self.rank == to:
                self.receive(source, torch.zeros(1, device=device), down).wait()
        return "from device to device (NCCL)"

    def wire(self, device: torch.device) -> torch.device:
        import torch

        return device if self._direct else torch.device("cpu")

    def send(self, to: int, values: Tensor, tag: int = 0) -> Handover:
        import torch.distributed as dist

        assert values.is_contiguous()
        way = self._way(values, self.rank, to, tag)
        return self._started(lambda: dist.isend(values, to, way, tag), values)

    def receive(self, source: int, out: Tensor, tag: int = 0) -> Handover:
        import torch.distributed as dist

        way = self._way(out, source, self.rank, tag)
        return self._started(lambda: dist.irecv(out, source, way, tag), out)

    def _way(self, values: Tensor, source: int, to: int, tag: int) -> Any:
        """Return the communicator that a tensor travels by; ``None``: gloo's."""
        return None if values.device.type == "cpu" else self._direct[2 * (tag % 2) + (source < to)]

    def _started(self, start: Callable[[], Any], values: Tensor) -> Handover:
        try:
            return _Work(start(), values, self._control, self.waited)
        except RuntimeError as error:
            raise self._control.failure_behind(error) from error

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        with self.waited.measure():
            return self._control.gather(topic, facts, among)

    def close(self, error: BaseException | None = None) -> None:
        import torch.distributed as dist

        self._control.close(error)
        # With an error, others may be gone: what is on its way to them ends with the process.
        if error is None and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


class _Work:
    """A transfer of gloo or NCCL; keeps its tensor alive."""

    def __init__(self, work: Any, values: Tensor, control: Control, waited: Waited) -> None:
        self._work, self._values, self._control, self._waited = work, values, control, waited

    def wait(self) -> None:
        try:
            with self._waited.measure(), self._control.waiting():
                self._work.wait()
        except RuntimeError as error:
            raise self._control.failure_behind(error) from error


def agreed(group: Group, topic: str, wish: bool) -> bool:
    """Tell whether any process of a group wishes something."""
    return (group.size > 1 and any(each["wish"] for each in group.gather(topic, {"wish": wish}))) or wish


def from_first(group: Group, topic: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Broadcast the values of process 0 on a topic."""
    return group.gather(topic, values if group.rank == 0 else {})[0]
