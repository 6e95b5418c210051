"""The ranks of a run, and the facts and tensors that they exchange.

The method bodies are the single-process case. `distributed.process_group` overrides them for several processes.
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

Link = tuple[int, int, int]  # source rank, target rank, 1 on the way down (backward) and 0 on the way up (forward)


class PendingTransfer(Protocol):
    """A tensor on its way to or from another rank."""

    def wait(self) -> None:
        """Wait for the end of the transfer; for a tensor on a device, make the current stream wait."""


class WaitTimer(threading.local):
    """Seconds that each thread has waited for other ranks."""

    seconds: float = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the seconds inside the block."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - start


class Group:
    """Some or all ranks of a run; a single process by default."""

    rank: int = 0  # rank 0 has the console
    size: int = 1
    local_size: int = 1  # ranks that share memory and cores of this machine
    local_rank: int | None = None  # None: single process
    threads_alone: int | None = None  # CPU threads without the other ranks of --nproc; None: unchanged
    names: Sequence[str] = ("process 1",)  # by rank, for messages
    waited: WaitTimer = WaitTimer()

    def __repr__(self) -> str:
        return "ALONE" if self.size == 1 else f"{type(self).__name__}({self.rank} of {self.size})"

    def gather(self, topic: str, facts: Mapping[str, Any], among: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return the facts of every rank, in rank order; wait until all have called it with this topic.

        Args:
            topic: the same on all ranks; may repeat.
            facts: JSON values by name.
            among: ranks that call; default: all.
        """
        return [dict(facts)]

    def barrier(self, topic: str) -> None:
        """Wait until every rank has come to this point."""
        self.gather(topic, {})

    def any(self, topic: str, flag: bool) -> bool:
        """Tell whether the flag is true on any rank."""
        return (self.size > 1 and any(each["flag"] for each in self.gather(topic, {"flag": flag}))) or flag

    def broadcast(self, topic: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of rank 0; those of other ranks are ignored."""
        sent = dict(values) if self.rank == 0 else None
        return dict(self.gather(topic, {"values": sent})[0]["values"])

    def connect(self, device: torch.device, links: Sequence[Link]) -> str:
        """Choose the transport of activations, on all ranks at once; return its name for the log.

        Args:
            links: every pair of ranks that exchange them, in the same order on all ranks.
        """
        return "within one process"

    def wire(self, device: torch.device) -> torch.device:
        """Return the device that activations are sent from: the computing device or the host."""
        return device

    def send(self, target: int, values: Tensor, tag: int = 0) -> PendingTransfer:
        """Start to send a contiguous tensor; it must not change before the transfer ends."""
        raise AssertionError("a single process has no rank to send to")

    def recv(self, source: int, out: Tensor, tag: int = 0) -> PendingTransfer:
        """Start to receive a tensor: the oldest unreceived one with this tag.

        On a device only the lowest bit of the tag counts.
        """
        raise AssertionError("a single process has no rank to receive from")

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error, and end the waits of this one's threads for them; `close` follows."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group; an error ends the other ranks, too."""


ALONE = Group()
