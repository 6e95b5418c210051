"""Accuracy and macro F1 of labels that are texts, such as generated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gptj_ft.evaluation.metrics.statistic import Statistic, Vector, divided, mean


def accuracy(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
    """Compute accuracy and macro F1.

    An answer is right if it equals one of the row's references, ignoring case and outer white space. The row's label
    is the matched reference, else the first.
    """
    labels, answers = [], []
    for prediction, targets in zip(predictions, references, strict=True):
        answer, accepted = _label(prediction), [_label(target) for target in targets]
        answers.append(answer)
        labels.append(answer if answer in accepted else accepted[0])
    right = [100.0 * (label == answer) for label, answer in zip(labels, answers, strict=True)]
    return {"accuracy": mean(right), "macro_f1": MacroF1(labels, answers)}


def _label(text: str) -> str:
    return text.strip().casefold()


@dataclass(frozen=True)
class MacroF1:
    """F1 of each label, averaged over the labels that occur; times 100.

    F1 of a label is 2 tp / (2 tp + fp + fn). An answer that is no row's label lowers the F1 of the row's label only
    (scikit-learn's ``f1_score(average="macro", labels=...)`` with the labels of the rows).
    """

    labels: Sequence[str]  # true label of each row
    answers: Sequence[str]  # predicted label of each row
    rows_N: Vector | None = None

    def evaluate(self, weights_BN: Vector) -> Vector:
        labels_N, answers_N = self._codes
        num_labels = int(labels_N.max()) + 1

        def counts(codes_N: NDArray[np.int64], chosen_N: NDArray[np.bool_]) -> Vector:
            codes, weights = codes_N[chosen_N], weights_BN[:, chosen_N]
            return np.stack([np.bincount(codes, each, num_labels) for each in weights]).astype(np.float64)

        right_BL = counts(labels_N, labels_N == answers_N)
        of_label_BL = counts(labels_N, np.ones_like(labels_N, dtype=np.bool_))
        # Answers that are no label have the number after the last one: they count for no label.
        of_answer_BL = counts(answers_N, answers_N < num_labels)
        occurs_BL = of_label_BL > 0
        # of_label = tp + fn, of_answer = tp + fp
        f1_BL = np.divide(2 * right_BL, of_label_BL + of_answer_BL, out=np.zeros_like(right_BL), where=occurs_BL)
        return divided(100.0 * f1_BL.sum(-1), occurs_BL.sum(-1))

    @cached_property
    def _codes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Labels and answers as numbers; an answer that is no label has the number after the last label."""
        codes = {label: code for code, label in enumerate(dict.fromkeys(self.labels))}
        labels = [codes[label] for label in self.labels]
        return np.asarray(labels), np.asarray([codes.get(answer, len(codes)) for answer in self.answers])
