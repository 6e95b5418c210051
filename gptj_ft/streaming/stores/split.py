"""Keep some layers in memory and the others on disk."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future

from torch import Tensor

from gptj_ft.models.layout import NO_PARAMETERS, Kind, Layout
from gptj_ft.streaming.stores.base import LayerStore, Span


def split_layouts(layouts: Sequence[Layout], in_memory: Container[int]) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts for a store in memory and for a store on disk; layers of the other one are empty."""
    memory = [layout if layer in in_memory else NO_PARAMETERS for layer, layout in enumerate(layouts)]
    disk = [NO_PARAMETERS if layer in in_memory else layout for layer, layout in enumerate(layouts)]
    return memory, disk


class SplitStore(LayerStore):
    """Store of every layer in one of two others.

    Args:
        memory: store of the layers ``in_memory``.
        disk: store of all other layers.
    """

    def __init__(self, memory: LayerStore, disk: LayerStore, in_memory: Container[int]) -> None:
        self._memory, self._disk, self._in_memory = memory, disk, in_memory

    def keeps(self, layer: int) -> bool:
        return layer in self._in_memory

    def part(self, layer: int) -> LayerStore:
        return self._memory if layer in self._in_memory else self._disk

    def own(self, kind: Kind, layer: int) -> Tensor | None:
        return self.part(layer).own(kind, layer)

    def in_host(self, kind: Kind, layer: int) -> Tensor | None:
        return self.part(layer).in_host(kind, layer)

    def bytes_moved(self, span: Span, out: Tensor) -> int:
        return self.part(span.layer).bytes_moved(span, out)

    def read(self, span: Span, out: Tensor) -> Future[Tensor]:
        return self.part(span.layer).read(span, out)

    def read_rows(self, span: Span, name: str, rows: Sequence[int], out: Tensor) -> None:
        self.part(span.layer).read_rows(span, name, rows, out)

    def write(self, span: Span, values: Tensor, digests: Sequence[str] = ()) -> Future[None]:
        return self.part(span.layer).write(span, values, digests)

    def commit(self, layer: int, step: int) -> None:
        self.part(layer).commit(layer, step)

    def then(self, task: Callable[[], None]) -> Future[None]:
        raise AssertionError("internal error: layers in memory are lost with the process, so no step is committed")

    def drain(self) -> None:
        self._memory.drain()
        self._disk.drain()

    def close(self) -> None:
        self._memory.close()
        self._disk.close()
