"""Read quantized weights in a model folder: in the layout of bitsandbytes, or with the codes of a GGUF file.

A 4-bit matrix ``X.weight`` holds packed codes, [bytes, 1]; beside it stand ``X.weight.absmax``, ``X.weight.quant_map``
and, as JSON in bytes, ``X.weight.quant_state.bitsandbytes__nf4``. An 8-bit one holds codes, [out, in], with ``X.SCB``.

A matrix with the codes of a GGUF file holds these, the other parts of its codec as ``X.weight.PART``, and their type as
JSON in bytes, ``X.weight.ggml``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptj_ft.checkpoints.weight_file import PIECE_BYTES, Shard, TensorInfo, read_tensor_rows
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.quantization.bitsandbytes import NESTED_BLOCK, NESTED_SCALES, TABLES, FourBit, Int8, NestedScales
from gptj_ft.models.quantization.form import CODES, SCALES, QuantizedForm
from gptj_ft.models.quantization.ggml import GGML
from gptj_ft.system.block_reader import Extent
from gptj_ft.system.dtypes import PRECISIONS

ABSMAX, NESTED_ABSMAX, MAP, NESTED_MAP = "absmax", "nested_absmax", "quant_map", "nested_quant_map"
STATE, ROW_SCALES, ROW_FORMAT = "quant_state.bitsandbytes__", "SCB", "weight_format"
GGML_STATE = "ggml"
GGML_PARTS = {GGML_STATE, *(part for codec in GGML.values() for part in codec.parts(1))}
MOST_STATE_BYTES = 1 << 16
VALUE_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PRECISIONS.values()}


class QuantizedTensor(Shard):
    """A matrix in quantized form; reads give its values.

    Args:
        name: the matrix's name in its file.
        extents: place of each part in the files.
    """

    def __init__(self, name: str, form: QuantizedForm, extents: Mapping[str, Extent]) -> None:
        self.path, self.form, self.extents = extents[CODES].path, form, extents
        self.entries = {name: TensorInfo(form.dtype, tuple(form.shape))}

    def rows_at_once(self, name: str) -> int:
        form = self.form
        if form.is_transposed:
            return form.columns
        return max(1, self.entries[name].rows_in(PIECE_BYTES) // form.row_step) * form.row_step

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        form = self.form
        if form.is_transposed:
            out = torch.empty(form.shape, dtype=form.dtype)
            form.dequantize(self._parts(0, form.rows), out)
            return out[start:stop].contiguous()
        stop = form.rows if stop is None else min(stop, form.rows)
        first = start // form.row_step * form.row_step
        last = min(-(-stop // form.row_step) * form.row_step, form.rows)
        out = torch.empty(last - first, form.columns, dtype=form.dtype)
        for rows, values in form.row_values(self._parts(first, last), first, last):
            out[rows.start - first : rows.stop - first] = values
        return out[start - first : stop - first].clone() if last - first > stop - start else out

    def _parts(self, start: int, stop: int) -> dict[str, Tensor]:
        """Read the items of stored rows."""
        parts, items = {}, self.form.num_items()
        for part, span in self.form.spans(start, stop).items():
            extent = self.extents[part]
            entry = TensorInfo(extent.dtype, (items[part],), extent.offset)
            parts[part] = read_tensor_rows(extent.path, entry, span.start, span.stop)
        return parts


@dataclass(frozen=True)
class _Files:
    """Tensors of a folder by their names in the files, before quantized ones are put together."""

    shards: Mapping[str, Shard]

    def part(self, name: str, of: str, dtype: torch.dtype, num_items: int) -> Extent:
        """Return the place of a part of a quantized matrix, whose size is checked."""
        shard = self.shards.get(name)
        if shard is None:
            path = self.shards[of].path
            raise DataError(f"{path}: {of} is quantized, but {name} is missing; get the folder again")
        entry, needed = shard.entries[name], num_items * dtype.itemsize
        if not entry.offset or entry.num_bytes != needed or (entry.dtype.is_floating_point != dtype.is_floating_point):
            raise DataError(
                f"{shard.path}: {name} does not fit the shape of {of}: it has {entry.num_bytes:,} bytes of "
                f"{str(entry.dtype).removeprefix('torch.')}, expected {needed:,}; get the folder again"
            )
        return Extent(shard.path, entry.offset, dtype)

    def numbers(self, name: str, of: str, count: int) -> Tensor:
        """Read a small fp32 tensor."""
        extent = self.part(name, of, torch.float32, count)
        return read_tensor_rows(extent.path, TensorInfo(torch.float32, (count,), extent.offset))

    def state(self, name: str, of: str) -> dict[str, Any]:
        """Read the JSON object that describes a matrix."""
        shard = self.shards[name]
        try:
            entry = shard.entries[name]
            if entry.num_bytes > MOST_STATE_BYTES:
                raise ValueError("too long")
            state = json.loads(bytes(shard.read(name).tolist()))
            if not isinstance(state, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            raise DataError(f"{shard.path}: {name} describes {of}, but is damaged: {error}") from error
        return state


def is_part(name: str, names: Collection[str]) -> bool:
    """Tell whether a tensor of a quantized folder is a part of a matrix other than its codes."""
    matrix, _, part = name.rpartition(".")
    if part in (ROW_SCALES, ROW_FORMAT):
        return f"{matrix}.weight" in names
    matrix = matrix.removesuffix(".quant_state")
    if part in GGML_PARTS:
        return f"{matrix}.{GGML_STATE}" in names
    return matrix in names and (part in (ABSMAX, NESTED_ABSMAX, MAP, NESTED_MAP) or part.startswith("bitsandbytes__"))


def with_matrices(shards: Mapping[str, Shard], transposed: Collection[str]) -> dict[str, Shard]:
    """Put the parts of quantized matrices together.

    Args:
        shards: file of each stored tensor, by its name in the file.
        transposed: names of parameters that are stored (in, out); their codes are of the transpose.

    Raises:
        UsageError: a quantization that is not read.
        DataError: a part is missing, damaged, or does not fit its matrix.
    """
    files = _Files(shards)
    states = {name.partition(f".{STATE}")[0]: name for name in shards if f".{STATE}" in name}
    result: dict[str, Shard] = {}
    for name, shard in shards.items():
        if is_part(name, shards.keys()):
            continue
        is_transposed, entry = name in transposed, shard.entries[name]
        if f"{name}.{GGML_STATE}" in shards:
            result[name] = _ggml(files, name, is_transposed)
        elif name in states:
            result[name] = _four_bit(files, name, states[name], is_transposed)
        elif entry.dtype == torch.int8 and len(entry.shape) == 2:
            result[name] = _int8(files, name, is_transposed)
        else:
            result[name] = shard
    return result


def _four_bit(files: _Files, name: str, state_name: str, is_transposed: bool) -> QuantizedTensor:
    state, path = files.state(state_name, name), files.shards[state_name].path
    try:
        table, block = str(state["quant_type"]), int(state["blocksize"])
        rows, columns = map(int, state["shape"])
        dtype = VALUE_TYPES[state["dtype"]]
        is_known = table in TABLES and block >= 2 and block & (block - 1) == 0 and min(rows, columns) > 0
        if not is_known:
            raise ValueError(f"{table} in blocks of {block}, shape {[rows, columns]}")
        if (name_absmax := f"{name}.{NESTED_ABSMAX}") in files.shards and state["nested_blocksize"] != NESTED_BLOCK:
            raise ValueError(f"scales in blocks of {state['nested_blocksize']}")
        offset = float(state.get("nested_offset", 0.0))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: {state_name} is damaged, or of a quantization that is not read: {error}") from error
    if not torch.equal(files.numbers(f"{name}.{MAP}", name, 16), torch.tensor(TABLES[table])):
        raise DataError(f"{path}: {name}.{MAP} has other values than {table}; get the folder again")
    nested = (
        NestedScales(files.numbers(f"{name}.{NESTED_MAP}", name, 256), offset) if name_absmax in files.shards else None
    )
    form = QuantizedForm(FourBit(table, block, nested), rows, columns, dtype, is_transposed)
    names = {CODES: name, SCALES: f"{name}.{ABSMAX}", NESTED_SCALES: name_absmax}
    return _matrix(files, name, form, names)


def _ggml(files: _Files, name: str, is_transposed: bool) -> QuantizedTensor:
    state_name = f"{name}.{GGML_STATE}"
    state, path = files.state(state_name, name), files.shards[state_name].path
    try:
        codec, dtype = GGML[state["type"]], VALUE_TYPES[state["dtype"]]
        rows, columns = map(int, state["shape"])
        most = max(part.numbers for part in codec.parts(columns).values())
        if min(rows, columns) < 1 or columns % most:
            raise ValueError(f"shape {[rows, columns]}")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: {state_name} is damaged, or of a quantization that is not read: {error}") from error
    form = QuantizedForm(codec, rows, columns, dtype, is_transposed)
    return _matrix(files, name, form, {part: name if part == CODES else f"{name}.{part}" for part in form.parts()})


def _int8(files: _Files, name: str, is_transposed: bool) -> QuantizedTensor:
    module, shard = name.removesuffix(".weight"), files.shards[name]
    rows, columns = shard.entries[name].shape
    layout = f"{module}.{ROW_FORMAT}"
    if layout in files.shards and int(files.shards[layout].read(layout).item()) != 0:
        raise UsageError(
            f"{shard.path}: {name} has the 8-bit layout of an old GPU, which is not read: load and save the model with "
            "today's bitsandbytes"
        )
    # No type is recorded; restored values are fp32.
    form = QuantizedForm(Int8(), rows, columns, torch.float32, is_transposed)
    return _matrix(files, name, form, {CODES: name, SCALES: f"{module}.{ROW_SCALES}"})


def _matrix(files: _Files, name: str, form: QuantizedForm, names: Mapping[str, str]) -> QuantizedTensor:
    items, parts = form.num_items(), form.parts()
    extents = {part: files.part(names[part], name, parts[part].dtype, items[part]) for part in parts}
    return QuantizedTensor(name, form, extents)
