"""Read frozen weights straight from a model folder each time they are needed, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gptj_ft.models.layout import Layout
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.stores.queue import TransferQueue
from gptj_ft.system.accelerator import StreamEvent, copy, ended
from gptj_ft.system.block_reader import BlockReader, Extent

ROWS_BLOCK_BYTES = 64 * 2**10  # around each row: hardly slower for a disk than the row alone
ROW_READERS = 4
WriteSource = Extent | Callable[[], Tensor]


class FolderStore(LayerStore):
    """Read-only store of a model folder's weights, of any float type.

    Args:
        find: (layer, name) -> the tensor's extent in a file, or a function that reads it if it is not contiguous.
    """

    def __init__(
        self, layouts: Sequence[Layout], find: Callable[[int, str], WriteSource], device: torch.device
    ) -> None:
        # Two readers: the next layer's first blocks are requested while this layer's last ones arrive.
        self._queue = TransferQueue("folder", 2, device)
        self._blocks = BlockReader(device)
        self._row_blocks = BlockReader(device, ROWS_BLOCK_BYTES, ROW_READERS)  # rows need not wait for whole layers
        self._layouts, self._find = layouts, find

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        layer = span.layer
        assert span.kind == "frozen"
        assert len(out) == self._layouts[layer].numel, "internal error: partial read of a layer in a model folder"

        def load(events: Sequence[StreamEvent]) -> Tensor:
            views = self._layouts[layer].views(out)
            sources = [(self._find(layer, name), view) for name, view in views.items()]
            pieces = (source.to(view) for source, view in sources if isinstance(source, Extent))
            self._blocks.read(pieces, events)
            for source, view in sources:
                if not isinstance(source, Extent):
                    copy(source(), view, events)
            return out

        return self._queue.read(layer, span.after, load)

    def read_rows(self, span: Span, name: str, rows: Sequence[int], out: Tensor) -> None:
        assert span.kind == "frozen"
        source, width, events = self._find(span.layer, name), out.shape[1], ended(span.after)
        if isinstance(source, Extent):
            pieces = (source.to(to, row * width) for row, to in zip(rows, out, strict=True))
            self._row_blocks.read(pieces, events)
        else:
            copy(source()[torch.tensor(rows)], out, events)

    def drain(self) -> None:
        self._queue.drain()

    def close(self) -> None:
        self._queue.close()
        self._blocks.close()
        self._row_blocks.close()
