"""The columns of rows as tokens: Python's values <-> Arrow's buffers.

Arrow's own conversion from Python is several times as slow, and loads pandas, which takes half a second.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

SCHEMA = pyarrow.schema(
    {
        "input_ids": pyarrow.list_(pyarrow.int32()),
        "prompt_length": pyarrow.int32(),
        "untrained": pyarrow.list_(pyarrow.int32()),
        "references": pyarrow.list_(pyarrow.string()),
        "source": pyarrow.string(),
        "line": pyarrow.int64(),
        "group": pyarrow.int64(),
        "label": pyarrow.string(),
        "continues": pyarrow.bool_(),
    }
)


def array_of(kind: pyarrow.DataType, values: Sequence[Any] | NDArray[Any]) -> pyarrow.Array:
    """Return values as Arrow has them.

    Args:
        kind: whole numbers, text, truth values, or lists of the first two; of numbers also arrays of the same width.
        values: none of them ``None``.
    """
    if pyarrow.types.is_list(kind):
        inner = array_of(kind.value_type, _end_to_end(kind.value_type, values))
        return pyarrow.ListArray.from_arrays(_offsets(map(len, values), len(values)), inner, type=kind)
    if pyarrow.types.is_string(kind):
        text = "".join(values)
        encoded = values if text.isascii() else [value.encode() for value in values]
        buffers = [None, _offsets(map(len, encoded), len(values)).buffers()[1], pyarrow.py_buffer(text.encode())]
    elif pyarrow.types.is_boolean(kind):
        buffers = [None, pyarrow.py_buffer(np.packbits(np.array(values, np.bool_), bitorder="little"))]
    else:
        buffers = [None, pyarrow.py_buffer(np.asarray(values, kind.to_pandas_dtype()))]
    return pyarrow.Array.from_buffers(kind, len(values), buffers, 0)


def _end_to_end(kind: pyarrow.DataType, values: Sequence[Any] | NDArray[Any]) -> Sequence[Any] | NDArray[Any]:
    if pyarrow.types.is_string(kind):
        return list(chain.from_iterable(values))
    dtype = kind.to_pandas_dtype()
    if len(values) and isinstance(values[0], array):
        return np.frombuffer(b"".join(values), dtype)
    return np.fromiter(chain.from_iterable(values), dtype, sum(map(len, values)))


def values_of(array: pyarrow.Array) -> list[Any]:
    """Return what Arrow has as Python's values: the inverse of `array_of`."""
    kind = array.type
    if pyarrow.types.is_list(kind):
        bounds = bounds_of(array)
        first, last = int(bounds[0]), int(bounds[-1])
        inner = values_of(array.values.slice(first, last - first))
        return [inner[start:end] for start, end in pairwise((bounds - first).tolist())]
    if pyarrow.types.is_string(kind):
        return list(array.to_pylist())
    if pyarrow.types.is_boolean(kind):
        first, end = array.offset, array.offset + len(array)
        bits = np.frombuffer(array.buffers()[1] or b"", np.uint8)
        return list(np.unpackbits(bits, bitorder="little")[first:end].astype(np.bool_).tolist())
    return list(numbers_of(array).tolist())


def numbers_of(array: pyarrow.Array) -> NDArray[Any]:
    """Return whole numbers where they are."""
    dtype = array.type.to_pandas_dtype()
    buffer = array.buffers()[1]
    return np.frombuffer(buffer or b"", dtype)[array.offset : array.offset + len(array)]


def bounds_of(array: pyarrow.Array) -> NDArray[np.int32]:
    """Return where each list of a column begins among the values of all of them, and where the last one ends."""
    return numbers_of(array.offsets)


def _offsets(lengths: Iterable[int], count: int) -> pyarrow.Array:
    """Return where values of some lengths begin that stand end to end, and where the last one ends."""
    return array_of(pyarrow.int32(), np.fromiter(accumulate(lengths, initial=0), np.int32, count + 1))
