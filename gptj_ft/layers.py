"""What layers are made of: ragged batches, attention inside documents, rotary positions, linear layers.

Axis letters: T tokens of a packed batch, S tokens that carry a target, D model width, N heads, H head width,
R rotary width, V vocabulary, L length of one document.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.kv_cache import KVCache

NO_TARGET = -100
FEW_TOKENS = 32
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedBatch:
    """Documents end to end; padding does not exist.

    Attributes:
        tokens_T: token ids, int64.
        positions_T: position of each token in its own document, int64.
        targets_T: the token to predict at each position, ``NO_TARGET`` where there is no loss, int64.
        cu_seqlens: where documents begin and end: document ``d`` is ``cu_seqlens[d]:cu_seqlens[d + 1]``.
        cache: when decoding, what keeps the keys and values.
        goes_on: whether the documents have begun in an earlier pass, whose keys and values the cache has.
        noise: seed of what training drops of this batch; ``None``: nothing is dropped.
        numbers: of its documents, among those of all batches that share a pass and a cache; none: from 0 on.
    """

    tokens_T: Tensor
    positions_T: Tensor
    targets_T: Tensor
    cu_seqlens: tuple[int, ...]
    cache: KVCache | None = None
    goes_on: bool = False
    noise: int | None = None
    numbers: tuple[int, ...] = ()

    @property
    def num_targets(self) -> int:
        return int((self.targets_T != NO_TARGET).sum())

    @cached_property
    def cu_seqlens_T(self) -> Tensor:
        """``cu_seqlens`` on the device, int32."""
        return torch.tensor(self.cu_seqlens, dtype=torch.int32, device=self.tokens_T.device)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(end - start for start, end in zip(self.cu_seqlens, self.cu_seqlens[1:], strict=False))

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on a device."""
        if self.tokens_T.device == device:
            return self
        tokens_T, positions_T, targets_T = (x.to(device) for x in (self.tokens_T, self.positions_T, self.targets_T))
        return replace(self, tokens_T=tokens_T, positions_T=positions_T, targets_T=targets_T)


def pack(
    documents: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int] | None = None,
    cache: KVCache | None = None,
    untrained: Sequence[Sequence[int]] | None = None,
    numbers: Sequence[int] = (),
) -> PackedBatch:
    """Put documents end to end.

    Args:
        documents: token ids of each.
        prompt_lengths: tokens at each document's start that are not trained on; ``None``: no targets at all.
        cache: to keep keys and values in.
        untrained: tokens after each document's prompt that are not trained on, as (start, end) pairs in one flat list.
        numbers: see `PackedBatch`.
    """
    tokens: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    cu_seqlens = [0]
    for index, ids in enumerate(documents):
        tokens += ids
        positions += range(len(ids))
        # The token at i predicts the token at i + 1; the prompt's last token predicts the first trained one.
        first = max(prompt_lengths[index], 1) - 1 if prompt_lengths is not None else len(ids)
        targets += [NO_TARGET] * min(first, len(ids)) + list(ids[first + 1 :])
        targets += [NO_TARGET] * (len(tokens) - len(targets))
        gaps = untrained[index] if untrained else ()
        for left, right in zip(gaps[::2], gaps[1::2], strict=True):  # what predicts them is one position before
            targets[cu_seqlens[-1] + left - 1 : cu_seqlens[-1] + right - 1] = [NO_TARGET] * (right - left)
        cu_seqlens.append(len(tokens))
    tokens_T, positions_T, targets_T = (torch.tensor(x, dtype=torch.int64) for x in (tokens, positions, targets))
    return PackedBatch(tokens_T, positions_T, targets_T, tuple(cu_seqlens), cache, numbers=tuple(numbers))


def rotate(x_TNH: Tensor, positions_T: Tensor, rotary_dim: int, base: float = 10000.0) -> Tensor:
    """Rotary position embedding on the first ``rotary_dim`` dims of each head, interleaved pairs (2i, 2i+1).

    As in mesh-transformer-jax and GPT-J (https://arxiv.org/abs/2104.09864); angles and rotation in fp32.
    """
    exponent = torch.arange(0, rotary_dim, 2, device=x_TNH.device, dtype=torch.int64).float() / rotary_dim
    angle_TR = positions_T[:, None].float() * (1.0 / base**exponent)
    cos, sin = angle_TR.cos()[:, None, :], angle_TR.sin()[:, None, :]
    even, odd = x_TNH[..., :rotary_dim:2].float(), x_TNH[..., 1:rotary_dim:2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((rotated.to(x_TNH.dtype), x_TNH[..., rotary_dim:]), dim=-1)


def project(x_TD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `torch.nn.functional.linear` does; faster on a few tokens, when a model writes on a CPU.

    Measured (MKL, 2 cores with AVX2): of 2 to 32 tokens, the product with weights on the left takes 0.3 to 0.8 times
    as long. It rounds differently, so training, which runs forward twice, does without: it is not in inference mode.
    """
    is_few = torch.is_inference_mode_enabled() and 1 < len(x_TD) <= FEW_TOKENS
    if not is_few or x_TD.device.type != "cpu" or x_TD.dtype != torch.float32:
        return F.linear(x_TD, weight, bias)
    out = torch.mm(weight, x_TD.t()).t().contiguous()
    return out if bias is None else out.add_(bias)


class Linear(nn.Linear):
    """`torch.nn.Linear` by way of `project`."""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self.weight, self.bias)


class Conv1D(nn.Module):
    """A linear layer whose weight is stored (in, out), as TensorFlow did."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.empty(num_out))

    def forward(self, x_TI: Tensor) -> Tensor:
        return torch.addmm(self.bias, x_TI, self.weight)


class TiedLinear(nn.Module):
    """A projection whose weight is a parameter of the model's first layer: its transposed embedding, say.

    The weight is a buffer, and in no ``state_dict``: it is stored, updated and counted where it belongs. Whoever runs
    the layer hands it in; see `stores.Layout.borrowed`.

    Args:
        shape: of the weight, (output width, input width).
        source: its name in the first layer.
    """

    weight: Tensor

    def __init__(self, shape: tuple[int, int], source: str) -> None:
        super().__init__()
        self.source = source
        self.register_buffer("weight", torch.empty(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, None)


@lru_cache
def takes_ragged(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Tell whether a device has a kernel that attends inside many documents at once, tried forward and backward.

    It is FlashAttention's, for CUDA and half precision; how wide a head may be depends on the device.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    x_TNH = torch.ones(3, 1, head_width, dtype=dtype, device=device, requires_grad=True)
    tokens_T = torch.zeros(3, dtype=torch.int64, device=device)
    try:
        with torch.enable_grad():
            attend_ragged(x_TNH, x_TNH, x_TNH, PackedBatch(tokens_T, tokens_T, tokens_T, (0, 1, 3))).sum().backward()  # type: ignore[no-untyped-call]
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
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
        if batch.goes_on:
            return batch.cache.attend(layer, q_TNH, k_TNH, v_TNH, scale)
        batch.cache.put(layer, k_TNH, v_TNH, batch.cu_seqlens, batch.numbers)
    if takes_ragged(q_TNH.device, q_TNH.dtype, q_TNH.shape[-1]):
        return attend_ragged(q_TNH, k_TNH, v_TNH, batch, scale)
    outputs = []
    for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        q, k, v = (x_TNH[start:end].transpose(0, 1)[None] for x_TNH in (q_TNH, k_TNH, v_TNH))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=end - start > 1, scale=scale)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
