"""Weights read straight from a model folder, each time they are needed: streaming without a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind, Layout
from gptj_ft.streaming.stores.queue import TransferQueue
from gptj_ft.system.accelerator import StreamEvent, Transfer, copy
from gptj_ft.system.block_reader import BlockReader, Extent

ROWS_BLOCK_BYTES = 64 * 2**10  # around rows that are wanted: takes a disk hardly longer than one of them
ROW_READERS = 4
WriteSource = Extent | Callable[[], Tensor]


class FolderStore:
    """Read-only weights, of any float type.

    Args:
        layouts: layout of each layer.
        find: (layer, name) -> where the tensor is in one piece; if it is nowhere, what reads it.
        device: device that computes.
    """

    def __init__(
        self, layouts: Sequence[Layout], find: Callable[[int, str], WriteSource], device: torch.device
    ) -> None:
        self.digest_numel = 0
        # The next layer's blocks are asked for while this one's last are on their way: the disk is never idle.
        self._queue = TransferQueue("folder", 2, device)
        self._blocks = BlockReader(device)
        self._row_blocks = BlockReader(device, ROWS_BLOCK_BYTES, ROW_READERS)  # that need not wait for whole layers
        self._layouts, self._find = layouts, find

    def own(self, kind: Kind, layer: int) -> Tensor | None:
        return None

    def in_host(self, kind: Kind, layer: int) -> Tensor | None:
        return None

    def read(
        self, kind: Kind, layer: int, out: Tensor, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[Tensor]:
        assert kind == "frozen"
        assert len(out) == self._layouts[layer].numel, "a model folder is read layer by layer"

        def load(events: Sequence[StreamEvent]) -> Tensor:
            views = self._layouts[layer].views(out)
            found = [(self._find(layer, name), view) for name, view in views.items()]
            pieces = (source.to(view) for source, view in found if isinstance(source, Extent))
            self._blocks.read(pieces, events)
            for source, view in found:
                if not isinstance(source, Extent):
                    copy(source(), view, events)
            return out

        return self._queue.read(layer, after, load)

    def read_rows(
        self, kind: Kind, layer: int, name: str, rows: Sequence[int], out: Tensor, after: Sequence[StreamEvent] = ()
    ) -> None:
        assert kind == "frozen"
        source, width = self._find(layer, name), out.shape[1]
        if isinstance(source, Extent):
            pieces = (source.to(to, row * width) for row, to in zip(rows, out, strict=True))
            self._row_blocks.read(pieces, after)
        else:
            copy(source()[torch.tensor(rows)], out, after)

    def write(
        self, kind: Kind, layer: int, values: Tensor, start: int = 0, after: Sequence[Transfer] = (),
        digests: Sequence[str] = (),
    ) -> Future[None]:  # fmt: skip
        raise AssertionError("a model folder is read only")

    def commit(self, layer: int, step: int) -> None:
        raise AssertionError("a model folder is read only")

    def then(self, task: Callable[[], None]) -> Future[None]:
        raise AssertionError("a model folder is read only")

    def drain(self) -> None:
        self._queue.drain()

    def close(self) -> None:
        self._queue.close()
        self._blocks.close()
        self._row_blocks.close()
