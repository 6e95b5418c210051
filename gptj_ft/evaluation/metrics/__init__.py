"""Score answers with metrics named and computed as in published results.

Metrics of texts, all times 100; each row takes its best reference:

    rouge       ROUGE-1, -2, -L, -Lsum by the rouge-score package, and -Lsum by sentences; means over rows
    squad       exact match and F1 by SQuAD's official scripts, v1.1 and v2.0, and a strict match; means over rows
    accuracy    labels: accuracy, and F1 averaged over the labels
    relations   precision, recall and F1 over the facts of all rows

`TASK_SCORES` lists the scores of heads with labels or numbers. `language_model` has loss, perplexity, token accuracy.
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
    """A metric of texts."""

    names: tuple[str, ...]  # all its scores, including those that need certain data
    main: str  # most informative score, also for single rows
    scorer: Scorer  # from answers and accepted texts to scores by name
    needs_reference: bool  # whether a row without an accepted text cannot be scored


METRICS: Mapping[str, Metric] = {
    "rouge": Metric(rouge.ROUGE_SCORES, "rougeL", rouge.rouge, needs_reference=True),
    "squad": Metric(squad.SQUAD_SCORES, "f1", squad.squad, needs_reference=False),
    "accuracy": Metric(("accuracy", "macro_f1"), "accuracy", accuracy.accuracy, needs_reference=True),
    "relations": Metric(relations.RELATION_SCORES, "relations_f1", relations.relations, needs_reference=False),
}


@dataclass(frozen=True)
class TaskScores:
    """Scores of a head's predictions."""

    names: tuple[str, ...]  # all scores, including those that need certain data
    main: str  # most informative score
    by_row: str  # most informative score of single rows


TASK_SCORES: Mapping[str, TaskScores] = {  # by `Recipe.task`
    "classification": TaskScores(SINGLE_LABEL_SCORES, "accuracy", "accuracy"),
    "multi-label": TaskScores(MULTI_LABEL_SCORES, "micro_f1", "micro_f1"),
    "regression": TaskScores(REGRESSION_SCORES, "pearson", "mse"),
    "token-labels": TaskScores(ENTITY_SCORES, "entity_f1", "word_accuracy"),
}
TASK_METRICS: Mapping[str, tuple[str, ...]] = {"spans": ("squad",), "sentences": ("rouge",)}  # heads that give texts


def main_score(names: Collection[str]) -> str:
    """Choose the most informative of the available scores; empty if there are none."""
    mains = [*(metric.main for metric in METRICS.values()), *(each.main for each in TASK_SCORES.values())]
    return next((main for main in mains if main in names), next(iter(names), ""))


def score_by_row(metrics: Sequence[str], names: Collection[str]) -> str:
    """Choose the score to compare rows by: the first metric's main score, else the task's, else the loss.

    Args:
        metrics: keys of `METRICS`.
        names: available scores.
    """
    mains = [*(METRICS[metric].main for metric in metrics[:1]), *(each.by_row for each in TASK_SCORES.values())]
    return next((main for main in mains if main in names), "loss")


def score_names(metrics: Sequence[str], task: str = "language-model") -> list[str]:
    """List the scores of some metrics, or of a task with a head."""
    if task in TASK_SCORES:
        return list(TASK_SCORES[task].names)
    return [name for metric in TASK_METRICS.get(task, metrics) for name in METRICS[metric].names]


def score(
    metrics: Sequence[str], predictions: Sequence[str], references: Sequence[Sequence[str]], stemming: bool = True
) -> dict[str, Statistic]:
    """Compute every score of some metrics.

    Args:
        metrics: keys of `METRICS`.
        predictions: one text per row.
        references: accepted texts of each row.
        stemming: whether ROUGE treats words with the same stem as equal; default true.

    Raises:
        DataError: no rows, or a row without a reference that a metric needs.
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
