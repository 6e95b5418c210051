"""The commands that train: `finetune`, and `plan`, which tells what it will cost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.commands.terminal import as_tuple, asking, console_for, fetched, print_json
from gptj_ft.errors import UsageError
from gptj_ft.options import (
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
    RecipeName,
    Seed,
    Weights,
    option_of,
)
from gptj_ft.recipe import Recipe, resolve

if TYPE_CHECKING:
    from rich.console import Console


def finetune(
    recipe: RecipeName = None,
    data: Data = None,
    val_data: Annotated[str | None, option_of("val_data")] = None,
    map: Map = None,
    max_bad_rows: MaxBadRows = None,
    cache: Cache = None,
    model: Model = None,
    output: Annotated[str | None, option_of("output")] = None,
    method: Annotated[str | None, option_of("method")] = None,
    train: Annotated[str | None, option_of("train")] = None,
    lr: Annotated[float | None, option_of("lr")] = None,
    epochs: Epochs = None,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    on_long: OnLong = None,
    seed: Seed = None,
    device: Device = None,
    precision: Precision = None,
    weights: Weights = None,
    optimizer_state: OptimizerState = None,
    activations: Activations = None,
    boundaries: Boundaries = None,
    max_time: MaxTime = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk_space: DiskSpace = None,
    validate_every: Annotated[int | None, option_of("validate_every")] = None,
    save_every: Annotated[int | None, option_of("save_every")] = None,
    keep: Annotated[str | None, option_of("keep")] = None,
    export: Annotated[str | None, option_of("export")] = None,
    config: Config = None,
    assignments: Assignments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what it will cost and stop")] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="go on with a run; needs nothing else")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="CHECKPOINT", help="with --resume: step-000120, best or last")
    ] = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model by weight streaming: every parameter, some of them (--train) or adapters (--method lora)."""
    began = time.monotonic()
    flags = {name: value for name, value in locals().items() if name in Recipe.model_fields and value is not None}
    from dataclasses import asdict

    from gptj_ft import finetune as command
    from gptj_ft.data.tokenizer import load_row_tokenizer
    from gptj_ft.data_report import show_data, show_examples
    from gptj_ft.report import show_plan, show_training

    console = console_for(quiet=as_json)
    if start is not None and resume is None:
        raise UsageError("--from names a checkpoint of a run: add --resume RUN")
    if resume is not None:
        prepared = command.resumed(resume, flags, config, as_tuple(assignments), start)
    else:
        resolved = fetched(resolve(flags, config, as_tuple(assignments)), offline, as_json)
        prepared = asking(resolved, as_json, command.fresh)
        show_data(console, prepared.report)
        if console.is_terminal:  # a log gets no text of the user's
            show_examples(console, prepared.rows[0], load_row_tokenizer(prepared.session.model).decode, 1)
    show_plan(console, prepared.session.plan, prepared.session.architecture.notes)
    if dry_run:
        if as_json:
            print_json(prepared.session.plan.to_dict())
        return
    result = command.execute(prepared, console, as_json, began)
    write_page(result.run, console)
    if as_json:
        print_json(asdict(result))
        return
    show_training(console_for(stderr=False), result)


def write_page(run: str, console: Console) -> None:
    """Write the run's report; what goes wrong with it takes nothing from a run that is done."""
    from gptj_ft.errors import GptjFtError
    from gptj_ft.run import Run
    from gptj_ft.run_report import write_report

    try:
        console.print(f"report: {write_report(Run(Path(run)))}", highlight=False, markup=False)
    except GptjFtError as error:
        console.print(f"no report was written: {error}", highlight=False, markup=False)


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
    measure: Annotated[bool, typer.Option("--measure", help="measure device and disk again, first")] = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Tell what a run will cost, before it starts; without --data, for rows of the greatest length."""
    flags = {name: value for name, value in locals().items() if name in Recipe.model_fields and value is not None}
    from gptj_ft import finetune as command
    from gptj_ft.report import show_outlook, show_plan

    forecast = command.forecast(fetched(resolve(flags, config, as_tuple(assignments)), offline, as_json), measure)
    if not as_json:
        console = console_for(stderr=False)
        show_plan(console, forecast.plan, forecast.notes)
        show_outlook(console, forecast.plan.outlook, forecast.published)
        if forecast.problem:
            raise forecast.problem
        return
    print_json(forecast.to_dict())
    if forecast.problem:
        typer.echo(f"gptj-ft: {forecast.problem}", err=True)
        raise typer.Exit(forecast.problem.exit_code)
