"""What is worth knowing of labels beside the scores: each label's own, what is taken for what, how sure a model is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from gptj_ft.evaluation.metrics.class_scores import CalibrationBin, CalibrationError
from gptj_ft.evaluation.metrics.entities import entity_counts

MOST_IN_MATRIX = 20  # classes of a confusion matrix that can be looked at
MOST_CONFUSED = 20  # pairs


@dataclass(frozen=True)
class ClassScore:
    """Scores of one label.

    Attributes:
        name: its name.
        precision: percentage of those given the label that have it; 0 if none was given it.
        recall: percentage of those that have the label that were given it; 0 if none has it.
        f1: their harmonic mean, in percent.
        expected: number of those that have the label (the support).
        given: number of those that were given it.
    """

    name: str
    precision: float
    recall: float
    f1: float
    expected: int
    given: int

    @classmethod
    def of(cls, name: str, both: int, given: int, expected: int) -> ClassScore:
        """Compute the scores of counts."""
        precision, recall = (100.0 * both / number if number else 0.0 for number in (given, expected))
        f1 = 200.0 * both / (given + expected) if given + expected else 0.0
        return cls(name, precision, recall, f1, expected, given)


@dataclass(frozen=True)
class Confusion:
    """A label taken for another.

    Attributes:
        label: name of the right one.
        answer: name of the one that was given.
        count: number of times.
        share: percentage of those that have the label.
    """

    label: str
    answer: str
    count: int
    share: float


@dataclass(frozen=True)
class LabelScores:
    """Scores of each label, and what goes with them.

    Attributes:
        unit: name of what has a label: ``rows``, ``words``, ``entities``.
        classes: scores of each label, in the order of class ids; of entities by type.
        commonest: label, or set of labels, that most have; empty for entities.
        base_rate: accuracy of giving it to all, in percent; 0 for entities.
        confusion: number of each label, a row, given each label, a column; empty where there are more than
            `MOST_IN_MATRIX`, and where labels do not exclude each other.
        confused: pairs of confused labels, the most frequent first, at most `MOST_CONFUSED`.
        calibration: rows by the probability of their answer; empty where there are no probabilities.
        threshold: probability from which a label is given; ``None``: the most likely one is.
    """

    unit: str
    classes: tuple[ClassScore, ...]
    commonest: str = ""
    base_rate: float = 0.0
    confusion: tuple[tuple[int, ...], ...] = ()
    confused: tuple[Confusion, ...] = ()
    calibration: tuple[CalibrationBin, ...] = ()
    threshold: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
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
    """Score each label where a row has one.

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
    """Score each label of words that are no entities, such as parts of speech.

    Args:
        labels: class id of each word, of all rows; [N].
        answers: class id that it was given; [N].
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
    right, given, expected = (
        np.bincount(each, minlength=len(names)).tolist()
        for each in (labels_N[labels_N == answers_N], answers_N, labels_N)
    )
    classes = tuple(ClassScore.of(*of_class) for of_class in zip(names, right, given, expected, strict=True))
    # Of hundreds of classes few pairs occur.
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
    """Score each label where a row may have several.

    Args:
        labels: 1 where the row has the label, else 0; [N, C].
        probabilities: probability of each label; [N, C].
        threshold: probability from which a label is given.
        names: names of the labels.
    """
    has_NC = np.asarray(labels, dtype=np.float64) > 0.5
    given_NC = np.asarray(probabilities, dtype=np.float64) >= threshold
    counts = zip(*((each.sum(0)).tolist() for each in (has_NC & given_NC, given_NC, has_NC)), strict=True)
    classes = tuple(ClassScore.of(name, *of_label) for name, of_label in zip(names, counts, strict=True))
    ((commonest, number),) = Counter(map(tuple, has_NC.tolist())).most_common(1)
    text = ", ".join(name for name, has in zip(names, commonest, strict=True) if has) or "no label"
    return LabelScores(
        "rows", classes, commonest=text, base_rate=100.0 * number / len(has_NC), threshold=float(threshold)
    )


def scores_of_entities(tags: Sequence[Sequence[str]], answers: Sequence[Sequence[str]]) -> LabelScores:
    """Score each type of entities.

    Args:
        tags: right tag of each word, for each row.
        answers: tag that the model gives it.
    """
    return LabelScores(
        "entities",
        tuple(
            ClassScore.of(type, sum(counts.both), sum(counts.given), sum(counts.expected))
            for type, counts in entity_counts(tags, answers).items()
        ),
    )
