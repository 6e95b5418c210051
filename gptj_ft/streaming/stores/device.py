"""Keep tensors on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind, Layout
from gptj_ft.streaming.moments import num_items
from gptj_ft.streaming.stores.base import LayerStore
from gptj_ft.system.accelerator import StreamEvent, fresh


class DeviceStore(LayerStore):
    """Store of kinds that stay on the device. Users read and change the store's own tensors in place."""

    def __init__(self, layouts: Sequence[Layout], kinds: Mapping[Kind, torch.dtype], device: torch.device) -> None:
        self._tensors: dict[tuple[Kind, int], Tensor] = {}
        self.zeroed: list[StreamEvent] = []  # other streams than the computation's wait for this initialization
        for kind, dtype in kinds.items():
            for layer, layout in enumerate(layouts):
                if layout.numel:
                    # The last event suffices: one stream zeroes the tensors in order.
                    self._tensors[kind, layer], self.zeroed = fresh(num_items(layout.numel, dtype), dtype, device)
        self._empty = torch.empty(0, device=device)  # for layers without elements

    def own(self, kind: Kind, layer: int) -> Tensor | None:
        return self._tensors.get((kind, layer), self._empty)

    def close(self) -> None:
        self._tensors.clear()
