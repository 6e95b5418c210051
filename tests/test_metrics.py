"""Scores against values worked out by hand, the rouge-score package, and SQuAD's own data."""

import json
import math
import os
from pathlib import Path

import pytest
from rouge_score.rouge_scorer import RougeScorer

from gptj_ft.errors import DataError
from gptj_ft.metrics import (
    METRICS,
    accuracy,
    normalize_answer,
    perplexity,
    relations,
    rouge,
    rouge_rows,
    score,
    squad,
    squad_rows,
)
from gptj_ft.recipe import Recipe, load_preset


def test_rouge_matches_values_worked_out_by_hand() -> None:
    # 3 of 3 predicted words among 6: P 1, R 1/2, F 2/3. Bigrams: 2 of 2 among 5: F 4/7. Longest common: 3.
    scores = rouge(["the cat sat"], [["the cat sat on the mat"]])
    assert scores["rouge1"] == pytest.approx(100 * 2 / 3)
    assert scores["rouge2"] == pytest.approx(100 * 4 / 7)
    assert scores["rougeL"] == scores["rougeLsum"] == pytest.approx(100 * 2 / 3)


def test_rouge_stems_words() -> None:
    assert rouge(["the doctors walked"], [["the doctor walks"]])["rouge1"] == pytest.approx(100)


def test_rouge_is_the_mean_over_rows_and_times_100() -> None:
    assert rouge(["a b", "x"], [["a b"], ["y"]])["rouge1"] == pytest.approx(50)


def test_each_rouge_takes_its_best_reference() -> None:
    references = [["d c b a", "a b x y z w"]]  # the first shares all words, the second a bigram
    scores = rouge(["a b c d"], references)
    assert scores["rouge1"] == pytest.approx(100)
    assert scores["rouge2"] == pytest.approx(100 * 2 * (1 / 3) * (1 / 5) / (1 / 3 + 1 / 5))


def test_rouge_lsum_splits_sentences_at_line_ends_and_after_full_stops() -> None:
    prediction, reference = "It rains. We stay in!\nWhy? No 3.5 idea.", "We stay in. It rains. No 3.5 idea."
    scorer = RougeScorer(["rougeL", "rougeLsum"], use_stemmer=True)
    lines = scorer.score("We stay in.\nIt rains.\nNo 3.5 idea.", "It rains.\nWe stay in!\nWhy?\nNo 3.5 idea.")
    scores = rouge([prediction], [[reference]])
    assert scores["rougeLsum"] == pytest.approx(100 * lines["rougeLsum"].fmeasure)
    assert scores["rougeLsum"] > scores["rougeL"] == pytest.approx(100 * lines["rougeL"].fmeasure)


