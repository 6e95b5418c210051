"""Extractive summaries: sentences chosen by their scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def select_sentences(
    scores: Sequence[float], sentences: Sequence[str], num_sentences: int, block_trigrams: bool
) -> list[int]:
    """Choose the sentences of a summary, best first; of equal scores the earlier one.

    Args:
        scores: score of each sentence.
        sentences: their texts.
        num_sentences: largest number of sentences; there are fewer if the document has no more, or none that is free of
            repetition.
        block_trigrams: whether to skip a sentence that has three words in a row in common with a chosen one. Words are
            what stands between white space (Paulus et al. 2017, https://arxiv.org/abs/1705.04304, section 2.5).

    Returns:
        Numbers of the sentences in the order of their scores, which is their order in the summary.
    """
    assert len(scores) == len(sentences), f"{len(scores)} scores, {len(sentences)} sentences"
    chosen: list[int] = []
    said: set[tuple[str, ...]] = set()
    for number in np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable"):
        if len(chosen) == num_sentences:
            break
        if block_trigrams:
            words = sentences[number].split()
            trigrams = set(zip(words, words[1:], words[2:], strict=False))
            if trigrams & said:
                continue
            said |= trigrams
        chosen.append(int(number))
    return chosen
