"""Quantized matrices have bitsandbytes' codes and values, whole or in pieces, on every path."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
import xxhash
from torch import Tensor

from gptj_ft.models.quantization.bitsandbytes import (
    FP4,
    NESTED_SCALES,
    NF4,
    FourBit,
    Int8,
    NestedScales,
)
from gptj_ft.models.quantization.form import CODES, SCALES, Codec, QuantizedForm
from gptj_ft.system.memory import bytes_of

SHAPES = ((64, 96), (33, 64), (128, 128), (7, 31), (256, 576), (50, 1), (1, 77), (3, 4096), (65, 192), (16, 16))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# XXH3-64 of the codes, scales and values of the 50 matrices by bitsandbytes 0.50.2 on a CPU: `quantize_4bit` and
# `dequantize_4bit`, `int8_vectorwise_quant` of the fp16 matrix and `int8_vectorwise_dequant`. Where rows are not whole
# blocks, its generic kernel: that for AVX-512 takes the scales of other blocks there. benchmarks/quantized.py computes
# them again where bitsandbytes is installed.
BITSANDBYTES = {"nf4": "d521564c61d21301", "int8": "8938e43bd4de10b2"}


def matrix(number: int) -> Tensor:
    """Return one of 50 matrices, with blocks and rows of zeros; made of integers, so equal on every machine."""
    rows, columns = SHAPES[number % len(SHAPES)]
    generator = torch.Generator().manual_seed(number)
    draws = [torch.randint(-1000, 1001, (rows, columns), generator=generator) for _ in range(3)]
    scale = (1e-6, 2e-5, 1e-4, 0.02, 50.0)[number // len(SHAPES)]
    values = sum(draws).to(torch.float32) * scale  # type: ignore[union-attr]
    if number % 5 == 0:
        values[0] = 0
    return values.to(DTYPES[number % 3])


def digest_of(codec: Codec) -> str:
    digest = xxhash.xxh3_64()
    for number in range(50):
        values = matrix(number)
        parts = codec.encode(values)
        form = QuantizedForm(codec, *values.shape, torch.float32 if codec.name == "int8" else values.dtype)
        restored = torch.empty(values.shape, dtype=form.dtype)
        form.dequantize(parts, restored)
        for tensor in (parts[CODES], parts[SCALES], restored):
            digest.update(bytes_of(tensor))
    return digest.hexdigest()


@pytest.mark.parametrize("codec", [FourBit(), Int8()], ids=lambda codec: codec.name)
def test_codes_and_values_of_50_matrices_equal_bitsandbytes(codec: Codec) -> None:
    assert digest_of(codec) == BITSANDBYTES[codec.name]


def by_definition(codec: FourBit, parts: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    """Restore 4-bit codes one by one."""
    table, found = {"nf4": NF4, "fp4": FP4}[codec.name], []
    for number in range(rows * columns):
        byte = int(parts[CODES][number // 2])
        code = byte >> 4 if number % 2 == 0 else byte & 15
        block = number // codec.block
        scale = parts[SCALES][block]
        if codec.nested is not None:
            scale = codec.nested.values[int(scale)] * parts[NESTED_SCALES][block // 256]
            scale = scale + torch.tensor(codec.nested.offset)
        found.append(torch.tensor(table[code]) * scale)
    return torch.stack(found).view(rows, columns)


@pytest.mark.parametrize(("table", "block", "nested"), [*product(("nf4", "fp4"), (64, 128), (False, True))])
def test_four_bit_values_are_table_times_scale(table: str, block: int, nested: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = 37, 45
    blocks = -(-rows * columns // block)
    scales = NestedScales(torch.rand(256, generator=generator), 0.125) if nested else None
    codec = FourBit(table, block, scales)
    parts = {CODES: torch.randint(0, 256, (-(-rows * columns // 2),), generator=generator).to(torch.uint8)}
    if nested:
        parts[SCALES] = torch.randint(0, 256, (blocks,), generator=generator).to(torch.uint8)
        parts[NESTED_SCALES] = torch.rand(-(-blocks // 256), generator=generator)
    else:
        parts[SCALES] = torch.rand(blocks, generator=generator)
    restored = torch.empty(rows, columns)
    QuantizedForm(codec, rows, columns, torch.float32).dequantize(parts, restored)
    assert torch.equal(restored, by_definition(codec, parts, rows, columns))


def test_values_are_rounded_to_stored_type_before_type_of_computation() -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    parts = FourBit().encode(values)
    exact, half, twice = torch.empty(64, 64), torch.empty(64, 64), torch.empty(64, 64, dtype=torch.bfloat16)
    QuantizedForm(FourBit(), 64, 64, torch.float32).dequantize(parts, exact)
    QuantizedForm(FourBit(), 64, 64, torch.float16).dequantize(parts, half)
    QuantizedForm(FourBit(), 64, 64, torch.float16).dequantize(parts, twice)
    assert torch.equal(half, exact.half().float())
    assert torch.equal(twice, exact.half().bfloat16())


@pytest.mark.parametrize("codec", [FourBit(), Int8()], ids=lambda codec: codec.name)
@pytest.mark.parametrize(("rows", "columns"), [(300, 1000), (1031, 96), (2, 200_000)])
def test_rows_restored_in_pieces_equal_whole_matrix(codec: Codec, rows: int, columns: int) -> None:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    form, parts = QuantizedForm(codec, rows, columns, torch.float32), codec.encode(values)
    whole, pieces = torch.empty(rows, columns), torch.empty(rows, columns)
    form.dequantize(parts, whole)
    step = form.row_step
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        own = {name: parts[name][span] for name, span in form.spans(start, stop).items()}
        for span, found in form.row_values(own, start, stop):
            pieces[span] = found
    assert torch.equal(pieces, whole)
    other = torch.empty(columns, rows)
    QuantizedForm(codec, rows, columns, torch.float32, is_transposed=True).dequantize(parts, other)
    assert torch.equal(other, whole.t())


def test_int8_error_is_at_most_half_a_step() -> None:
    values = torch.randn(64, 300, generator=torch.Generator().manual_seed(2)).half().float()
    restored = torch.empty_like(values)
    QuantizedForm(Int8(), 64, 300, torch.float32).dequantize(Int8().encode(values), restored)
    step = values.abs().amax(dim=1, keepdim=True) / 127
    assert ((restored - values).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("codec", [FourBit(), Int8()], ids=lambda codec: codec.name)
def test_some_rows_equal_those_of_the_matrix(codec: Codec) -> None:
    values = torch.randn(7, 48)  # blocks of 64: rows 0 to 3 begin together, and the last ones are fewer
    parts, form = codec.encode(values), QuantizedForm(codec, 7, 48, torch.bfloat16)
    whole = torch.empty(7, 48, dtype=form.dtype)
    form.dequantize(parts, whole)

    def read(part: str, spans: Sequence[slice], out: Tensor) -> None:
        for span, target in zip(spans, out, strict=True):
            items = parts[part][span]
            target[: len(items)] = items

    for rows in ([6], [5, 0, 5, 3], range(7)):
        assert torch.equal(form.some_rows(rows, read), whole[list(rows)]), rows
