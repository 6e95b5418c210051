"""Exchange activations, gradients and read-only batches with other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gptj_ft.distributed.pipeline import Partition, PipelineChannel
from gptj_ft.distributed.row_shards import PendingSum, ShardSums, local_shards, shard_rows
from gptj_ft.distributed.scatter import end_serving, scatter, scatter_batches
from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.layout import Layout
from gptj_ft.streaming.exchange import Channel, ComputeBatches, Exchange, GradientReducer, Query, Result
from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.objective import Objective, StepLoss
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.system.group import ALONE, Group


class DistributedExchange(Exchange):
    """Connect a model to ranks with other layers, other rows, or the same model.

    Args:
        partition: owner rank of each layer.
        replicas: ranks with the same layers, which train on other rows.
        num_shards: row shards of a step.
        servers: ranks with the same model, which serve read-only work.
    """

    def __init__(
        self, partition: Partition, replicas: Group = ALONE, num_shards: int = 1, servers: Group = ALONE
    ) -> None:
        self._partition, self._group = partition, partition.group
        self._replicas, self._num_shards, self._servers = replicas, num_shards, servers
        self.num_replicas = servers.size
        self._sums: ShardSums | None = None  # of the current step

    def has(self, layer: int) -> bool:
        return self._partition.has(layer)

    def shard_rows(self, lengths: Sequence[int]) -> list[list[int]]:
        return super().shard_rows(lengths) if self._num_shards == 1 else shard_rows(lengths, self._num_shards)

    def begin_step(self, shards: Sequence[Sequence[PackedBatch]], objective: Objective) -> Sequence[PackedBatch]:
        if self._num_shards == 1:
            return super().begin_step(shards, objective)
        group = self._replicas
        own = [shards[shard] for shard in local_shards(group.rank, group.size, self._num_shards)]
        every = [batch for shard in shards for batch in shard]
        weight = sum(objective.weight(batch) for batch in every)
        num_targets = sum(batch.num_targets for batch in every)
        self._sums = ShardSums(group, self._num_shards, list(accumulate(map(len, own))), weight, num_targets)
        return [batch for shard in own for batch in shard]

    def gather_layers(
        self, layers: Iterator[dict[str, Tensor]], layouts: Sequence[Layout]
    ) -> Iterator[dict[str, Tensor]]:
        group = self._group
        for layer, (layout, own) in enumerate(zip(layouts, layers, strict=True)):
            values, owner = own, self._partition.owner(layer)
            if owner and layout.numel and group.rank == owner:
                for name in layout.shapes:
                    group.send(0, values[name].contiguous()).wait()
            elif owner and layout.numel and group.rank == 0:
                values = {name: torch.empty(shape) for name, shape in layout.shapes.items()}
                for out in values.values():
                    group.recv(owner, out).wait()
            yield values

    def open_channel(
        self, layers: Sequence[int], num_tokens: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Channel:
        if self._group.size == 1:
            return Channel()
        return PipelineChannel(self._partition, layers, num_tokens, dtype, device)

    def open_reducer(self, consume: Callable[[LoadedLayer], None]) -> GradientReducer:
        return ShardReducer(consume, self._sums) if self._sums else GradientReducer(consume)

    def broadcast_losses(self, losses: list[StepLoss] | None) -> list[StepLoss]:
        if losses is not None and self._group.size == 1:
            return losses
        values = None if losses is None else [asdict(loss) for loss in losses]
        result = self._group.gather("losses", {"values": values})[self._partition.owners[-1]]["values"]
        assert result is not None
        return [StepLoss(**each) for each in result]

    def merge_norms(self, norms: dict[int, float]) -> dict[int, float]:
        every = self._group.gather("norms", {"of": {str(layer): value for layer, value in norms.items()}})
        return {int(layer): value for each in every for layer, value in each["of"].items()}

    def map_batches(
        self, kind: str, batches: Sequence[PackedBatch], queries: Sequence[Query], compute: ComputeBatches
    ) -> Iterable[Result]:
        if self.num_replicas == 1:
            return compute(batches, queries)
        return scatter_batches(self._servers, kind, batches, queries, compute)

    def map_units(
        self, kind: str, units: Sequence[Any], sizes: Sequence[int], compute: Callable[[Sequence[Any]], Iterable[Any]]
    ) -> list[Any]:
        return scatter(self._servers, kind, units, sizes, compute)


@contextmanager
def scattered(model: OffloadedModel, servers: Group) -> Iterator[None]:
    """Scatter the read-only work of a model inside the block to ranks in `scatter.serve`; then end their serving."""
    before = model.exchange
    if servers.size > 1:
        model.exchange = DistributedExchange(Partition(), servers=servers)
    try:
        yield
    finally:
        model.exchange = before
    end_serving(servers)


@dataclass(frozen=True)
class _ReducingLayer:
    """A layer whose gradients are being summed while the next layer computes."""

    layer: LoadedLayer
    pending: PendingSum

    def finish(self, consume: Callable[[LoadedLayer], None]) -> None:
        (total,) = self.pending.result()
        self.layer.gradient.lease_again().copy_(total)
        consume(self.layer)
        self.layer.gradient.release()


class ShardReducer(GradientReducer):
    """Sum the gradients of a step over its row shards, while the next layer computes where possible."""

    def __init__(self, consume: Callable[[LoadedLayer], None], sums: ShardSums) -> None:
        super().__init__(consume)
        self._sums = sums
        self._layer: LoadedLayer | None = None  # the layer that `begin` has started
        # Of a tied source: the part of its gradient from the tied layer, which is complete.
        self._tied_part: Tensor | None = None
        self._reducing: _ReducingLayer | None = None

    def totals(self, batches: Sequence[PackedBatch], objective: Objective) -> tuple[float, int]:
        return self._sums.weight, self._sums.num_targets

    def gather_losses(self, series: list[list[float]]) -> list[list[float]]:
        return self._sums.gather_losses(series)

    def begin(self, layer: LoadedLayer) -> None:
        self._layer, self._tied_part = layer, None
        # The tied layer's part is a sum over all shards already: keep it out of this one.
        if layer.gradient.is_tied_source:
            self._tied_part = layer.gradient.flat.clone()
            layer.gradient.flat.zero_()
        self._sums.begin(layer.gradient.sums())
        # The first shards may be empty: close them before the first micro-batch.
        self._sums.close(layer.gradient.sums(), 0)

    def end_micro_batch(self, layer: LoadedLayer, num_done: int) -> None:
        self._sums.close(layer.gradient.sums(), num_done)

    def end(self, layer: LoadedLayer) -> None:
        if layer.task.trains:
            if self._layer is not layer:  # this rank has no rows in this step
                layer.gradient.begin()
                self.begin(layer)
            # An update in backward needs the layer's weights now. A layer with tied parameters has two gradients.
            is_whole = not layer.layout.tied and self._tied_part is None and not layer.tiles
            can_overlap = layer.task.gradient == "write" and is_whole
            if can_overlap and self._sums.group.size > 1:
                reducing = _ReducingLayer(layer, self._sums.start())
                layer.gradient.release()  # the sums of the shards are copies: the next layer may take the buffer
                self._finish_earlier()
                self._reducing = reducing
                return
            self._sums.total(layer.gradient.sums())
            if self._tied_part is not None:
                layer.gradient.flat.add_(self._tied_part)
                self._tied_part = None
        self._finish_earlier()
        super().end(layer)

    def close(self) -> None:
        self._finish_earlier()

    def _finish_earlier(self) -> None:
        earlier, self._reducing = self._reducing, None
        if earlier:
            earlier.finish(self._consume)
