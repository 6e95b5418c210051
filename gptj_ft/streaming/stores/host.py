"""Keep tensors in host memory, and copy them to the device and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind, Layout
from gptj_ft.streaming.moments import num_items
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.stores.queue import TransferQueue
from gptj_ft.system.accelerator import StreamEvent, copy, ended, has_streams, pin
from gptj_ft.system.memory import allocate
from gptj_ft.system.units import gigabytes

log = logging.getLogger(__name__)


class HostStore(LayerStore):
    """Store in host memory. On a CPU it copies as well, so that tests on a CPU exercise this path."""

    def __init__(self, layouts: Sequence[Layout], kinds: Mapping[Kind, torch.dtype], device: torch.device) -> None:
        self._queue = TransferQueue("host", 2 if has_streams(device) else 1, device)
        self._layouts = layouts
        self._tensors = {
            (kind, layer): allocate(num_items(layout.numel, dtype), dtype, torch.device("cpu"))
            for kind, dtype in kinds.items()
            for layer, layout in enumerate(layouts)
            if layout.numel
        }
        self._unpin: list[Callable[[], object]] = []
        pinned = 0
        for values in self._tensors.values() if has_streams(device) else ():
            unpin = pin(values, device)
            if unpin is None:
                total = sum(each.nbytes for each in self._tensors.values())
                log.warning(
                    "the system refuses to pin more host memory (%s of %s are pinned): the rest is copied more slowly",
                    gigabytes(pinned), gigabytes(total),
                )  # fmt: skip
                break
            pinned += values.nbytes
            self._unpin.append(unpin)

    def in_host(self, kind: Kind, layer: int) -> Tensor | None:
        return self._tensors[kind, layer]

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        own = self._part(span, out)

        def load(events: Sequence[StreamEvent]) -> Tensor:
            copy(own, out, events)
            return out

        return self._queue.read(span.layer, span.after, load)

    def read_rows(self, span: Span, name: str, rows: Sequence[int], out: Tensor) -> None:
        flat = self._tensors[span.kind, span.layer]
        copy(self._layouts[span.layer].views(flat)[name][torch.tensor(rows)], out, ended(span.after))

    def write(self, span: Span, values: Tensor, digests: Sequence[str] = ()) -> Future[None]:
        own = self._part(span, values)
        return self._queue.write(span.layer, span.after, lambda events: copy(values, own, events))

    def _part(self, span: Span, items: Tensor) -> Tensor:
        start = num_items(span.start, items.dtype)
        return self._tensors[span.kind, span.layer][start : start + len(items)]

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
