"""Packed batches: documents end to end, without padding.

Axis letters: T rows of a packed batch, G documents of a bucket, L its length, P slots of all buckets, N heads, H head
width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.dropout import Noise, NoiseSpan, row_keys
from gptj_ft.models.kv_cache import KVCache
from gptj_ft.models.linear import Kernel

CPU = torch.device("cpu")
NO_TARGET = -100
BUCKET_PAIRS = 2**17  # (query, key) pairs of a bucket; the attention weights of all heads then fit in the CPU's caches
MOST_SCORES = 2**19  # (query, key) pairs of a bucket on an accelerator, of up to `SCORED_QUERIES` queries a document
SCORED_QUERIES = 256
# Pairs of padding in a bucket on an accelerator; they take about as long as another bucket's launches.
MOST_PADDING = 2**18
SHORT = 32  # tokens; documents up to this length are padded and attended together, since a call each takes longer
Poll = Callable[[], None]
"""Layers call it between their operations; it advances prefetching, see `prefetch.Prefetcher`."""


class Marks(NamedTuple):
    """Targets of a document other than its next tokens."""

    borders: Sequence[int] = ()  # tokens at which the token type flips between 0 and 1; none: all are of type 0
    marks: Sequence[int] = ()  # tokens that the head reads; none: all
    targets: Sequence[int] = ()  # class id of each mark; if the head reads all tokens, first and last of an answer
    values: Sequence[float] = ()  # numbers for each mark, if the targets are numbers


def padded_length(length: int) -> int:
    """Return a document's padded length for attention. It depends only on the document; few lengths occur.

    >>> [padded_length(length) for length in (1, 8, 13, 70, 300)]
    [8, 8, 16, 96, 320]
    """
    step = 8 if length <= 32 else 16 if length <= 64 else 32 if length <= 256 else 64
    return -(-length // step) * step


def rounded_up(count: int) -> int:
    """Round up a number of rows by less than a sixteenth, so that few matrix shapes occur.

    >>> [rounded_up(count) for count in (5, 31, 33, 100, 1000, 1100, 2048)]
    [5, 31, 34, 100, 1024, 1152, 2048]
    """
    # oneDNN compiles a kernel for each shape, and keeps it. Measured, 1,000 micro-batches of 1,400 to 2,048 tokens
    # through a matrix of 96 x 384 and back: resident memory grows by 0.8 GB in bf16 and 0.9 in fp32; rounded up, by
    # 0.03 and 0.04, in no more time. With 384 x 1,536 it grows by 0.9 and 1.9 GB.
    step = max(1, (1 << (count - 1).bit_length()) // 32)
    return -(-count // step) * step


def most_padded(count: int) -> int:
    """Return the largest total of batches with ``count`` rows in all, each rounded by `rounded_up`."""
    return count + count // 16


def few_groups(lengths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Group documents for an accelerator, where a group costs launches: padded length and documents of each group.

    >>> few_groups([100, 0, 30, 600, 90])
    [(640, [3]), (128, [0, 4, 2])]
    """
    groups: list[tuple[int, list[int]]] = []
    for document in sorted(filter(lengths.__getitem__, range(len(lengths))), key=lambda i: -lengths[i]):
        if not groups or not _is_worth_padding(groups[-1][0], [lengths[i] for i in (*groups[-1][1], document)]):
            groups.append((padded_length(lengths[document]), []))
        groups[-1][1].append(document)
    return groups


def _is_worth_padding(longest: int, lengths: Sequence[int]) -> bool:
    """Tell whether documents may share a bucket: it fits in memory, and padding costs less than another bucket."""
    tokens, padding = longest * len(lengths), sum(longest**2 - length**2 for length in lengths)
    scores = tokens * min(longest, SCORED_QUERIES)
    return padding <= MOST_PADDING and scores <= MOST_SCORES and tokens <= 2 * sum(map(padded_length, lengths))


