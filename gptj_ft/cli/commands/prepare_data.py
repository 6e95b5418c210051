"""The commands about rows: `prepare-data` and `cache`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.cli.options import (
    Assignments,
    Cache,
    Config,
    HelpAll,
    Json,
    Map,
    MaxBadRows,
    MaxLength,
    Model,
    Offline,
    OnLong,
    Quiet,
    RecipeName,
    Seed,
    option_of,
)
from gptj_ft.cli.terminal.output import Output, as_tuple, asking, fetched
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve
from gptj_ft.system.plain_text import command_line
from gptj_ft.system.signals import stop_says

if TYPE_CHECKING:
    from rich.console import Console

    from gptj_ft.training.prepare_data import Preparation


def prepare_data(
    data: Annotated[str, option_of("data")],
    output: Annotated[Path | None, typer.Option("--output", help="new folder; default DATA.prepared")] = None,
    recipe: RecipeName = None,
    model: Model = None,
    map: Map = None,
    max_bad_rows: MaxBadRows = None,
    cache: Cache = None,
    max_length: MaxLength = None,
    on_long: OnLong = None,
    seed: Seed = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="mend what can be mended, in a new file beside DATA, and go on with that")
    ] = False,
    fixed: Annotated[
        Path | None, typer.Option("--fixed", metavar="FILE", help="with --fix: the new file; default NAME.fixed.jsonl")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="new file for counts and lengths: .json or .html")
    ] = None,
    show: Annotated[
        int | None,
        typer.Option(
            "--show",
            min=0,
            help="show so many rows as the model will see them [default 1, in a log none]; in the --report, too",
        ),
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
    offline: Offline = False,
    quiet: Quiet = False,
    as_json: Json = False,
    help_all: HelpAll = False,
) -> None:
    """Check rows and turn them into token ids.

    Each row is kept or reported with its file and line; `finetune --data` takes the folder. --fix mends what can be.
    """
    flags = {name: value for name, value in locals().items() if name in Recipe.model_fields and value is not None}
    flags.pop("output", None)  # here that is the folder of the rows
    out = Output(as_json, quiet)
    with out.activity():
        from gptj_ft.cli.html.data_page import check_report_path
        from gptj_ft.training.prepare_data import Targets, prepare_rows

    resolved = resolve(flags, config, as_tuple(assignments))
    if report is not None:
        check_report_path(report)
    targets = Targets.of(data, output, fix, fixed, report, show or 0)
    resolved = fetched(resolved, offline, out)
    with stop_says(targets.stopped):
        done = asking(resolved, out, lambda its: prepare_rows(its.recipe, targets, lambda: out.bar("rows", "rows")))
        done.write()
        if report is not None:
            _write_report(done, report)
    out.finish(done.to_dict(), str(targets.folder), lambda console: _show(console, done, show))


def _write_report(done: Preparation, path: Path) -> None:
    """Write the report on prepared rows, with as many of them as are to be shown."""
    from gptj_ft.cli.html.data_page import examples_of, facts_of, write_report

    shown = examples_of(done.prepared, done.tokenizer.decode, done.targets.examples)
    examples = {"examples": shown} if shown else {}
    write_report(path, {**done.origin, **facts_of(done.prepared, done.recipe), **examples})


def _show(console: Console, done: Preparation, num_examples: int | None) -> None:
    """Show what became of the rows, what the model will see, and what to type next; a log gets no row unasked."""
    from gptj_ft.cli.terminal.data_tables import show_data, show_examples, show_fixes, show_lengths
    from gptj_ft.cli.terminal.screen import next_steps, panel, whole

    if done.fixes:
        show_fixes(console, done.fixes)
    show_data(console, done.prepared.report)
    show_lengths(console, done.prepared, done.recipe)
    num_examples = int(console.is_terminal) if num_examples is None else num_examples
    show_examples(console, done.prepared, done.tokenizer.decode, num_examples)
    page = [("report", whole(str(done.targets.report)))] if done.targets.report else []
    panel(console, "Written", [("tokens", whole(str(done.targets.folder))), *page])
    model = ("--model", done.recipe.model) if done.recipe.model else ()
    next_steps(console, command_line("finetune", "--recipe", done.recipe.recipe, "--data", done.targets.folder, *model))
