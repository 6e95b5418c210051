"""Deal micro-batches that are only read out to the processes that have the same model.

A micro-batch is computed as a whole by one of them, whoever that is: so what is found is what one process would find,
to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptj_ft.models.batch import PackedBatch
from gptj_ft.streaming.model import OffloadedModel
from gptj_ft.system.processes.dealing import deal, end_serving
from gptj_ft.system.processes.group import ALONE, Group

Unit = Mapping[str, Any]
_TENSORS = ("tokens_T", "positions_T", "targets_T", "types_T", "values_SC")


@contextmanager
def lent(model: OffloadedModel, replicas: Group) -> Iterator[None]:
    """Deal what is computed with a model out to other processes, which are in `dealing.serve`, inside the block."""
    model.replicas = replicas
    try:
        yield
    finally:
        model.replicas = ALONE
    end_serving(replicas)


def deal_batches(
    model: OffloadedModel,
    kind: str,
    batches: Sequence[PackedBatch],
    asked: Sequence[Mapping[str, Tensor]],
    compute: Callable[[Sequence[Unit]], Iterable[Any]],
) -> list[Any]:
    """Have micro-batches computed by the replicas of a model and by this process; return what was found of each.

    Args:
        model: the offloaded model.
        kind: name of what is computed.
        batches: the micro-batches.
        asked: queries of each, if there are any.
        compute: computes this process's share, see `batch_of`.
    """
    units = [
        {**_unit_of(batch), **{name: _array(values) for name, values in each.items()}}
        for batch, each in zip(batches, asked, strict=True)
    ]
    return deal(model.replicas, kind, units, [len(batch.tokens_T) for batch in batches], compute)


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
