"""Weights read straight from a model folder, each time they are needed: streaming without a copy of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from gptj_ft.stores import Kind, Layout, Transfer
from gptj_ft.stores.blockio import TRANSFERS
from gptj_ft.stores.cuda import copy, use_own_stream
from gptj_ft.stores.queue import TransferQueue

Piece = tuple[int, Callable[[], Tensor]]


class FolderStore:
    """Read-only weights, of any float type.

    Args:
        layouts: of each layer.
        load: (layer, name) -> the pieces of a tensor, as (first row, what reads them); some are read at a time, for a
            disk reaches its rate only with several requests in flight.
        device: where they go.
    """

    resident = False

    def __init__(
        self, layouts: Sequence[Layout], load: Callable[[int, str], Iterator[Piece]], device: torch.device
    ) -> None:
        self._queue = TransferQueue("folder", device=device)
        self._pieces = ThreadPoolExecutor(TRANSFERS, "folder-piece", partial(use_own_stream, device))
        self._layouts, self._load = layouts, load

    def read(
        self, kind: Kind, layer: int, out: Tensor | None, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[Tensor]:
        assert out is not None
        assert kind == "frozen"
        assert len(out) == self._layouts[layer].numel, "a model folder is read layer by layer"

        def load() -> Tensor:
            views = self._layouts[layer].views(out)
            pieces = [(views[name], *piece) for name in views for piece in self._load(layer, name)]
            for done in [self._pieces.submit(_bring, *piece) for piece in pieces]:
                done.result()
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
        self._pieces.shutdown(cancel_futures=True)


def _bring(view: Tensor, row: int, read: Callable[[], Tensor]) -> None:
    values = read()
    copy(values, view[row : row + len(values)])
