"""Select the rows of a step and pack them into micro-batches.

The step number, the seed and the epoch determine the rows: no generator state is stored, nothing is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gptj_ft.data.loss_mask import num_inputs, num_targets
from gptj_ft.data.table import TokenTable

if TYPE_CHECKING:
    from gptj_ft.models.batch import Marks, PackedBatch

Packing = Literal["off", "apart", "joined"]
Slice = tuple[int, int, int]  # document, first token, end


class Document(NamedTuple):
    """A document; attention does not leave it."""

    ids: Sequence[int]
    prompt_length: int = 0  # untrained tokens at the start
    masked_spans: Sequence[int] = ()  # further untrained spans, (start, end) pairs in one flat list
    window: int | None = None  # most inputs, see `num_inputs`
    marks: Marks | None = None  # targets of tasks with labels; None: the next tokens

    @property
    def num_inputs(self) -> int:
        """Number of tokens that the model reads."""
        return num_inputs(len(self.ids), self.window)


@dataclass(frozen=True)
class Rows:
    """The training set: documents, or windows packed with them."""

    documents: Sequence[Sequence[int]]  # token ids of each; a table reads them from its file on access
    prompt_lengths: Sequence[int]  # untrained tokens at the start of each document
    masked_spans: Sequence[Sequence[int]] = ()  # further untrained spans of each document; empty: none
    windows: Sequence[Sequence[Slice]] | None = None  # slices that make up each row; None: a row is one document
    known_lengths: Sequence[int] | None = None  # tokens of each document, if counted
    is_joined: bool = False  # whether a window is one document, with attention across its slices
    most_inputs: int | None = None  # most inputs of a document, see `num_inputs`
    marks: Sequence[Marks] | None = None  # targets of tasks with labels; None: the next tokens

    @classmethod
    def of(cls, rows: TokenTable | None, packing: Packing = "off", length: int | None = None) -> Rows:
        """Return the rows of a table; none for ``None``.

        Args:
            packing: ``apart`` or ``joined`` packs windows, provided that all tokens of all documents are targets.
            length: tokens of a window; most inputs of a document.
        """
        if rows is None:
            return cls([], [])
        if any(rows["targets"]):
            from gptj_ft.models.batch import Marks

            columns = (list(rows[name]) for name in ("borders", "marks", "targets", "values"))
            marks = [Marks(*row) for row in zip(*columns, strict=True)]
            lengths = rows.lengths().tolist()
            # A prompt as long as its document: no next token is a target.
            return cls(rows["input_ids"], lengths, (), None, lengths, marks=marks)
        prompts = list(rows["prompt_length"])
        masked_spans = list(rows["untrained"])
        lengths = rows.lengths().tolist()
        plain = cls(rows["input_ids"], prompts, masked_spans if any(masked_spans) else [], None, lengths, False, length)
        if packing == "off" or any(prompts) or any(masked_spans):
            return plain
        assert length is not None, "packing fills windows of some length"
        if packing == "joined":
            windows = windows_joined(lengths, rows["continues"], length)
        else:
            windows = windows_apart(lengths, length)
        return cls(plain.documents, prompts, (), windows, lengths, packing == "joined", length)

    def __len__(self) -> int:
        return len(self.prompt_lengths if self.windows is None else self.windows)

    @cached_property
    def lengths(self) -> list[int]:
        """Number of inputs of each row."""
        if self.windows is not None:
            most = self.most_inputs
            return [sum(num_inputs(end - start, most) for _, start, end in window) for window in self.windows]
        return [num_inputs(length, self.most_inputs) for length in self._tokens]

    @cached_property
    def _tokens(self) -> Sequence[int]:
        return [len(ids) for ids in self.documents] if self.known_lengths is None else self.known_lengths

    @property
    def num_targets(self) -> int:
        """Number of targets of all rows."""
        return sum(self.targets)

    @cached_property
    def targets(self) -> list[int]:
        """Number of targets of each row."""
        if self.windows is not None:
            tokens = [sum(end - start for _, start, end in window) for window in self.windows]
            # Nothing predicts the first token of a slice, or of a joined window.
            firsts = [1 if self.is_joined else len(window) for window in self.windows]
            return [total - first for total, first in zip(tokens, firsts, strict=True)]
        if self.marks is not None:
            # Without marks the head reads every token.
            return [len(mark.marks) or tokens for mark, tokens in zip(self.marks, self._tokens, strict=True)]
        masked_spans = self.masked_spans or [()] * len(self._tokens)
        return list(map(num_targets, self._tokens, self.prompt_lengths, masked_spans))

    def row(self, index: int) -> list[Document]:
        """Return the documents of a row: one, unless rows are packed windows."""
        if self.windows is None:
            masked_spans = self.masked_spans[index] if self.masked_spans else ()
            marks = self.marks[index] if self.marks is not None else None
            return [Document(self.documents[index], self.prompt_lengths[index], masked_spans, self.most_inputs, marks)]
        pieces = [self.documents[document][start:end] for document, start, end in self.windows[index]]
        if self.is_joined:
            pieces = [[token for piece in pieces for token in piece]]
        return [Document(piece, window=self.most_inputs) for piece in pieces]

    def prompt(self, index: int) -> Sequence[int]:
        """Return the part of a row before its last span of targets."""
        ids, masked_spans = self.documents[index], self.masked_spans[index] if self.masked_spans else ()
        return ids[: masked_spans[-1] if masked_spans else self.prompt_lengths[index]]

    def batches(
        self, rows: Iterable[int], budget_tokens: int, seed: Callable[[int], int] | None = None
    ) -> list[PackedBatch]:
        """Pack rows into micro-batches; see `micro_batches`.

        Args:
            rows: row numbers.
            budget_tokens: most tokens of a micro-batch.
            seed: maps a document's number within ``rows`` to its dropout seed; ``None``: no dropout.
        """
        documents = [document for row in rows for document in self.row(row)]
        ids, prompts, masked_spans, _, marks = zip(*documents, strict=True) if documents else ((), (), (), (), ())
        seeds = None if seed is None else [seed(number) for number in range(len(documents))]
        own_marks = None if self.marks is None else marks
        return micro_batches(ids, prompts, budget_tokens, masked_spans, self.most_inputs, own_marks, seeds)


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Count the optimizer steps of an epoch; the last step may have fewer rows."""
    return -(-num_rows // batch_size)


def rows_of_step(step: int, num_rows: int, batch_size: int, seed: int) -> list[int]:
    """Select the rows of an optimizer step.

    Each epoch takes every row once, in an order that depends only on (seed, epoch); no step crosses an epoch's end.

    Args:
        step: step number, from 0.
        num_rows: rows of the data set.
        batch_size: rows per step.
    """
    assert step >= 0
    assert num_rows > 0
    assert batch_size > 0
    epoch, index = divmod(step, steps_per_epoch(num_rows, batch_size))
    order = _order_of_epoch(num_rows, seed, epoch)[index * batch_size : (index + 1) * batch_size]
    return [int(row) for row in order]


@lru_cache(maxsize=2)
def _order_of_epoch(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # A run resumed after a numpy upgrade must see the same rows. numpy guarantees the raw stream of a bit generator
    # (NEP 19), but not Generator.permutation.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


def micro_batches(
    documents: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    budget_tokens: int,
    masked_spans: Sequence[Sequence[int]] | None = None,
    window: int | None = None,
    marks: Sequence[Marks] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[PackedBatch]:
    """Pack documents into micro-batches of at most ``budget_tokens`` tokens, without padding.

    First fit decreasing: the longest documents go first, each into the first micro-batch with room (at most 11/9 of the
    optimum: Johnson, "Near-optimal bin packing algorithms", 1973). A document above the budget gets a micro-batch of
    its own. Documents within a micro-batch, and micro-batches by their first document, keep the input order.

    Args:
        documents: token ids of each document of an optimizer step.
        prompt_lengths: untrained tokens at the start of each.
        masked_spans: further untrained spans of each, (start, end) pairs in one flat list.
        window: most inputs of a document, see `num_inputs`.
        marks: targets of each, for tasks with labels.
        seeds: dropout seed of each; ``None``: no dropout.
    """
    from gptj_ft.models.batch import pack, pack_marked

    masked_spans = masked_spans or [()] * len(documents)
    inputs = [len(ids) if marks is not None else num_inputs(len(ids), window) for ids in documents]
    batches = []
    for group in first_fit(inputs, budget_tokens):
        chosen = [documents[i] for i in group]
        if marks is not None:
            batch = pack_marked(chosen, [marks[i] for i in group])
        else:
            spans = [masked_spans[i] for i in group]
            whole = pack(chosen, [prompt_lengths[i] for i in group], masked_spans=spans)
            batch = whole.truncated([inputs[i] for i in group])
        batches.append(batch if seeds is None else replace(batch, seeds=tuple(seeds[i] for i in group)))
    return batches


def first_fit(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Group documents into micro-batches by their lengths; see `micro_batches`."""
    groups: list[list[int]] = []
    room: list[int] = []
    # Ties go by index, so that the grouping is deterministic.
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        group = next((group for group, tokens in enumerate(room) if tokens >= length), len(groups))
        if group == len(groups):
            groups.append([])
            room.append(budget_tokens)
        groups[group].append(index)
        room[group] -= length
    return sorted(map(sorted, groups))


def windows_apart(lengths: Sequence[int], length: int) -> list[list[Slice]]:
    """Pack documents into windows, end to end; the last window may be short.

    A document that does not fit continues in the next window, starting with the last token of its previous slice, so
    that every token except a document's first is a target once.

    Args:
        lengths: tokens of each document. Documents of a single token have no target and are left out.
        length: tokens of a window, at least 2. A document of ``length`` + 1 tokens fits an empty window, see
            `num_inputs`.
    """
    windows: list[list[Slice]] = [[]]
    room = length
    for document, tokens in enumerate(lengths):
        start = 0
        while tokens - start > 1:
            if room < 2:  # a slice of one token has no target
                windows.append([])
                room = length
            fits = room == length and num_inputs(tokens - start, length) == length
            end = tokens if fits else min(start + room, tokens)
            windows[-1].append((document, start, end))
            room -= end - start
            # Repeat the slice's last token in the next window, where it predicts the token after it.
            start = end if end == tokens else end - 1
    return [window for window in windows if window]


def windows_joined(lengths: Sequence[int], continues: Sequence[bool], length: int) -> list[list[Slice]]:
    """Pack all documents as one stream of tokens; each window repeats the last token of the window before.

    Args:
        lengths: tokens of each document.
        continues: whether a document repeats the last token of the document before; the repetition is dropped.
        length: tokens of a window, at least 2.
    """
    windows: list[list[Slice]] = []
    window: list[Slice] = []
    room = length
    for document, (tokens, is_more) in enumerate(zip(lengths, continues, strict=True)):
        start = int(is_more)
        while start < tokens:
            end = min(start + room, tokens)
            window.append((document, start, end))
            room -= end - start
            start = end
            if not room:
                windows.append(window)
                # The next window starts with this window's last token, which was a target but not yet an input.
                window, room = [(document, end - 1, end)], length - 1
    return windows if sum(end - start for _, start, end in window) < 2 else [*windows, window]