@dataclass(frozen=True, eq=False)
class Bucket:
    """Documents of similar length, attended together, each padded to the same length L.

    The index tensors are on the host.
    """

    documents: tuple[int, ...]  # G document numbers
    length: int  # L
    rows_GL: Tensor  # row of each slot; padding slots repeat their document's first row
    is_token_GL: Tensor  # False for padding
    mask_GL: Tensor | None  # ``is_token_GL`` on the device; None if there is no padding

    @classmethod
    def of(cls, documents: Sequence[int], cu_seqlens: Sequence[int], length: int, device: torch.device) -> Bucket:
        starts_G1, ends_G1 = (
            torch.tensor([cu_seqlens[document + k] for document in documents])[:, None] for k in (0, 1)
        )
        # Padding slots repeat a row of their own document: a valid index, and finite values.
        rows_GL = starts_G1 + torch.arange(length)
        is_token_GL = rows_GL < ends_G1
        mask_GL = None if is_token_GL.all() else is_token_GL.to(device)
        return cls(tuple(documents), length, torch.where(is_token_GL, rows_GL, starts_G1), is_token_GL, mask_GL)

    @cached_property
    def rows_P(self) -> Tensor:
        return self.rows_GL.flatten()

    @cached_property
    def token_slots(self) -> Tensor:
        return self.is_token_GL.flatten().nonzero().squeeze(-1)

    @cached_property
    def is_padding_LG1(self) -> Tensor | None:
        """Padding on the device, token by token; None if there is none."""
        return None if self.mask_GL is None else ~self.mask_GL.t()[..., None]

    @cached_property
    def is_padding_P11(self) -> Tensor:
        return ~self.is_token_GL.flatten()[:, None, None]

    def take(self, x_TNH: Tensor) -> Tensor:
        """Gather the rows of the documents, [G, N, L, H]; on a CPU only, as are the next two."""
        taken = x_TNH.index_select(0, self.rows_P)
        return taken.view(*self.rows_GL.shape, *x_TNH.shape[1:]).transpose(1, 2)

    def take_gradient(self, x_TNH: Tensor) -> Tensor:
        """Gather the rows of the documents, with zeros in padding slots."""
        # Padding repeats a real row, whose gradient must not count again.
        taken = x_TNH.index_select(0, self.rows_P).masked_fill_(self.is_padding_P11, 0.0)
        return taken.view(*self.rows_GL.shape, *x_TNH.shape[1:]).transpose(1, 2)

    def put(self, x_TNH: Tensor, values: Tensor) -> None:
        """Scatter values, [G, N, L, H], to the rows of the documents."""
        values_PNH = values.transpose(1, 2).reshape(-1, *x_TNH.shape[1:])
        rows, slots = self.rows_P[self.token_slots], self.token_slots
        x_TNH.index_copy_(0, rows, values_PNH.index_select(0, slots).to(x_TNH.dtype))


class BucketIndex(NamedTuple):
    """Index of the heads of all rows in the slots of all buckets, one bucket after another.

    A bucket's slots are [G, N, L], or [L, G, N] in token order. Row and head are numbered as ``row * N + head``.
    Padding slots take the document's first row; filler rows have slots behind the buckets.
    """

    source_P: Tensor  # row and head in each slot
    slot_T: Tensor  # slot of each row and head


class SlotTable(NamedTuple):
    """Slots of all buckets for one head, int64 on an accelerator; the indexes for all heads are made from it there."""

    source_P: Tensor  # row of each slot; padding slots repeat their document's first row
    is_padding_P: Tensor
    before_T: Tensor  # slots before the row's document
    length_T: Tensor  # padded length of the row's document
    position_T: Tensor  # position of the row in its document
    turned_T: Tensor  # slot of the row, if slots are in token order


