"""Oracle labels against PreSumm's rules, restated."""

from __future__ import annotations

import json
import re
import time

from hypothesis import given
from hypothesis import strategies as st
from support.real_data import real_data

from gptj_ft.data.labelled.oracle import MAX_SENTENCES, oracle_sentences


def rouge_sum(chosen: list[str], summary: str) -> float:
    """ROUGE-1 F + ROUGE-2 F of some sentences, with n-grams as sets."""
    total = 0.0
    for size in (1, 2):

        def grams(text: str, size: int = size) -> set[str]:
            words = re.sub("[^A-Za-z0-9 ]", "", text).split()
            return {" ".join(words[at : at + size]) for at in range(len(words) - size + 1)}

        found, expected = set().union(*map(grams, chosen)), grams(summary)
        precision = len(found & expected) / len(found) if found else 0.0
        recall = len(found & expected) / len(expected) if expected else 0.0
        total += 2 * precision * recall / (precision + recall + 1e-8)
    return total


def greedy(sentences: list[str], summary: str, most: int) -> list[int]:
    """Every candidate's score from scratch in every round."""
    chosen: list[int] = []
    for _ in range(most):
        now = rouge_sum([sentences[number] for number in chosen], summary)
        totals = {
            number: rouge_sum([sentences[each] for each in [*chosen, number]], summary)
            for number in range(len(sentences))
            if number not in chosen
        }
        if not totals or max(totals.values()) <= now:
            break
        chosen.append(max(totals, key=totals.__getitem__))
    return sorted(chosen)


WORDS = ["cat", "Cat", "sat", "mat", "don't", "-", "3.5", "35", "on", "the"]
TEXT = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)


@given(st.lists(TEXT, max_size=8), TEXT, st.integers(1, 4))
def test_oracle_is_the_greedy_choice_worked_out_from_scratch(sentences: list[str], summary: str, most: int) -> None:
    assert oracle_sentences(sentences, summary, most) == greedy(sentences, summary, most)


def test_oracle_takes_one_sentence_where_a_second_lowers_the_score() -> None:
    # The first: 2 of 2 words, 1 of 1 bigram: 2. Another one adds words that are not the summary's.
    assert oracle_sentences(["a dog barks", "the cat", "the cat"], "the cat") == [1]


def test_oracle_is_empty_where_nothing_is_in_common_and_says_at_most_so_many() -> None:
    assert oracle_sentences(["a b", ""], "c d") == oracle_sentences([], "c") == oracle_sentences(["a"], "") == []
    assert oracle_sentences(["a", "b", "c", "d"], "d c b a", most=2) == [0, 1]


def test_only_letters_digits_and_blanks_make_words_and_case_counts() -> None:
    assert oracle_sentences(["it s", "its"], "it's") == [1]
    assert oracle_sentences(["The", "the"], "the") == [1]
    assert oracle_sentences(["x", "one\ntwo"], "one\ttwo") == [1], "white space of any kind separates"


def test_bigrams_reach_over_the_sentences_of_the_summary_but_not_over_those_chosen() -> None:
    assert oracle_sentences(["b", "a", "b c"], ["a b", "c d"], most=1) == [2]
    # The unigrams of both are the summary's; only the second has the bigram between its sentences.
    assert oracle_sentences(["c b", "b c"], ["a b", "c d"], most=1) == [1]


def test_sentences_beyond_the_hundredth_are_no_candidates() -> None:
    sentences = ["x"] * MAX_SENTENCES + ["a b"]
    assert oracle_sentences(sentences, "a b") == []
    assert oracle_sentences(sentences[1:], "a b") == [MAX_SENTENCES - 1]


def test_oracle_of_the_cnn_dailymail_sample_is_that_of_presumm() -> None:
    stories = json.loads(real_data("summarization/cnndm-sample/cnndm_sample.train.0.json").read_text(encoding="utf-8"))
    documents = [[" ".join(words) for words in story["src"]] for story in stories]
    summaries = [[" ".join(words) for words in story["tgt"]] for story in stories]
    assert [len(document) for document in documents] == [71, 59, 55, 40, 11, 31]
    start = time.perf_counter()
    found = [oracle_sentences(*pair) for pair in zip(documents, summaries, strict=True)]
    assert (time.perf_counter() - start) / len(found) < 0.1
    assert found == [[1, 15, 26], [7, 20, 25], [9, 14, 22], [3, 18], [1, 2, 3], [10, 14, 19]]
    assert found == [oracle_sentences(*pair) for pair in zip(documents, map(" ".join, summaries), strict=True)]


def test_oracle_of_a_long_article_takes_milliseconds() -> None:
    sentences = [" ".join(f"w{(row * 7 + place * 3) % 500}" for place in range(25)) for row in range(70)]
    summary = " ".join(f"w{place}" for place in range(60))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        oracle_sentences(sentences, summary)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05  # about 0.002 on a quiet machine
