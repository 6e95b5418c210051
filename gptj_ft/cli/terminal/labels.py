"""Show predicted labels, and scores of labels: by class, confusions, calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gptj_ft import api
from gptj_ft.cli.html.label_tables import MOST_CLASSES, LabelTable
from gptj_ft.cli.terminal.output import Output
from gptj_ft.cli.terminal.progress import TerminalReporter
from gptj_ft.cli.terminal.screen import panel, say, table, whole
from gptj_ft.cli.terminal.tables import show_reading, show_threads
from gptj_ft.config.options import Recipe
from gptj_ft.evaluation.predict import LabelJob

MOST_IN_ROW = 10  # labels of a confusion matrix on a terminal
MOST_PAIRS = 10


def show_labels(console: Console, facts: Mapping[str, Any]) -> None:
    """Show scores of labels that fit a terminal: the weakest labels, and the matrix or its worst pairs.

    Args:
        facts: mapping made by `label_facts`.
    """
    for line in facts["lines"]:
        say(console, line, "  ")
    classes: LabelTable = facts["classes"]
    _show(console, replace(classes, rows=classes.rows[:MOST_CLASSES]))
    hidden = len(classes.rows) - MOST_CLASSES
    if hidden > 0:
        say(console, f"and {hidden:,} more: --report FILE.html shows all", "  ")
    matrix, pairs = facts["confusion"], facts["confused"]
    if matrix and len(matrix.rows) <= MOST_IN_ROW:
        _show(console, matrix)
    elif pairs:
        _show(console, replace(pairs, rows=pairs.rows[:MOST_PAIRS]))
    if facts["calibration"]:
        _show(console, facts["calibration"])


def _show(console: Console, shown: LabelTable) -> None:
    table(console, shown.title, [shown.head, *shown.rows], right=range(shown.num_names, len(shown.head)))


def show_text_labels(folder: Path, recipe: Recipe, text: str, pair: str | None, out: Output) -> None:
    """Label a text, or a pair of texts, and show the answer."""
    with out.activity("reading the text"):
        (facts,) = api.label([text if pair is None else (text, pair)], folder, recipe)
    out.finish(facts, _in_words(facts), lambda console: _show_facts(console, facts))


def label_file(job: LabelJob, rows: Path, dry_run: bool, out: Output) -> None:
    """Label the rows of a file; on a dry run, only show the memory needed."""
    setup, output = job.setup, job.output
    about = [("model", whole(str(setup.folder))), ("rows", whole(str(rows))), ("labels", f"in {whole(str(output))}")]
    if dry_run:
        out.finish(
            job.plan.to_dict(), "", lambda console: show_reading(console, "The labels", about, job.plan, writes=False)
        )
        return
    show_reading(out.notes, "The labels", about, job.plan, writes=False)
    show_threads(out.notes, setup.recipe, setup.workers.group)
    with TerminalReporter(out.notes) as reporter:
        done = api.run_predictions(job, reporter)
    skipped = {reason: each.count for reason, each in done.skipped.items()}
    facts = {"model": str(setup.folder), "output": str(output), "rows": done.rows, "found": done.resumed,
             "windowed": done.windowed, "cut": done.cut, "skipped": skipped}  # fmt: skip
    notes = [f"{done.resumed:,} of them by an earlier session"] * bool(done.resumed)
    notes += [f"{done.windowed:,} read in several windows"] * bool(done.windowed)
    notes += [f"{done.cut:,} cut to the model's maximum length"] * bool(done.cut)
    notes += [f"{count:,} left out: {reason}" for reason, count in skipped.items()]
    shown = [("rows", "; ".join([f"{done.rows:,}", *notes])), ("labels", whole(str(output)))]
    out.finish(facts, str(output), lambda console: panel(console, "Labelled", shown))


def _in_words(facts: Mapping[str, Any]) -> str:
    """Format the facts of an answer as text."""
    if "label" in facts:
        label = facts["label"]
        return label if isinstance(label, str) else ", ".join(label)
    if "tokens" in facts:
        return "\n".join(f"{token['text']}\t{token['label']}" for token in facts["tokens"])
    if "sentences" in facts:
        return "\n".join(facts["sentences"])
    return str(facts["answer"]) if "answer" in facts else f"{facts['score']:.6g}"


def _show_facts(console: Console, facts: Mapping[str, Any]) -> None:
    for line in _in_words(facts).splitlines() or ["(no answer)"]:
        console.print(line, markup=False, highlight=False)
    likely = sorted(facts.get("probabilities", {}).items(), key=lambda each: -each[1])[:MOST_IN_ROW]
    if likely:
        table(
            console,
            "",
            [("label", "probability, %"), *((name, f"{100 * each:.2f}") for name, each in likely)],
            right=[1],
        )