@dataclass(frozen=True)
class Documents:
    """Positions of the documents in packed rows, for attention within each."""

    cu_seqlens: tuple[int, ...]
    """Cumulative lengths: document ``d`` is ``cu_seqlens[d]:cu_seqlens[d + 1]``; it may be empty."""
    seeds: tuple[int, ...] | None  # dropout seed of each document; None: no dropout
    device: torch.device
    num_fillers: int = 0  # rows behind the last document
    keys_T: Tensor | None = field(default=None, repr=False, compare=False)  # on an accelerator: see `dropout.row_keys`
    indexes: dict[tuple[int, bool], BucketIndex] = field(default_factory=dict, repr=False, compare=False)
    hidden: dict[Any, Tensor | None] = field(default_factory=dict, repr=False, compare=False)  # masks of attention
    splits: dict[int, tuple[list[int], list[Bucket]]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """All documents, grouped into buckets of similar length: small ones on a CPU, few on an accelerator."""
        if self.device.type != "cpu":
            return self._device_buckets()
        buckets = []
        for length, group in sorted(self._by_length(longest=None).items()):
            size = max(1, BUCKET_PAIRS // length**2)
            buckets += [self._bucket(length, group[start : start + size]) for start in range(0, len(group), size)]
        return buckets

    @cached_property
    def groups(self) -> list[tuple[int, list[int]]]:
        """Groups of documents on an accelerator."""
        return few_groups(self.sizes[:-1])

    @cached_property
    def table(self) -> SlotTable:
        return SlotTable(*(each.to(self.device) for each in self.host_table()))

    def host_table(self) -> SlotTable:
        """Return the `table` on the CPU."""
        assert not self.num_fillers, "internal error: fillers on an accelerator"
        before_T, length_T, position_T, turned_T = torch.zeros(4, self.cu_seqlens[-1], dtype=torch.int64)
        rows, padding, num_slots = [], [], 0
        for length, group in self.groups:
            bucket = Bucket.of(group, self.cu_seqlens, length, CPU)
            is_token_GL = bucket.is_token_GL
            numbers, positions = is_token_GL.nonzero().unbind(1)
            rows_T = bucket.rows_GL[is_token_GL]
            before_T[rows_T], length_T[rows_T], position_T[rows_T] = num_slots + numbers * length, length, positions
            turned_T[rows_T] = num_slots + positions * len(group) + numbers
            rows.append(bucket.rows_P)
            padding.append((~is_token_GL).flatten().to(torch.int64))
            num_slots += is_token_GL.numel()
        empty = [before_T[:0]]
        return SlotTable(
            torch.cat(rows or empty), torch.cat(padding or empty), before_T, length_T, position_T, turned_T
        )

    def _device_buckets(self) -> list[Bucket]:
        sizes = [length * len(group) for length, group in self.groups]
        buckets = []
        for (length, group), is_padding in zip(
            self.groups, self.table.is_padding_P.split_with_sizes(sizes), strict=True
        ):
            bucket = Bucket.of(group, self.cu_seqlens, length, CPU)
            mask_GL = None if bucket.mask_GL is None else is_padding.view(-1, length) == 0
            buckets.append(replace(bucket, mask_GL=mask_GL))
        return buckets

    def _device_index(self, num_heads: int, in_token_order: bool) -> BucketIndex:
        table, sizes = self.table, [length * len(group) for length, group in self.groups]
        heads_N = torch.arange(num_heads, device=self.device)
        parts = []
        for (length, _), rows in zip(self.groups, table.source_P.split_with_sizes(sizes), strict=True):
            rows_GL = rows.view(-1, length)
            if in_token_order:
                parts.append((rows_GL.t()[..., None] * num_heads + heads_N).flatten())
            else:
                parts.append((rows_GL[:, None] * num_heads + heads_N[:, None]).flatten())
        if in_token_order:
            slots_TN = table.turned_T[:, None] * num_heads + heads_N
        else:
            firsts_T = table.before_T * num_heads + table.position_T
            slots_TN = firsts_T[:, None] + table.length_T[:, None] * heads_N
        return BucketIndex(torch.cat(parts) if len(parts) > 1 else parts[0], slots_TN.flatten())

    @cached_property
    def slot_keys(self) -> list[Tensor]:
        """Dropout keys of the queries in each bucket, [G, L]."""
        assert self.keys_T is not None
        source_P = self.index(1).source_P if self.device.type == "cpu" else self.table.source_P
        keys_P = self.keys_T.index_select(0, source_P)
        shapes = [(len(bucket.documents), bucket.length) for bucket in self.buckets]
        parts = keys_P.split_with_sizes([*map(math.prod, shapes), self.num_fillers])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each document, then the number of fillers."""
        return [*(end - start for start, end in pairwise(self.cu_seqlens)), self.num_fillers]

    def split(self, longest: int = SHORT) -> tuple[list[int], list[Bucket]]:
        """Return the documents that causal attention computes one by one, and buckets of those up to a length.

        A document's padded length depends only on the document, so its results have the same bits in any batch.
        """
        if longest not in self.splits:
            long = [document for document, size in enumerate(self.sizes[:-1]) if size > longest]
            short = [self._bucket(length, group) for length, group in sorted(self._by_length(longest).items())]
            self.splits[longest] = long, short
        return self.splits[longest]

    def _by_length(self, longest: int | None) -> dict[int, list[int]]:
        """Group the non-empty documents, up to a length, by padded length."""
        groups: dict[int, list[int]] = {}
        for document, size in enumerate(self.sizes[:-1]):
            if size and (longest is None or size <= longest):
                groups.setdefault(padded_length(size), []).append(document)
        return groups

    def _bucket(self, length: int, documents: Sequence[int]) -> Bucket:
        return Bucket.of(documents, self.cu_seqlens, length, self.device)

    def index(self, num_heads: int, in_token_order: bool = False) -> BucketIndex:
        """Return the index of all buckets for a number of heads."""
        key = num_heads, in_token_order
        if key in self.indexes:
            return self.indexes[key]
        if self.device.type != "cpu":
            self.indexes[key] = self._device_index(num_heads, in_token_order)
            return self.indexes[key]
        order, back = ((2, 0, 1), (1, 2, 0)) if in_token_order else ((0, 1, 2), (0, 1, 2))
        heads_N1, sources = torch.arange(num_heads)[:, None], []
        num_rows, num_slots = self.cu_seqlens[-1] + self.num_fillers, 0
        slot_TN = torch.empty(num_rows, num_heads, dtype=torch.int64)
        for bucket in self.buckets:
            # [G, 1, L] and [N, 1] broadcast to [G, N, L], the order in which attention reads its slots.
            source_GNL = bucket.rows_GL[:, None] * num_heads + heads_N1
            source = source_GNL.permute(order)
            sources.append(source.flatten())
            slots_GNL = (num_slots + torch.arange(source.numel())).view(source.shape).permute(back)
            is_token_GL = bucket.is_token_GL
            # Padding slots share a row with a token, so only tokens have an inverse.
            slot_TN[bucket.rows_GL[is_token_GL]] = slots_GNL.transpose(1, 2)[is_token_GL]
            num_slots += source_GNL.numel()
        sources.append(torch.arange(self.cu_seqlens[-1] * num_heads, num_rows * num_heads))
        slot_TN[self.cu_seqlens[-1] :] = num_slots + torch.arange(self.num_fillers * num_heads).view(-1, num_heads)
        index = BucketIndex(torch.cat(sources).to(self.device), slot_TN.flatten().to(self.device))
        self.indexes[key] = index
        return index


@dataclass(frozen=True)
class HeadRows:
    """Rows of hidden states that a head reads, document after document."""

    kernel: Kernel = "training"
    noise: Noise | None = None  # dropout; None: no dropout
    ends: tuple[int, ...] = ()  # end of each document's rows, if documents are complete

    def padded(self, count: int) -> HeadRows:
        """Return the rows with ``count`` fillers behind them."""
        if self.noise is None or not count:
            return self
        assert self.noise.keys_R is None, "internal error: fillers on an accelerator"
        return replace(self, noise=Noise((*self.noise.spans, *padding_noise(count))))


def padding_noise(count: int) -> tuple[NoiseSpan, ...]:
    """Return the dropout noise of filler rows; its values have no effect."""
    return (NoiseSpan(0, 0, count, count),) if count else ()


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch: documents packed end to end, without padding."""

    tokens_T: Tensor  # token ids, int64; behind the last document are fillers, see `padded`
    positions_T: Tensor  # position of each token in its own document, int64
    targets_T: Tensor
    """int64, ``NO_TARGET`` where there is no loss: the next token, or the class id of `Marks`. If the head reads all
    tokens: 1 at the first token of an answer, plus 2 at its last.
    """
    cu_seqlens: tuple[int, ...]  # cumulative lengths: document ``d`` is ``cu_seqlens[d]:cu_seqlens[d + 1]``
    cache: KVCache | None = None  # for decoding
    is_decode_step: bool = False  # whether the cache has the documents' earlier keys and values
    document_ids: tuple[int, ...] = ()  # document numbers among all batches that share a cache; default: from 0
    seeds: tuple[int, ...] | None = None  # dropout seed of each document; None: no dropout
    types_T: Tensor | None = None  # token types, int64; None: all 0
    values_SC: Tensor | None = None  # target numbers of each mark, fp32
    parents_T: Tensor | None = None
    """Row of the token before each token in its branch, int64; -1: first token of a document. None: the documents have
    no branches. Documents with branches are for scoring: they have neither targets nor dropout.
    """
    rotary_cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # see `rotary`

    @property
    def kernel(self) -> Kernel:
        """Kernel of matrix products; batches with a cache are never trained on."""
        return "training" if self.cache is None else "decoding"

    @property
    def num_targets(self) -> int:
        return len(self.target_positions_T)

    @cached_property
    def target_positions_T(self) -> Tensor:
        """Positions with a target, ascending, int64 [S]."""
        return (self.targets_T != NO_TARGET).nonzero().squeeze(-1)

    @cached_property
    def noise(self) -> Noise | None:
        """Dropout noise of all tokens."""
        if self.seeds is None:
            return None
        lengths = [end - start for start, end in pairwise(self.cu_seqlens)]
        spans = (NoiseSpan(seed, 0, length, length) for seed, length in zip(self.seeds, lengths, strict=True))
        return Noise((*spans, *padding_noise(self.num_fillers)), self.keys[0] if self.keys else None)

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor] | None:
        """`row_keys` of all tokens, and of the rows that the head reads; None on a CPU, which hashes nothing."""
        if self.seeds is None or self.tokens_T.device.type == "cpu":
            return None
        keys_T, keys_S = (each.to(self.tokens_T.device) for each in self._host_keys())
        return keys_T, keys_S

    def _host_keys(self) -> tuple[Tensor, Tensor]:
        """Return the `keys` on the CPU."""
        assert self.seeds is not None
        of_tokens, of_targets = (
            [NoiseSpan(seed, 0, end - start, end - start) for seed, (start, end) in zip(self.seeds, pairs, strict=True)]
            for pairs in (pairwise(self.cu_seqlens), pairwise((0, *self.row_ends)))
        )
        return row_keys(of_tokens), row_keys(of_targets)

    @cached_property
    def row_ends(self) -> tuple[int, ...]:
        """End of each document's rows among the rows that the head reads."""
        # Cumulative number of targets, read at the last token of each document.
        before = (self.on_host("targets_T") != NO_TARGET).cumsum(0)
        return tuple(before[torch.tensor(self.cu_seqlens[1:]) - 1].tolist())

    @cached_property
    def documents(self) -> Documents:
        keys_T = self.keys[0] if self.keys else None
        return Documents(self.cu_seqlens, self.seeds, self.tokens_T.device, self.num_fillers, keys_T)

    @property
    def num_fillers(self) -> int:
        """Number of tokens behind the last document."""
        return len(self.tokens_T) - self.cu_seqlens[-1]

    def padded(self) -> PackedBatch:
        """Return the batch padded with filler tokens to `rounded_up` tokens.

        Nothing attends to fillers; they have no targets and no gradients, so they change no result.
        """
        count = rounded_up(len(self.tokens_T)) - len(self.tokens_T)
        if not count:
            return self
        assert self.cache is None, "keys and values are those of documents"
        return replace(
            self,
            tokens_T=torch.cat([self.tokens_T, self.tokens_T[-1:].expand(count)]),  # needs no further embedding row
            positions_T=F.pad(self.positions_T, (0, count)),
            targets_T=F.pad(self.targets_T, (0, count), value=NO_TARGET),
            types_T=None if self.types_T is None else F.pad(self.types_T, (0, count)),
            parents_T=None if self.parents_T is None else F.pad(self.parents_T, (0, count), value=-1),
            rotary_cache={},
        )

    def head_rows(self, start: int, stop: int, with_ends: bool = False) -> HeadRows:
        """Describe the target rows ``start`` to ``stop`` for the head, optionally with the ends of documents."""
        ends = self.row_ends if with_ends else ()
        if self.seeds is None:
            return HeadRows(ends=ends)
        spans = [
            NoiseSpan(seed, max(start - first, 0), min(stop, end) - first, end - first)
            for seed, (first, end) in zip(self.seeds, pairwise((0, *self.row_ends)), strict=True)
            # Heads that use the ends take a seed from every span, also of documents without rows here.
            if with_ends or (first < stop and end > start)
        ]
        return HeadRows(noise=Noise(tuple(spans), self.keys[1][start:stop] if self.keys else None), ends=ends)

    def on_host(self, name: str) -> Tensor:
        """Return a tensor of the batch on the CPU; if the batch was moved from there, without waiting for the
        device.
        """
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

    def truncated(self, counts: Sequence[int]) -> PackedBatch:
        """Truncate each document to its first ``counts[d]`` tokens; the last target may be one token beyond."""
        ends = self.cu_seqlens
        if all(end - start == count for start, end, count in zip(ends, ends[1:], counts, strict=False)):
            return self
        assert self.types_T is None, "documents with token types are never truncated"
        assert self.parents_T is None, "documents with branches are never truncated"
        # Targets are cut like tokens: the last kept token still predicts the first dropped one.
        kept_T = self.positions_T < torch.tensor(counts).repeat_interleave(torch.tensor(ends).diff())
        tokens_T, positions_T, targets_T = (x[kept_T] for x in (self.tokens_T, self.positions_T, self.targets_T))
        cu_seqlens = tuple(accumulate(counts, initial=0))
        return replace(self, tokens_T=tokens_T, positions_T=positions_T, targets_T=targets_T, cu_seqlens=cu_seqlens)

    def to(self, device: torch.device) -> PackedBatch:
        if self.tokens_T.device == device:
            return self
        # One copy for all tensors: each copy makes the program wait for the device.
        host = [self.tokens_T, self.positions_T, self.targets_T, self.target_positions_T, torch.tensor(self.cu_seqlens)]
        host += [each for each in (self.types_T, self.parents_T) if each is not None]
        if device.type != "cpu":
            table = Documents(self.cu_seqlens, None, device, self.num_fillers).host_table()
            host += [*table, *(() if self.seeds is None else self._host_keys())]
        moved_parts: tuple[Tensor, ...] = torch.cat(host).to(device).split_with_sizes([len(x) for x in host])
        tokens_T, positions_T, targets_T, target_positions_T, ends, *others = moved_parts
        moved = replace(
            self,
            tokens_T=tokens_T,
            positions_T=positions_T,
            targets_T=targets_T,
            types_T=None if self.types_T is None else others.pop(0),
            parents_T=None if self.parents_T is None else others.pop(0),
            values_SC=None if self.values_SC is None else self.values_SC.to(device),
            rotary_cache={},
        )
        # Prefill cached properties; computing the target positions on the device would wait for it.
        # A cached property lives in the instance's __dict__, which a frozen dataclass leaves writable.
        vars(moved).update(_source=self, target_positions_T=target_positions_T, cu_seqlens_T=ends.to(torch.int32))
        if device.type != "cpu":
            count = len(SlotTable._fields)
            vars(moved).update(keys=tuple(others[count:]) or None)
            vars(moved.documents).update(table=SlotTable(*others[:count]))
        return moved


def pack(
    documents: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int] | None = None,
    cache: KVCache | None = None,
    masked_spans: Sequence[Sequence[int]] | None = None,
    document_ids: Sequence[int] = (),
    parents: Sequence[Sequence[int]] | None = None,
) -> PackedBatch:
    """Pack documents end to end.

    Args:
        documents: token ids of each.
        prompt_lengths: untrained tokens at each document's start; ``None``: no targets at all.
        masked_spans: further untrained spans of each, (start, end) pairs in one flat list.
        document_ids: see `PackedBatch`.
        parents: position before each token of documents with branches; -1: none.
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
        # The last token of a document predicts nothing.
        targets += [NO_TARGET] * (len(tokens) - len(targets))
        spans = masked_spans[index] if masked_spans else ()
        for left, right in zip(spans[::2], spans[1::2], strict=True):  # position i - 1 predicts token i
            targets[cu_seqlens[-1] + left - 1 : cu_seqlens[-1] + right - 1] = [NO_TARGET] * (right - left)
        cu_seqlens.append(len(tokens))
    tokens_T, positions_T, targets_T = (torch.tensor(x, dtype=torch.int64) for x in (tokens, positions, targets))
    batch = PackedBatch(tokens_T, positions_T, targets_T, tuple(cu_seqlens), cache, document_ids=tuple(document_ids))
    return batch if parents is None else _with_branches(batch, parents)


def _with_branches(batch: PackedBatch, parents: Sequence[Sequence[int]]) -> PackedBatch:
    """Return documents with branches; a token's position is the number of tokens before it in its branch."""
    positions, rows = list[int](), list[int]()
    for start, own in zip(batch.cu_seqlens, parents, strict=False):
        for parent in own:
            positions.append(positions[start + parent] + 1 if parent >= 0 else 0)
            rows.append(start + parent if parent >= 0 else -1)
    positions_T, parents_T = (torch.tensor(values, dtype=torch.int64) for values in (positions, rows))
    return replace(batch, positions_T=positions_T, parents_T=parents_T)


