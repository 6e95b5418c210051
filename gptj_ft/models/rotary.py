"""Rotary position embedding (https://arxiv.org/abs/2104.09864).

Axis letters: T tokens of a packed batch, N heads, H head width, R rotary width.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gptj_ft.models.batch import PackedBatch


def rotary_freqs(batch: PackedBatch, rotary_dim: int) -> Tensor:
    """Return the rotary frequencies of a batch: cos + i sin of the angles, complex64 [T, 1, R/2].

    In decoding and on a CPU they are cached for all layers of a pass: computing them takes longer than the rotation.
    """
    cached: Tensor | None = batch.rotary_cache.get(rotary_dim)
    if cached is not None:
        return cached
    # In fp32 always: bf16 cannot tell positions above 256 apart.
    angle_T1R = (batch.positions_T[:, None].float() * _inv_freq(rotary_dim, batch.positions_T.device))[:, None]
    freqs = torch.complex(angle_T1R.cos(), angle_T1R.sin())
    if batch.cache is not None or freqs.device.type == "cpu":
        batch.rotary_cache[rotary_dim] = freqs
    return freqs


@lru_cache
def _inv_freq(rotary_dim: int, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # training shares this cached tensor
        exponent = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.int64).float() / rotary_dim
        return 1.0 / 10000.0**exponent


def apply_rotary(x_TNH: Tensor, freqs: Tensor, in_place: bool) -> Tensor:
    """Apply rotary position embedding to the first R dims of each head (interleaved pairs), in fp32.

    As in mesh-transformer-jax and GPT-J (https://arxiv.org/abs/2104.09864).
    """
    rotary_dim = 2 * freqs.shape[-1]
    if in_place and x_TNH.dtype == torch.float32 and x_TNH.shape[-1] % 2 == 0:
        # One complex product rotates all pairs in fp32. view_as_complex needs even strides.
        pairs = x_TNH[..., :rotary_dim].view(*x_TNH.shape[:-1], -1, 2)
        torch.view_as_complex(pairs).mul_(freqs)
        return x_TNH
    cos, sin = freqs.real, freqs.imag
    even, odd = x_TNH[..., :rotary_dim:2].float(), x_TNH[..., 1:rotary_dim:2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((rotated.to(x_TNH.dtype), x_TNH[..., rotary_dim:]), dim=-1)
