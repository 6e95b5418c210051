"""Forms in which Adam's moments are stored, by their names in the option ``moments``.

| form | bytes per element | values |
|---|---|---|
| fp32 | 4 | exact |
| bf16 | 2 | rounded stochastically |
| int8 | 1.016 | 8-bit codes of bitsandbytes, a scale per 256 elements; rounded stochastically |

A file per form, and a line here. State files, stores and forecasts ask for the items of some elements only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gptj_ft.streaming.moments.bf16 import Bf16
from gptj_ft.streaming.moments.form import MomentForm
from gptj_ft.streaming.moments.fp32 import Fp32
from gptj_ft.streaming.moments.int8 import Int8

FORMS: Mapping[str, MomentForm] = {"fp32": Fp32(), "bf16": Bf16(), "int8": Int8()}
_BY_DTYPE = {form.dtype: form for form in FORMS.values()}
# Of the types whose items are not elements: a forecast asks millions of times.
_PACKED = {form.dtype: (form.block, form.items) for form in FORMS.values() if form.items != form.block}


def form_of(dtype: torch.dtype) -> MomentForm:
    """Return the form of moments with this type."""
    return _BY_DTYPE[dtype]


def num_items(numel: int, dtype: torch.dtype) -> int:
    """Return the items of a flat tensor's leading elements."""
    if dtype not in _PACKED:
        return numel
    block, items = _PACKED[dtype]
    assert numel % block == 0, "internal error: a part of a block of moments"
    return numel // block * items


def items_of(span: slice, dtype: torch.dtype) -> slice:
    """Return the items of some elements of a flat tensor."""
    return span if dtype not in _PACKED else slice(num_items(span.start, dtype), num_items(span.stop, dtype))


def num_elements(items: Tensor) -> int:
    """Return the elements in some items of a flat tensor."""
    block, per_block = _PACKED.get(items.dtype, (1, 1))
    return items.numel() // per_block * block


def num_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of some elements of a flat tensor."""
    return num_items(numel, dtype) * dtype.itemsize
