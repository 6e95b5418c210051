"""Exchange activations, gradients and read-only batches with other ranks of a run.

The method bodies here are the single-process case: every layer is local, tensors pass from layer to layer in lists, and
a gradient is complete when its last micro-batch is. A run on several ranks overrides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.layout import Layout
from gptj_ft.streaming.objective import Objective, StepLoss

if TYPE_CHECKING:
    from gptj_ft.streaming.loaded_layer import LoadedLayer

Query = tuple[Tensor, ...]
Result = tuple[Tensor, ...]
ComputeBatches = Callable[[Sequence[PackedBatch], Sequence[Query]], Iterable[Result]]


class Channel:
    """Carry one tensor per micro-batch from each layer of a pass to the next layer.

    Forward carries activations up, backward carries their gradients down.
    """

    def inputs(self, layer: int, local: list[Tensor]) -> Iterator[Tensor]:
        """Yield a layer's input for each micro-batch.

        Args:
            layer: a local layer.
            local: outputs of the previous layer if it is local. The iterator empties the list, so that each tensor is
                freed after its last use.
        """
        # pop() leaves the consumer with the only reference. A list iterator would keep every tensor until the end.
        local.reverse()
        while local:
            yield local.pop()

    def send(self, layer: int, output: Tensor) -> bool:
        """Send a layer's output for one micro-batch; return False if the next layer is local and nothing was sent."""
        return False

    def close(self) -> None:
        """Wait until every sent tensor has left."""


class GradientReducer:
    """Complete the gradient of each layer of one step, then pass the layer to the optimizer.

    The step calls `begin`, `end_micro_batch` for each micro-batch and `end`, layer by layer.
    """

    def __init__(self, consume: Callable[[LoadedLayer], None]) -> None:
        self._consume = consume

    def totals(self, batches: Sequence[PackedBatch], objective: Objective) -> tuple[float, int]:
        """Return the loss divisor and the number of targets of the whole step."""
        return sum(map(objective.weight, batches)), sum(batch.num_targets for batch in batches)

    def gather_losses(self, series: list[list[float]]) -> list[list[float]]:
        """Extend each series of loss terms to the whole step."""
        return series

    def begin(self, layer: LoadedLayer) -> None:
        """Start a trained layer: its gradient buffers are ready, no micro-batch is summed yet."""

    def end_micro_batch(self, layer: LoadedLayer, num_done: int) -> None:
        """Note that the gradient buffers contain ``num_done`` micro-batches."""

    def end(self, layer: LoadedLayer) -> None:
        """Reduce the layer's gradient and pass it to the optimizer, now or while the next layer computes."""
        if layer.task.gradient:
            self._consume(layer)

    def close(self) -> None:
        """Wait until the optimizer has every gradient."""


class Exchange:
    """Connect a model to the other ranks that train or evaluate it."""

    num_replicas: int = 1  # whole models that share read-only work

    def __repr__(self) -> str:
        return "LOCAL"  # a default value in the documentation

    def has(self, layer: int) -> bool:
        """Tell whether a layer is local."""
        return True

    def shard_rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """Divide the rows of a step into row shards.

        Args:
            lengths: tokens of each row.
        """
        return [list(range(len(lengths)))]

    def begin_step(self, shards: Sequence[Sequence[PackedBatch]], objective: Objective) -> Sequence[PackedBatch]:
        """Return the local micro-batches of a step, from those of every row shard."""
        (batches,) = shards
        return batches

    def gather_layers(
        self, layers: Iterator[dict[str, Tensor]], layouts: Sequence[Layout]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the parameters of every layer on rank 0; other ranks send theirs while they iterate.

        Args:
            layers: parameters of each layer, fp32; empty for remote layers.
            layouts: layouts of all layers.
        """
        return layers

    def open_channel(
        self, layers: Sequence[int], num_tokens: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Channel:
        """Open the channel of one pass.

        Args:
            layers: every layer of the pass, in order.
            num_tokens: tokens of each micro-batch.
        """
        return Channel()

    def open_reducer(self, consume: Callable[[LoadedLayer], None]) -> GradientReducer:
        """Open the reducer of one step; ``consume`` gives a layer's complete gradient to the optimizer."""
        return GradientReducer(consume)

    def broadcast_losses(self, losses: list[StepLoss] | None) -> list[StepLoss]:
        """Return the losses that the owner of the head has computed; the other ranks pass None."""
        assert losses is not None
        return losses

    def merge_norms(self, norms: dict[int, float]) -> dict[int, float]:
        """Merge the gradient norms of the local layers with those of all other layers."""
        return norms

    def map_batches(
        self, kind: str, batches: Sequence[PackedBatch], queries: Sequence[Query], compute: ComputeBatches
    ) -> Iterable[Result]:
        """Compute read-only batches on all replicas; return the results in order.

        Args:
            kind: name of the computation, known to every replica.
            batches: micro-batches, each computed by one replica.
            queries: further tensors of each batch.
            compute: function for the local share.
        """
        return compute(batches, queries)

    def map_units(
        self, kind: str, units: Sequence[Any], sizes: Sequence[int], compute: Callable[[Sequence[Any]], Iterable[Any]]
    ) -> list[Any]:
        """Compute units of work on all replicas, balanced by size; return the results in order.

        Args:
            kind: name of the computation, known to every replica.
            units: JSON values and arrays.
            sizes: tokens of each unit.
            compute: function for the local share.
        """
        return list(compute(units))


LOCAL = Exchange()
