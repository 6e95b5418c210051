"""Choose the sentences of a summary."""

from __future__ import annotations

import numpy as np

from gptj_ft.evaluation.readout import select_sentences


def test_best_sentences_first_then_earlier() -> None:
    texts = ["a", "b", "c", "d", "e"]
    assert select_sentences([0.1, 0.7, 0.9, 0.7, 0.7], texts, 3, block_trigrams=True) == [2, 1, 3]
    many = select_sentences([0.1, 0.5] * 50, ["a"] * 100, 100, block_trigrams=False)
    assert many == [*range(1, 100, 2), *range(0, 100, 2)]
    assert select_sentences([0.1, 0.2], ["a", "b"], 3, block_trigrams=True) == [1, 0]
    assert select_sentences(np.array([], np.float32), [], 3, block_trigrams=False) == []


def test_sentence_with_a_repeated_trigram_is_skipped() -> None:
    texts = ["the cat sat on mats", "so The cat sat on", "so the cat sat .", "the cat , sat on"]
    scores = [0.9, 0.8, 0.7, 0.6]
    # The second shares "cat sat on" (but not "the cat sat": case counts), the third "the cat sat", the fourth none.
    assert select_sentences(scores, texts, 3, block_trigrams=True) == [0, 3]
    assert select_sentences(scores, texts, 3, block_trigrams=False) == [0, 1, 2]


def test_trigrams_of_all_chosen_sentences_count() -> None:
    assert select_sentences([3.0, 2.0, 1.0], ["a b c", "d e f", "a b c d"], 3, block_trigrams=True) == [0, 1]


def test_skipped_sentence_blocks_no_other() -> None:
    texts = ["a b c", "a b c d e f", "d e f"]
    assert select_sentences([3.0, 2.0, 1.0], texts, 2, block_trigrams=True) == [0, 2]


def test_short_sentences_are_never_blocked() -> None:
    assert select_sentences([4.0, 3.0, 2.0, 1.0], ["a b", "a b", "x x x x", "a b"], 4, block_trigrams=True) == [
        0,
        1,
        2,
        3,
    ]
