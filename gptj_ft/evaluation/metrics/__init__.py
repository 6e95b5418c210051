"""Score answers with metrics named and computed as in published results.

    rouge       ROUGE-1, -2, -L, -Lsum as by the rouge-score package, and -Lsum by sentences; means over rows
    squad       exact match and F1 as by SQuAD's official scripts, v1.1 and v2.0, and a strict match; means over rows
    accuracy    labels: accuracy, and F1 averaged over the labels
    relations   precision, recall and F1 of all facts of all rows together

A row counts its best reference. All times 100. Loss, perplexity and token accuracy are in `language_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gptj_ft.errors import DataError
from gptj_ft.evaluation.metrics import classification, relations, rouge, squad
from gptj_ft.evaluation.metrics.statistic import Statistic, Vector

__all__ = ["METRICS", "Metric", "Statistic", "Vector", "score", "score_names"]

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
    "accuracy": Metric(("accuracy", "macro_f1"), "accuracy", classification.accuracy, needs_reference=True),
    "relations": Metric(relations.RELATION_SCORES, "relations_f1", relations.relations, needs_reference=False),
}


def score_names(metrics: Sequence[str]) -> list[str]:
    """List the names of all scores of some metrics."""
    return [name for metric in metrics for name in METRICS[metric].names]


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
