"""Which tokens of a document are targets: those after its prompt, but for the stretches that are not trained on."""

from __future__ import annotations

from collections.abc import Sequence


def num_targets(length: int, prompt_length: int, untrained: Sequence[int] = ()) -> int:
    """Return how many tokens of a document are targets.

    Args:
        length: of the document, in tokens.
        prompt_length: tokens at its start that are not trained on; the first never is, since nothing predicts it.
        untrained: what else is not, as (start, end) pairs in one flat list, all of it after the prompt.
    """
    return length - max(prompt_length, 1) - sum(untrained[1::2]) + sum(untrained[::2])
