"""Scatter read-only units of work to the ranks with the same model, and gather their results.

Rank 0 has the units; the other ranks serve. A unit contains everything that its computation needs except the model. One
rank computes it whole, so that every bit of its result equals that of a single process.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gptj_ft.distributed.control import LINE_BYTES
from gptj_ft.models.batch import PackedBatch
from gptj_ft.streaming.exchange import ComputeBatches, Query
from gptj_ft.system.group import Group

Compute = Callable[[Sequence[Any]], Iterable[Any]]
"""Computes some units. Units and results are JSON values and NumPy arrays."""
_TENSORS = ("tokens_T", "positions_T", "targets_T", "types_T", "values_SC", "parents_T")


def balance(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of each unit: largest first, each to the rank with the least (LPT scheduling).

    >>> balance([2, 9, 4, 4], 2)
    [1, 0, 1, 1]
    """
    totals, ranks = [0] * num_ranks, [0] * len(sizes)
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        ranks[unit] = totals.index(min(totals))
        totals[ranks[unit]] += sizes[unit]
    return ranks


def scatter(group: Group, kind: str, units: Sequence[Any], sizes: Sequence[int], compute: Compute) -> list[Any]:
    """Compute units on all ranks, from rank 0; return the results in order.

    Args:
        group: rank 0 and the serving ranks.
        kind: name of the computation on the serving ranks.
        sizes: tokens of each unit, for the balance.
        compute: computes the share of rank 0.
    """
    ranks = balance(sizes, group.size)
    shares = [[unit for unit, owner in zip(units, ranks, strict=True) if owner == rank] for rank in range(group.size)]
    gather_texts(group, "work", _encode({"kind": kind, "shares": shares[1:]}))
    own = list(compute(shares[0])) if shares[0] else []
    texts = gather_texts(group, "results", "")
    results = [iter(own), *(iter(_decode(text)) for text in texts[1:])]
    return [next(results[rank]) for rank in ranks]


def serve(group: Group, works: Mapping[str, Compute]) -> None:
    """Compute the units that rank 0 scatters, on another rank, until it calls `end_serving`.

    Args:
        works: the function for each kind of work.
    """
    while (request := _decode(gather_texts(group, "work", "")[0])) is not None:
        share = request["shares"][group.rank - 1]
        gather_texts(group, "results", _encode(list(works[request["kind"]](share)) if share else []))


def end_serving(group: Group) -> None:
    """End `serve` on the other ranks."""
    if group.size > 1:
        gather_texts(group, "work", _encode(None))


# ------------------------------------------------------------------ micro-batches as units


def scatter_batches(
    group: Group, kind: str, batches: Sequence[PackedBatch], queries: Sequence[Query], compute: ComputeBatches
) -> list[tuple[Tensor, ...]]:
    """Compute micro-batches on all ranks, as `scatter` does units; return the results on the CPU."""
    units = [
        {**_unit_of(batch), "query": [_array(values) for values in query]}
        for batch, query in zip(batches, queries, strict=True)
    ]
    device = batches[0].tokens_T.device if batches else torch.device("cpu")
    results = scatter(group, kind, units, [len(batch.tokens_T) for batch in batches], on_units(compute, device))
    return [tuple(map(torch.from_numpy, each)) for each in results]


def on_units(compute: ComputeBatches, device: torch.device) -> Compute:
    """Wrap a computation of micro-batches as one of units."""

    def compute_units(units: Sequence[Any]) -> Iterator[list[NDArray[Any]]]:
        batches = [batch_of(unit, device) for unit in units]
        queries = [tuple(torch.from_numpy(values).to(device) for values in unit["query"]) for unit in units]
        for result in compute(batches, queries):
            yield [_array(values) for values in result]

    return compute_units


def batch_of(unit: Mapping[str, Any], device: torch.device) -> PackedBatch:
    """Restore the micro-batch of a unit on a device."""
    tensors: dict[str, Any] = {name: torch.from_numpy(unit[name]) for name in _TENSORS if name in unit}
    return PackedBatch(cu_seqlens=tuple(unit["cu_seqlens"]), **tensors).to(device)


def _unit_of(batch: PackedBatch) -> dict[str, Any]:
    assert batch.cache is None, "decoding needs the local key-value cache"
    assert batch.seeds is None, "dropout is for training"
    tensors = {name: _array(batch.on_host(name)) for name in _TENSORS if getattr(batch, name) is not None}
    return {"cu_seqlens": batch.cu_seqlens, **tensors}


# ------------------------------------------------------------------ encoding: JSON, never a pickle


def gather_texts(group: Group, topic: str, text: str) -> list[str]:
    """Return the text of every rank, by rank; long texts take several messages."""
    most = LINE_BYTES // 4 // group.size  # rank 0 sends all of them in one line, and escapes take two bytes
    pieces = [text[start : start + most] for start in range(0, len(text), most)] or [""]
    messages = group.gather(topic, {"text": pieces[0], "more": len(pieces) - 1})
    texts = [[each["text"]] for each in messages]
    for number in range(1, 1 + max(each["more"] for each in messages)):
        further = group.gather(topic, {"text": pieces[number] if number < len(pieces) else ""})
        for whole, each in zip(texts, further, strict=True):
            whole.append(each["text"])
    return ["".join(whole) for whole in texts]


def _encode(value: Any) -> str:
    return json.dumps(value, default=_in_json)


def _decode(text: str) -> Any:
    return json.loads(text, object_hook=_from_json)


def _in_json(values: Any) -> dict[str, Any]:
    array = np.ascontiguousarray(values)
    return {"dtype": array.dtype.str, "shape": array.shape, "base64": b64encode(array.tobytes()).decode()}


def _from_json(value: dict[str, Any]) -> Any:
    if value.keys() != {"dtype", "shape", "base64"}:
        return value
    return np.frombuffer(bytearray(b64decode(value["base64"])), value["dtype"]).reshape(value["shape"])


def _array(values: Tensor) -> NDArray[Any]:
    return np.ascontiguousarray(values.cpu().numpy())
