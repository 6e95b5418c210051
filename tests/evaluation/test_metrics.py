"""Compare scores with hand computations, the rouge-score package, and SQuAD's script and data."""

import json
import math
import os
import re
import string
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from gptj_ft.config.options import Recipe
from gptj_ft.config.presets import load_preset
from gptj_ft.errors import DataError
from gptj_ft.evaluation.metrics import METRICS, Statistic, score, score_names
from gptj_ft.evaluation.metrics.accuracy import MacroF1
from gptj_ft.evaluation.metrics.language_model import RowLoss, language_model
from gptj_ft.evaluation.metrics.rouge import one_sentence_a_line, warning
from gptj_ft.evaluation.metrics.squad import normalize_answer, unanswered
from gptj_ft.evaluation.metrics.statistic import Ratio, estimate_scores, mean, values

Texts, Answers = list[str], list[list[str]]


def scores(metric: str, predictions: Texts, references: Answers) -> dict[str, float]:
    return values(score([metric], predictions, references), len(predictions))


def rows_of(metric: str, predictions: Texts, references: Answers) -> list[dict[str, float]]:
    figures = score([metric], predictions, references)
    return [{name: float(figure.rows_N[row]) for name, figure in figures.items()} for row in range(len(predictions))]


def rouge(predictions: Texts, references: Answers) -> dict[str, float]:
    return scores("rouge", predictions, references)


def squad(predictions: Texts, references: Answers) -> dict[str, float]:
    found = scores("squad", predictions, references)
    return {name: found[name] for name in ("exact_match", "f1")}


def accuracy(predictions: Texts, references: Answers) -> dict[str, float]:
    return scores("accuracy", predictions, references)


def relations(predictions: Texts, references: Answers) -> dict[str, float]:
    return scores("relations", predictions, references)


def test_rouge_matches_hand_computation() -> None:
    # 3 of 3 predicted words, 6 expected: P 1, R 1/2, F 2/3. Bigrams: 2 of 2, 5 expected: F 4/7. Longest common: 3.
    scores = rouge(["the cat sat"], [["the cat sat on the mat"]])
    assert scores["rouge1"] == pytest.approx(100 * 2 / 3)
    assert scores["rouge2"] == pytest.approx(100 * 4 / 7)
    assert scores["rougeL"] == scores["rougeLsum"] == scores["rougeLsum_sentences"] == pytest.approx(100 * 2 / 3)


def test_rouge_stems_words() -> None:
    texts = (["the doctors walked"], [["the doctor walks"]])
    assert rouge(*texts)["rouge1"] == pytest.approx(100)
    unstemmed = values(score(["rouge"], *texts, stemming=False), 1)
    assert unstemmed == pytest.approx({**dict.fromkeys(unstemmed, 100 / 3), "rouge2": 0.0})


def test_rouge_is_a_mean_times_100() -> None:
    assert rouge(["a b", "x"], [["a b"], ["y"]])["rouge1"] == pytest.approx(50)


def test_each_rouge_takes_its_best_reference() -> None:
    references = [["d c b a", "a b x y z w"]]  # the first shares all words, the second one bigram
    scores = rouge(["a b c d"], references)
    assert scores["rouge1"] == pytest.approx(100)
    assert scores["rouge2"] == pytest.approx(100 * 2 * (1 / 3) * (1 / 5) / (1 / 3 + 1 / 5))


def test_rouge_lsum_sentences_splits_at_stops() -> None:
    prediction, reference = "It rains. We stay in!\nWhy? No 3.5 idea.", "We stay in. It rains. No 3.5 idea."
    assert one_sentence_a_line(prediction) == "It rains.\nWe stay in!\nWhy?\nNo 3.5 idea."
    scorer = RougeScorer(["rougeL", "rougeLsum"], use_stemmer=True)
    lines = scorer.score("We stay in.\nIt rains.\nNo 3.5 idea.", "It rains.\nWe stay in!\nWhy?\nNo 3.5 idea.")
    scores = rouge([prediction], [[reference]])
    assert scores["rougeLsum_sentences"] == pytest.approx(100 * lines["rougeLsum"].fmeasure)
    assert scores["rougeLsum_sentences"] > scores["rougeL"] == pytest.approx(100 * lines["rougeL"].fmeasure)


