"""Oracle labels of extractive summaries: the sentences that together are most like the summary.

Greedy, as in PreSumm (``greedy_selection``; Liu and Lapata 2019, https://arxiv.org/abs/1908.08345, section 3.1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

MAX_SENTENCES = 100
"""sentences that are looked at: PreSumm's default"""

_WHITE = str.maketrans("\t\n\v\f\r", "     ")
_FOREIGN = re.compile("[^a-zA-Z0-9 ]")


def oracle_sentences(sentences: Sequence[str], summary: str | Sequence[str], most: int = 3) -> list[int]:
    """Choose the sentences that raise ROUGE-1 F + ROUGE-2 F most, one after another, until none does.

    N-grams are sets, without stemming. Everything but ASCII letters, digits and blanks is deleted before texts are
    split into words, so "don't" is one word. Case counts: PreSumm's corpora are in lower case. Bigrams of the chosen
    sentences are those within each; of the summary's sentences, those of all in one. Of equally good sentences the
    first is chosen.

    Args:
        sentences: sentences of the document; the first `MAX_SENTENCES` are candidates.
        summary: its summary, or the sentences of that.
        most: largest number of sentences; default 3.

    Returns:
        Numbers of the sentences, ascending; empty if none has a word of the summary.
    """
    goal = _ngrams(_words(summary if isinstance(summary, str) else " ".join(summary)))
    candidates = [_ngrams(_words(sentence)) for sentence in sentences[:MAX_SENTENCES]]
    shared = [[each & of_goal for each, of_goal in zip(grams, goal, strict=True)] for grams in candidates]
    chosen: list[int] = []
    written, right = _ngrams([]), _ngrams([])  # of the chosen sentences: all, and those of the summary
    best = 0.0
    while len(chosen) < most:
        pick = None
        for number, (grams, of_goal) in enumerate(zip(candidates, shared, strict=True)):
            if number in chosen:
                continue
            score = sum(
                _f1(
                    len(right[size]) + len(of_goal[size] - right[size]),
                    len(written[size]) + len(grams[size] - written[size]),
                    len(goal[size]),
                )
                for size in range(len(goal))
            )
            if score > best:
                best, pick = score, number
        if pick is None:
            break
        chosen.append(pick)
        for size in range(len(goal)):
            written[size] |= candidates[pick][size]
            right[size] |= shared[pick][size]
    return sorted(chosen)


def _words(text: str) -> list[str]:
    return _FOREIGN.sub("", text.translate(_WHITE)).split()


def _ngrams(words: Sequence[str]) -> list[set[tuple[str, ...]]]:
    """Collect the unigrams and the bigrams."""
    return [{(word,) for word in words}, set(pairwise(words))]


def _f1(both: int, written: int, expected: int) -> float:
    """Compute F1 with PreSumm's 1e-8 in the divisor, which decides between candidates that are nearly as good."""
    precision = both / written if written else 0.0
    recall = both / expected if expected else 0.0
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))