def test_rouge_matches_the_package_on_single_references() -> None:
    rows = [
        ("She left early. He stayed.", "He stayed, she left."),
        ("", "something"),
        ("numbers 12 34", "12 34 numbers"),
    ]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    for (prediction, reference), scores in zip(
        rows, rouge_rows(*zip(*[(p, [r]) for p, r in rows], strict=True)), strict=True
    ):
        expected = scorer.score(reference, prediction)
        assert {name: scores[name] for name in expected} == pytest.approx(
            {name: 100 * value.fmeasure for name, value in expected.items()}
        )


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
def test_answers_are_normalised_as_by_squad(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_squad_matches_values_worked_out_by_hand() -> None:
    predictions = ["the Denver Broncos", "in 1999 , 1999", "Paris"]
    references = [["Denver Broncos", "Broncos"], ["1999"], ["London", "Rome"]]
    # Row 2: words in, 1999, 1999 against 1999: 1 in common, P 1/3, R 1, F 1/2.
    assert squad_rows(predictions, references) == [
        {"exact_match": 100.0, "f1": 100.0},
        {"exact_match": 0.0, "f1": 50.0},
        {"exact_match": 0.0, "f1": 0.0},
    ]
    assert squad(predictions, references) == {"exact_match": pytest.approx(100 / 3), "f1": pytest.approx(50)}


def test_f1_and_exact_match_take_the_best_reference() -> None:
    assert squad(["new york city"], [["york", "new york", "the New York City!"]]) == {"exact_match": 100.0, "f1": 100.0}


@pytest.mark.parametrize("references", [[], [""], ["the"]])
def test_a_question_without_an_answer_wants_an_empty_one(references: list[str]) -> None:
    assert squad([" The. "], [references]) == {"exact_match": 100.0, "f1": 100.0}
    assert squad(["Paris"], [references]) == {"exact_match": 0.0, "f1": 0.0}


def test_an_empty_prediction_is_wrong_where_there_is_an_answer() -> None:
    assert squad([""], [["Paris"]]) == {"exact_match": 0.0, "f1": 0.0}


def test_accuracy_and_macro_f1_match_values_worked_out_by_hand() -> None:
    # Rows:    cat cat cat cat dog dog bird        Of 7 answers 4 are right.
    # Answers: cat cat cat dog dog cat cow
    # cat:  tp 3, fp 1, fn 1: 6/8.  dog: tp 1, fp 1, fn 1: 2/4.  bird: tp 0: 0.  cow is no label: not averaged.
    answers = ["cat", "cat", "cat", "dog", "dog", "cat", "cow"]
    labels = [["cat"]] * 4 + [["dog"]] * 2 + [["bird"]]
    assert accuracy(answers, labels) == pytest.approx({"accuracy": 400 / 7, "macro_f1": 100 * (3 / 4 + 1 / 2 + 0) / 3})


def test_always_answering_the_frequent_label_is_seen_in_macro_f1() -> None:
    # no: tp 9, fp 1, fn 0: 18/19. yes: 0.
    scores = accuracy(["no"] * 10, [["no"]] * 9 + [["yes"]])
    assert scores == pytest.approx({"accuracy": 90, "macro_f1": 100 * (18 / 19) / 2})


def test_case_and_outer_blanks_of_a_label_do_not_count_and_all_else_does() -> None:
    assert accuracy([" Positive\n", "STRASSE"], [["positive"], ["straße"]]) == {"accuracy": 100.0, "macro_f1": 100.0}
    assert accuracy(["positive.", "not  good", ""], [["positive"], ["not good"], ["good"]])["accuracy"] == 0


def test_any_reference_is_right_and_a_miss_counts_against_the_first() -> None:
    # Met: b. Missed: the label is a, whose F1 is 0; c is no label. b: tp 1, fp 0, fn 0.
    assert accuracy(["b", "c"], [["a", "b"], ["a", "b"]]) == pytest.approx({"accuracy": 50, "macro_f1": 50})


FACTS = "Ann | born in | Bonn\nAnn | works for | Acme\nBob | born in | Bern"


def test_relations_match_values_worked_out_by_hand() -> None:
    # Row 1: 2 of 4 written are among 3. Row 2: 1 of 1 among 2. Row 3: 1 written where there is nothing. Together 3 of 6
    # written and 3 of 5 expected, F1 6/11. The mean over the rows would be another number.
    written = ["Ann | born in | Bonn\nBob | born in | Bern\nBob | born in | Bonn\nx | y | z", "a | b | c", "a | b | c"]
    expected = [[FACTS], ["a | b | c\nd | e | f"], [""]]
    assert relations(written, expected) == pytest.approx(
        {"relations_precision": 50, "relations_recall": 60, "relations_f1": 600 / 11}
    )


def test_order_case_blanks_and_repetition_of_facts_do_not_count() -> None:
    written = "\n bob|BORN   in |Bern\n\nann | works for | acme\nAnn | born in | Bonn\nAnn | born in | Bonn \n"
    assert relations([written], [[FACTS]])["relations_f1"] == 100


def test_subject_and_object_swapped_or_a_part_missing_is_wrong() -> None:
    assert relations(["Bonn | born in | Ann\nAnn | born in"], [["Ann | born in | Bonn"]])["relations_f1"] == 0


def test_nothing_written_where_there_is_nothing_is_right_and_elsewhere_wrong() -> None:
    zero, all_right = ({f"relations_{name}": value for name in ("precision", "recall", "f1")} for value in (0.0, 100.0))
    assert relations([" \n", ""], [[""], []]) == all_right
    assert relations([""], [[FACTS]]) == zero
    assert relations([FACTS], [[""]]) == zero
    # Beside other rows, such a row changes nothing.
    assert relations(["", "a | b | c"], [[""], ["a | b | c"]]) == all_right


def test_of_several_references_facts_are_compared_with_the_nearest() -> None:
    assert relations(["a | b | c"], [[FACTS, "a | b | c\nd | e | f"]]) == pytest.approx(
        {"relations_precision": 100, "relations_recall": 50, "relations_f1": 200 / 3}
    )


def test_a_recipe_can_ask_for_every_metric_and_recipes_with_labels_or_facts_do() -> None:
    assert Recipe(metrics=tuple(METRICS)).metrics == tuple(METRICS)
    for name in ("sentiment", "sst2", "entailment", "mnli"):
        assert load_preset(name)["metrics"] == ["accuracy"]
    assert load_preset("relation-extraction")["metrics"] == ["relations"]


def test_score_joins_the_metrics_asked_for() -> None:
    assert set(score(["rouge", "squad"], ["a b"], [["a b"]])) == {
        "rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match", "f1",
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
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(50400)) == pytest.approx(50400)
    assert perplexity(1e6) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_every_gold_answer_of_squad_scores_100() -> None:
    data = Path(os.environ.get("GPTJ_FT_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
    path = data / "squad" / "dev-v1.1.json"
    if not path.is_file():
        pytest.skip("SQuAD's dev-v1.1.json is not here; set GPTJ_FT_TEST_DATA to the folder that holds squad/")
    articles = json.loads(path.read_text(encoding="utf-8"))["data"][:5]
    questions = [qa for article in articles for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    references = [[answer["text"] for answer in qa["answers"]] for qa in questions]
    assert len(references) > 1000
    assert squad([answers[-1] for answers in references], references) == {"exact_match": 100.0, "f1": 100.0}
