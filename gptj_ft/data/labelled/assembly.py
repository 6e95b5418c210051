"""Put special tokens around texts, and cut what is too long as transformers' tokenizers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gptj_ft.data.tokenization import Frame
from gptj_ft.errors import RowSkipped, UsageError

JOINT = "\n"  # between two texts, where a tokenizer has nothing to stand there


class EncodedDocument(NamedTuple):
    """A text, a pair or a window as the model reads it; see the columns of `gptj_ft.data.table`.

    Attributes:
        ids: tokens.
        borders: tokens at which the token type flips.
        marks: tokens that the head reads; none: all.
        targets: class ids of the marks, or the first and the last token of a span.
        values: 0 or 1 for each label, or a number.
        texts: words or texts that predictions are made of.
        offsets: characters of each token in the text, first and end.
    """

    ids: Sequence[int]
    borders: Sequence[int] = ()
    marks: Sequence[int] = ()
    targets: Sequence[int] = (0,)
    values: Sequence[float] = ()
    texts: Sequence[str] = ()
    offsets: Sequence[int] = ()

    @property
    def num_targets(self) -> int:
        """What is trained on: the marks, or the window."""
        return len(self.marks) or int(bool(self.targets))


class LabelledRow(NamedTuple):
    """What becomes of a row.

    Attributes:
        documents: the row as the model reads it; of a row that is split, its windows in order.
        group: hash of what must not be divided between training and validation.
        label: names of its labels; empty where rows are not told apart by them.
        references: right answers, for scoring.
        tokens_cut: tokens lost by truncation.
    """

    documents: Sequence[EncodedDocument]
    group: int
    label: str = ""
    references: Sequence[str] = ()
    tokens_cut: int = 0


def framed(frame: Frame, first: Sequence[int], second: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Return the tokens of a text or a pair with those that frame it, and the borders of its token types."""
    ids = [*frame.first, *first]
    if second is None:
        return [*ids, *frame.last], []
    ids += frame.middle
    borders = [len(ids)] if frame.has_types else []
    return [*ids, *second, *frame.last], borders


def frame_tokens(frame: Frame, is_pair: bool) -> int:
    """Count the tokens that frame a text or a pair."""
    return len(frame.first) + len(frame.last) + (len(frame.middle) if is_pair else 0)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the number of tokens to keep of each of two texts: the longer one is cut, or both to the half.

    As the `tokenizers` library has it; Google's script takes single tokens from the longer text, and from the second
    if they are equal, which may give the first text a token more.

    >>> longest_first(9, 3, 8), longest_first(3, 9, 8), longest_first(5, 5, 7), longest_first(6, 5, 7)
    ((5, 3), (3, 5), (3, 4), (4, 3))
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    if short + max(short, room - short) <= room:
        kept = short, room - short
    else:
        kept = room // 2, room - room // 2
    return kept if first <= second else kept[::-1]


def kept_of(ids: Sequence[int], keep: int, cut: str) -> Sequence[int]:
    """Return so many tokens of a text.

    Args:
        ids: its tokens.
        keep: number of tokens to keep.
        cut: part that is left out: ``end``, ``start`` or ``middle``.

    >>> [kept_of([1, 2, 3, 4], 3, cut) for cut in ("end", "start", "middle")]
    [[1, 2, 3], [2, 3, 4], [1, 2, 4]]
    """
    lost = len(ids) - keep
    if lost <= 0:
        return ids
    if cut == "start":
        return ids[lost:]
    head = keep if cut == "end" else -(-keep // 2)
    return [*ids[:head], *ids[head + lost :]]


def windows_of(count: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return windows over a text: (first, end) tokens of each, which share ``stride`` tokens with the next.

    Args:
        count: tokens of the text.
        room: most tokens of a window.
        stride: tokens shared.

    Raises:
        RowSkipped: there is no room for any window.

    >>> windows_of(10, 5, 2), windows_of(8, 5, 2), windows_of(5, 5, 2)
    ([(0, 5), (3, 8), (6, 10)], [(0, 5), (3, 8)], [(0, 5)])
    """
    if count <= room:
        return [(0, count)]
    if room <= stride:
        raise RowSkipped(f"too long: besides its other text there is no room for windows that share {stride} tokens")
    starts = range(0, count - stride, room - stride)
    return [(start, min(start + room, count)) for start in starts]


def check_stride(stride: int, max_length: int, frame: Frame, is_pair: bool) -> None:
    """Check that windows can move on.

    Raises:
        UsageError: they would share all of their tokens.
    """
    room = max_length - frame_tokens(frame, is_pair)
    if stride >= room:
        raise UsageError(
            f"stride: windows that share {stride} tokens cannot be moved where max_length leaves room for {room}; "
            "lower stride or raise max_length"
        )
