"""Compare scores of classes, label sets, numbers and entities with scikit-learn, scipy and seqeval.

The expected values were computed once on the same rows, with scikit-learn 1.9.1, scipy 1.17.1 and seqeval 1.2.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from gptj_ft.evaluation.metrics.class_scores import (
    MULTI_LABEL_SCORES,
    SINGLE_LABEL_SCORES,
    CalibrationError,
    RocAuc,
    best_threshold,
    multi_label,
    sigmoid,
    single_label,
    softmax,
)
from gptj_ft.evaluation.metrics.entities import ENTITY_SCORES, Entity, are_entity_tags, entities, entities_of
from gptj_ft.evaluation.metrics.label_scores import (
    MOST_CONFUSED,
    MOST_IN_MATRIX,
    Confusion,
    LabelScores,
    scores_of_entities,
    scores_of_label_sets,
    scores_of_rows,
    scores_of_words,
)
from gptj_ft.evaluation.metrics.regression import REGRESSION_SCORES, regression
from gptj_ft.evaluation.metrics.statistic import Statistic, estimate_scores, values

Array = np.ndarray


def noise(count: int, k: int = 1) -> Array:
    """Return pseudo-random numbers from 0 to 1, equal on every platform."""
    return np.array([((37 * i * i + 11 * i * k + 5 * k) % 101) / 101 for i in range(1, count + 1)])


def classified(num_rows: int, num_classes: int) -> tuple[Array, Array]:
    """Return labels and mostly right probabilities; with three classes, no row has the last."""
    labels = (noise(num_rows, 3) ** 2 * (num_classes - (num_classes == 3))).astype(int)
    logits = np.stack([noise(num_rows, j + 1) * 3 + 1.5 * (labels == j) for j in range(num_classes)], 1)
    return labels, softmax(logits)


def label_sets() -> tuple[Array, Array]:
    """Return label sets and probabilities; no row has the last label."""
    has = np.stack([noise(50, j) > 0.7 for j in range(5)], 1).astype(int)
    probabilities = np.stack([0.6 * noise(50, j + 9) + 0.4 * has[:, j] for j in range(5)], 1)
    has[:, 4] = 0
    return has, probabilities


def numbers() -> tuple[Array, Array]:
    """Return targets and predictions with many equal numbers."""
    expected = np.round(noise(40, 2) * 10) / 2
    return expected, (expected * 0.5 + noise(40, 5) * 2).round(1)


def tagged() -> tuple[list[list[str]], list[list[str]]]:
    names = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "E-ORG", "S-PER"]

    def row(k: int, length: int) -> list[str]:
        return [names[(k * k * 5 + i * i * 3 + i * k) % 11 % 7] for i in range(length)]

    tags = [row(k, 4 + k % 5) for k in range(20)]
    return tags, [[t if (i * k) % 3 else row(k + 2, 9)[i] for i, t in enumerate(each)] for k, each in enumerate(tags)]


TAGS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "E-ORG", "S-PER")

# scikit-learn: accuracy_score, f1_score, matthews_corrcoef, roc_auc_score, top_k_accuracy_score
SINGLE = {
    2: {
        "accuracy": 0.8833333333333333, "macro_f1": 0.8588235294117648, "micro_f1": 0.8833333333333333,
        "weighted_f1": 0.888235294117647, "mcc": 0.7348469228349535, "positive_f1": 0.8, "roc_auc": 0.9688888888888889,
    },
    3: {
        "accuracy": 0.8, "macro_f1": 0.5149535423925667, "micro_f1": 0.8, "weighted_f1": 0.841572299651568,
        "mcc": 0.569599641239043,
    },
    12: {
        "accuracy": 0.7266666666666667, "macro_f1": 0.6691980148231697, "micro_f1": 0.7266666666666667,
        "weighted_f1": 0.7377497917693728, "mcc": 0.6903864787073176, "top5_accuracy": 0.9266666666666666,
    },
}  # fmt: skip


@pytest.mark.parametrize(("num_classes", "num_rows"), [(2, 60), (3, 80), (12, 150)])
def test_single_label_scores_match_scikit_learn(num_classes: int, num_rows: int) -> None:
    found = values(single_label(*classified(num_rows, num_classes)), num_rows)
    del found["ece"]
    assert found == pytest.approx(times_100(SINGLE[num_classes]), rel=1e-12)


def test_multi_label_scores_match_scikit_learn() -> None:
    # f1_score with zero_division=nan, which skips labels that are neither expected nor predicted.
    expected = {
        "micro_f1": 0.6506024096385542, "macro_f1": 0.6013650312419122, "weighted_f1": 0.7504539637745021,
        "micro_precision": 0.5454545454545454, "micro_recall": 0.8059701492537313, "subset_accuracy": 0.32,
    }  # fmt: skip
    assert values(multi_label(*label_sets(), 0.5), 50) == pytest.approx(times_100(expected), rel=1e-12)


def test_regression_scores_match_scipy() -> None:
    expected = {"pearson": 80.82151122918708, "spearman": 78.82764304440288, "mse": 0.9967500000000001, "mae": 0.8025}
    assert values(regression(*numbers()), 40) == pytest.approx(expected, rel=1e-12)


def test_entity_scores_match_seqeval() -> None:
    expected = {
        "entity_f1": 0.4776119402985075, "entity_precision": 0.48484848484848486,
        "entity_recall": 0.47058823529411764, "word_accuracy": 0.4583333333333333,
    }  # fmt: skip
    assert values(entities(*tagged(), TAGS), 20) == pytest.approx(times_100(expected), rel=1e-12)


def times_100(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: 100 * value for name, value in scores.items()}


def test_declared_scores_are_computed() -> None:
    found = {name for num_classes in SINGLE for name in single_label(*classified(20, num_classes))}
    assert found == set(SINGLE_LABEL_SCORES)
    assert tuple(multi_label(*label_sets(), 0.5)) == MULTI_LABEL_SCORES
    assert tuple(regression(*numbers())) == REGRESSION_SCORES
    assert tuple(entities(*tagged(), TAGS)) == ENTITY_SCORES


def pick(rows: Array, *columns: Array | list) -> list:
    """Return some rows of some columns."""
    return [[column[row] for row in rows] if isinstance(column, list) else column[rows] for column in columns]


KINDS: dict[str, tuple[Callable[..., dict[str, Statistic]], tuple]] = {
    "two classes": (single_label, classified(30, 2)),
    "twelve classes": (single_label, classified(30, 12)),
    "label sets": (lambda *rows: multi_label(*rows, 0.5), label_sets()),
    "numbers": (regression, numbers()),
    "entities": (lambda *rows: entities(*rows, TAGS), tagged()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_row_weights_equal_repeated_rows(kind: str) -> None:
    scorer, columns = KINDS[kind]
    number = len(columns[0])
    figures = scorer(*columns)
    for seed in range(10):
        weights = np.random.default_rng(seed).integers(0, 4, (2, number))
        for sample in range(2):
            rows = np.repeat(np.arange(number), weights[sample])
            expected = values(scorer(*pick(rows, *columns)), len(rows))
            found = {name: figure.evaluate(weights.astype(float))[sample] for name, figure in figures.items()}
            assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_score_has_an_interval(kind: str) -> None:
    scorer, columns = KINDS[kind]
    found = estimate_scores(scorer(*columns), {}, len(columns[0]), seed=0)
    for name, estimate in found.scores.items():
        assert estimate.low < estimate.high, name
        # Bootstrap samples have larger calibration errors than all rows, since their bins have fewer distinct rows.
        assert estimate.low <= estimate.value or name == "ece", name
        assert estimate.value <= estimate.high, name


def test_positive_f1_is_f1_of_class_1() -> None:
    # tp 1, fp 1, fn 0 of class 1: 2/3. Macro: (2/3 + 4/5)/2 is another number.
    found = values(single_label([0, 0, 0, 1], [[1, 0], [1, 0], [0, 1], [0, 1]]), 4)
    assert found["positive_f1"] == pytest.approx(200 / 3)
    assert found["macro_f1"] == pytest.approx(100 * (2 / 3 + 4 / 5) / 2)


def test_averages_skip_unused_labels() -> None:
    three, two = (values(single_label([0, 1, 1], np.eye(number)[[0, 1, 0]]), 3) for number in (3, 2))
    assert three["macro_f1"] == two["macro_f1"] == pytest.approx(200 / 3)
    assert three["weighted_f1"] == two["weighted_f1"]


def test_threshold_is_inclusive() -> None:
    assert values(multi_label([[1, 0]], [[0.5, 0.49]], 0.5), 1)["subset_accuracy"] == 100


def test_matthews_correlation_of_constant_and_right_answers() -> None:
    labels = [0, 1, 2, 1]
    right = np.eye(3)[labels]
    assert values(single_label(labels, right), 4)["mcc"] == pytest.approx(100)
    assert values(single_label(labels, np.tile([0, 1.0, 0], (4, 1))), 4)["mcc"] == 0
    assert values(single_label([1, 1], [[0, 1.0], [1, 0.0]]), 2)["mcc"] == 0
    # (tp tn - fp fn) / root of the product of the four sums: (2 * 1 - 1 * 1) / sqrt(3 * 3 * 2 * 2)
    found = values(single_label([1, 1, 1, 0, 0], np.eye(2)[[1, 1, 0, 1, 0]]), 5)
    assert found["mcc"] == pytest.approx(100 / 6)


def test_roc_auc_counts_ties_half() -> None:
    positive, scores = np.array([True, True, False, False]), np.array([0.9, 0.5, 0.5, 0.1])
    assert values({"": RocAuc(positive, scores)}, 4)[""] == pytest.approx(100 * 3.5 / 4)
    assert np.isnan(values({"": RocAuc(positive[:2], scores[:2])}, 2)[""])


def test_calibration_error_matches_hand_computation() -> None:
    # Two rows in 0.8 < p <= 0.8667, one right: |0.84 - 0.5|. 0.6 is the upper bound of its bin, 0.61 is in the next.
    right, confidence = np.array([True, False, True, False]), np.array([0.84, 0.84, 0.6, 0.61])
    error = CalibrationError(right, confidence)
    assert values({"": error}, 4)[""] == pytest.approx(100 * (2 * 0.34 + 0.4 + 0.61) / 4)
    assert [(round(each.low * 15), each.rows, each.confidence, each.accuracy) for each in error.bins] == [
        (8, 1, 0.6, 1.0), (9, 1, 0.61, 0.0), (12, 2, 0.84, 0.5),
    ]  # fmt: skip
    assert CalibrationError(np.array([True]), np.array([1.0])).bins[0].high == 1.0


def test_probabilities_of_large_logits_are_finite() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert softmax([[1000.0, 0.0], [-1000.0, -1000.0]]).tolist() == [[1, 0], [0.5, 0.5]]
        assert sigmoid([1000.0, 0.0, -1000.0]).tolist() == [1, 0.5, 0]
    assert sigmoid(np.array([0.3], np.float32))[0] == pytest.approx(1 / (1 + np.exp(-np.float64(np.float32(0.3)))))


def test_best_threshold_beats_a_grid() -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        probabilities = generator.integers(0, 12, (9, 4)) / 12
        has = generator.random((9, 4)) < probabilities * 0.7
        tried = [values(multi_label(has, probabilities, at / 24), 9)["micro_f1"] for at in range(25)]
        threshold = best_threshold(has, probabilities)
        assert values(multi_label(has, probabilities, threshold), 9)["micro_f1"] == pytest.approx(max(tried))


def test_best_threshold_is_midway_between_probabilities() -> None:
    assert best_threshold([[1, 0], [1, 0]], [[0.9, 0.2], [0.4, 0.1]]) == pytest.approx(0.3)
    assert best_threshold([[1, 1]], [[0.9, 0.2]]) == pytest.approx(0.1)
    assert best_threshold([[0, 0]], [[0.9, 0.2]]) == 0.5
    # Predicting the first alone is as good as all three. Of the thresholds 0.85 and 0.2, the second is nearer to 0.5.
    assert best_threshold([[1, 0, 1]], [[0.9, 0.8, 0.4]]) == pytest.approx(0.2)


def test_correlation_of_a_constant_is_undefined() -> None:
    found = values(regression([1.0, 2.0], [3.0, 3.0]), 2)
    assert np.isnan(found["pearson"])
    assert np.isnan(found["spearman"])
    assert (found["mse"], found["mae"]) == (2.5, 1.5)
    pearson = regression([1.0, 2.0, 4.0, 5.0], [0.1, 0.1, 0.1, 0.3])["pearson"]
    found_B = pearson.evaluate(np.array([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 3.0, 2.0], [3.0, 0.0, 0.0, 0.0]]))
    assert np.isnan(found_B).tolist() == [True, False, True]


def test_inside_tag_can_start_an_entity() -> None:
    tags = ["I-A", "I-A", "I-B", "B-B", "E-B", "I-B", "O", "S-A", "I-A", "B", "I", "O"]
    assert entities_of(tags) == [
        Entity(0, 2, "A"), Entity(2, 3, "B"), Entity(3, 5, "B"), Entity(5, 6, "B"), Entity(7, 8, "A"),
        Entity(8, 9, "A"), Entity(9, 11, "_"),
    ]  # fmt: skip
    assert entities_of([]) == entities_of(["O"]) == []
    assert entities_of(["O", "B-x-y"]) == [Entity(1, 2, "x-y")]


def test_entity_needs_right_words_and_type() -> None:
    found = values(entities([["B-A"], ["I-A"]], [["B-A"], ["I-A"]], TAGS), 2)
    assert found["entity_f1"] == 100
    assert list(entities([["B-A"], ["I-A"]], [["B-A"], ["O"]], TAGS)["entity_recall"].rows_N) == [100, 0]
    for wrong in (["B-A", "O"], ["B-B", "I-B"], ["O", "O"]):
        assert values(entities([["B-A", "I-A"]], [wrong], TAGS), 1)["entity_f1"] == 0


def test_rows_without_entities_score_100() -> None:
    found = values(entities([["O"], ["O"]], [["O"], ["O"]], TAGS), 2)
    assert found == dict.fromkeys(ENTITY_SCORES, 100.0)


def test_plain_word_labels_have_only_accuracy() -> None:
    assert not are_entity_tags(["NOUN", "VERB"])
    assert not are_entity_tags(["O"])
    assert not are_entity_tags([])
    assert are_entity_tags(["O", "B", "I"])
    found = values(entities([["NOUN", "VERB", "NOUN"]], [["NOUN", "VERB", "VERB"]], ["NOUN", "VERB"]), 1)
    assert found == {"word_accuracy": pytest.approx(200 / 3)}


def test_label_scores_and_confusion_match_scikit_learn() -> None:
    # scikit-learn's precision_recall_fscore_support and confusion_matrix
    found = scores_of_rows(*classified(80, 3), ["a", "b", "c"])
    assert found.confusion == ((51, 8, 1), (1, 13, 6), (0, 0, 0))
    assert [(each.precision, each.recall, each.f1) for each in found.classes] == [
        pytest.approx((98.076923076923, 85.0, 91.07142857142857)),
        pytest.approx((61.9047619047619, 65.0, 63.41463414634146)),
        (0, 0, 0),
    ]
    assert [(each.name, each.expected, each.given) for each in found.classes] == [
        ("a", 60, 52),
        ("b", 20, 21),
        ("c", 0, 7),
    ]
    assert found.confused == (
        Confusion("a", "b", 8, 100 * 8 / 60),
        Confusion("b", "c", 6, 30.0),
        Confusion("b", "a", 1, 5.0),
        Confusion("a", "c", 1, 100 / 60),
    )
    assert (found.commonest, found.base_rate, found.unit) == ("a", 75.0, "rows")
    assert sum(each.rows for each in found.calibration) == 80


def test_many_labels_keep_only_the_worst_pairs() -> None:
    number = 500
    labels = np.arange(3 * number) % number
    answers = np.where(labels % 2, labels, (labels + 1) % number)
    found = scores_of_words(labels, answers, [str(each) for each in range(number)])
    assert number > MOST_IN_MATRIX
    assert found.confusion == ()
    assert len(found.confused) == MOST_CONFUSED
    assert found.confused[0] == Confusion("0", "1", 3, 100.0)
    assert [each.f1 for each in found.classes[:2]] == [0, pytest.approx(200 * 3 / 9)]


def test_label_sets_have_scores_by_label() -> None:
    has = [[1, 0], [1, 1], [0, 0], [1, 1]]
    found = scores_of_label_sets(has, [[0.6, 0.6], [0.6, 0.1], [0.1, 0.1], [0.4, 0.5]], 0.5, ["x", "y"])
    assert [(each.name, each.precision, each.recall, each.expected, each.given) for each in found.classes] == [
        ("x", 100.0, pytest.approx(200 / 3), 3, 2), ("y", 50.0, 50.0, 2, 2),
    ]  # fmt: skip
    assert (found.commonest, found.base_rate, found.threshold) == ("x, y", 50.0, 0.5)


def test_entity_type_scores_match_seqeval() -> None:
    found = scores_of_entities(*tagged())
    assert [(each.name, each.precision, each.recall, each.expected) for each in found.classes] == [
        ("ORG", pytest.approx(59.18367346938775), pytest.approx(59.18367346938775), 49),
        ("PER", pytest.approx(38.0), pytest.approx(35.84905660377358), 53),
    ]
    assert found.classes[1].f1 == pytest.approx(36.89320388349514)


def test_label_scores_survive_json() -> None:
    found = scores_of_rows(*classified(80, 3), ["a", "b", "c"])
    assert LabelScores.from_dict(found.to_dict()) == found
    sets = scores_of_label_sets(*label_sets(), 0.3, list("abcde"))
    assert LabelScores.from_dict(sets.to_dict()) == sets


def test_intervals_of_10000_rows_take_seconds() -> None:
    labels, probabilities = classified(10_000, 3)
    start = time.perf_counter()
    estimate_scores(single_label(labels, probabilities), {}, len(labels), seed=0)
    assert time.perf_counter() - start < 30  # about 2 on a quiet machine
