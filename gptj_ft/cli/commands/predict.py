"""The command `predict`: label a text, or the rows of a file, with a tuned head."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gptj_ft.cli.options import (
    INFERENCE_OPTIONS,
    TUNED_RECIPE,
    Assignments,
    Config,
    Json,
    Nproc,
    Quiet,
    SetOptions,
    complete_model,
    flag,
    is_assigned,
    takes_options,
)
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import UsageError
from gptj_ft.system.streams import read_input


@takes_options("recipe", "map", "max_bad_rows", *INFERENCE_OPTIONS, meanings={"recipe": TUNED_RECIPE})
def predict(
    *,
    text: Annotated[str | None, typer.Argument(help="text to label; - reads standard input")] = None,
    pair: Annotated[str | None, flag("second text, for tasks about two: a question's context")] = None,
    model: Annotated[str | None, flag("model or run; default: the newest run", autocompletion=complete_model)] = None,
    rows: Annotated[Path | None, flag("rows to label, in any format of --data", "--input", metavar="FILE")] = None,
    output: Annotated[
        Path | None,
        flag(
            "with --input: .jsonl, .csv, or .json for answers by id as SQuAD's scripts read them; the same command "
            "resumes it",
            metavar="FILE",
        ),
    ] = None,
    keep: Annotated[str | None, flag("with --input: columns to copy to the output", metavar="NAME,...")] = None,
    raw_cells: Annotated[
        bool, flag("with a .csv: write texts unchanged, also those that a spreadsheet computes", "--raw-cells")
    ] = False,
    options: SetOptions,
    config: Config = None,
    assignments: Assignments = None,
    dry_run: Annotated[bool, flag("with --input: show the plan and stop", "--dry-run")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    nproc: Nproc = None,
) -> None:
    """Label a text, or the rows of a file, with a tuned head.

    The head's task decides the result: a label with probabilities, several labels, a number, a label for each word, the
    span that answers a question, or the sentences of a summary. Texts go through the template that the model was tuned
    with.
    """
    from gptj_ft.cli.several import check_has_rows, leading

    check_has_rows(nproc, rows)
    with leading(nproc) as workers:
        if rows is not None and text is not None:
            raise UsageError("a text and --input exclude each other: use one")
        is_piped = text == "-" or (text is None and rows is None and not sys.stdin.isatty())
        single = read_input() if is_piped else text
        if rows is None and single is None:
            raise UsageError('nothing to label: gptj-ft predict "text", or --input FILE --output FILE')
        if (rows is None) != (output is None):
            raise UsageError("--input and --output go together: --input rows.csv --output out.jsonl")
        if rows is None and (keep or dry_run or raw_cells):
            raise UsageError("--keep, --raw-cells and --dry-run are for the rows of a file: add --input and --output")
        if rows is not None and pair is not None:
            raise UsageError("with --input, second texts are a column of the file: leave out --pair")
        if is_assigned("data", assignments):
            raise UsageError("--set data names rows to train on: name those to label with --input FILE --output FILE")
        out = Output(as_json, quiet)
        with out.activity():
            from gptj_ft import api
            from gptj_ft.cli.terminal.labels import label_file, show_text_labels
            from gptj_ft.generation.generator import InferenceSetup

        settings = {**options, "config": config}
        folder = api.named_model(model, "predict", settings, assignments)
        recipe = api.model_options(folder, settings, assignments=assignments).recipe
        if rows is not None and output is not None:
            columns = tuple(name.strip() for name in (keep or "").split(",") if name.strip())
            setup = InferenceSetup.of(folder, recipe, workers=workers)
            with out.activity("reading the rows"):
                job = api.plan_predictions(rows, output, setup, columns, raw_cells)
            label_file(job, rows, dry_run, out)
        else:
            show_text_labels(folder, recipe, str(single), pair, out)
