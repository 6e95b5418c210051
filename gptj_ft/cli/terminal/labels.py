"""Show scores of labels: each label's own, what is taken for what, how sure the model is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from gptj_ft.cli.html.label_tables import MOST_CLASSES, LabelTable
from gptj_ft.cli.terminal.screen import say, table

MOST_IN_ROW = 10  # labels of a confusion matrix on a terminal
MOST_PAIRS = 10


def show_labels(console: Console, facts: Mapping[str, Any]) -> None:
    """Show what fits a terminal: of many labels the weakest, of a large matrix the worst pairs.

    Args:
        console: terminal or log.
        facts: mapping made by `label_facts`.
    """
    for line in facts["lines"]:
        say(console, line, "  ")
    classes: LabelTable = facts["classes"]
    _show(console, replace(classes, rows=classes.rows[:MOST_CLASSES]))
    hidden = len(classes.rows) - MOST_CLASSES
    if hidden > 0:
        say(console, f"and {hidden:,} more: --report FILE.html has all", "  ")
    matrix, pairs = facts["confusion"], facts["confused"]
    if matrix and len(matrix.rows) <= MOST_IN_ROW:
        _show(console, matrix)
    elif pairs:
        _show(console, replace(pairs, rows=pairs.rows[:MOST_PAIRS]))
    if facts["calibration"]:
        _show(console, facts["calibration"])


def _show(console: Console, shown: LabelTable) -> None:
    table(console, shown.title, [shown.head, *shown.rows], right=range(shown.num_names, len(shown.head)))