@pytest.mark.parametrize("stemming", [True, False])
def test_rouge_matches_the_package(stemming: bool) -> None:
    rows = [
        ("She left early. He stayed.", ["He stayed, she left.", "She left.\nHe was staying. Early."]),
        ("It rained\nand rains.", ["It rains. It rained."]),
        ("", ["something"]),
        ("numbers 12 34", ["12 34 numbers", "", "the number 34"]),
    ]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=stemming)
    figures = score(["rouge"], [text for text, _ in rows], [targets for _, targets in rows], stemming)
    for row, (prediction, references) in enumerate(rows):
        for name, expected in scorer.score_multi(references, prediction).items():
            assert figures[name].rows_N[row] == pytest.approx(100 * expected.fmeasure, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat, an old-one!", "cat oldone"),
        ("A.", ""),
        ("theatre and another", "theatre and another"),
        ("U.S. $1,000", "us 1000"),
        ("l’été – “the”", "l’été – “ ”"),  # ASCII punctuation only, as in the official script
    ],
)
def test_normalization_follows_squad(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_squad_matches_hand_computation() -> None:
    predictions = ["the Denver Broncos", "in 1999 , 1999", "Paris"]
    references = [["Denver Broncos", "Broncos"], ["1999"], ["London", "Rome"]]
    # Row 2: words in, 1999, 1999 against 1999: 1 in common, P 1/3, R 1, F 1/2.
    assert rows_of("squad", predictions, references) == [
        {"exact_match": 100.0, "f1": 100.0, "strict_match": 0.0},
        {"exact_match": 0.0, "f1": 50.0, "strict_match": 0.0},
        {"exact_match": 0.0, "f1": 0.0, "strict_match": 0.0},
    ]
    assert squad(predictions, references) == {"exact_match": pytest.approx(100 / 3), "f1": pytest.approx(50)}


def test_squad_takes_the_best_reference() -> None:
    assert squad(["new york city"], [["york", "new york", "the New York City!"]]) == {"exact_match": 100.0, "f1": 100.0}


@pytest.mark.parametrize("references", [[], [""], [" "]])
def test_unanswerable_question_expects_an_empty_answer(references: list[str]) -> None:
    assert squad([" The. "], [references]) == {"exact_match": 100.0, "f1": 100.0}
    assert squad(["Paris"], [references]) == {"exact_match": 0.0, "f1": 0.0}


def test_empty_prediction_misses_an_answer() -> None:
    assert squad([""], [["Paris"]]) == {"exact_match": 0.0, "f1": 0.0}


def test_accuracy_matches_hand_computation() -> None:
    # Rows:    cat cat cat cat dog dog bird        Of 7 answers 4 are right.
    # Answers: cat cat cat dog dog cat cow
    # cat:  tp 3, fp 1, fn 1: 6/8.  dog: tp 1, fp 1, fn 1: 2/4.  bird: tp 0: 0.  cow is no label: not averaged.
    answers = ["cat", "cat", "cat", "dog", "dog", "cat", "cow"]
    labels = [["cat"]] * 4 + [["dog"]] * 2 + [["bird"]]
    assert accuracy(answers, labels) == pytest.approx({"accuracy": 400 / 7, "macro_f1": 100 * (3 / 4 + 1 / 2 + 0) / 3})


def test_macro_f1_exposes_constant_answers() -> None:
    # no: tp 9, fp 1, fn 0: 18/19. yes: 0.
    scores = accuracy(["no"] * 10, [["no"]] * 9 + [["yes"]])
    assert scores == pytest.approx({"accuracy": 90, "macro_f1": 100 * (18 / 19) / 2})


def test_labels_ignore_case_and_outer_space() -> None:
    assert accuracy([" Positive\n", "STRASSE"], [["positive"], ["straße"]]) == {"accuracy": 100.0, "macro_f1": 100.0}
    assert accuracy(["positive.", "not  good", ""], [["positive"], ["not good"], ["good"]])["accuracy"] == 0


def test_any_label_matches_and_misses_count_first() -> None:
    # Row 1 matches b. Row 2 misses, so its label is a, with F1 0; c is no label. b: tp 1, fp 0, fn 0.
    assert accuracy(["b", "c"], [["a", "b"], ["a", "b"]]) == pytest.approx({"accuracy": 50, "macro_f1": 50})


FACTS = "Ann | born in | Bonn\nAnn | works for | Acme\nBob | born in | Bern"


def test_relations_match_hand_computation() -> None:
    # Row 1: 2 of 4 predicted, 3 expected. Row 2: 1 of 1, 2 expected. Row 3: 0 of 1, none expected. Sum: 3 of 6
    # predicted, 5 expected, F1 6/11. The mean over rows would differ.
    written = ["Ann | born in | Bonn\nBob | born in | Bern\nBob | born in | Bonn\nx | y | z", "a | b | c", "a | b | c"]
    expected = [[FACTS], ["a | b | c\nd | e | f"], [""]]
    assert relations(written, expected) == pytest.approx(
        {"relations_precision": 50, "relations_recall": 60, "relations_f1": 600 / 11}
    )


def test_relations_ignore_order_case_and_repetition() -> None:
    written = "\n bob|BORN   in |Bern\n\nann | works for | acme\nAnn | born in | Bonn\nAnn | born in | Bonn \n"
    assert relations([written], [[FACTS]])["relations_f1"] == 100


def test_swapped_or_incomplete_relations_are_wrong() -> None:
    assert relations(["Bonn | born in | Ann\nAnn | born in"], [["Ann | born in | Bonn"]])["relations_f1"] == 0


def test_empty_relations_match_only_empty_references() -> None:
    zero, all_right = ({f"relations_{name}": value for name in ("precision", "recall", "f1")} for value in (0.0, 100.0))
    assert relations([" \n", ""], [[""], []]) == all_right
    assert relations([""], [[FACTS]]) == zero
    assert relations([""], [[FACTS, " "]]) == all_right, "the best reference counts: it is empty"
    assert relations([FACTS], [[""]]) == zero
    # Together with other rows, such a row changes nothing.
    assert relations(["", "a | b | c"], [[""], ["a | b | c"]]) == all_right


def test_relations_take_the_nearest_reference() -> None:
    assert relations(["a | b | c"], [[FACTS, "a | b | c\nd | e | f"]]) == pytest.approx(
        {"relations_precision": 100, "relations_recall": 50, "relations_f1": 200 / 3}
    )


def test_recipes_name_their_metrics() -> None:
    assert Recipe(metrics=tuple(METRICS)).metrics == tuple(METRICS)
    for name in ("sentiment", "sst2", "entailment", "mnli"):
        assert load_preset(name)["metrics"] == ["accuracy"]
    assert load_preset("relation-extraction")["metrics"] == ["relations"]


def test_score_joins_the_named_metrics() -> None:
    assert set(score(["rouge", "squad"], ["a b"], [["a b"]])) == {
        "rouge1", "rouge2", "rougeL", "rougeLsum", "rougeLsum_sentences", "exact_match", "f1", "strict_match",
    }  # fmt: skip
    assert score([], ["a"], [["a"]]) == {}


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(DataError, match="no rows to score"):
        rouge([], [])
    with pytest.raises(DataError, match="row 2 has no reference"):
        rouge(["a", "b"], [["a"], []])
    with pytest.raises(DataError, match="row 1 has no reference"):
        accuracy(["a"], [[]])


def test_perplexity_never_overflows() -> None:
    for loss in (0.0, math.log(50400), 1e6, math.inf, math.nan):
        found = values(language_model([RowLoss(loss, 1, 0, None, None)]), 1)["perplexity"]
        expected = math.exp(loss) if loss < 100 else loss if math.isnan(loss) else math.inf
        assert found == pytest.approx(expected, nan_ok=True)


def test_gold_answers_of_squad_score_100() -> None:
    data = Path(os.environ.get("GPTJ_FT_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
    path = data / "squad" / "dev-v1.1.json"
    if not path.is_file():
        pytest.skip("SQuAD's dev-v1.1.json is missing; set GPTJ_FT_TEST_DATA to the folder that contains squad/")
    articles = json.loads(path.read_text(encoding="utf-8"))["data"][:5]
    questions = [qa for article in articles for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    references = [[answer["text"] for answer in qa["answers"]] for qa in questions]
    assert len(references) > 1000
    assert squad([answers[-1] for answers in references], references) == {"exact_match": 100.0, "f1": 100.0}


# SQuAD's scores, reimplemented after the official scripts evaluate-v1.1.py and evaluate-v2.0.py.


def official_normal(text: str) -> str:
    without = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.compile(r"\b(a|an|the)\b", re.UNICODE).sub(" ", without).split())


def official_f1(prediction: str, truth: str, is_v2: bool) -> float:
    predicted, true = official_normal(prediction).split(), official_normal(truth).split()
    shared = sum((Counter(predicted) & Counter(true)).values())
    if is_v2 and (not predicted or not true):
        return float(predicted == true)
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(true)
    return 2 * precision * recall / (precision + recall)


def official(predictions: Texts, golds: Answers, is_v2: bool) -> dict[str, float]:
    exact, f1, has = [], [], []
    for prediction, answers in zip(predictions, golds, strict=True):
        true = ([answer for answer in answers if official_normal(answer)] or [""]) if is_v2 else answers
        exact.append(max(official_normal(prediction) == official_normal(answer) for answer in true))
        f1.append(max(official_f1(prediction, answer, is_v2) for answer in true))
        has.append(bool(answers))
    found = {"exact_match": 100 * sum(exact) / len(exact), "f1": 100 * sum(f1) / len(f1)}
    if is_v2:
        for part, wanted in (("HasAns", True), ("NoAns", False)):
            chosen = [index for index, each in enumerate(has) if each == wanted]
            found[f"{part}_exact"] = 100 * sum(exact[index] for index in chosen) / len(chosen)
            found[f"{part}_f1"] = 100 * sum(f1[index] for index in chosen) / len(chosen)
    return found


WORDS = ["the", "The", "a", "an", "cat", "Cat!", "3.5", "35", "U.S.", "$", "on", "—", "l’été", "mat", "mat", "..."]


@given(data=st.data(), is_v2=st.booleans())
@settings(max_examples=150, deadline=None)
def test_squad_matches_the_official_script(data: st.DataObject, is_v2: bool) -> None:
    phrase = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)
    golds = data.draw(st.lists(st.lists(phrase, min_size=1, max_size=3), min_size=1, max_size=6))
    if is_v2:
        golds = [[], ["cat"], *golds]
    predictions = [data.draw(st.one_of(phrase, st.just(""))) for _ in golds]
    found = scores("squad", predictions, golds)
    assert {name: found[name] for name in found if name != "strict_match"} == pytest.approx(
        official(predictions, golds, is_v2), rel=1e-12
    )


def test_strict_match_keeps_numbers_punctuation_and_case() -> None:
    pairs = [("35", "3.5"), ("C", "C++"), ("the cat", "cat"), ("Cat", "cat"), ("3.5  g\n", "3.5 g"), ("", "x")]
    found = rows_of("squad", [p for p, _ in pairs], [[r] for _, r in pairs])
    assert [row["strict_match"] for row in found] == [0, 0, 0, 0, 100, 0]
    assert [row["exact_match"] for row in found] == [100, 100, 100, 100, 100, 0]
    assert scores("squad", ["", "x"], [[], []])["strict_match"] == 50


def test_no_answer_text_scores_as_empty() -> None:
    assert unanswered(["Unanswerable.", "Paris", ""], "unanswerable") == ["", "Paris", ""]
    assert unanswered(["unanswerable"], "") == ["unanswerable"]


def test_rouge_warns_about_dropped_letters() -> None:
    assert warning([["It costs 3.50, at the café."] * 9, ["naïve"]]) is None or "letters" in str(warning([["é"]]))
    assert warning([["The cat sat on the mat, 3.5 times!"]]) is None
    assert warning([[]]) is None
    found = warning([["Мама мыла раму."]])
    assert found
    assert found.startswith("100% of the letters")
    assert rouge(["Мама мыла раму"], [["Мама мыла раму"]])["rouge1"] == 0, "the reason of the warning"


def test_language_model_scores_match_hand_computation() -> None:
    rows = [RowLoss(6.0, 3, 1, words=2, bytes=10), RowLoss(2.0, 1, 1, words=0, bytes=2)]
    assert values(language_model(rows), 2) == pytest.approx(
        {
            "loss": 2.0, "perplexity": math.exp(2), "word_perplexity": math.exp(4), "byte_perplexity": math.exp(8 / 12),
            "token_accuracy": 50.0,
        }
    )  # fmt: skip
    assert list(language_model(rows)["loss"].rows_N) == [2.0, 2.0]


def test_every_score_name_is_declared() -> None:
    texts, golds = ["a | b | c", ""], [["a | b | c"], []]
    for name in METRICS:
        found = score([name], texts, [["a"], ["b"]] if METRICS[name].needs_reference else golds)
        assert set(found) <= set(score_names([name]))


def brute_force(figure: Statistic, weights: list[int]) -> float:
    """Compute the score of rows repeated as often as their weights say."""
    rows = [row for row, times in enumerate(weights) for _ in range(times)]
    if isinstance(figure, MacroF1):
        labels, answers = ([texts[row] for row in rows] for texts in (figure.labels, figure.answers))
        return accuracy(answers, [[label] for label in labels])["macro_f1"]
    assert isinstance(figure, Ratio)
    again = Ratio(figure.above_N[rows], figure.below_N[rows], figure.finish, figure.empty)
    return values({"": again}, len(rows))[""]


def test_row_weights_equal_repeated_rows() -> None:
    generator = np.random.default_rng(0)
    figures = {
        **score(["accuracy"], ["x", "y", "z", "x", "x"], [["x"], ["x"], ["y"], ["y"], ["w"]]),
        **score(["squad"], ["x", "y z", "", "x", "x"], [["x"], ["y"], [], [], ["w"]]),
        **score(["relations"], ["a|b", "a|b\nc|d", "", "", "e|f"], [["a|b"], ["a|b"], [], ["g|h"], ["e|f\ng|h"]]),
        **language_model([RowLoss(n + 1.0, n + 2, n, n + 1, 9) for n in range(5)]),
    }
    for _ in range(20):
        weights = generator.integers(0, 3, 5)
        if not weights.any():
            continue
        for name, figure in figures.items():
            found = float(figure.evaluate(weights[None].astype(float))[0])
            assert found == pytest.approx(brute_force(figure, list(weights)), nan_ok=True), name


def test_intervals_cover_the_mean() -> None:
    generator, hits = np.random.default_rng(1), 0
    for trial in range(200):
        rows = generator.exponential(size=80)
        found = estimate_scores({"x": mean(rows)}, {}, len(rows), seed=trial).scores["x"]
        hits += found.low <= 1.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.98


def test_paired_difference_is_narrower_than_intervals() -> None:
    hard = np.random.default_rng(2).normal(50, 20, 200)  # rows are easy or hard for both systems
    before, after = {"x": mean(hard)}, {"x": mean(hard + 1 + np.random.default_rng(3).normal(0, 2, 200))}
    found = estimate_scores(after, before, 200, seed=0)
    assert found == estimate_scores(after, before, 200, seed=0)
    assert found.baseline["x"].high > found.scores["x"].low, "the intervals overlap"
    assert found.differences["x"].is_clear
    assert found.differences["x"].value == pytest.approx(found.scores["x"].value - found.baseline["x"].value)
    assert not estimate_scores(before, before, 200, seed=0).differences["x"].is_clear


def test_part_of_rows_scores_like_those_alone() -> None:
    rows, part = np.arange(6.0), np.array([0, 1, 1, 0, 1, 0.0])
    apart, alone = (
        estimate_scores({"x": mean(r)}, {}, len(r), 0, p) for r, p in ((rows, part), (rows[[1, 2, 4]], None))
    )
    assert apart == alone
    assert (
        estimate_scores({"x": mean([3.0])}, {}, 1, 0).scores["x"]
        == estimate_scores({"x": mean([3.0])}, {}, 1, 1).scores["x"]
    )
    assert estimate_scores({"x": mean([3.0])}, {}, 1, 0).scores["x"].low is None
    two = estimate_scores({"x": mean([1.0, 3.0])}, {}, 2, 0).scores["x"]
    assert (two.low, two.high) == (1.0, 3.0)
