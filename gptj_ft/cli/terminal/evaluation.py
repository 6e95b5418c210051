"""Show an evaluation, write its reports, check its gates, and record it in the model's run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from gptj_ft import api
from gptj_ft.cli.html import check_report_path, write_new
from gptj_ft.cli.html.evaluation_page import (
    EVALUATION_SUFFIXES,
    Facts,
    cut_text,
    evaluation_facts,
    evaluation_report,
    record,
)
from gptj_ft.cli.html.run_page import write_page
from gptj_ft.cli.terminal.labels import show_labels
from gptj_ft.cli.terminal.output import Output
from gptj_ft.cli.terminal.progress import TerminalReporter
from gptj_ft.cli.terminal.screen import next_steps, panel, say, table, whole
from gptj_ft.cli.terminal.tables import ask, show_reading, show_threads
from gptj_ft.config.run_folder import Run
from gptj_ft.errors import GateError, GptjFtError, UsageError
from gptj_ft.evaluation.comparison import Gate, ModelComparison, failed_gates
from gptj_ft.evaluation.evaluate import EvaluateRequest, PairedEvaluation, TasksRequest
from gptj_ft.evaluation.predictions_file import write_outputs
from gptj_ft.system.atomic import require_new, require_writable
from gptj_ft.system.plain_text import command_line

ONLY_IN_REPORTS = ("word_perplexity", "byte_perplexity")  # not on a terminal, so that the table fits
SHOWN_CHARACTERS = 300  # of an answer on a terminal


@dataclass(frozen=True)
class EvaluationOutput:
    """Output of an evaluation."""

    out: Output
    output: Path | None  # new file with a line per row
    reports: Sequence[Path]  # new files
    show: int  # number of answers to show with their references
    command: str  # command line, as typed

    def check_files(self) -> None:
        """Check the output files before the evaluation.

        Raises:
            UsageError: a file exists, is named twice or cannot be written, or the suffix of a report is unknown.
        """
        for path in self.reports:
            check_report_path(path, EVALUATION_SUFFIXES)
        if self.output is not None:
            require_new(self.output)
        if twice := [path for path, count in Counter(self.files).items() if count > 1]:
            raise UsageError(f"{twice[0]} is named twice: each --report and --output needs a file of its own")
        require_writable(*self.files)

    @property
    def files(self) -> list[Path]:
        """New files, in the order in which they are written."""
        return [path for path in (self.output, *self.reports) if path is not None]

    def conclude(
        self,
        result: ModelComparison,
        gates: Sequence[Gate],
        following: Sequence[str] = (),
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Show a comparison and the next commands, and write the output files.

        Args:
            close: function that deletes the cached results; called when the comparison is shown.

        Raises:
            GateError: a score missed its gate.
        """
        failed = failed_gates(gates, result.comparison.scores)
        facts = evaluation_facts(result, self.command, self.show)
        json_facts = {**result.to_dict(self.show > 0), "gates_missed": failed}
        if self.output is not None:
            write_outputs(self.output, result.model, result.baseline)
        for path in self.reports:
            write_new(path, evaluation_report(path.suffix.lower(), facts, json_facts))
        self.out.finish(
            json_facts, scores_text(facts), lambda console: show_comparison(console, facts, self.files, following)
        )
        close()
        fail_if_missed(failed, self.out)

    def record(self, model: Path, result: ModelComparison) -> tuple[str, ...]:
        """Add a comparison to the report of the model's run, if any; return the command that shows it.

        A folder that cannot be written to, such as another user's run, only costs a note.
        """
        run = Run(model.resolve().parent)
        if not run.recipe_file.is_file() or run.model != model.resolve():
            return ()
        try:
            record(run.folder, result, self.command)
        except GptjFtError as error:
            self.out.notes.print(f"not recorded in the report of the run: {error}")
            return ()
        write_page(run, self.out.notes.print)
        return (command_line("report", model.parent, "--show-text"),)


def fail_if_missed(failed: Sequence[str], out: Output) -> None:
    """End the command with an error if a score missed its gate.

    Raises:
        GateError: a gate was missed.
    """
    if failed and out.as_json:  # the JSON object has it
        raise typer.Exit(GateError.exit_code)
    if failed:
        raise GateError("gate missed: " + "; ".join(failed))


