"""Deal units of work out to the processes of a group: process 0 has them and gets the results, the others serve.

What a unit has to be computed from goes with it, so that the others need nothing but the model: neither the rows nor
what has been found out before. Results come back in the order of the units, whoever has computed them.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gptj_ft.distributed.control import LINE_BYTES
from gptj_ft.system.group import Group

Compute = Callable[[Sequence[Any]], Iterable[Any]]
"""Computes some units. They and their results are JSON's values and NumPy's arrays."""


def owners_of(sizes: Sequence[int], num_processes: int) -> list[int]:
    """Assign units of work to processes: the largest first, each to the process that has least.

    >>> owners_of([2, 9, 4, 4], 2)
    [1, 0, 1, 1]
    """
    loads, owners = [0] * num_processes, [0] * len(sizes)
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        owners[unit] = loads.index(min(loads))
        loads[owners[unit]] += sizes[unit]
    return owners


def deal(group: Group, kind: str, units: Sequence[Any], sizes: Sequence[int], compute: Compute) -> list[Any]:
    """Have units of work computed by all processes, in process 0; return their results, in order.

    Args:
        group: the processes; all others are in `serve`.
        kind: name of the work.
        units: units of work.
        sizes: tokens of each, by which they are shared out.
        compute: computes this process's share.

    Raises:
        PeerFailed: another process has failed, or is gone.
    """
    owners = owners_of(sizes, group.size)
    shares = [[unit for unit, owner in zip(units, owners, strict=True) if owner == rank] for rank in range(group.size)]
    gather_texts(group, "work", _encode({"kind": kind, "shares": shares[1:]}))
    own = list(compute(shares[0])) if shares[0] else []
    said = gather_texts(group, "results", "")
    results = [iter(own), *(iter(_decode(text)) for text in said[1:])]
    return [next(results[owner]) for owner in owners]


def serve(group: Group, works: Mapping[str, Compute]) -> None:
    """Compute what process 0 deals out, in another process, until it says that this is all.

    Args:
        group: the processes.
        works: function that computes each kind of work, by name.

    Raises:
        PeerFailed: another process has failed, or is gone.
    """
    while (told := _decode(gather_texts(group, "work", "")[0])) is not None:
        share = told["shares"][group.rank - 1]
        gather_texts(group, "results", _encode(list(works[told["kind"]](share)) if share else []))


def end_serving(group: Group) -> None:
    """Tell the other processes, in process 0, that there is no more work of these kinds."""
    if group.size > 1:
        gather_texts(group, "work", _encode(None))


def gather_texts(group: Group, topic: str, text: str) -> list[str]:
    """Return the text of every process, by rank, however long they are: longer ones in several lines."""
    most = LINE_BYTES // 4 // group.size  # process 0 tells all of them in one line, in which quotes take two bytes
    pieces = [text[start : start + most] for start in range(0, len(text), most)] or [""]
    said = group.gather(topic, {"text": pieces[0], "more": len(pieces) - 1})
    texts = [[each["text"]] for each in said]
    for number in range(1, 1 + max(each["more"] for each in said)):
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
