"""Store fp32 master weights as bf16 weights and their 16 low bits: four bytes instead of six, and the same values.

With ``bits`` as the 32 bits of a master weight, in two's complement:

    weight = (bits + 0x8000) >> 16        low_bits = bits - (weight << 16)

The low bits always fit 16 bits, and ``(weight << 16) + low_bits`` is always the master weight, also for infinities and
NaN. The same split in Transformer Engine: https://github.com/NVIDIA/TransformerEngine/pull/1408
"""

# Half away from zero, not half to even as torch rounds. Half to even leaves 65,537 differences to a weight with an even
# last bit, one more than 16 bits can tell apart. Both rules differ only halfway between two bf16 numbers.
# The sum overflows for a NaN of all ones: its weight is a zero. No master becomes NaN, because models with such weights
# are rejected, and so are such gradients.

from __future__ import annotations

import torch
from torch import Tensor

from gptj_ft.models.layout import Kind

LOW_BITS: Kind = "low_bits"
HALF = 0x8000  # half a unit in the last place of bf16


def join(weight: Tensor, low_bits: Tensor, out: Tensor | None = None) -> Tensor:
    """Restore fp32 master weights.

    Args:
        weight: flat, bf16.
        low_bits: flat, int16.
        out: fp32 target of the same length; default: new memory.
    """
    out = torch.empty_like(weight, dtype=torch.float32) if out is None else out
    out.copy_(weight)  # appends 16 zeros, without arithmetic
    out.view(torch.int32).add_(low_bits)
    return out


def split(master: Tensor, weight: Tensor, low_bits: Tensor) -> None:
    """Split fp32 master weights, which are overwritten; arguments as in `join`."""
    bits = master.view(torch.int32)
    # Conversion to int16 keeps the low half.
    low_bits.copy_(bits)
    bits += HALF
    bits >>= 16
    weight.view(torch.int16).copy_(bits)


def store(master: Tensor, kind: Kind, target: Tensor) -> None:
    """Store fp32 master weights as one kind: as weights, as their low bits, or as they are.

    Args:
        master: flat, fp32; not changed.
        kind: ``weight``, ``low_bits`` or ``master``.
        target: flat, of the kind's type; may be on another device.
    """
    bits = master.view(torch.int32)
    if kind == LOW_BITS:
        target.copy_(bits)
    elif target.dtype == torch.bfloat16:
        target.view(torch.int16).copy_((bits + HALF).bitwise_right_shift_(16))
    else:
        target.copy_(master)
