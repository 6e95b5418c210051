"""Tensors in host RAM, copied to the device's buffers and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind, Layout
from gptj_ft.streaming.stores.queue import TransferQueue
from gptj_ft.system.accelerator import StreamEvent, Transfer, copy, has_streams, pin
from gptj_ft.system.memory import allocate

log = logging.getLogger(__name__)


class HostStore:
    """Keeps its kinds in host RAM. On a CPU the copies are real too, so that a test there exercises this path."""

    def __init__(self, layouts: Sequence[Layout], kinds: Mapping[Kind, torch.dtype], device: torch.device) -> None:
        self.digest_numel = 0
        self._queue = TransferQueue("host", 2 if has_streams(device) else 1, device)
        self._layouts = layouts
        self._tensors = {
            (kind, layer): allocate(layout.numel, dtype, torch.device("cpu"))
            for kind, dtype in kinds.items()
            for layer, layout in enumerate(layouts)
            if layout.numel
        }
        self._unpin: list[Callable[[], None]] = []
        for values in self._tensors.values() if has_streams(device) else ():
            unpin = pin(values, device)
            if unpin is None:
                log.warning("this system locks no more pages in RAM: some copies to the device will be slower")
                break
            self._unpin.append(unpin)

    def own(self, kind: Kind, layer: int) -> Tensor | None:
        return None

    def in_host(self, kind: Kind, layer: int) -> Tensor | None:
        return self._tensors[kind, layer]

    def read(
        self, kind: Kind, layer: int, out: Tensor, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[Tensor]:
        own = self._tensors[kind, layer][start : start + len(out)]

        def load(events: Sequence[StreamEvent]) -> Tensor:
            copy(own, out, events)
            return out

        return self._queue.read(layer, after, load)

    def read_rows(
        self, kind: Kind, layer: int, name: str, rows: Sequence[int], out: Tensor, after: Sequence[StreamEvent] = ()
    ) -> None:
        values = self._layouts[layer].views(self._tensors[kind, layer])[name][torch.tensor(rows)]
        copy(values, out, after)

    def write(
        self, kind: Kind, layer: int, values: Tensor, start: int = 0, after: Sequence[Transfer] = (),
        digests: Sequence[str] = (),
    ) -> Future[None]:  # fmt: skip
        own = self._tensors[kind, layer][start : start + len(values)]
        return self._queue.write(layer, after, lambda events: copy(values, own, events))

    def commit(self, layer: int, step: int) -> None:
        self._queue.commit(layer, lambda: None)

    def then(self, task: Callable[[], None]) -> Future[None]:
        return self._queue.then(task)

    def drain(self) -> None:
        self._queue.drain()

    def close(self) -> None:
        self._queue.close()
        for unpin in self._unpin:
            unpin()
        self._unpin.clear()
        self._tensors.clear()
