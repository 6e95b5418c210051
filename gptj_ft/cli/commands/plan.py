"""The command `plan`: forecast what a run will cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.cli.options import (
    Activations,
    Assignments,
    BatchSize,
    Boundaries,
    Config,
    Data,
    Device,
    DeviceMemory,
    DiskSpace,
    Epochs,
    HelpAll,
    HostMemory,
    Json,
    MaxLength,
    MaxSteps,
    Model,
    Offline,
    OptimizerState,
    Precision,
    RecipeName,
    Weights,
)
from gptj_ft.cli.terminal.output import Output, as_tuple, fetched, print_note
from gptj_ft.config.options import Recipe
from gptj_ft.config.resolve import resolve

if TYPE_CHECKING:
    from rich.console import Console


def plan(
    recipe: RecipeName = None,
    data: Data = None,
    model: Model = None,
    epochs: Epochs = None,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    device: Device = None,
    precision: Precision = None,
    weights: Weights = None,
    optimizer_state: OptimizerState = None,
    activations: Activations = None,
    boundaries: Boundaries = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk_space: DiskSpace = None,
    config: Config = None,
    assignments: Assignments = None,
    scaling_law: Annotated[
        bool,
        typer.Option("--scaling-law", help="tell what a pre-training from scratch would take and reach, too"),
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="measure device and disk again, first")] = False,
    offline: Offline = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print nothing: the exit code tells if it fits")] = False,
    as_json: Json = False,
    help_all: HelpAll = False,
) -> None:
    """Tell what a run will cost, before it starts.

    Memory and disk that it needs beside what there is, seconds a step, the time it ends. Without --data, for rows of
    the greatest length.
    """
    flags = {name: value for name, value in locals().items() if name in Recipe.model_fields and value is not None}
    out = Output(as_json, quiet)
    with out.activity():
        from gptj_ft.cli.terminal.progress import TerminalReporter
        from gptj_ft.cli.terminal.tables import show_outlook, show_plan
        from gptj_ft.training import finetune as command

    resolved = fetched(resolve(flags, config, as_tuple(assignments)), offline, out)
    with TerminalReporter(out.notes) as reporter:
        forecast = command.forecast(resolved, measure, reporter)

    def show(console: Console) -> None:
        show_plan(console, forecast.plan, forecast.notes)
        if scaling_law:
            show_outlook(console, forecast.plan.outlook, forecast.published)

    out.finish(forecast.to_dict(), "", show)
    if forecast.problem and as_json:  # said in the one object that is printed
        print_note(f"gptj-ft: {forecast.problem}")
        raise typer.Exit(forecast.problem.exit_code)
    if forecast.problem:
        raise forecast.problem
