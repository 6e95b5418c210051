"""Exchange activations, gradients and read-only batches between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gptj_ft.distributed.batches import deal_batches
from gptj_ft.distributed.pipeline import Relay, Route
from gptj_ft.distributed.row_shards import LaneSums, Summing
from gptj_ft.distributed.scatter import deal, end_serving
from gptj_ft.models.batch import PackedBatch
from gptj_ft.streaming.exchange import Channel, ComputeBatches, Exchange, GradientReducer, Query, Result
from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.objective import Objective, StepLoss
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.group import ALONE, Group


class SharedExchange(Exchange):
    """Connect a model to processes that have other layers, other rows, or the same model.

    Args:
        relay: owner process of each layer.
        replicas: processes that have the same model and serve read-only work.
    """

    def __init__(self, relay: Relay, replicas: Group = ALONE) -> None:
        self._relay, self._replicas = relay, replicas
        self.num_replicas = replicas.size
        self.lanes: LaneSums | None = None
        """Row shards of the current step; set before each step if there are several."""

    def has(self, layer: int) -> bool:
        return self._relay.has(layer)

    def open_channel(
        self, layers: Sequence[int], num_tokens: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Channel:
        if self._relay.group.size == 1:
            return Channel()
        return Route(self._relay, layers, num_tokens, dtype, device)

    def open_reducer(self, consume: Callable[[LoadedLayer], None]) -> GradientReducer:
        return LaneReducer(consume, self.lanes) if self.lanes else GradientReducer(consume)

    def broadcast_losses(self, losses: list[StepLoss] | None) -> list[StepLoss]:
        if losses is not None and self._relay.group.size == 1:
            return losses
        values = None if losses is None else [asdict(loss) for loss in losses]
        result = self._relay.group.gather("losses", {"values": values})[self._relay.owners[-1]]["values"]
        assert result is not None
        return [StepLoss(**each) for each in result]

    def merge_norms(self, norms: dict[int, float]) -> dict[int, float]:
        every = self._relay.group.gather("norms", {str(layer): value for layer, value in norms.items()})
        return {int(layer): value for each in every for layer, value in each.items()}

    def map_batches(
        self, kind: str, batches: Sequence[PackedBatch], queries: Sequence[Query], compute: ComputeBatches
    ) -> Iterable[Result]:
        if self.num_replicas == 1:
            return compute(batches, queries)
        return deal_batches(self._replicas, kind, batches, queries, compute)

    def map_units(
        self, kind: str, units: Sequence[Any], sizes: Sequence[int], compute: Callable[[Sequence[Any]], Iterable[Any]]
    ) -> list[Any]:
        return deal(self._replicas, kind, units, sizes, compute)


@contextmanager
def lent(model: OffloadedModel, replicas: Group) -> Iterator[None]:
    """Share read-only work inside the block with processes that have the same model and are in `scatter.serve`."""
    before = model.exchange
    if replicas.size > 1:
        model.exchange = SharedExchange(Relay.alone(len(model.layers)), replicas)
    try:
        yield
    finally:
        model.exchange = before
    end_serving(replicas)


@dataclass(frozen=True)
class LayerSum:
    """A layer whose gradient other processes are summing while the next layer computes."""

    layer: LoadedLayer
    summing: Summing

    def end(self, consume: Callable[[LoadedLayer], None]) -> None:
        """Wait for the sum, and give it to the optimizer."""
        (total,) = self.summing.end()
        self.layer.gradient.lease_again().copy_(total)
        consume(self.layer)
        self.layer.gradient.release()


class LaneReducer(GradientReducer):
    """Sum the gradients of a step over its lanes, while the next layer computes where that is possible."""

    def __init__(self, consume: Callable[[LoadedLayer], None], lanes: LaneSums) -> None:
        super().__init__(consume)
        self._lanes = lanes
        self._layer: LoadedLayer | None = None  # the layer that `begin` has started
        # Tied source: the part of its gradient that the tied layer has summed. It is complete already.
        self._tied_part: Tensor | None = None
        self._earlier: LayerSum | None = None

    def totals(self, batches: Sequence[PackedBatch], objective: Objective) -> tuple[float, int]:
        return self._lanes.weight, self._lanes.num_targets

    def gather_losses(self, series: list[list[float]]) -> list[list[float]]:
        return self._lanes.losses(series)

    def begin(self, layer: LoadedLayer) -> None:
        self._layer, self._tied_part = layer, None
        if layer.gradient.is_tied_source:
            self._tied_part = layer.gradient.flat.clone()
            layer.gradient.flat.zero_()
        self._lanes.begin(layer.gradient.sums())
        self._lanes.close(layer.gradient.sums(), 0)

    def end_micro_batch(self, layer: LoadedLayer, num_done: int) -> None:
        self._lanes.close(layer.gradient.sums(), num_done)

    def end(self, layer: LoadedLayer) -> None:
        if layer.is_trained:
            if self._layer is not layer:  # this process has no rows in this step
                layer.gradient.begin()
                self.begin(layer)
            # An update in backward needs the layer's weights now. A layer with tied parameters has two gradients.
            can_wait = layer.task.gradient == "write" and not layer.layout.tied and self._tied_part is None
            if can_wait and self._lanes.group.size > 1:
                following = LayerSum(layer, self._lanes.start())
                layer.gradient.release()  # the lanes' sums are copies: the previous layer gets the buffer
                self._end_earlier()
                self._earlier = following
                return
            self._lanes.total(layer.gradient.sums())
            if self._tied_part is not None:
                layer.gradient.flat.add_(self._tied_part)
                self._tied_part = None
        self._end_earlier()
        super().end(layer)

    def close(self) -> None:
        self._end_earlier()

    def _end_earlier(self) -> None:
        earlier, self._earlier = self._earlier, None
        if earlier:
            earlier.end(self._consume)
