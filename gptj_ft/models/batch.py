"""Packed batches: documents end to end, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gptj_ft.models.dropout import Noise, NoiseSpan
from gptj_ft.models.kv_cache import KVCache
from gptj_ft.models.linear import Kernel

NO_TARGET = -100
BUCKET_PAIRS = (
    2**17
)  # of tokens, a weight of attention each: few enough that those of all heads stay near the processor
SHORT = 32  # tokens of a document, up to which a call for each takes longer than filling them up to one length
Poll = Callable[[], None]
"""Called by a layer between its operations: lets the next layers' weights come nearer; see `prefetch.Prefetcher`."""


class Marks(NamedTuple):
    """What is predicted of a document, where that is not its next tokens.

    Attributes:
        borders: tokens at which the token type changes, from 0 to 1 and back; none: all are of type 0.
        marks: tokens that the head reads; none: all of them.
        targets: an integer for each mark; where all tokens are read, the first and the last of an answer.
        values: numbers for each mark, where what is predicted are numbers.
    """

    borders: Sequence[int] = ()
    marks: Sequence[int] = ()
    targets: Sequence[int] = ()
    values: Sequence[float] = ()


def padded_length(length: int) -> int:
    """Return the length that a document is filled up to for attention: by its own length alone, a few for all.

    >>> [padded_length(length) for length in (1, 8, 13, 70, 300)]
    [8, 8, 16, 96, 320]
    """
    step = 8 if length <= 32 else 16 if length <= 64 else 32 if length <= 256 else 64
    return -(-length // step) * step


def rounded_up(count: int) -> int:
    """Return a number of rows rounded up by less than a sixteenth, so that products have few different shapes.

    oneDNN compiles a kernel for each shape, and keeps it. Measured, 1,000 micro-batches of 1,400 to 2,048 tokens
    through a matrix of 96 x 384 and back: resident memory grows by 0.8 GB in bf16, 0.9 in fp32, rounded up by 0.03 and
    0.04, in no more time; of 384 x 1,536 by 0.9 and 1.9 GB.

    >>> [rounded_up(count) for count in (5, 31, 33, 100, 1000, 1100, 2048)]
    [5, 31, 34, 100, 1024, 1152, 2048]
    """
    step = max(1, (1 << (count - 1).bit_length()) // 32)
    return -(-count // step) * step


def most_filled(count: int) -> int:
    """Return the most rows that batches of so many in all may have when each is `rounded_up`."""
    return count + count // 16


class Bucket(NamedTuple):
    """Documents whose attention is computed together, each filled up to the same length.

    Attributes:
        documents: numbers of the documents, G of them.
        lengths: their lengths.
        longest: length that they are filled up to.
        is_token_GL: whether there is a row in each place; ``None``: everywhere.
    """

    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    longest: int
    is_token_GL: Tensor | None


class AttentionCall(NamedTuple):
    """Short documents whose causal attention is one call of a kernel, each filled up to the same length.

    Attributes:
        num_documents: number of documents, G.
        length: length that they are filled up to.
        rows_P: their rows, [G * L]; where there is no row those of the first.
        tokens: their rows without what fills them up.
        places: indices of these among ``rows_P``.
        is_filler_P: whether each of ``rows_P`` is a filler, bool [G * L, 1, 1].
    """

    num_documents: int
    length: int
    rows_P: Tensor
    tokens: Tensor
    places: Tensor
    is_filler_P: Tensor

    def take(self, x_TNH: Tensor) -> Tensor:
        """Return the rows of the documents, [G, N, L, H]."""
        taken = x_TNH.index_select(0, self.rows_P)
        return taken.view(self.num_documents, self.length, *x_TNH.shape[1:]).transpose(1, 2)

    def take_gradient(self, x_TNH: Tensor) -> Tensor:
        """Return the rows of the documents, zeros where they are filled up."""
        taken = x_TNH.index_select(0, self.rows_P).masked_fill_(self.is_filler_P, 0.0)
        return taken.view(self.num_documents, self.length, *x_TNH.shape[1:]).transpose(1, 2)

    def put(self, x_TNH: Tensor, values: Tensor) -> None:
        """Put what was computed, [G, N, L, H], into the documents' rows."""
        values_PNH = values.transpose(1, 2).reshape(-1, *x_TNH.shape[1:])
        x_TNH.index_copy_(0, self.tokens, values_PNH.index_select(0, self.places).to(x_TNH.dtype))


class Places(NamedTuple):
    """Where heads of rows are in all buckets together: those of one bucket after another's, [G, N, L] of each.

    Attributes:
        there_P: row and head, numbered by rows, in each place; where there is no row, that of the document's first.
            Behind the buckets those of fillers.
        back_T: place of each row and head, by rows.
    """

    there_P: Tensor
    back_T: Tensor


@dataclass(frozen=True)
class Documents:
    """Where the documents of packed rows are, for attention inside each.

    Attributes:
        cu_seqlens: cumulative lengths: document ``d`` is ``cu_seqlens[d]:cu_seqlens[d + 1]``; it may be empty.
        seeds: seed of what training drops of each document; ``None``: nothing is dropped.
        device: device of the rows.
        num_fillers: rows behind them that belong to no document.
    """

    cu_seqlens: tuple[int, ...]
    seeds: tuple[int, ...] | None
    device: torch.device
    num_fillers: int = 0
    known_places: dict[int, Places] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Documents of about the same length."""
        groups: dict[int, list[tuple[int, int]]] = {}
        for document, (start, end) in enumerate(pairwise(self.cu_seqlens)):
            if end > start:
                groups.setdefault(padded_length(end - start), []).append((document, end - start))
        buckets = []
        full = [
            (longest, group[start : start + size])
            for longest, group in sorted(groups.items())
            for size in [max(1, BUCKET_PAIRS // longest**2)]
            for start in range(0, len(group), size)
        ]
        for longest, group in full:
            documents, lengths = zip(*group, strict=True)
            is_token_GL = torch.arange(longest) < torch.tensor(lengths)[:, None]
            is_full = min(lengths) == longest
            buckets.append(Bucket(documents, lengths, longest, None if is_full else is_token_GL.to(self.device)))
        return buckets

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each document, and of no document."""
        return [*(end - start for start, end in pairwise(self.cu_seqlens)), self.num_fillers]

    @cached_property
    def long(self) -> list[int]:
        """Numbers of the documents that are not short."""
        return [document for document, size in enumerate(self.sizes[:-1]) if size > SHORT]

    @cached_property
    def short(self) -> list[AttentionCall]:
        """Short documents, by the length that they are filled up to for causal attention; the others go one by one.

        What is computed of a document depends on its own length alone.
        """
        calls, short = list[AttentionCall](), dict[int, list[tuple[int, int]]]()
        for start, end in pairwise(self.cu_seqlens):
            if 0 < end - start <= SHORT:
                short.setdefault(padded_length(end - start), []).append((start, end))
        for length, ends in sorted(short.items()):
            starts_G1, ends_G1 = torch.tensor(ends).T[:, :, None]
            rows_GL = starts_G1 + torch.arange(length)
            is_token_P = (rows_GL < ends_G1).flatten()
            rows_P = torch.where(rows_GL < ends_G1, rows_GL, starts_G1).flatten()
            found = rows_P, rows_P[is_token_P], is_token_P.nonzero().squeeze(-1), ~is_token_P[:, None, None]
            calls.append(AttentionCall(len(ends), length, *(each.to(self.device) for each in found)))
        return calls

    def places(self, num_heads: int) -> Places:
        """Return the places of so many heads of each row in the buckets; those of fillers are behind them."""
        if num_heads in self.known_places:
            return self.known_places[num_heads]
        heads_N1, there = torch.arange(num_heads)[:, None], []
        num_rows, before = self.cu_seqlens[-1] + self.num_fillers, 0
        back_TN = torch.empty(num_rows, num_heads, dtype=torch.int64)
        for bucket in self.buckets:
            starts_G1 = torch.tensor([self.cu_seqlens[document] for document in bucket.documents])[:, None]
            slots_L = torch.arange(bucket.longest)
            is_token_GL = slots_L < torch.tensor(bucket.lengths)[:, None]
            rows_GL = torch.where(is_token_GL, starts_G1 + slots_L, starts_G1)
            places_GNL = rows_GL[:, None] * num_heads + heads_N1
            there.append(places_GNL.flatten())
            numbers_GNL = before + torch.arange(places_GNL.numel()).view_as(places_GNL)
            back_TN[rows_GL[is_token_GL]] = numbers_GNL.transpose(1, 2)[is_token_GL]
            before += places_GNL.numel()
        there.append(torch.arange(self.cu_seqlens[-1] * num_heads, num_rows * num_heads))
        back_TN[self.cu_seqlens[-1] :] = before + torch.arange(self.num_fillers * num_heads).view(-1, num_heads)
        places = Places(torch.cat(there).to(self.device), back_TN.flatten().to(self.device))
        self.known_places[num_heads] = places
        return places


@dataclass(frozen=True)
class HeadRows:
    """Rows of hidden states that a head takes, those of one document after another.

    Attributes:
        kernel: kernel of products with weights.
        noise: random numbers of dropout; ``None``: nothing is dropped.
        ends: end of the rows of each document; known where a document is never cut.
    """

    kernel: Kernel = "training"
    noise: Noise | None = None
    ends: tuple[int, ...] = ()

    def filled(self, count: int) -> HeadRows:
        """Return the rows with so many more of no document."""
        return self if self.noise is None else replace(self, noise=(*self.noise, *filler_noise(count)))


def filler_noise(count: int) -> Noise:
    """Return random numbers for so many rows of no document: any, for nothing comes of them."""
    return (NoiseSpan(0, 0, count, count),) if count else ()


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch: documents packed end to end, without padding.

    Attributes:
        tokens_T: token ids, int64; those behind the last document are fillers, see `filled`.
        positions_T: position of each token in its own document, int64.
        targets_T: target at each position, ``NO_TARGET`` where there is no loss, int64: the next token, or as `Marks`
            has it; where the head reads all tokens, 1 at the first of an answer and 2, added, at the last.
        cu_seqlens: cumulative lengths: document ``d`` is ``cu_seqlens[d]:cu_seqlens[d + 1]``.
        cache: cache of keys and values, when decoding.
        is_decode_step: whether the documents began in an earlier pass, whose keys and values the cache holds.
        seeds: seed of what training drops of each document; ``None``: nothing is dropped.
        types_T: type of each token, int64; ``None``: all are of type 0.
        values_SC: numbers to predict for each mark, fp32; ``None``: what is predicted are no numbers.
        document_ids: numbers of its documents among all batches of a pass that share a cache; default: from 0 on.
    """

    tokens_T: Tensor
    positions_T: Tensor
    targets_T: Tensor
    cu_seqlens: tuple[int, ...]
    cache: KVCache | None = None
    is_decode_step: bool = False
    document_ids: tuple[int, ...] = ()
    seeds: tuple[int, ...] | None = None
    types_T: Tensor | None = None
    values_SC: Tensor | None = None
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

    @cached_property
    def noise(self) -> Noise | None:
        """Random numbers of dropout, for all of its tokens."""
        if self.seeds is None:
            return None
        lengths = [end - start for start, end in pairwise(self.cu_seqlens)]
        spans = (NoiseSpan(seed, 0, length, length) for seed, length in zip(self.seeds, lengths, strict=True))
        return (*spans, *filler_noise(self.num_fillers))

    @cached_property
    def row_ends(self) -> tuple[int, ...]:
        """Where the rows that the head takes of each document end."""
        before = (self.on_host("targets_T") != NO_TARGET).cumsum(0)
        return tuple(before[torch.tensor(self.cu_seqlens[1:]) - 1].tolist())

    @cached_property
    def documents(self) -> Documents:
        """Where its documents are."""
        return Documents(self.cu_seqlens, self.seeds, self.tokens_T.device, self.num_fillers)

    @property
    def num_fillers(self) -> int:
        """Tokens that belong to no document."""
        return len(self.tokens_T) - self.cu_seqlens[-1]

    def filled(self) -> PackedBatch:
        """Return the batch with tokens behind its last document, so many that `rounded_up` is its number of tokens.

        They are attended to by nobody, predict nothing, and have no gradient: what is computed is that of the documents
        alone.
        """
        count = rounded_up(len(self.tokens_T)) - len(self.tokens_T)
        if not count:
            return self
        assert self.cache is None, "keys and values are those of documents"
        return replace(
            self,
            tokens_T=torch.cat([self.tokens_T, self.tokens_T[-1:].expand(count)]),  # no other row of a table is read
            positions_T=F.pad(self.positions_T, (0, count)),
            targets_T=F.pad(self.targets_T, (0, count), value=NO_TARGET),
            types_T=None if self.types_T is None else F.pad(self.types_T, (0, count)),
            rotary_cache={},
        )

    def head_rows(self, start: int, stop: int, with_ends: bool = False) -> HeadRows:
        """Describe some of the rows that carry a target, for the head; with the ends of documents, if it asks."""
        ends = self.row_ends if with_ends else ()
        if self.seeds is None:
            return HeadRows(ends=ends)
        spans = [
            NoiseSpan(seed, max(start - first, 0), min(stop, end) - first, end - first)
            for seed, (first, end) in zip(self.seeds, pairwise((0, *self.row_ends)), strict=True)
            if with_ends or (first < stop and end > start)
        ]
        return HeadRows(noise=tuple(spans), ends=ends)

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
        assert self.types_T is None, "of documents that are read as a whole none is cut"
        kept_T = self.positions_T < torch.tensor(counts).repeat_interleave(torch.tensor(ends).diff())
        tokens_T, positions_T, targets_T = (x[kept_T] for x in (self.tokens_T, self.positions_T, self.targets_T))
        cu_seqlens = tuple(accumulate(counts, initial=0))
        return replace(self, tokens_T=tokens_T, positions_T=positions_T, targets_T=targets_T, cu_seqlens=cu_seqlens)

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on a device: one copy for all of it, for each makes the program wait for the device."""
        if self.tokens_T.device == device:
            return self
        here = [self.tokens_T, self.positions_T, self.targets_T, self.target_positions_T, torch.tensor(self.cu_seqlens)]
        here += [] if self.types_T is None else [self.types_T]
        there: tuple[Tensor, ...] = torch.cat(here).to(device).split_with_sizes([len(x) for x in here])
        tokens_T, positions_T, targets_T, target_positions_T, ends, *types = there
        moved = replace(
            self,
            tokens_T=tokens_T,
            positions_T=positions_T,
            targets_T=targets_T,
            types_T=types[0] if types else None,
            values_SC=None if self.values_SC is None else self.values_SC.to(device),
            rotary_cache={},
        )
        vars(moved).update(_source=self, target_positions_T=target_positions_T, cu_seqlens_T=ends.to(torch.int32))
        return moved


def pack(
    documents: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int] | None = None,
    cache: KVCache | None = None,
    masked_spans: Sequence[Sequence[int]] | None = None,
    document_ids: Sequence[int] = (),
) -> PackedBatch:
    """Pack documents end to end.

    Args:
        documents: token ids of each.
        prompt_lengths: tokens at each document's start that are not trained on; ``None``: no targets at all.
        cache: cache that keeps keys and values.
        masked_spans: further masked spans of each, (start, end) pairs in one flat list; default: none.
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
        gaps = masked_spans[index] if masked_spans else ()
        for left, right in zip(gaps[::2], gaps[1::2], strict=True):  # what predicts them is one position before
            targets[cu_seqlens[-1] + left - 1 : cu_seqlens[-1] + right - 1] = [NO_TARGET] * (right - left)
        cu_seqlens.append(len(tokens))
    tokens_T, positions_T, targets_T = (torch.tensor(x, dtype=torch.int64) for x in (tokens, positions, targets))
    return PackedBatch(tokens_T, positions_T, targets_T, tuple(cu_seqlens), cache, document_ids=tuple(document_ids))


def pack_marked(documents: Sequence[Sequence[int]], marks: Sequence[Marks]) -> PackedBatch:
    """Pack documents of which something else is predicted than their next tokens.

    Args:
        documents: token ids of each.
        marks: targets of each.
    """
    lengths = [len(ids) for ids in documents]
    cu_seqlens = tuple(accumulate(lengths, initial=0))
    types_T = torch.zeros(cu_seqlens[-1], dtype=torch.int64)
    targets_T = torch.full_like(types_T, NO_TARGET)
    for start, end, mark in zip(cu_seqlens, cu_seqlens[1:], marks, strict=False):
        for border in mark.borders:
            types_T[start + border : end] ^= 1
        if mark.marks:
            targets_T[start + torch.tensor(mark.marks)] = torch.tensor(mark.targets)
        else:
            targets_T[start:end] = 0
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
