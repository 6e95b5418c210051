"""Tensors that stay on the device: nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind, Layout
from gptj_ft.streaming.stores.base import finished
from gptj_ft.system.accelerator import StreamEvent, Transfer, fresh


class DeviceStore:
    """Keeps its kinds on the device for good; a read is a look, a write has already happened in place.

    Attributes:
        zeroed: event after which all of it is zeroed, for streams other than the computation's.
    """

    def __init__(self, layouts: Sequence[Layout], kinds: Mapping[Kind, torch.dtype], device: torch.device) -> None:
        self._tensors: dict[tuple[Kind, int], Tensor] = {}
        self.digest_numel = 0
        self.zeroed: list[StreamEvent] = []
        for kind, dtype in kinds.items():
            for layer, layout in enumerate(layouts):
                if layout.numel:
                    self._tensors[kind, layer], self.zeroed = fresh(layout.numel, dtype, device)
        self._empty = torch.empty(0, device=device)  # of layers that have nothing of it

    def own(self, kind: Kind, layer: int) -> Tensor | None:
        return self._tensors.get((kind, layer), self._empty)

    def in_host(self, kind: Kind, layer: int) -> Tensor | None:
        return None

    def read(
        self, kind: Kind, layer: int, out: Tensor, start: int = 0, after: Sequence[Transfer] = ()
    ) -> Future[Tensor]:
        raise AssertionError("it is there")

    def read_rows(
        self, kind: Kind, layer: int, name: str, rows: Sequence[int], out: Tensor, after: Sequence[StreamEvent] = ()
    ) -> None:
        raise AssertionError("the matrix itself is there")

    def write(
        self, kind: Kind, layer: int, values: Tensor, start: int = 0, after: Sequence[Transfer] = (),
        digests: Sequence[str] = (),
    ) -> Future[None]:  # fmt: skip
        raise AssertionError("it is changed in place")

    def commit(self, layer: int, step: int) -> None:
        pass

    def then(self, task: Callable[[], None]) -> Future[None]:
        task()
        return finished(None)

    def drain(self) -> None:
        pass

    def close(self) -> None:
        self._tensors.clear()
