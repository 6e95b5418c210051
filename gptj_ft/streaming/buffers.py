"""Memory on the device that the model passes through: a few buffers of one size, used in turn."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gptj_ft.system.cuda import Transfer, record_event
from gptj_ft.system.memory import allocate


@dataclass(eq=False)
class Buffer:
    """A piece of memory and the transfers that use it.

    Attributes:
        tensor: flat.
        holds: what is in it, or will be when the transfers have ended; ``None``: nothing of use.
        transfers: those that use it still.
        users: who relies on its content; without users it may be given to something else.
    """

    tensor: Tensor
    key: Hashable = None
    transfers: list[Transfer] = field(default_factory=list)
    refcount: int = 0

    def release(self) -> None:
        """End a use. A device may be behind the program: whatever is put here next waits until it has caught up."""
        self.refcount -= 1
        self.transfers += record_event(self.tensor.device)


class BufferPool:
    """Buffers of one size, the longest unused first in line; what is still in one need not be read again.

    The passes over the layers go up and down in turn, so what was used last is needed first.
    """

    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._line = [Buffer(allocate(numel, dtype, device)) for _ in range(count)]
        for buffer in self._line:
            buffer.transfers += record_event(device)  # of the zeros

    def has_free(self, content: Hashable) -> bool:
        """Tell whether `acquire` would return a buffer."""
        return any(not buffer.refcount or (content is not None and buffer.key == content) for buffer in self._line)

    def key(self, content: Hashable) -> bool:
        """Tell whether a buffer has a content."""
        return any(buffer.key == content for buffer in self._line)

    def acquire(self, content: Hashable) -> tuple[Buffer, bool]:
        """Return a buffer for a content, and whether it holds it already; it has one user more until its `release`."""
        found = [buffer for buffer in self._line if content is not None and buffer.key == content]
        unused = [buffer for buffer in self._line if not buffer.refcount]
        buffer = (found or [buffer for buffer in unused if buffer.key is None] or unused)[0]
        buffer.key = content
        buffer.refcount += 1
        self._line.remove(buffer)
        self._line.append(buffer)
        buffer.transfers = [transfer for transfer in buffer.transfers if not transfer.done() or transfer.exception()]
        return buffer, bool(found)

    def cancel(self) -> None:
        """End every use: nobody comes back for what he took."""
        for buffer in self._line:
            if buffer.refcount:
                buffer.refcount = 1
                buffer.release()
