"""Show a leak report, write it to files, and check its gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gptj_ft import api
from gptj_ft.cli.html import write_new
from gptj_ft.cli.html.leaks_page import SHOWN_ROWS, leak_facts, leak_report
from gptj_ft.cli.terminal.evaluation import EvaluationOutput, fail_if_missed
from gptj_ft.cli.terminal.progress import TerminalReporter
from gptj_ft.cli.terminal.screen import say, table, whole
from gptj_ft.cli.terminal.tables import show_reading, show_threads
from gptj_ft.evaluation.comparison import failed_gates, parse_gates
from gptj_ft.evaluation.leak_report import LEAK_SCORES
from gptj_ft.evaluation.leaks import LeakExamination, LeakRequest

ROWS_ON_TERMINAL = 10


def examine_leaks(request: LeakRequest, gate_texts: Sequence[str], shown: EvaluationOutput, dry_run: bool) -> None:
    """Examine a model and show the result; on a dry run, only show the memory needed.

    Raises:
        GateError: a score missed its gate.
    """
    out, notes, gates = shown.out, shown.out.notes, parse_gates(gate_texts, LEAK_SCORES)
    with TerminalReporter(notes) as reporter:
        examination = api.plan_leaks(request, reporter)
    plan, about = examination.plan, _about(examination)
    if dry_run:
        out.finish(plan.to_dict(), "", lambda console: show_reading(console, "The leak report", about, plan, False))
        return
    show_reading(notes, "The leak report", about, plan, writes=False)
    show_threads(notes, request.recipe, request.workers.group)
    with TerminalReporter(notes) as reporter:
        report = examination.measure(reporter.on_count)
    failed = failed_gates(gates, report.scores)
    facts, json_facts = leak_facts(report, shown.command), {**report.to_dict(SHOWN_ROWS), "gates_missed": failed}
    for path in shown.reports:
        write_new(path, leak_report(path.suffix.lower(), facts, json_facts))
    text = "\n".join(f"{name} {estimate.value:.4f}" for name, estimate in report.scores.items())
    out.finish(json_facts, text, lambda console: _show(console, facts, shown.reports))
    examination.close()
    fail_if_missed(failed, out)


def _about(examination: LeakExamination) -> list[tuple[str, str]]:
    request, baseline = examination.request, examination.baseline
    trained = sum(probe.is_trained for probe in examination.probes)
    unseen = whole(request.data) if request.data else "held out from training"
    canaries = sum(canary.repeats > 0 for canary in examination.canaries)
    planted = [("canaries", f"{canaries:,} planted, as many controls")] if canaries else []
    return [
        ("model", whole(str(request.model))),
        ("untuned", whole(str(baseline)) if baseline else "none: scores are not calibrated"),
        ("rows", f"{trained:,} training rows; {len(examination.probes) - trained:,} unseen rows, {unseen}"),
        *planted,
    ]


def _show(console: Console, facts: Mapping[str, Any], written: Sequence[Path]) -> None:
    rows = {**facts["rows"], "rows": facts["rows"]["rows"][:ROWS_ON_TERMINAL]}
    for each in [*facts["tables"], rows]:
        table(console, each["title"], [each["head"], *each["rows"]])
        say(console, each["caption"], "  ")
    for note in facts["notes"]:
        say(console, f"\n{note}", "  ")
    console.print(Text(f"\n{facts['model']}: {facts['title']}", style="bold"), soft_wrap=True)
    say(console, facts["summary"])
    for path in written:
        console.print(f"written to {path}")
