"""Rotary positions and causal attention inside the documents of a packed batch.

Axis letters: T tokens of a packed batch, N heads, H head width, R rotary width.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.batch import PackedBatch

log = logging.getLogger(__name__)


def rotary_freqs(batch: PackedBatch, rotary_dim: int, base: float = 10000.0) -> Tensor:
    """Return the rotary frequencies of a batch: cos + i sin of the angles, complex64 [T, 1, R/2].

    In decoding it is computed once for all layers of a pass: it takes longer than the rotation.
    """
    key = rotary_dim, base
    if key in batch.rotary_cache:
        return batch.rotary_cache[key]
    angle_T1R = (batch.positions_T[:, None].float() * _inv_freq(rotary_dim, base, batch.positions_T.device))[:, None]
    freqs = torch.complex(angle_T1R.cos(), angle_T1R.sin())
    if batch.cache is not None:
        batch.rotary_cache[key] = freqs
    return freqs


@lru_cache
def _inv_freq(rotary_dim: int, base: float, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # training uses it, too
        exponent = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.int64).float() / rotary_dim
        return 1.0 / base**exponent


def apply_rotary(x_TNH: Tensor, freqs: Tensor, in_place: bool) -> Tensor:
    """Rotary position embedding on the first R dims of each head, interleaved pairs (2i, 2i+1); in place if possible.

    As in mesh-transformer-jax and GPT-J (https://arxiv.org/abs/2104.09864); in fp32.
    """
    rotary_dim = 2 * freqs.shape[-1]
    if in_place and x_TNH.dtype == torch.float32 and x_TNH.shape[-1] % 2 == 0:
        pairs = x_TNH[..., :rotary_dim].view(*x_TNH.shape[:-1], -1, 2)
        torch.view_as_complex(pairs).mul_(freqs)
        return x_TNH
    cos, sin = freqs.real, freqs.imag
    even, odd = x_TNH[..., :rotary_dim:2].float(), x_TNH[..., 1:rotary_dim:2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((rotated.to(x_TNH.dtype), x_TNH[..., rotary_dim:]), dim=-1)


@lru_cache
def takes_ragged(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Tell whether a device has a kernel that attends inside many documents at once, tried forward and backward.

    It is FlashAttention's, for half precision; which devices have it, and how wide a head may be, is found by trying.
    Without memory (``meta``) it stands for them in a plan.
    """
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        # Whoever asks first may be writing, and inference mode records nothing that backward could follow.
        with torch.inference_mode(mode=False), torch.enable_grad():
            x_TNH = torch.ones(3, 1, head_width, dtype=dtype, device=device, requires_grad=True)
            tokens_T = torch.zeros(3, dtype=torch.int64, device=device)
            attend_ragged(x_TNH, x_TNH, x_TNH, PackedBatch(tokens_T, tokens_T, tokens_T, (0, 1, 3))).sum().backward()  # type: ignore[no-untyped-call]
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        log.warning("attention goes document by document: %s", str(error).partition("\n")[0])
        return False
    return True


def attend_ragged(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, batch: PackedBatch, scale: float | None = None
) -> Tensor:
    """`attend` by one kernel for all documents, without a cache; see `takes_ragged`."""
    from torch.nn.attention.varlen import varlen_attn

    ends = batch.cu_seqlens_T
    out = varlen_attn(
        q_TNH.contiguous(), k_TNH.contiguous(), v_TNH.contiguous(), ends, ends, batch.longest, batch.longest,
        scale=scale, window_size=(-1, 0),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def attend(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, batch: PackedBatch, layer: int, scale: float | None = None
) -> Tensor:
    """Causal attention inside each document only; scores scaled, by 1/sqrt(H) unless told otherwise; softmax in fp32.

    With a cache, the queries also see what the cache holds of their document.

    Returns: [T, N, H].
    """
    if batch.cache is not None:
        if batch.is_decode_step:
            return batch.cache.attend(layer, q_TNH, k_TNH, v_TNH, scale)
        batch.cache.put(layer, k_TNH, v_TNH, batch.cu_seqlens, batch.document_ids)
    if takes_ragged(q_TNH.device, q_TNH.dtype, q_TNH.shape[-1]):
        return attend_ragged(q_TNH, k_TNH, v_TNH, batch, scale)
    outputs = []
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        q, k, v = (x_TNH[start:end].transpose(0, 1)[None] for x_TNH in (q_TNH, k_TNH, v_TNH))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=end - start > 1, scale=scale)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
