"""Accuracy and macro-averaged F1 of labels that are texts, such as generated ones."""

from __future__ import annotations

from collections.abc import Sequence

from gptj_ft.evaluation.metrics.statistic import MacroF1, Statistic, mean


def accuracy(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Statistic]:
    """Compute accuracy and macro F1.

    An answer is right if it is one of the row's references; case, and blanks at both ends, do not count. A row's label
    is the reference that was met, else the first.
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
