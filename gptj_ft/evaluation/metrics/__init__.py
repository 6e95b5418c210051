"""Score answers with metrics named and computed as in published results.

    rouge       ROUGE-1, -2, -L, -Lsum as by the rouge-score package, and -Lsum by sentences; means over rows
    squad       exact match and F1 as by SQuAD's official scripts, v1.1 and v2.0, and a strict match; means over rows
    accuracy    labels: accuracy, and F1 averaged over the labels
    relations   precision, recall and F1 of all facts of all rows together

A row counts its best reference. All times 100. Loss, perplexity and token accuracy are in `language_model`.

These are of texts. What a head with labels or numbers predicts has the scores of `TASK_SCORES`, by the recipe's task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gptj_ft.errors import DataError
from gptj_ft.evaluation.metrics import accuracy, relations, rouge, squad
from gptj_ft.evaluation.metrics.class_scores import MULTI_LABEL_SCORES, SINGLE_LABEL_SCORES
from gptj_ft.evaluation.metrics.entities import ENTITY_SCORES
from gptj_ft.evaluation.metrics.regression import REGRESSION_SCORES
from gptj_ft.evaluation.metrics.statistic import Statistic, Vector

__all__ = [
    "METRICS",
    "TASK_SCORES",
    "Metric",
    "Statistic",
    "TaskScores",
    "Vector",
    "main_score",
    "score",
    "score_by_row",
    "score_names",
]

Scorer = Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, Statistic]]


@dataclass(frozen=True)
class Metric:
    """A metric: its function and the names of its scores.

    Attributes:
        names: names of its scores, including those that need certain data.
        main: the one that says most, and says it of each row, too.
        scorer: answers, and for each all texts that are right -> score by name.
        needs_reference: whether a row without a text that is right cannot be scored.
    """

    names: tuple[str, ...]
    main: str
    scorer: Scorer
    needs_reference: bool


METRICS: Mapping[str, Metric] = {
    "rouge": Metric(rouge.ROUGE_SCORES, "rougeL", rouge.rouge, needs_reference=True),
    "squad": Metric(squad.SQUAD_SCORES, "f1", squad.squad, needs_reference=False),
    "accuracy": Metric(("accuracy", "macro_f1"), "accuracy", accuracy.accuracy, needs_reference=True),
    "relations": Metric(relations.RELATION_SCORES, "relations_f1", relations.relations, needs_reference=False),
}


@dataclass(frozen=True)
class TaskScores:
    """Scores of what a head predicts.

    Attributes:
        names: names of the scores, including those that need certain data.
        main: the one that says most.
        by_row: the one that says most of each row.
    """

    names: tuple[str, ...]
    main: str
    by_row: str


TASK_SCORES: Mapping[str, TaskScores] = {
    "classification": TaskScores(SINGLE_LABEL_SCORES, "accuracy", "accuracy"),
    "multi-label": TaskScores(MULTI_LABEL_SCORES, "micro_f1", "micro_f1"),
    "regression": TaskScores(REGRESSION_SCORES, "pearson", "mse"),
    "token-labels": TaskScores(ENTITY_SCORES, "entity_f1", "word_accuracy"),
}
"""Scores by `Recipe.task`; the answers of other tasks are texts, with the metrics of texts."""
TASK_METRICS: Mapping[str, tuple[str, ...]] = {"spans": ("squad",), "sentences": ("rouge",)}


def main_score(names: Collection[str]) -> str:
    """Choose the score that says most; empty if there is none.

    Args:
        names: names of the scores that there are.
    """
    mains = [*(metric.main for metric in METRICS.values()), *(each.main for each in TASK_SCORES.values())]
    return next((main for main in mains if main in names), next(iter(names), ""))


def score_by_row(metrics: Sequence[str], names: Collection[str]) -> str:
    """Choose the score that rows are compared by: the first metric's main one, else the task's, else the loss.

    Args:
        metrics: keys of `METRICS`.
        names: names of the scores that there are.
    """
    mains = [*(METRICS[metric].main for metric in metrics[:1]), *(each.by_row for each in TASK_SCORES.values())]
    return next((main for main in mains if main in names), "loss")


def score_names(metrics: Sequence[str], task: str = "language-model") -> list[str]:
    """List the names of all scores of some metrics, or of a task with labels."""
    if task in TASK_SCORES:
        return list(TASK_SCORES[task].names)
    return [name for metric in TASK_METRICS.get(task, metrics) for name in METRICS[metric].names]


def score(
    metrics: Sequence[str], predictions: Sequence[str], references: Sequence[Sequence[str]], stemming: bool = True
) -> dict[str, Statistic]:
    """Compute every score of the named metrics.

    Args:
        metrics: keys of `METRICS`.
        predictions: one text per row.
        references: accepted texts of each row.
        stemming: whether words with the same stem are the same to ROUGE; default true.

    Raises:
        DataError: no rows, or a row without what the metric needs.
    """
    assert len(predictions) == len(references), f"{len(predictions)} predictions, {len(references)} rows of references"
    assert not any(isinstance(targets, str) for targets in references), "references are lists of texts"
    if metrics and not predictions:
        raise DataError("no rows to score")
    figures: dict[str, Statistic] = {}
    for name in metrics:
        if METRICS[name].needs_reference:
            for row, targets in enumerate(references, start=1):
                if not targets:
                    raise DataError(f"row {row} has no reference, which {name} needs")
        scorer = METRICS[name].scorer if stemming or name != "rouge" else partial(rouge.rouge, stemming=False)
        figures |= scorer(predictions, references)
    return figures
