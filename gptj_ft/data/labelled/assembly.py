"""Put special tokens around texts, and truncate them like the tokenizers of `transformers`."""

from __future__ import annotations

from collections.abc import Sequence

from gptj_ft.data.tokenization import Frame
from gptj_ft.errors import RowSkipped, UsageError

JOINT = "\n"  # between two texts, if the tokenizer has no separator


def add_special_tokens(frame: Frame, first: Sequence[int], second: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Add special tokens to a text or a pair; return the token ids and the borders of token types."""
    ids = [*frame.first, *first]
    if second is None:
        return [*ids, *frame.last], []
    ids += frame.middle
    borders = [len(ids)] if frame.has_types else []
    return [*ids, *second, *frame.last], borders


def num_special_tokens(frame: Frame, is_pair: bool) -> int:
    """Count the special tokens around a text or a pair."""
    return len(frame.first) + len(frame.last) + (len(frame.middle) if is_pair else 0)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the number of tokens to keep of each text of a pair: the longer one is cut, or both to one half.

    This is the rule of the `tokenizers` library. Google's script removes single tokens from the longer text, or from
    the second of equally long ones, which may keep one token more of the first.

    >>> longest_first(9, 3, 8), longest_first(3, 9, 8), longest_first(5, 5, 7), longest_first(6, 5, 7)
    ((5, 3), (3, 5), (3, 4), (4, 3))
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    # True if the shorter text takes at most half of the room: then it is kept whole.
    if short + max(short, room - short) <= room:
        kept = short, room - short
    else:
        kept = room // 2, room - room // 2
    return kept if first <= second else kept[::-1]


def truncate(ids: Sequence[int], keep: int, cut: str) -> Sequence[int]:
    """Keep ``keep`` tokens of a text; ``cut`` tells which part to remove: ``end``, ``start`` or ``middle``.

    >>> [truncate([1, 2, 3, 4], 3, cut) for cut in ("end", "start", "middle")]
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
    """Return windows over a text as (first, end) tokens; consecutive ones share ``stride`` tokens.

    Args:
        count: tokens of the text.
        room: most tokens of a window.

    Raises:
        RowSkipped: there is no room for windows.

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
    """Check that windows advance."""
    room = max_length - num_special_tokens(frame, is_pair)
    if stride >= room:
        raise UsageError(
            f"stride: windows of at most {room} tokens (by max_length) cannot share {stride} tokens with the next; "
            "lower stride or raise max_length"
        )
