"""Map torch dtypes to their names in options, safetensors and NumPy."""

from __future__ import annotations

import torch

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISION_NAMES = {dtype: name for name, dtype in PRECISIONS.items()}
# NumPy has no bfloat16; JAX saves it as an opaque type of two bytes.
_CODES = {
    torch.float64: ("F64", "<f8"),
    torch.float32: ("F32", "<f4"),
    torch.float16: ("F16", "<f2"),
    torch.bfloat16: ("BF16", "|V2"),
    torch.int64: ("I64", "<i8"),
    torch.int32: ("I32", "<i4"),
    torch.int16: ("I16", "<i2"),
    torch.uint32: ("U32", "<u4"),
    torch.int8: ("I8", "|i1"),
    torch.uint8: ("U8", "|u1"),
    torch.bool: ("BOOL", "|b1"),
}
SAFETENSORS_CODES = {dtype: codes[0] for dtype, codes in _CODES.items()}
NUMPY_CODES = {dtype: codes[1] for dtype, codes in _CODES.items()}
FROM_SAFETENSORS = {code: dtype for dtype, code in SAFETENSORS_CODES.items()}
FROM_NUMPY = {code: dtype for dtype, code in NUMPY_CODES.items()}
