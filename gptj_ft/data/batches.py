"""Select the rows of a step and pack them; a step is addressed by its number alone, nothing is replayed."""

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
Slice = tuple[int, int, int]  # a document, and which of its tokens: the first, and the one after the last


class Document(NamedTuple):
    """A document: attention stays inside it.

    Attributes:
        ids: its tokens.
        prompt_length: tokens at its start that are not trained on.
        masked_spans: further masked spans, (start, end) pairs in one flat list.
        window: most inputs, see `num_inputs`.
        marks: targets other than the next tokens; default: the next tokens.
    """

    ids: Sequence[int]
    prompt_length: int = 0
    masked_spans: Sequence[int] = ()
    window: int | None = None
    marks: Marks | None = None

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads."""
        return num_inputs(len(self.ids), self.window)


@dataclass(frozen=True)
class Rows:
    """The training set: documents, or windows filled with them.

    Attributes:
        documents: token ids of each; of a table, read from its memory-mapped file when asked for.
        prompt_lengths: tokens at each document's start that are not trained on.
        masked_spans: further masked spans of each document, (start, end) pairs in one flat list; empty: there are none.
        windows: pieces of documents that make each row; ``None``: a row is one document.
        known_lengths: tokens of each document, if they have been counted.
        is_joined: whether a window is one document, so that attention goes across its pieces.
        most_inputs: most inputs of a document, see `num_inputs`; ``None``: no limit.
        marks: targets of each document other than its next tokens; ``None``: the next tokens.
    """

    documents: Sequence[Sequence[int]]
    prompt_lengths: Sequence[int]
    masked_spans: Sequence[Sequence[int]] = ()
    windows: Sequence[Sequence[Slice]] | None = None
    known_lengths: Sequence[int] | None = None
    is_joined: bool = False
    most_inputs: int | None = None
    marks: Sequence[Marks] | None = None

    @classmethod
    def of(cls, rows: TokenTable | None, packing: Packing = "off", length: int | None = None) -> Rows:
        """Return the rows of a table; none of ``None``.

        Args:
            rows: prepared ones.
            packing: ``apart`` or ``joined`` fills windows with documents that are trained on as a whole.
            length: tokens of a window; most inputs of a document.
        """
        if rows is None:
            return cls([], [])
        if any(rows["targets"]):
            from gptj_ft.models.batch import Marks

            columns = (list(rows[name]) for name in ("borders", "marks", "targets", "values"))
            marks = [Marks(*row) for row in zip(*columns, strict=True)]
            lengths = rows.lengths().tolist()
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
        """Tokens of each row that are computed: its inputs."""
        if self.windows is not None:
            most = self.most_inputs
            return [sum(num_inputs(end - start, most) for _, start, end in window) for window in self.windows]
        return [num_inputs(length, self.most_inputs) for length in self._tokens]

    @cached_property
    def _tokens(self) -> Sequence[int]:
        """Tokens of each document."""
        return [len(ids) for ids in self.documents] if self.known_lengths is None else self.known_lengths

    @property
    def num_targets(self) -> int:
        """Tokens that are trained on, of all rows."""
        return sum(self.targets)

    @cached_property
    def targets(self) -> list[int]:
        """Tokens of each row that are trained on."""
        if self.windows is not None:
            tokens = [sum(end - start for _, start, end in window) for window in self.windows]
            firsts = [1 if self.is_joined else len(window) for window in self.windows]
            return [total - first for total, first in zip(tokens, firsts, strict=True)]
        if self.marks is not None:
            return [len(mark.marks) or tokens for mark, tokens in zip(self.marks, self._tokens, strict=True)]
        masked_spans = self.masked_spans or [()] * len(self._tokens)
        return list(map(num_targets, self._tokens, self.prompt_lengths, masked_spans))

    def row(self, index: int) -> list[Document]:
        """Return the documents of a row: one, if rows are not packed into windows."""
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
        """Return some rows as micro-batches; see `micro_batches`.

        Args:
            rows: numbers of the rows.
            budget_tokens: tokens computed at once.
            seed: number of a document among those of the rows -> its seed for dropout; ``None``: nothing is dropped.
        """
        documents = [document for row in rows for document in self.row(row)]
        ids, prompts, masked_spans, _, marks = zip(*documents, strict=True) if documents else ((), (), (), (), ())
        seeds = None if seed is None else [seed(number) for number in range(len(documents))]
        given = None if self.marks is None else marks
        return micro_batches(ids, prompts, budget_tokens, masked_spans, self.most_inputs, given, seeds)


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Count the optimizer steps of an epoch; the last may take fewer rows than the others."""
    return -(-num_rows // batch_size)


def rows_of_step(step: int, num_rows: int, batch_size: int, seed: int) -> list[int]:
    """Select the rows of one optimizer step.

    Each epoch takes every row once, in an order that depends on (seed, epoch) alone; no step straddles two epochs.

    Args:
        step: number of the step, from 0.
        num_rows: rows of the data set, at least 1.
        batch_size: rows per step, at least 1.
        seed: the recipe's.
    """
    assert step >= 0
    assert num_rows > 0
    assert batch_size > 0
    epoch, index = divmod(step, steps_per_epoch(num_rows, batch_size))
    order = _order_of_epoch(num_rows, seed, epoch)[index * batch_size : (index + 1) * batch_size]
    return [int(row) for row in order]


@lru_cache(maxsize=2)
def _order_of_epoch(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # numpy may change Generator.permutation between releases, and a run resumed after an upgrade must see the same
    # rows; it guarantees the raw stream of a bit generator (NEP 19).
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
    """Pack documents into micro-batches of at most ``budget_tokens`` tokens by first fit decreasing; no padding.

    The longest go first, each into the first micro-batch with room (first fit decreasing, within 11/9 of the fewest:
    Johnson, "Near-optimal bin packing algorithms", 1973). A document above the budget has one to itself. Documents of
    a micro-batch, and micro-batches by their first one, are in the order given.

    Args:
        documents: token ids of each, of one optimizer step.
        prompt_lengths: tokens at each document's start that are not trained on.
        budget_tokens: tokens computed at once.
        masked_spans: further masked spans of each, (start, end) pairs in one flat list; default: none.
        window: most inputs of a document, see `num_inputs`.
        marks: targets of each other than its next tokens; default: the next tokens.
        seeds: seed of each document's dropout; ``None``: nothing is dropped.
    """
    from gptj_ft.models.batch import pack, pack_marked

    gaps = masked_spans or [()] * len(documents)
    inputs = [len(ids) if marks is not None else num_inputs(len(ids), window) for ids in documents]
    batches = []
    for group in first_fit(inputs, budget_tokens):
        chosen = [documents[i] for i in group]
        if marks is not None:
            batch = pack_marked(chosen, [marks[i] for i in group])
        else:
            whole = pack(chosen, [prompt_lengths[i] for i in group], masked_spans=[gaps[i] for i in group])
            batch = whole.up_to([inputs[i] for i in group])
        batches.append(batch if seeds is None else replace(batch, seeds=tuple(seeds[i] for i in group)))
    return batches


def first_fit(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Group documents into micro-batches by their lengths; see `micro_batches`."""
    groups: list[list[int]] = []
    room: list[int] = []
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
    """Fill windows with documents, end to end; the last may be short.

    What does not fit goes on in the next window, from the token that the piece ended with, so that every token but a
    document's first is a target once.

    Args:
        lengths: tokens of each document; one of a single token has no target, and no place.
        length: tokens of a window, at least 2. A document of one more fills a window that is empty: see `num_inputs`.
    """
    windows: list[list[Slice]] = [[]]
    room = length
    for document, tokens in enumerate(lengths):
        start = 0
        while tokens - start > 1:
            if room < 2:  # one token alone has no target
                windows.append([])
                room = length
            fits = room == length and num_inputs(tokens - start, length) == length
            end = tokens if fits else min(start + room, tokens)
            windows[-1].append((document, start, end))
            room -= end - start
            start = end if end == tokens else end - 1
    return [window for window in windows if window]


def windows_joined(lengths: Sequence[int], continues: Sequence[bool], length: int) -> list[list[Slice]]:
    """Fill windows with one stream of tokens, each from the token that the last one ended with: the last is short.

    Args:
        lengths: tokens of each document.
        continues: whether a document begins with the token that the one before ends with, which is taken once.
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
                window, room = [(document, end - 1, end)], length - 1
    return windows if sum(end - start for _, start, end in window) < 2 else [*windows, window]
