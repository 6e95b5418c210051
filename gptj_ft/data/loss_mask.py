"""Count inputs and targets of documents, and locate the trained spans.

Targets are the tokens after the prompt, without masked spans. All tokens are inputs, except the last token of a
document that is one longer than the window: it is only a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any


def span_borders(row: Mapping[str, Any]) -> list[int]:
    """Return the borders of a row's alternating spans (masked, trained, masked, ...), and the row's end."""
    return [0, row["prompt_length"], *row["untrained"], len(row["input_ids"])]


def spans_of(row: Mapping[str, Any], decode: Callable[[list[int]], str]) -> Iterator[tuple[str, bool]]:
    """Yield each span's text, and whether it is trained."""
    for number, (start, end) in enumerate(pairwise(span_borders(row))):
        yield decode(row["input_ids"][start:end]), number % 2 == 1


def num_inputs(length: int, window: int | None) -> int:
    """Count the input tokens of a document.

    A window of n positions has n inputs and n targets, so a document of n + 1 tokens fits: no position reads the last.

    Args:
        length: tokens of the document.
        window: most inputs; ``None``: no limit.
    """
    return length - (window is not None and length > window)


def num_targets(length: int, prompt_length: int, masked_spans: Sequence[int] = ()) -> int:
    """Count the target tokens of a document.

    Args:
        length: tokens of the document.
        prompt_length: untrained tokens at the start. The first token is never a target, since nothing predicts it.
        masked_spans: further untrained spans after the prompt, (start, end) pairs in one flat list.
    """
    targets = length - max(prompt_length, 1)
    return targets - sum(masked_spans[1::2]) + sum(masked_spans[::2]) if masked_spans else targets
