"""Groups of several processes: facts through `control`, tensors through torch.distributed.

Facts are JSON lines and tensors raw bytes: nothing on the wire is unpickled. torch's object collectives would unpickle,
and let whoever reaches the port run code.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gptj_ft.distributed.control import Control
from gptj_ft.system.group import ALONE, Group, Link, PendingTransfer, WaitTimer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NO_TIMEOUT = timedelta(hours=24)  # `control` detects dead peers; slow ones may take as long as they need
NCCL = "GPTJ_FT_NCCL"  # 1: activations go from GPU to GPU where possible


class ProcessGroup(Group):
    """All processes of a run, connected.

    Args:
        control: connection for facts, liveness and errors.
        local_size: processes on this machine.
        local_rank: number of this process among them.
        threads_alone: CPU threads that this process would have without the others.
        transport: module that transfers tensors, by default `torch.distributed`.
    """

    def __init__(
        self,
        control: Control,
        local_size: int,
        local_rank: int,
        threads_alone: int | None = None,
        transport: Any = None,
    ) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.names = control.rank, control.size, control.names
        self.local_size, self.local_rank, self.threads_alone = local_size, local_rank, threads_alone
        self.waited = WaitTimer()
        self._control, self._transport = control, transport or dist
        self._nccl: list[Any] = []  # communicators

    def connect(self, device: torch.device, links: Sequence[Link]) -> str:
        import torch

        from gptj_ft.system.accelerator import device_id

        can = os.environ.get(NCCL) == "1" and device.type == "cuda" and self._transport.is_nccl_available()
        own = f"{platform.node()} {device_id(device)}" if can else ""
        if len({each["device"] for each in self.gather("devices", {"device": own})} - {""}) < self.size:
            return "through host memory (gloo)"
        # NCCL has no tags: a communicator of two ranks does one transfer at a time, whatever its direction. Receives
        # are posted early, those of backward while forward still sends. In one communicator, a send behind such a
        # receive would wait for ever. So each pass and each direction has its own, in which both ends have the order
        # of layers and micro-batches.
        self._nccl = [self._transport.new_group(backend="nccl", timeout=NO_TIMEOUT) for _ in range(4)]
        # torch creates a communicator at its first transfer, which blocks both ends: do it before anything overlaps.
        for source, target, down in links:
            if self.rank == source:
                self.send(target, torch.zeros(1, device=device), down).wait()
            elif self.rank == target:
                self.recv(source, torch.zeros(1, device=device), down).wait()
        return "from device to device (NCCL)"

    def wire(self, device: torch.device) -> torch.device:
        import torch

        return device if self._nccl else torch.device("cpu")

    def send(self, target: int, values: Tensor, tag: int = 0) -> PendingTransfer:
        assert values.is_contiguous()
        communicator = self._communicator(values, self.rank, target, tag)
        return self._start(lambda: self._transport.isend(values, target, communicator, tag), values)

    def recv(self, source: int, out: Tensor, tag: int = 0) -> PendingTransfer:
        communicator = self._communicator(out, source, self.rank, tag)
        return self._start(lambda: self._transport.irecv(out, source, communicator, tag), out)

    def _communicator(self, values: Tensor, source: int, target: int, tag: int) -> Any:
        """Return the NCCL communicator of a transfer; None for gloo."""
        # The lowest bit of the tag tells the pass, the order of the two ranks the direction.
        return None if values.device.type == "cpu" else self._nccl[2 * (tag % 2) + (source < target)]

    def _start(self, start: Callable[[], Any], values: Tensor) -> PendingTransfer:
        try:
            return _Work(start(), values, self._control, self.waited)
        except RuntimeError as error:
            raise self._control.failure_behind(error) from error

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        with self.waited.measure():
            return self._control.gather(topic, facts, among)

    def fail(self, error: BaseException) -> None:
        self._control.fail(error)

    def close(self, error: BaseException | None = None) -> None:
        import torch.distributed as dist

        self._control.close(error)
        # After an error, peers may be gone, and destroying the group would wait for them.
        if error is None and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


class _Work:
    """A transfer of gloo or NCCL; keeps its tensor alive."""

    def __init__(self, work: Any, values: Tensor, control: Control, waited: WaitTimer) -> None:
        self._work, self._values, self._control, self._waited = work, values, control, waited

    def wait(self) -> None:
        try:
            with self._waited.measure(), self._control.waiting():
                self._work.wait()
        except RuntimeError as error:
            raise self._control.failure_behind(error) from error


class Subgroup(Group):
    """Some ranks of a group, numbered from 0.

    Args:
        ranks: ranks in the group, this one included.
    """

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._group, self._ranks = group, tuple(ranks)
        self.rank, self.size = self._ranks.index(group.rank), len(ranks)
        self.local_size, self.local_rank, self.threads_alone = group.local_size, group.local_rank, group.threads_alone
        self.names = [group.names[rank] for rank in ranks]
        self.waited = group.waited

    def connect(self, device: torch.device, links: Sequence[Link]) -> str:
        return self._group.connect(device, [(self._ranks[a], self._ranks[b], down) for a, b, down in links])

    def wire(self, device: torch.device) -> torch.device:
        return self._group.wire(device)

    def send(self, target: int, values: Tensor, tag: int = 0) -> PendingTransfer:
        return self._group.send(self._ranks[target], values, tag)

    def recv(self, source: int, out: Tensor, tag: int = 0) -> PendingTransfer:
        return self._group.recv(self._ranks[source], out, tag)

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        return self._group.gather(topic, facts, [self._ranks[rank] for rank in among or range(self.size)])

    def fail(self, error: BaseException) -> None:
        self._group.fail(error)

    def close(self, error: BaseException | None = None) -> None:
        self._group.close(error)


def subgroup(group: Group, ranks: Sequence[int]) -> Group:
    """Return the group of some ranks, this one included."""
    return group if len(ranks) == group.size else ALONE if len(ranks) == 1 else Subgroup(group, ranks)
