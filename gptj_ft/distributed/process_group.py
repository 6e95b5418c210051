"""Exchange facts and tensors with the other processes of a run.

Facts are lines of JSON over a star of connections through process 0 (`distributed.control`). Tensors are raw bytes from
one process to another through torch's gloo, or from one GPU to another through NCCL. Nothing on the wire is ever
unpickled.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gptj_ft.distributed.control import Control
from gptj_ft.system.group import Handover, Link, Waited

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SLOW = timedelta(hours=24)  # slow is not dead: that is for `control` to tell
NCCL = "GPTJ_FT_NCCL"  # 1: hidden states go from GPU to GPU, where that can be done


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
