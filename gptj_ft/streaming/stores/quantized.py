"""Restore the values of quantized matrices on their way to the computation, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptj_ft.models.layout import FLAT_ALIGNMENT, FROZEN, Layout
from gptj_ft.models.quantization.form import QuantizedForm
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.stores.host import HostStore
from gptj_ft.streaming.stores.queue import TransferQueue
from gptj_ft.system.accelerator import StreamEvent, copy, current_stream, ended, use_own_stream, wait_for_stream
from gptj_ft.system.memory import allocate
from gptj_ft.system.threads import compute_in_one_thread

NUM_THREADS = 2  # that restore values
PIECE_BYTES = 8 << 20  # of codes and scales that a thread restores at once
PART_ALIGNMENT = 64  # bytes

Parts = Mapping[str, Tensor]  # flat


class Piece(NamedTuple):
    """Some stored rows of a quantized matrix."""

    form: QuantizedForm
    source: Mapping[str, Any]  # where each part of the matrix is: its place in a file, or a flat tensor
    start: int  # row
    stop: int
    out: Tensor  # the whole parameter, on the device

    @property
    def spans(self) -> dict[str, slice]:
        """Items of each part."""
        return self.form.spans(self.start, self.stop)

    def views(self, staging: Tensor) -> dict[str, Tensor]:
        """Return the parts of these rows as views of staging memory."""
        parts, views, at = self.form.parts(), {}, 0
        for name, span in self.spans.items():
            num_bytes = (span.stop - span.start) * parts[name].dtype.itemsize
            views[name] = staging[at : at + num_bytes].view(parts[name].dtype)
            at += _aligned(num_bytes)
        return views

    @property
    def num_bytes(self) -> int:
        """Bytes of the parts in staging memory."""
        parts = self.form.parts()
        return sum(_aligned((span.stop - span.start) * parts[name].dtype.itemsize) for name, span in self.spans.items())

    def restore(self, parts: Parts) -> None:
        """Write the values of the rows."""
        target = self.out.t() if self.form.is_transposed else self.out
        for rows, values in self.form.row_values(parts, self.start, self.stop):
            target[rows].copy_(values)


def pieces_of(form: QuantizedForm, source: Mapping[str, Any], out: Tensor) -> list[Piece]:
    """Cut a matrix into pieces of `PIECE_BYTES`."""
    step = max(1, PIECE_BYTES * form.rows // (form.num_bytes * form.row_step)) * form.row_step
    return [Piece(form, source, start, min(start + step, form.rows), out) for start in range(0, form.rows, step)]


class Restorer:
    """Restore matrices by two threads: one piece arrives while the values of another are computed.

    Args:
        load: fills views of staging memory with the parts of a piece and returns them; or returns other tensors on the
            device that hold the parts.
    """

    def __init__(self, device: torch.device, load: Callable[[Piece, Parts], Parts]) -> None:
        self._device, self._load = device, load
        self._threads = ThreadPoolExecutor(NUM_THREADS, "codes", partial(_begin_thread, device))
        self._staging = local()  # of each thread

    def restore(self, pieces: Sequence[Piece], after: Sequence[StreamEvent]) -> None:
        """Write the values of all pieces; return when they are written.

        Args:
            after: work of other streams that still uses the targets.
        """
        tasks = [self._threads.submit(self._restore, piece, after) for piece in pieces]
        failed = [error for task in tasks if (error := task.exception())]  # waits for all: they write to the targets
        if failed:
            raise failed[0]

    def _restore(self, piece: Piece, after: Sequence[StreamEvent]) -> None:
        parts = self._load(piece, piece.views(self._staged(piece.num_bytes)))
        for event in after:
            event.wait(current_stream(self._device))
        piece.restore(parts)
        wait_for_stream(self._device)  # before the next piece arrives in the same staging memory

    def _staged(self, num_bytes: int) -> Tensor:
        """Return this thread's staging memory."""
        memory: Tensor | None = getattr(self._staging, "memory", None)
        if memory is None or len(memory) < num_bytes:  # a row may be larger than a piece
            memory = allocate(max(PIECE_BYTES, num_bytes), torch.uint8, self._device)
            wait_for_stream(self._device)  # it is zeroed, and other streams write to it
            self._staging.memory = memory
        return memory

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()