def pack_marked(documents: Sequence[Sequence[int]], marks: Sequence[Marks]) -> PackedBatch:
    """Pack documents whose targets are `Marks`."""
    lengths = [len(ids) for ids in documents]
    cu_seqlens = tuple(accumulate(lengths, initial=0))
    types_T = torch.zeros(cu_seqlens[-1], dtype=torch.int64)
    targets_T = torch.full_like(types_T, NO_TARGET)
    for start, end, mark in zip(cu_seqlens, cu_seqlens[1:], marks, strict=False):
        for border in mark.borders:  # flip the type of all tokens from here on
            types_T[start + border : end] ^= 1
        if mark.marks:
            targets_T[start + torch.tensor(mark.marks)] = torch.tensor(mark.targets)
        else:
            targets_T[start:end] = 0
            # Codes 1 and 2 add up to 3 where the answer is a single token.
            for code, token in enumerate(mark.targets, 1):
                targets_T[start + token] += code
    values = [mark.values for mark in marks]
    return PackedBatch(
        torch.tensor([token for ids in documents for token in ids], dtype=torch.int64),
        torch.cat([torch.arange(length) for length in lengths]),
        targets_T,
        cu_seqlens,
        types_T=types_T if any(mark.borders for mark in marks) else None,
        values_SC=torch.tensor(values, dtype=torch.float32) if any(values) else None,
    )
