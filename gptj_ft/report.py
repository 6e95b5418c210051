"""What the commands print for people: tables and lines, from the values that `--json` prints for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gptj_ft.plan import Plan, gigabytes
from gptj_ft.progress import clock

if TYPE_CHECKING:
    from gptj_ft.data.prepared import Report
    from gptj_ft.evaluate import Evaluation

SAMPLE_CHARACTERS = 300


def show_data(console: Console, report: Report) -> None:
    """Show what was understood of the rows, and what became of each."""
    columns = ", ".join(f"{field} = column '{column}'" for field, column in report.columns.items())
    lines = [
        f"{', '.join(report.files)}: {report.rows_read:,} rows read, {report.rows_kept:,} kept",
        f"  {columns}",
        f"  {report.tokens:,} tokens, {report.target_tokens:,} of them trained on; longest row {report.longest:,}",
    ]
    if report.rows_cut:
        lines.append(f"  {report.rows_cut:,} rows shortened in '{report.settings['shorten']}' to fit max_length")
    if report.windows > report.rows_kept:
        lines.append(f"  split into {report.windows:,} windows of at most {report.settings['max_length']:,} tokens")
    for reason, skips in report.rows_skipped.items():
        lines.append(f"  skipped {skips.count:,}: {reason} ({', '.join(skips.first)})")
    console.print(escape("\n".join(lines)), highlight=False)


def show_plan(console: Console, plan: Plan) -> None:
    """Show what a run will cost."""
    table = Table(title="What it will cost", show_header=False, title_justify="left")
    rows = [
        ("parameters", f"{plan.num_parameters:,}, all trained; computed in {plan.precision}"),
        ("placement", str(plan.placement)),
        ("memory", f"about {gigabytes(plan.device_bytes)} on the device, {gigabytes(plan.host_bytes)} beside it"),
        ("disk", f"about {gigabytes(plan.disk_bytes)} at most, with a checkpoint and the tuned model"),
        (
            "moved per step",
            f"{gigabytes(plan.bytes_read_per_step)} read, {gigabytes(plan.bytes_written_per_step)} written",
        ),
        ("steps", f"{plan.num_steps or 'not counted without rows'}, of {plan.tokens_per_step:,.0f} tokens on average"),
        (
            "time",
            f"about {plan.seconds_per_step:.2g} s a step" + (f", {clock(plan.seconds)} in all" if plan.seconds else ""),
        ),
    ]
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)


def describe_best(run: str, best: Mapping[str, Any]) -> str:
    """Say that the validation loss was lowest before the end, and how to have that state."""
    where = (
        f"it is kept: `gptj-ft runs export {run} FOLDER --from best`"
        if best["checkpoint"]
        else "--keep best,last keeps that state, --export best exports it"
    )
    return f"the validation loss was lowest after {best['step']} steps, {best['validation_loss']:.4f}; {where}"


def show_evaluation(console: Console, tuned: Evaluation, baseline: Evaluation | None) -> None:
    """Show a model's figures, the baseline's beside them if there is one."""
    table = Table(title=f"{tuned.rows:,} rows, {tuned.target_tokens:,} target tokens", title_justify="left")
    table.add_column("")
    for name in (*(["baseline"] if baseline else []), "model", *(["change"] if baseline else [])):
        table.add_column(name, justify="right")
    figures = {"loss": tuned.loss, "perplexity": tuned.perplexity, **tuned.scores}
    before = {"loss": baseline.loss, "perplexity": baseline.perplexity, **baseline.scores} if baseline else {}
    for name, value in figures.items():
        cells = (
            [f"{before[name]:,.2f}", f"{value:,.2f}", f"{value - before[name]:+,.2f}"] if before else [f"{value:,.2f}"]
        )
        table.add_row(name, *cells)
    console.print(table)


def show_samples(console: Console, tuned: Evaluation, baseline: Evaluation | None, count: int) -> None:
    """Show the first answers beside what was expected. Only for users who asked to see their texts."""
    for row in range(min(count, tuned.rows)):
        pairs = [("expected", " | ".join(tuned.references[row])), ("model", tuned.answers[row])]
        if baseline:
            pairs.insert(1, ("baseline", baseline.answers[row]))
        console.print(f"\nrow {row + 1}")
        for name, text in pairs:
            shown = text if len(text) <= SAMPLE_CHARACTERS else text[:SAMPLE_CHARACTERS] + " ..."
            console.print(f"  {name:9}", escape(shown), highlight=False)
