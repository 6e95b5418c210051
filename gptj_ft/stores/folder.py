"""Weights read straight from a model folder, each time they are needed: streaming without a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from gptj_ft.stores import Kind, Layout
from gptj_ft.stores.queue import TransferQueue


class FolderStore:
    """Read-only weights; ``load(layer)`` returns a layer's tensors by name, of any float type."""

    resident = False

    def __init__(self, layouts: Sequence[Layout], load: Callable[[int], Mapping[str, Tensor]]) -> None:
        self._queue = TransferQueue("folder")
        self._layouts, self._load = layouts, load

    def read(
        self, kind: Kind, layer: int, out: Tensor | None, start: int = 0, after: Sequence[Future[Any]] = ()
    ) -> Future[Tensor]:
        assert out is not None
        assert kind == "weight"
        assert len(out) == self._layouts[layer].numel, "a model folder is read layer by layer"

        def copy() -> Tensor:
            tensors = self._load(layer)
            for name, view in self._layouts[layer].views(out).items():
                view.copy_(tensors[name])
            return out

        return self._queue.read(layer, after, copy)

    def write(self, kind: Kind, layer: int, values: Tensor, start: int = 0) -> Future[None]:
        raise AssertionError("a model folder is read only")

    def commit(self, layer: int, step: int) -> None:
        raise AssertionError("a model folder is read only")

    def then(self, task: Callable[[], None]) -> Future[None]:
        raise AssertionError("a model folder is read only")

    def drain(self) -> None:
        self._queue.drain()

    def close(self) -> None:
        self._queue.close()
