"""Read frozen weights straight from a model folder each time they are needed, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from gptj_ft.checkpoints.quantized import QuantizedTensor
from gptj_ft.models.layout import Layout
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.stores.quantized import Parts, Piece, Restorer, part_name, pieces_of
from gptj_ft.streaming.stores.queue import TransferQueue
from gptj_ft.system.accelerator import StreamEvent, copy, ended
from gptj_ft.system.block_reader import BlockReader, Extent, ReadRequest

ROWS_BLOCK_BYTES = 64 * 2**10  # around each row: hardly slower for a disk than the row alone
ROW_READERS = 4
TensorSource = Extent | QuantizedTensor | Callable[[], Tensor]


class FolderStore(LayerStore):
    """Read-only store of a model folder's weights, of any float type or quantized.

    Args:
        find: (layer, name) -> the tensor's extent in a file, or its quantized form, or a function that reads it if it
            is not contiguous.
    """

    def __init__(
        self, layouts: Sequence[Layout], find: Callable[[int, str], TensorSource], device: torch.device
    ) -> None:
        # Two readers: the next layer's first blocks are requested while this layer's last ones arrive.
        self._queue = TransferQueue("folder", 2, device)
        self._blocks = BlockReader(device)
        self._row_blocks = BlockReader(device, ROWS_BLOCK_BYTES, ROW_READERS)  # rows need not wait for whole layers
        self._layouts, self._find = layouts, find
        self._restorer = Restorer(device, self._load_parts)

    def bytes_moved(self, span: Span, out: Tensor) -> int:
        return self._layouts[span.layer].bytes_in("disk", out.dtype)

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        layer = span.layer
        assert span.kind == "frozen"
        assert len(out) == self._layouts[layer].numel, "internal error: partial read of a layer in a model folder"

        def load(events: Sequence[StreamEvent]) -> Tensor:
            views = self._layouts[layer].views(out)
            sources = [(self._find(layer, name), view) for name, view in views.items()]
            self._blocks.read((source.to(view) for source, view in sources if isinstance(source, Extent)), events)
            pieces = list[Piece]()
            for source, view in sources:
                if isinstance(source, QuantizedTensor):
                    pieces += pieces_of(source.form, source.extents, view)
                elif not isinstance(source, Extent):
                    copy(source(), view, events)
            self._restorer.restore(pieces, events)
            return out

        return self._queue.read(layer, span.after, load)

    def read_stored(self, layer: int, out: Mapping[str, Tensor]) -> None:
        """Read a layer's tensors into host memory, quantized ones as they are stored, and wait.

        Args:
            out: target of each tensor by name, of each part of a quantized one by `part_name`.
        """
        requests, others = list[ReadRequest](), list[tuple[Callable[[], Tensor], Tensor]]()
        for name in self._layouts[layer].shapes:
            source = self._find(layer, name)
            if isinstance(source, QuantizedTensor):
                requests += [extent.to(out[part_name(name, part)]) for part, extent in source.extents.items()]
            elif isinstance(source, Extent):
                requests.append(source.to(out[name]))
            else:
                others.append((source, out[name]))
        self._blocks.read(requests)
        for read, target in others:
            target.copy_(read())

    def _load_parts(self, piece: Piece, staging: Parts) -> Parts:
        """Read the parts of some rows of a quantized matrix."""
        extents: Mapping[str, Extent] = piece.source
        requests = (extents[part].to(staging[part], span.start) for part, span in piece.spans.items())
        self._blocks.read(requests)
        return staging

    def read_rows(self, span: Span, name: str, rows: Sequence[int], out: Tensor) -> None:
        assert span.kind == "frozen"
        source, width, events = self._find(span.layer, name), out.shape[1], ended(span.after)
        if isinstance(source, Extent):
            pieces = (source.to(to, row * width) for row, to in zip(rows, out, strict=True))
            self._row_blocks.read(pieces, events)
        elif isinstance(source, QuantizedTensor):
            copy(source.form.some_rows(rows, partial(self._read_items, source.extents)), out, events)
        else:
            copy(source()[torch.tensor(rows)], out, events)

    def _read_items(self, extents: Mapping[str, Extent], part: str, spans: Sequence[slice], out: Tensor) -> None:
        """Read items of a part of a quantized matrix, a row of ``out`` for each span."""
        targets = zip(spans, out, strict=True)
        self._row_blocks.read(extents[part].to(to[: span.stop - span.start], span.start) for span, to in targets)

    def close(self) -> None:
        self._queue.close()
        self._restorer.close()
        self._blocks.close()
        self._row_blocks.close()
