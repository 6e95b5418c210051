"""Tensors in host RAM, copied to the device's buffers and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from gptj_ft.stores import Kind, Layout, allocate
from gptj_ft.stores.queue import TransferQueue


class HostStore:
    """Keeps its kinds in host RAM. On a CPU the copies are real too, so that a test there exercises this path."""

    resident = False

    def __init__(self, layouts: Sequence[Layout], kinds: Mapping[Kind, torch.dtype]) -> None:
        self._queue = TransferQueue("host")
        self._tensors = {
            (kind, layer): allocate(layout.numel, dtype, torch.device("cpu"))
            for kind, dtype in kinds.items()
            for layer, layout in enumerate(layouts)
        }

    def read(
        self, kind: Kind, layer: int, out: Tensor | None, start: int = 0, after: Sequence[Future[Any]] = ()
    ) -> Future[Tensor]:
        assert out is not None
        own = self._tensors[kind, layer][start : start + len(out)]
        return self._queue.read(layer, after, lambda: out.copy_(own))

    def write(self, kind: Kind, layer: int, values: Tensor, start: int = 0) -> Future[None]:
        def copy() -> None:
            self._tensors[kind, layer][start : start + len(values)].copy_(values)

        return self._queue.write(layer, copy)

    def commit(self, layer: int, step: int) -> None:
        self._queue.commit(layer, lambda: None)

    def then(self, task: Callable[[], None]) -> Future[None]:
        return self._queue.then(task)

    def drain(self) -> None:
        self._queue.drain()

    def close(self) -> None:
        self._queue.close()
        self._tensors.clear()
