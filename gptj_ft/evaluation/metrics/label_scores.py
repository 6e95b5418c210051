"""Details about labels for reports: scores of each label, confused labels, calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gptj_ft.evaluation.metrics.class_scores import CalibrationBin, CalibrationError
from gptj_ft.evaluation.metrics.entities import entity_counts

MOST_IN_MATRIX = 20  # classes of a readable confusion matrix
MOST_CONFUSED = 20  # pairs


@dataclass(frozen=True)
class ClassScore:
    """Scores of one label, in percent."""

    name: str
    precision: float  # 0 if it was never predicted
    recall: float  # 0 if it does not occur
    f1: float
    expected: int  # number that have the label (the support)
    given: int  # number that were predicted to have it

    @classmethod
    def of(cls, name: str, true_positives: int, predicted: int, expected: int) -> ClassScore:
        """Compute the scores from counts."""
        precision, recall = (100.0 * true_positives / number if number else 0.0 for number in (predicted, expected))
        f1 = 200.0 * true_positives / (predicted + expected) if predicted + expected else 0.0
        return cls(name, precision, recall, f1, expected, predicted)


@dataclass(frozen=True)
class Confusion:
    """A label predicted in place of another."""

    label: str  # true label
    answer: str  # predicted label
    count: int
    share: float  # percentage of those that have the label


@dataclass(frozen=True)
class LabelScores:
    """Scores of each label, with details."""

    unit: str  # labelled items: ``rows``, ``words``, ``entities``
    classes: tuple[ClassScore, ...]  # in the order of class ids; entities by type
    commonest: str = ""  # most frequent label or set of labels; empty for entities
    base_rate: float = 0.0  # accuracy of always predicting it, in percent; 0 for entities
    confusion: tuple[tuple[int, ...], ...] = ()
    """counts by true label (row) and predicted label (column); empty for several labels per row, or too many labels"""
    confused: tuple[Confusion, ...] = ()  # most frequent pairs first, at most `MOST_CONFUSED`
    calibration: tuple[CalibrationBin, ...] = ()  # empty if there are no probabilities
    threshold: float | None = None  # lowest probability of a predicted label; None: the most likely label

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LabelScores:
        """Convert from JSON values made by `to_dict`."""
        return cls(
            **{
                **values,
                "classes": tuple(ClassScore(**each) for each in values["classes"]),
                "confusion": tuple(map(tuple, values["confusion"])),
                "confused": tuple(Confusion(**each) for each in values["confused"]),
                "calibration": tuple(CalibrationBin(**each) for each in values["calibration"]),
            }
        )


def scores_of_rows(labels: ArrayLike, probabilities: ArrayLike, names: Sequence[str]) -> LabelScores:
    """Score each label of rows that have one label.

    Args:
        labels: class id of each row; [N].
        probabilities: probability of each class; [N, C].
        names: names of the classes.
    """
    labels_N, probabilities_NC = np.asarray(labels, dtype=np.int64), np.asarray(probabilities, dtype=np.float64)
    answers_N = probabilities_NC.argmax(-1)
    calibration = CalibrationError(labels_N == answers_N, probabilities_NC.max(-1)).bins
    return _scores_of_classes("rows", labels_N, answers_N, names, tuple(calibration))


def scores_of_words(labels: ArrayLike, answers: ArrayLike, names: Sequence[str]) -> LabelScores:
    """Score each label of words that is no entity tag, such as a part of speech.

    Args:
        labels: class id of each word, of all rows; [N].
        answers: predicted class id; [N].
        names: names of the classes.
    """
    return _scores_of_classes("words", labels, answers, names)


def _scores_of_classes(
    unit: str,
    labels: ArrayLike,
    answers: ArrayLike,
    names: Sequence[str],
    calibration: tuple[CalibrationBin, ...] = (),
) -> LabelScores:
    labels_N, answers_N = np.asarray(labels, dtype=np.int64), np.asarray(answers, dtype=np.int64)
    right, predicted, expected = (
        np.bincount(each, minlength=len(names)).tolist()
        for each in (labels_N[labels_N == answers_N], answers_N, labels_N)
    )
    classes = tuple(ClassScore.of(*of_class) for of_class in zip(names, right, predicted, expected, strict=True))
    # Count the pairs that occur: with hundreds of classes that is far fewer than all.
    pairs, counts = np.unique(np.stack([labels_N, answers_N], -1), axis=0, return_counts=True)
    of_pair = {(label, answer): count for (label, answer), count in zip(pairs.tolist(), counts.tolist(), strict=True)}
    wrong = [
        Confusion(names[label], names[answer], count, 100.0 * count / expected[label])
        for (label, answer), count in of_pair.items()
        if label != answer
    ]
    ids = range(len(names) if len(names) <= MOST_IN_MATRIX else 0)
    return LabelScores(
        unit,
        classes,
        commonest=names[expected.index(max(expected))],
        base_rate=100.0 * max(expected) / len(labels_N),
        confusion=tuple(tuple(of_pair.get((label, answer), 0) for answer in ids) for label in ids),
        confused=tuple(sorted(wrong, key=lambda pair: (-pair.count, -pair.share))[:MOST_CONFUSED]),
        calibration=calibration,
    )


def scores_of_label_sets(
    labels: ArrayLike, probabilities: ArrayLike, threshold: float, names: Sequence[str]
) -> LabelScores:
    """Score each label of rows that may have several.

    Args:
        labels: 1 where the row has the label, else 0; [N, C].
        probabilities: probability of each label; [N, C].
        threshold: lowest probability of a predicted label.
    """
    has_NC = np.asarray(labels, dtype=np.float64) > 0.5
    predicted_NC = np.asarray(probabilities, dtype=np.float64) >= threshold
    counts = zip(*((each.sum(0)).tolist() for each in (has_NC & predicted_NC, predicted_NC, has_NC)), strict=True)
    classes = tuple(ClassScore.of(name, *of_label) for name, of_label in zip(names, counts, strict=True))
    ((commonest, number),) = Counter(map(tuple, has_NC.tolist())).most_common(1)
    text = ", ".join(name for name, has in zip(names, commonest, strict=True) if has) or "no label"
    return LabelScores(
        "rows", classes, commonest=text, base_rate=100.0 * number / len(has_NC), threshold=float(threshold)
    )


def scores_of_entities(tags: Sequence[Sequence[str]], answers: Sequence[Sequence[str]]) -> LabelScores:
    """Score each type of entities.

    Args:
        tags: true tag of each word of each row.
        answers: predicted tag of each word.
    """
    return LabelScores(
        "entities",
        tuple(
            ClassScore.of(type, sum(counts.true_positives), sum(counts.predicted), sum(counts.expected))
            for type, counts in entity_counts(tags, answers).items()
        ),
    )