def evaluate_model(
    request: EvaluateRequest | TasksRequest, gates: Sequence[Gate], shown: EvaluationOutput, dry_run: bool
) -> None:
    """Evaluate a model and show the result; on a dry run, only show the memory needed.

    Raises:
        GateError: a score missed its gate.
    """
    out, notes = shown.out, shown.out.notes
    if isinstance(request, TasksRequest):
        evaluation = PairedEvaluation.of_tasks(request)
    else:
        with TerminalReporter(notes) as reporter:
            evaluation = api.plan_evaluation(request, reporter)
    recipe, plan, about = request.recipe, evaluation.plan, rows_about(evaluation)
    writes = recipe.task == "language-model"
    if dry_run:
        out.finish(plan.to_dict(), "", lambda console: show_reading(console, "The evaluation", about, plan, writes))
        return
    show_reading(notes, "The evaluation", about, plan, writes)
    show_threads(notes, recipe, request.workers.group)
    with TerminalReporter(notes) as reporter:
        result = evaluation.measure(reporter.on_count)
    if isinstance(request, TasksRequest):
        shown.conclude(result, gates, close=evaluation.close)
        return
    following = [*shown.record(request.model, result), ask(recipe, request.model)]
    shown.conclude(result, gates, following, evaluation.close)


def rows_about(evaluation: PairedEvaluation) -> list[tuple[str, str]]:
    """Return the facts of a planned evaluation."""
    request, baseline = evaluation.request, evaluation.baseline
    models = [("model", whole(str(request.model))), ("baseline", whole(str(baseline)) if baseline else "none")]
    if isinstance(request, TasksRequest):
        return [*models, ("tasks", ", ".join(request.tasks.names))]
    is_labelled = request.recipe.task != "language-model"
    if baseline is None and request.baseline == "auto" and not is_labelled:
        models[1] = ("baseline", "none: the base model is missing; name one with --baseline")
    rows = whole(str(evaluation.data)) + (f", the first {request.limit:,}" if request.limit else "")
    language = ", ".join(("loss and perplexity", *request.recipe.metrics))
    measured = f"loss, scores of {request.recipe.task}" if is_labelled else language
    note = [("note", evaluation.note)] if evaluation.note else []
    return [*models, ("rows", rows), ("measured", measured), *note]


def show_comparison(console: Console, facts: Facts, written: Sequence[Path] = (), commands: Sequence[str] = ()) -> None:
    """Show the scores of model and baseline, sampled rows, the verdict and the next commands.

    Args:
        facts: mapping made by `evaluation_facts`.
        written: output files.
        commands: commands to suggest.
    """
    _show_table(console, f"{facts['rows']:,} rows, {facts['target_tokens']:,} target tokens", facts["table"], facts)
    for file, rows in facts["by_file"].items():
        _show_table(console, f"rows of {file}", rows, facts)
    for line in facts["lines"]:
        say(console, line, "  ")
    if facts["labels"]:
        show_labels(console, facts["labels"])
    for sample in facts["samples"]:
        texts = [(name, cut_text(text, SHOWN_CHARACTERS)) for name, text in sample["texts"].items()]
        panel(console, sample["place"], texts)
    headline = facts["headline"]
    text = ": ".join(filter(None, (headline["words"], headline["figures"])))
    console.print(Text(f"\n{text[:1].upper()}{text[1:]}", style="bold"), soft_wrap=True)
    for path in written:
        console.print(f"written to {path}")
    next_steps(console, *commands)


def scores_text(facts: Facts) -> str:
    """Return the model's scores as lines of text."""
    return "\n".join(f"{row['name']} {row['model']['value'].replace(',', '')}" for row in facts["table"])


def _show_table(console: Console, title: str, rows: Sequence[Facts], facts: Facts) -> None:
    compared = facts["baseline"] is not None
    names = ("baseline", "model", "change") if compared else ("model",)
    head = ("score", *names, "95 % interval", *(("",) if compared else ()))
    lines = [
        (row["name"], *(row[key]["value"] for key in ("baseline", "model", "change")), row["change"]["interval"],
         row["verdict"])
        if compared else (row["name"], row["model"]["value"], row["model"]["interval"])
        for row in rows
        if row["name"].rpartition(".")[2] not in ONLY_IN_REPORTS or len(rows) <= len(ONLY_IN_REPORTS)
    ]  # fmt: skip
    table(console, title, [head, *lines], right=range(1, 5))
