"""Packed batches: documents end to end, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from gptj_ft.models.kv_cache import KVCache
from gptj_ft.models.linear import Kernel

NO_TARGET = -100
Poll = Callable[[], None]
"""Called by a layer between its operations: lets the next layers' weights come nearer; see `prefetch.Prefetcher`."""


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch: documents packed end to end, without padding.

    Attributes:
        tokens_T: token ids, int64.
        positions_T: position of each token in its own document, int64.
        targets_T: the token to predict at each position, ``NO_TARGET`` where there is no loss, int64.
        cu_seqlens: cumulative lengths: document ``d`` is ``cu_seqlens[d]:cu_seqlens[d + 1]``.
        cache: when decoding, what keeps the keys and values.
        is_decode_step: whether the documents began in an earlier pass, whose keys and values the cache holds.
        dropout_seed: seed of what training drops of this batch; ``None``: nothing is dropped.
        document_ids: numbers of its documents among all batches of a pass that share a cache; default: from 0 on.
    """

    tokens_T: Tensor
    positions_T: Tensor
    targets_T: Tensor
    cu_seqlens: tuple[int, ...]
    cache: KVCache | None = None
    is_decode_step: bool = False
    dropout_seed: int | None = None
    document_ids: tuple[int, ...] = ()
    rotary_cache: dict[tuple[int, float], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def kernel(self) -> Kernel:
        """How products are computed; nothing that is decoded with a cache is ever trained on."""
        return "training" if self.cache is None else "decoding"

    @property
    def num_targets(self) -> int:
        return len(self.target_positions_T)

    @cached_property
    def target_positions_T(self) -> Tensor:
        """The positions that carry a target, in order, int64 [S]."""
        return (self.targets_T != NO_TARGET).nonzero().squeeze(-1)

    def on_host(self, name: str) -> Tensor:
        """Return a tensor of the batch on the CPU; where the batch comes from there, nothing is waited for."""
        source: PackedBatch = vars(self).get("_source", self)
        return getattr(source, name).cpu()  # type: ignore[no-any-return]

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
        """Return the batch on a device: one copy for all of it, for each makes the program wait for the device."""
        if self.tokens_T.device == device:
            return self
        here = (self.tokens_T, self.positions_T, self.targets_T, self.target_positions_T, torch.tensor(self.cu_seqlens))
        there: tuple[Tensor, ...] = torch.cat(here).to(device).split_with_sizes([len(x) for x in here])
        tokens_T, positions_T, targets_T, target_positions_T, ends = there
        moved = replace(self, tokens_T=tokens_T, positions_T=positions_T, targets_T=targets_T, rotary_cache={})
        vars(moved).update(_source=self, target_positions_T=target_positions_T, cu_seqlens_T=ends.to(torch.int32))
        return moved


def pack(
    documents: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int] | None = None,
    cache: KVCache | None = None,
    untrained: Sequence[Sequence[int]] | None = None,
    document_ids: Sequence[int] = (),
) -> PackedBatch:
    """Pack documents end to end.

    Args:
        documents: token ids of each.
        prompt_lengths: tokens at each document's start that are not trained on; ``None``: no targets at all.
        cache: cache that keeps keys and values.
        untrained: tokens after each document's prompt that are not trained on, as (start, end) pairs in one flat list.
        document_ids: see `PackedBatch`.
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
    return PackedBatch(tokens_T, positions_T, targets_T, tuple(cu_seqlens), cache, document_ids=tuple(document_ids))
