"""The commands that train: `finetune`, and `plan`, which tells what it will cost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.cli.options import (
    MORE,
    Activations,
    Assignments,
    BatchSize,
    Boundaries,
    Cache,
    Config,
    Data,
    Device,
    DeviceMemory,
    DiskSpace,
    Epochs,
    HelpAll,
    HostMemory,
    Json,
    Map,
    MaxBadRows,
    MaxLength,
    MaxSteps,
    MaxTime,
    Model,
    Offline,
    OnLong,
    OptimizerState,
    Precision,
    Quiet,
    RecipeName,
    Seed,
    Weights,
    complete_run,
    option_of,
)
from gptj_ft.cli.terminal.output import Output, as_tuple, asking, fetched
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import Resolved, resolve
from gptj_ft.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from gptj_ft.training.finetune import PreparedRun


def finetune(
    recipe: RecipeName = None,
    data: Data = None,
    model: Model = None,
    map: Map = None,
    val_data: Annotated[str | None, option_of("val_data")] = None,
    output: Annotated[str | None, option_of("output")] = None,
    method: Annotated[str | None, option_of("method")] = None,
    lr: Annotated[float | None, option_of("lr")] = None,
    epochs: Epochs = None,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    max_time: MaxTime = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    config: Config = None,
    assignments: Assignments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what it will cost and stop")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="RUN", help="go on with a run; needs nothing else", autocompletion=complete_run
        ),
    ] = None,
    show: Annotated[
        int | None,
        typer.Option("--show", min=0, help="show so many rows as the model will see them, whole [default: one, cut]"),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="show what the engine does: FLOPs, bytes moved, rates measured")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="with --resume: step-000120, best or last; start: step 0",
            rich_help_panel=MORE,
        ),
    ] = None,
    train: Annotated[str | None, option_of("train", more=True)] = None,
    seed: Seed = None,
    on_long: OnLong = None,
    max_bad_rows: MaxBadRows = None,
    cache: Cache = None,
    offline: Offline = False,
    validate_every: Annotated[int | None, option_of("validate_every", more=True)] = None,
    save_every: Annotated[int | None, option_of("save_every", more=True)] = None,
    keep: Annotated[str | None, option_of("keep", more=True)] = None,
    export: Annotated[str | None, option_of("export", more=True)] = None,
    report_to: Annotated[str | None, option_of("report_to", more=True)] = None,
    device: Device = None,
    precision: Precision = None,
    weights: Weights = None,
    optimizer_state: OptimizerState = None,
    activations: Activations = None,
    boundaries: Boundaries = None,
    disk_space: DiskSpace = None,
    help_all: HelpAll = False,
) -> None:
    """Train a model on your rows.

    By weight streaming: every parameter, some of them (--train) or adapters (--method lora).
    """
    began = time.monotonic()
    flags = {name: value for name, value in locals().items() if name in Recipe.model_fields and value is not None}
    from gptj_ft.config.run_folder import Run, stopped
    from gptj_ft.system.signals import stop_says

    run = Run(resume) if resume is not None else None
    with stop_says(lambda: stopped(run)):
        out = Output(as_json, quiet)
        with out.activity():
            from gptj_ft.cli.terminal.progress import TerminalReporter
            from gptj_ft.cli.terminal.tables import show_plan, show_prepared_run, show_training
            from gptj_ft.training import finetune as command

        reporter = TerminalReporter(out.notes, verbose)
        if start is not None and resume is None:
            raise UsageError("--from names a checkpoint of a run: add --resume RUN")
        if resume is not None:
            try:
                with out.activity("reading the run"):
                    prepared = command.resumed(resume, flags, config, as_tuple(assignments), start)
            except command.Finished:
                if not (resume.expanduser() / "report.html").is_file():  # it was cut off in its last moment
                    write_page(str(resume.expanduser()), out.notes)
                raise
        else:
            resolved = fetched(resolve(flags, config, as_tuple(assignments)), offline, out)

            def read(its: Resolved) -> PreparedRun:
                with reporter:
                    return command.fresh(its, reporter)

            prepared = asking(resolved, out, read)
            _show_rows(out.notes, prepared, show)
        if dry_run:
            plan, notes = prepared.setup.plan, prepared.setup.architecture.notes
            out.finish(plan.to_dict(), "", lambda console: show_plan(console, plan, notes))
            return
        show_prepared_run(out.notes, prepared, verbose)
        result = command.execute(prepared, reporter, began)
        run = Run(Path(result.run))
        write_page(result.run, out.notes)
        measured_on = len(prepared.setup.validation)
        out.finish(result.to_dict(), result.model, lambda console: show_training(console, result, measured_on, verbose))


def _show_rows(console: Console, prepared: PreparedRun, count: int | None) -> None:
    """Show what was understood of the rows; on a terminal one of them, too: a log gets no text of the user's.

    Args:
        console: where to.
        prepared: run whose rows are shown.
        count: rows that were asked for; ``None``: one is shown, and the middle of it left out if it is long.
    """
    from gptj_ft.cli.terminal.data_tables import show_data, show_examples
    from gptj_ft.data.tokenization import load_row_tokenizer

    show_data(console, prepared.report)
    if console.is_terminal and not console.quiet:
        decode = load_row_tokenizer(prepared.setup.model).decode
        show_examples(console, prepared.rows[0], decode, 1 if count is None else count, cut=count is None)


def write_page(run: str, console: Console) -> None:
    """Write the run's report; what goes wrong with it takes nothing from a run that is done."""
    from gptj_ft.cli.html.run_page import write_report
    from gptj_ft.config.run_folder import Run
    from gptj_ft.errors import GptjFtError

    try:
        write_report(Run(Path(run)))
    except GptjFtError as error:
        console.print(f"no report was written: {error}")
