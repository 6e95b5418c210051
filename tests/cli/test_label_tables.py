"""Scores of labels on a terminal, on pages and in Markdown."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from gptj_ft.cli.html.evaluation_page import evaluation_facts, evaluation_report, record, recorded_facts
from gptj_ft.cli.html.label_tables import DARKEST, MOST_CLASSES, label_facts
from gptj_ft.cli.terminal.evaluation import show_comparison
from gptj_ft.cli.terminal.labels import MOST_PAIRS, show_labels
from gptj_ft.evaluation.comparison import Evaluation, ModelComparison, compare_models
from gptj_ft.evaluation.metrics.class_scores import single_label, softmax
from gptj_ft.evaluation.metrics.label_scores import (
    ClassScore,
    LabelScores,
    scores_of_entities,
    scores_of_label_sets,
    scores_of_rows,
    scores_of_words,
)
from gptj_ft.evaluation.metrics.regression import regression

NAMES = ["entail|ment", "<neutral>", "contradiction"]


def evaluation(seed: int, names: list[str] = NAMES, skill: float = 2.0) -> Evaluation:
    labels = np.arange(90) % len(names)
    noise = np.random.default_rng(seed).normal(size=(90, len(names)))
    probabilities = softmax(noise + skill * np.eye(len(names))[labels])
    return Evaluation(
        f"models/m{seed}",
        single_label(labels, probabilities),
        [f"rows.tsv:{row}" for row in range(90)],
        [names[answer] for answer in probabilities.argmax(-1)],
        [[names[label]] for label in labels],
        labels=scores_of_rows(labels, probabilities, names),
    )


def compared(names: list[str] = NAMES) -> ModelComparison:
    return compare_models(evaluation(1, names), evaluation(2, names, skill=0.5), (), seed=0)


def shown(facts: dict, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    show_labels(console, facts)
    return console.file.getvalue()


def test_label_scores_fit_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    show_comparison(console, evaluation_facts(compared(), "gptj-ft evaluate m1", 0))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^label +precision +recall +F1 +F1 of baseline +rows +predicted$", text, re.MULTILINE)
    assert re.search(r"^<neutral>( +\d+\.\d\d){4} +30 +\d+$", text, re.MULTILINE)
    assert re.search(r"^label +entail\|ment +<neutral> +contradiction$", text, re.MULTILINE)
    assert "Calibration: confidence and accuracy" in text
    assert "\nbase rate: always answering 'entail|ment' is right for 33.33 % of the rows" in text
    assert text.splitlines()[-1].startswith("Better: accuracy "), "the main score, not the first one"


def test_page_shows_labels_matrix_and_chart() -> None:
    page = evaluation_report(".html", evaluation_facts(compared(), "gptj-ft evaluate m1", 0), {})
    assert "<neutral>" not in page
    assert page.count('<th role="rowheader" scope="row">&lt;neutral&gt;</th>') == 2
    matrix = page[page.index("Confusion matrix: true labels down, answers across") :]
    assert len(re.findall(r'class="number right"', matrix)) == 3, "the diagonal"
    assert re.search(r'<td role="cell" class="number right"[^>]* style="--share: \d+%">\d+</td>', matrix)
    assert "<svg" in matrix
    assert "Base rate: always answering &#39;entail|ment&#39; is right for 33.33 % of the rows." in page
    assert "<details><summary>All" not in page


def test_matrix_shades_are_row_shares() -> None:
    found = scores_of_words([0, 0, 0, 0, 1], [0, 0, 0, 1, 1], ["a", "b", "c"])
    facts = label_facts(found)
    assert facts["confusion"].shades == ((round(0.75 * DARKEST), round(0.25 * DARKEST), 0), (0, DARKEST, 0), (0, 0, 0))
    assert facts["confusion"].rows == [("a", "3", "1", "0"), ("b", "0", "1", "0"), ("c", "0", "0", "0")]


def test_markdown_tables_escape_pipes_in_names() -> None:
    text = evaluation_report(".md", evaluation_facts(compared(), "gptj-ft evaluate m1", 0), {})
    lines = [line for line in text.splitlines() if line.startswith("|")]
    tables = text.split("\n## ")[1:]
    assert [table.splitlines()[0] for table in tables] == [
        "Labels", "Confusion matrix: true labels down, answers across", "Calibration: confidence and accuracy",
    ]  # fmt: skip
    assert any(line.startswith("| entail\\|ment | ") for line in lines)
    for table in tables:
        rows = [line.replace("\\|", "") for line in table.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) == 1
    assert "- base rate: always answering 'entail|ment'" in text


def test_many_labels_show_weakest_first() -> None:
    names = [f"fold {number}" for number in range(45)]
    facts = evaluation_facts(compared(names), "gptj-ft evaluate m1", 0)
    text = shown(facts["labels"])
    assert "Labels, lowest F1 first" in text
    assert "\nand 25 more: --report FILE.html shows all" in text
    values = [float(row[3]) for row in facts["labels"]["classes"].rows]
    assert values == sorted(values)
    assert len(re.findall(r"^fold \d+( +\d+\.\d\d){4} ", text, re.MULTILINE)) == MOST_CLASSES
    assert len(re.findall(r"^fold \d+ +fold \d+ ", text, re.MULTILINE)) == MOST_PAIRS
    page = evaluation_report(".html", facts, {})
    assert "<details><summary>All 45</summary>" in page
    assert page.count('<th role="rowheader" scope="row">fold ') == 45 + len(facts["labels"]["confused"].rows)


def test_labels_without_rows_come_last() -> None:
    classes = tuple(ClassScore.of(str(number), number % 2, 2, number % 3) for number in range(30))
    rows = label_facts(LabelScores("rows", classes))["classes"].rows
    expected = [int(row[-2].replace(",", "")) for row in rows]
    assert expected[:20] == [each for each in expected if each]
    assert expected[20:] == [0] * 10


def test_label_sets_show_threshold_entities_show_types() -> None:
    sets = label_facts(scores_of_label_sets([[0, 0], [0, 1]], [[0.1, 0.2], [0.2, 0.9]], 0.35, ["x", "y"]))
    assert sets["lines"][-1] == "labels are predicted from a probability of 0.35"
    text = shown(sets)
    assert "label  precision  recall      F1  rows  predicted" in text
    assert sets["confusion"] is sets["calibration"] is None
    none = label_facts(scores_of_label_sets([[0], [0], [1]], [[0.1], [0.2], [0.9]], 0.5, ["x"]))
    assert none["lines"][0] == "base rate: always answering no label is right for 66.67 % of the rows"
    types = label_facts(scores_of_entities([["B-PER", "O"]], [["B-PER", "B-ORG"]]))
    assert types["classes"].title == "Entities by type"
    assert types["classes"].rows == [("ORG", "0.00", "0.00", "0.00", "0", "1"), ("PER", *["100.00"] * 3, "1", "1")]
    assert types["lines"] == []


def test_recorded_label_scores_survive_json(tmp_path: Path) -> None:
    verdict = compared()
    facts = verdict.to_dict(texts=False)
    assert LabelScores.from_dict(json.loads(json.dumps(facts))["model"]["labels"]) == verdict.model.labels
    assert recorded_facts(tmp_path) is None
    record(tmp_path, verdict, "gptj-ft evaluate m1")
    recorded = recorded_facts(tmp_path)
    assert recorded["labels"] == evaluation_facts(verdict, "gptj-ft evaluate m1", 0)["labels"]
    without = compare_models(
        Evaluation("m", {"loss": single_label([0], [[1.0]])["accuracy"]}, ["f:1"], [""], [[]]), None, (), 0
    )
    assert "labels" not in without.to_dict(texts=False)["model"]
    assert evaluation_facts(without, "gptj-ft evaluate", 0)["labels"] is None


@pytest.mark.parametrize(("name", "better"), [("pearson", False), ("mse", True), ("mae", True)])
def test_lower_regression_error_is_better(name: str, better: bool) -> None:
    numbers = np.arange(20.0)
    far, near = (regression(numbers, numbers + shift * (-1) ** np.arange(20)) for shift in (3.0, 1.0))
    places = [f"f:{row}" for row in range(20)]
    found = compare_models(
        Evaluation("near", near, places, [""] * 20, [[]] * 20),
        Evaluation("far", far, places, [""] * 20, [[]] * 20),
        (),
        0,
    )
    assert found.by_row.score == "mse"
    assert len(found.by_row.better) == 20
    assert (found.comparison.differences[name].value < 0) == better
    verdicts = {row["name"]: row["verdict"] for row in evaluation_facts(found, "gptj-ft evaluate", 0)["table"]}
    assert verdicts[name] == "better"
