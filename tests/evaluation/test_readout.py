"""Which sentences make a summary."""

from __future__ import annotations

import numpy as np

from gptj_ft.evaluation.readout import select_sentences


def test_sentences_are_chosen_by_score_and_the_earlier_of_equals() -> None:
    texts = ["a", "b", "c", "d", "e"]
    assert select_sentences([0.1, 0.7, 0.9, 0.7, 0.7], texts, 3, block_trigrams=True) == [2, 1, 3]
    many = select_sentences([0.1, 0.5] * 50, ["a"] * 100, 100, block_trigrams=False)
    assert many == [*range(1, 100, 2), *range(0, 100, 2)]
    assert select_sentences([0.1, 0.2], ["a", "b"], 3, block_trigrams=True) == [1, 0]
    assert select_sentences(np.array([], np.float32), [], 3, block_trigrams=False) == []


def test_a_sentence_that_repeats_three_words_in_a_row_is_skipped_for_the_next() -> None:
    texts = ["the cat sat on mats", "so The cat sat on", "so the cat sat .", "the cat , sat on"]
    scores = [0.9, 0.8, 0.7, 0.6]
    # The second shares "cat sat on" (case counts: not "the cat sat"), the third "the cat sat", the fourth nothing.
    assert select_sentences(scores, texts, 3, block_trigrams=True) == [0, 3]
    assert select_sentences(scores, texts, 3, block_trigrams=False) == [0, 1, 2]


def test_a_sentence_is_compared_with_all_that_are_chosen() -> None:
    assert select_sentences([3.0, 2.0, 1.0], ["a b c", "d e f", "a b c d"], 3, block_trigrams=True) == [0, 1]


def test_a_skipped_sentence_blocks_no_other() -> None:
    texts = ["a b c", "a b c d e f", "d e f"]
    assert select_sentences([3.0, 2.0, 1.0], texts, 2, block_trigrams=True) == [0, 2]


def test_sentences_of_fewer_than_three_words_are_never_blocked_and_a_repeat_within_one_is_none() -> None:
    assert select_sentences([4.0, 3.0, 2.0, 1.0], ["a b", "a b", "x x x x", "a b"], 4, block_trigrams=True) == [
        0,
        1,
        2,
        3,
    ]
