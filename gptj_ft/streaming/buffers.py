"""Pools of buffers on the device, through which the tensors of a model pass."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gptj_ft.system.accelerator import Transfer, fresh, record_event


@dataclass(eq=False)
class Buffer:
    """Memory on the device and the transfers that use it.

    Attributes:
        tensor: flat tensor.
        key: name of its content, now or when the transfers have ended; ``None``: nothing of use.
        transfers: transfers that use it still.
        refcount: active users; at 0 the buffer may be reused.
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
        self._line = [
            Buffer(tensor, None, [*zeroed]) for tensor, zeroed in (fresh(numel, dtype, device) for _ in range(count))
        ]

    def has_free(self, key: Hashable) -> bool:
        """Tell whether `acquire` would return a buffer."""
        return any(not buffer.refcount or (key is not None and buffer.key == key) for buffer in self._line)

    def holds(self, key: Hashable) -> bool:
        """Tell whether a buffer has a content."""
        return any(buffer.key == key for buffer in self._line)

    def acquire(self, key: Hashable) -> tuple[Buffer, bool]:
        """Return a buffer for a content, and whether it holds it already; it has one user more until its `release`."""
        found = [buffer for buffer in self._line if key is not None and buffer.key == key]
        unused = [buffer for buffer in self._line if not buffer.refcount]
        buffer = (found or [buffer for buffer in unused if buffer.key is None] or unused)[0]
        buffer.key = key
        buffer.refcount += 1
        self._line.remove(buffer)
        self._line.append(buffer)
        buffer.transfers = [transfer for transfer in buffer.transfers if not transfer.done() or transfer.exception()]
        return buffer, bool(found)

    def cancel(self) -> None:
        """Release every buffer: their users were cancelled."""
        for buffer in self._line:
            if buffer.refcount:
                buffer.refcount = 1
                buffer.release()


@dataclass(eq=False)
class Lease:
    """The use of some elements on the device: a store's own memory, or a buffer that is read into and written from.

    Attributes:
        tensor: the elements, flat.
        buffer: the buffer that they are in; ``None``: they are the store's own, and nothing has to be moved.
        is_cached: whether they need not be read: the store's own, or still in the buffer.
    """

    tensor: Tensor
    buffer: Buffer | None = None
    is_cached: bool = True

    @classmethod
    def of(cls, pool: BufferPool, key: Hashable, numel: int) -> Lease:
        """Acquire a buffer for a content of so many elements."""
        buffer, is_cached = pool.acquire(key)
        return cls(buffer.tensor[:numel], buffer, is_cached)

    @property
    def transfers(self) -> list[Transfer]:
        """Transfers that still use the memory; new ones are appended."""
        return [] if self.buffer is None else self.buffer.transfers

    def label(self, key: Hashable) -> None:
        """Name the content, now or when the transfers have ended; ``None``: nothing of use."""
        if self.buffer is not None:
            self.buffer.key = key

    def release(self) -> None:
        """End the use."""
        if self.buffer is not None:
            self.buffer.release()
