"""Weights read straight from a model folder, each time they are needed: streaming without a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gptj_ft.stores import Kind, Layout, Transfer
from gptj_ft.stores.cuda import copy
from gptj_ft.stores.queue import TransferQueue


class FolderStore:
    """Read-only weights; ``load(layer, name)`` returns one of a layer's tensors, of any float type."""

    resident = False

    def __init__(self, layouts: Sequence[Layout], load: Callable[[int, str], Tensor], device: torch.device) -> None:
        self._queue = TransferQueue("folder", device=device)
        self._layouts, self._load = layouts, load

    def read(
        self, kind: Kind, layer: int, out: Tensor | None, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[Tensor]:
        assert out is not None
        assert kind == "frozen"
        assert len(out) == self._layouts[layer].numel, "a model folder is read layer by layer"

        def load() -> Tensor:
            for name, view in self._layouts[layer].views(out).items():
                copy(self._load(layer, name), view)
            return out

        return self._queue.read(layer, after, load)

    def write(
        self, kind: Kind, layer: int, values: Tensor, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[None]:
        raise AssertionError("a model folder is read only")

    def commit(self, layer: int, step: int) -> None:
        raise AssertionError("a model folder is read only")

    def then(self, task: Callable[[], None]) -> Future[None]:
        raise AssertionError("a model folder is read only")

    def drain(self) -> None:
        self._queue.drain()

    def close(self) -> None:
        self._queue.close()
