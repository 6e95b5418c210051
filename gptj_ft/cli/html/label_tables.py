"""Lay out the scores of labels once, as tables of text for terminal, HTML and Markdown; chart the calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from gptj_ft.cli.html.charts import Axis, Line, line_chart
from gptj_ft.evaluation.metrics.label_scores import ClassScore, LabelScores

MOST_CLASSES = 20  # with more, the weakest come first, and a page folds the table
FEWEST_PAIRED = 4  # labels; with fewer, the matrix is easier to read than pairs
DARKEST = 55  # percent of colour in a cell of the matrix; the number stays readable


@dataclass(frozen=True)
class LabelTable:
    """Table of text: names on the left, numbers on the right."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    num_names: int = 1  # columns of names
    shades: tuple[tuple[int, ...], ...] = ()  # colour of each number in percent; empty: none


def label_facts(scores: LabelScores | None, baseline: LabelScores | None = None) -> dict[str, Any] | None:
    """Collect the facts of labels as text; ``None`` without labels.

    Args:
        baseline: scores of the baseline on the same rows; its F1 gets a column.
    """
    if scores is None:
        return None
    return {
        "lines": _lines(scores),
        "classes": _class_table(scores, baseline),
        "is_long": len(scores.classes) > MOST_CLASSES,
        "confusion": _matrix(scores) if scores.confusion else None,
        "confused": _pairs(scores) if scores.confused and len(scores.classes) >= FEWEST_PAIRED else None,
        "calibration": _calibration_table(scores) if scores.calibration else None,
        "chart": Markup(_calibration_chart(scores)),
    }


def _lines(scores: LabelScores) -> list[str]:
    lines = []
    if scores.commonest:
        answer = f"'{scores.commonest}'" if scores.commonest != "no label" else scores.commonest
        lines.append(f"base rate: always answering {answer} is right for {scores.base_rate:.2f} % of the {scores.unit}")
    if scores.threshold is not None:
        lines.append(f"labels are predicted from a probability of {scores.threshold:.4g}")
    return lines


def _class_table(scores: LabelScores, baseline: LabelScores | None) -> LabelTable:
    before = {each.name: each for each in baseline.classes} if baseline else {}
    classes, title = list(scores.classes), "Entities by type" if scores.unit == "entities" else "Labels"
    if len(classes) > MOST_CLASSES:
        classes.sort(key=lambda each: (not each.expected, each.f1, -each.expected))
        title += ", lowest F1 first"

    def row(score: ClassScore) -> tuple[str, ...]:
        other = [_percent(before[score.name].f1) if score.name in before else ""] if before else []
        shares = (score.precision, score.recall, score.f1)
        return (score.name, *map(_percent, shares), *other, f"{score.expected:,}", f"{score.given:,}")

    return LabelTable(
        title,
        (
            "type" if scores.unit == "entities" else "label", "precision", "recall", "F1",
            *(["F1 of baseline"] if before else []), scores.unit, "predicted",
        ),
        [row(each) for each in classes],
    )  # fmt: skip


def _matrix(scores: LabelScores) -> LabelTable:
    names = [each.name for each in scores.classes]
    shades = tuple(tuple(round(DARKEST * each / max(1, sum(row))) for each in row) for row in scores.confusion)
    rows = [(name, *(f"{each:,}" for each in row)) for name, row in zip(names, scores.confusion, strict=True)]
    return LabelTable("Confusion matrix: true labels down, answers across", ("label", *names), rows, shades=shades)


def _pairs(scores: LabelScores) -> LabelTable:
    rows = [(each.label, each.answer, f"{each.count:,}", _percent(each.share)) for each in scores.confused]
    return LabelTable("Most frequent confusions", ("label", "answer", scores.unit, "% of label"), rows, num_names=2)


def _calibration_table(scores: LabelScores) -> LabelTable:
    rows = [
        (
            f"{100 * each.low:.0f} to {100 * each.high:.0f}", f"{each.rows:,}", _percent(100 * each.confidence),
            _percent(100 * each.accuracy),
        )
        for each in scores.calibration
    ]  # fmt: skip
    head = ("probability, %", scores.unit, "mean, %", "right, %")
    return LabelTable("Calibration: confidence and accuracy", head, rows)


def _calibration_chart(scores: LabelScores) -> str:
    points = [(100 * each.confidence, 100 * each.accuracy) for each in scores.calibration]
    if len(points) < 2:
        return ""
    ends: Sequence[float] = (points[0][0], points[-1][0])
    lines = [Line("perfect calibration", [(end, end) for end in ends], is_faint=True), Line("answers", points)]
    return line_chart("Right answers", Axis("probability of the answer, %"), Axis("right answers, %", True), lines)


def _percent(share: float) -> str:
    return f"{share:.2f}"
