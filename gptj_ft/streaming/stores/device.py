"""Tensors that stay on the device: nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind, Layout
from gptj_ft.streaming.stores.base import finished
from gptj_ft.system.cuda import Transfer
from gptj_ft.system.memory import allocate


class DeviceStore:
    """Keeps its kinds on the device for good; a read is a look, a write has already happened in place."""

    resident = True

    def __init__(self, layouts: Sequence[Layout], kinds: Mapping[Kind, torch.dtype], device: torch.device) -> None:
        self._tensors = {
            (kind, layer): allocate(layout.numel, dtype, device)
            for kind, dtype in kinds.items()
            for layer, layout in enumerate(layouts)
            if layout.numel
        }

    def read(
        self, kind: Kind, layer: int, out: Tensor | None, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[Tensor]:
        return finished(self._tensors[kind, layer])

    def read_rows(self, kind: Kind, layer: int, name: str, rows: Sequence[int], out: Tensor) -> None:
        raise AssertionError("the matrix itself is there")

    def write(
        self, kind: Kind, layer: int, values: Tensor, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[None]:
        own = self._tensors[kind, layer][start:]
        assert values.data_ptr() == own.data_ptr(), "resident tensors are changed in place"
        return finished(None)

    def commit(self, layer: int, step: int) -> None:
        pass

    def then(self, task: Callable[[], None]) -> Future[None]:
        task()
        return finished(None)

    def drain(self) -> None:
        pass

    def close(self) -> None:
        self._tensors.clear()