@dataclass(frozen=True)
class PackedLayout(Layout):
    """Layout of a layer's bytes: the parts of its quantized matrices, and the other parameters."""

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)  # of each entry of `shapes`

    __hash__ = Layout.__hash__

    @classmethod
    def pack(cls, layout: Layout, forms: Mapping[str, QuantizedForm], dtype: torch.dtype) -> PackedLayout:
        """Lay out the bytes of a layer.

        Args:
            forms: quantized forms by parameter.
            dtype: type of the other parameters.
        """
        dtypes: dict[str, torch.dtype] = {}
        shapes: dict[str, torch.Size] = {}
        for name, shape in layout.shapes.items():
            if name not in forms:
                dtypes[name], shapes[name] = dtype, shape
                continue
            parts = forms[name].parts()
            for part, count in forms[name].num_items().items():
                dtypes[part_name(name, part)] = parts[part].dtype
                shapes[part_name(name, part)] = torch.Size((count,))
        offsets, offset = {}, 0
        for name, shape in shapes.items():
            offsets[name] = offset
            offset += _aligned(shape.numel() * dtypes[name].itemsize)
        return cls(shapes, offsets, 0, -(-offset // FLAT_ALIGNMENT) * FLAT_ALIGNMENT, dtypes=dtypes)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each entry as a view of a flat tensor of bytes, in its type."""
        return {
            name: flat[self.offsets[name] :][: shape.numel() * self.dtypes[name].itemsize]
            .view(self.dtypes[name])
            .view(shape)
            for name, shape in self.shapes.items()
        }


class PackedStore(LayerStore):
    """Store of frozen weights in host memory that keeps quantized matrices as codes.

    Args:
        layouts: layout of each layer's values.
        packed: layout of each layer's bytes.
        forms: quantized matrices of each layer.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        packed: Sequence[PackedLayout],
        forms: Sequence[Mapping[str, QuantizedForm]],
        device: torch.device,
    ) -> None:
        self._layouts, self._packed, self._forms, self._device = layouts, packed, forms, device
        self._memory = HostStore(packed, {FROZEN: torch.uint8}, device)
        self._queue = TransferQueue("codes", 1, device)
        self._restorer = Restorer(device, self._load)

    def stored(self, layer: int) -> dict[str, Tensor]:
        """Return the stored tensors of a layer in host memory, to be filled once."""
        flat = self._memory.in_host(FROZEN, layer)
        assert flat is not None
        return self._packed[layer].views(flat)

    def bytes_moved(self, span: Span, out: Tensor) -> int:
        return self._packed[span.layer].numel

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        layer = span.layer
        assert len(out) == self._layouts[layer].numel, "internal error: partial read of packed weights"

        def load(events: Sequence[StreamEvent]) -> Tensor:
            stored, pieces, forms = self.stored(layer), list[Piece](), self._forms[layer]
            for name, view in self._layouts[layer].views(out).items():
                if name in forms:
                    source = {part: stored[part_name(name, part)] for part in forms[name].parts()}
                    pieces += pieces_of(forms[name], source, view)
                else:
                    copy(stored[name], view, events)
            self._restorer.restore(pieces, events)
            return out

        return self._queue.read(layer, span.after, load)

    def read_rows(self, span: Span, name: str, rows: Sequence[int], out: Tensor) -> None:
        forms = self._forms[span.layer]
        stored = self.stored(span.layer)

        def items(part: str, spans: Sequence[slice], found: Tensor) -> None:
            own = stored[part_name(name, part)]
            starts = torch.tensor([each.start for each in spans], dtype=torch.int64)
            places = starts[:, None] + torch.arange(found.shape[1])
            # The last rows may be fewer than are restored together.
            torch.index_select(own, 0, places.clamp_(max=len(own) - 1).view(-1), out=found.view(-1))

        if name in forms:
            copy(forms[name].some_rows(rows, items), out, ended(span.after))
        else:
            copy(stored[name][torch.tensor(rows)], out, ended(span.after))

    def close(self) -> None:
        self._queue.close()
        self._restorer.close()
        self._memory.close()

    def _load(self, piece: Piece, staging: Parts) -> Parts:
        stored = {part: piece.source[part][span] for part, span in piece.spans.items()}
        if self._device.type == "cpu":
            return stored
        for part, values in stored.items():
            copy(values, staging[part])
        return staging


def _begin_thread(device: torch.device) -> None:
    use_own_stream(device)
    compute_in_one_thread()


def part_name(parameter: str, part: str) -> str:
    """Return the name of a part of a quantized parameter in a `PackedLayout`."""
    return f"{parameter}/{part}"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PART_ALIGNMENT) * PART_ALIGNMENT
