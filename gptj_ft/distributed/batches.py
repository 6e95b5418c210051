"""Deal micro-batches that are only read out to the processes that have the same model.

A micro-batch is computed as a whole by one of them, whoever that is: so what is found is what one process would find,
to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptj_ft.distributed.scatter import Compute, deal
from gptj_ft.models.batch import PackedBatch
from gptj_ft.streaming.exchange import ComputeBatches, Query
from gptj_ft.system.group import Group

Unit = Mapping[str, Any]
_TENSORS = ("tokens_T", "positions_T", "targets_T", "types_T", "values_SC")


def deal_batches(
    replicas: Group, kind: str, batches: Sequence[PackedBatch], queries: Sequence[Query], compute: ComputeBatches
) -> list[tuple[Tensor, ...]]:
    """Compute micro-batches on all replicas; return the results in order, on the CPU.

    Args:
        replicas: processes that have the same model; all others are in `scatter.serve`.
        kind: name of the computation.
        batches: the micro-batches.
        queries: further tensors of each.
        compute: function for the local share.
    """
    units = [
        {**_unit_of(batch), "query": [_array(values) for values in query]}
        for batch, query in zip(batches, queries, strict=True)
    ]
    device = batches[0].tokens_T.device if batches else torch.device("cpu")
    results = deal(replicas, kind, units, [len(batch.tokens_T) for batch in batches], on_units(compute, device))
    return [tuple(map(torch.from_numpy, each)) for each in results]


def on_units(compute: ComputeBatches, device: torch.device) -> Compute:
    """Return a function that computes units of work in place of micro-batches."""

    def compute_units(units: Sequence[Unit]) -> Iterator[list[NDArray[Any]]]:
        batches = [batch_of(unit, device) for unit in units]
        queries = [tuple(torch.from_numpy(values).to(device) for values in unit["query"]) for unit in units]
        for result in compute(batches, queries):
            yield [_array(values) for values in result]

    return compute_units


def _unit_of(batch: PackedBatch) -> dict[str, Any]:
    assert batch.cache is None, "what is decoded stays where its keys and values are"
    assert batch.seeds is None, "nothing is trained"
    tensors = {name: _array(batch.on_host(name)) for name in _TENSORS if getattr(batch, name) is not None}
    return {"cu_seqlens": batch.cu_seqlens, **tensors}


def batch_of(unit: Unit, device: torch.device) -> PackedBatch:
    """Return the micro-batch of a unit of work, on a device."""
    tensors: dict[str, Any] = {name: torch.from_numpy(unit[name]) for name in _TENSORS if name in unit}
    return PackedBatch(cu_seqlens=tuple(unit["cu_seqlens"]), **tensors).to(device)


def _array(values: Tensor) -> NDArray[Any]:
    found: NDArray[Any] = values.cpu().numpy()
    return np.ascontiguousarray(found)
