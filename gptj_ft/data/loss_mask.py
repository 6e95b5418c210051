"""Count inputs and targets of documents, and locate the spans that are trained on.

Targets are the tokens after the prompt, without masked spans. Inputs are all tokens, but for the last one of a document
that is one token longer than the window: it is a target only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any


def span_borders(row: Mapping[str, Any]) -> list[int]:
    """Return the borders of a row's spans: masked, trained, masked, ...; the row's end is last."""
    return [0, row["prompt_length"], *row["untrained"], len(row["input_ids"])]


def spans_of(row: Mapping[str, Any], decode: Callable[[list[int]], str]) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a row's spans, and whether each is trained on."""
    for number, (start, end) in enumerate(pairwise(span_borders(row))):
        yield decode(row["input_ids"][start:end]), number % 2 == 1


def num_inputs(length: int, window: int | None) -> int:
    """Count the tokens of a document that are inputs.

    A window of n positions has n inputs and n targets, the last of which no position reads: it is made of n + 1 tokens.

    Args:
        length: tokens of the document.
        window: most inputs; ``None``: no limit.
    """
    return length - (window is not None and length > window)


def num_targets(length: int, prompt_length: int, masked_spans: Sequence[int] = ()) -> int:
    """Count the tokens of a document that are targets.

    Args:
        length: tokens of the document.
        prompt_length: tokens at its start that are not trained on; the first never is, since nothing predicts it.
        masked_spans: further masked spans, (start, end) pairs in one flat list, all of them after the prompt.
    """
    targets = length - max(prompt_length, 1)
    return targets - sum(masked_spans[1::2]) + sum(masked_spans[::2]) if masked_spans else targets
