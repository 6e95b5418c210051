"""What layers are made of: ragged batches, attention inside documents, rotary positions.

Axis letters: T tokens of a packed batch, S tokens that carry a target, D model width, N heads, H head width,
R rotary width, V vocabulary, L length of one document.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptj_ft.models.kv_cache import KVCache

NO_TARGET = -100
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
        turns: what `turns` has found for it.
    """

    tokens_T: Tensor
    positions_T: Tensor
    targets_T: Tensor
    cu_seqlens: tuple[int, ...]
    cache: KVCache | None = None
    goes_on: bool = False
    noise: int | None = None
    numbers: tuple[int, ...] = ()
    turns: dict[tuple[int, float], Tensor] = field(default_factory=dict, repr=False, compare=False)

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

    def up_to(self, counts: Sequence[int]) -> PackedBatch:
        """Return the batch with so many tokens of each document, its first; a target may be the one after them."""
        ends = self.cu_seqlens
        if all(end - start == count for start, end, count in zip(ends, ends[1:], counts, strict=False)):
            return self
        kept_T = self.positions_T < torch.tensor(counts).repeat_interleave(torch.tensor(ends).diff())
        tokens_T, positions_T, targets_T = (x[kept_T] for x in (self.tokens_T, self.positions_T, self.targets_T))
        cu_seqlens = tuple(accumulate(counts, initial=0))
        return replace(self, tokens_T=tokens_T, positions_T=positions_T, targets_T=targets_T, cu_seqlens=cu_seqlens)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on a device."""
        if self.tokens_T.device == device:
            return self
        tokens_T, positions_T, targets_T = (x.to(device) for x in (self.tokens_T, self.positions_T, self.targets_T))
        return replace(self, tokens_T=tokens_T, positions_T=positions_T, targets_T=targets_T, turns={})


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


@dataclass(frozen=True)
class Rows:
    """Some rows of a matrix, where a layer needs no others.

    Attributes:
        numbers: which, int64, rising.
        values: theirs, [rows, D].
    """

    numbers: Tensor
    values: Tensor


class Embedding(nn.Module):
    """A matrix of which each token takes a row; whoever runs the layer may hand in just the `Rows` that are taken.

    Args:
        num_rows: of the matrix.
        width: of a row.
        index: what of a batch tells the row.
    """

    weight: Tensor | Rows

    def __init__(self, num_rows: int, width: int, index: Literal["tokens_T", "positions_T"] = "tokens_T") -> None:
        super().__init__()
        self.index, self.num_embeddings = index, num_rows
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, numbers_T: Tensor) -> Tensor:
        weight = self.weight
        if isinstance(weight, Rows):
            return F.embedding(torch.searchsorted(weight.numbers, numbers_T), weight.values)
        return F.embedding(numbers_T, weight)


def turns(batch: PackedBatch, rotary_dim: int, base: float = 10000.0) -> Tensor:
    """Return what `rotate` turns a batch's pairs by: cos + i sin of their angles, complex64 [T, 1, R/2].

    When a model writes, it is computed once for all layers of a pass: it takes longer than the turning.
    """
    key = rotary_dim, base
    if key in batch.turns:
        return batch.turns[key]
    angle_T1R = (batch.positions_T[:, None].float() * _speeds(rotary_dim, base, batch.positions_T.device))[:, None]
    turn = torch.complex(angle_T1R.cos(), angle_T1R.sin())
    if batch.cache is not None:
        batch.turns[key] = turn
    return turn


@lru_cache
def _speeds(rotary_dim: int, base: float, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):  # training uses it, too
        exponent = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.int64).float() / rotary_dim
        return 1.0 / base**exponent


def rotate(x_TNH: Tensor, turn: Tensor) -> Tensor:
    """Rotary position embedding on the first R dims of each head, interleaved pairs (2i, 2i+1); in place if possible.

    As in mesh-transformer-jax and GPT-J (https://arxiv.org/abs/2104.09864); in fp32.
    """
    rotary_dim = 2 * turn.shape[-1]
    if torch.is_inference_mode_enabled() and x_TNH.dtype == torch.float32 and x_TNH.shape[-1] % 2 == 0:
        pairs = x_TNH[..., :rotary_dim].view(*x_TNH.shape[:-1], -1, 2)
        torch.view_as_complex(pairs).mul_(turn)
        return x_TNH
    cos, sin = turn.real, turn.imag
    even, odd = x_TNH[..., :rotary_dim:2].float(), x_TNH[..., 1:rotary_dim:2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((rotated.to(x_TNH.dtype), x_TNH[..., rotary_dim:]), dim=-1)


@lru_cache
def takes_ragged(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Tell whether a device has a kernel that attends inside many documents at once, tried forward and backward.

    It is FlashAttention's, for CUDA and half precision; how wide a head may be depends on the device.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        # Whoever asks first may be writing, and inference mode records nothing that backward could follow.
        with torch.inference_mode(mode=False), torch.enable_grad():
            x_TNH = torch.ones(3, 1, head_width, dtype=dtype, device=device, requires_grad=True)
            tokens_T = torch.zeros(3, dtype=torch.int64, device=device)
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
