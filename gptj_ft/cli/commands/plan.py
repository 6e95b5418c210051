"""The command `plan`: forecast the cost of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.cli.options import PLACEMENT_OPTIONS, Assignments, Config, Json, Offline, SetOptions, flag, takes_options
from gptj_ft.cli.terminal.output import Output, print_note
from gptj_ft.config.resolve import resolve
from gptj_ft.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


@takes_options(
    "recipe", "data", "model", "method", "epochs", "max_steps", "batch_size", "max_length", *PLACEMENT_OPTIONS
)
def plan(
    options: SetOptions,
    config: Config = None,
    assignments: Assignments = None,
    scaling_law: Annotated[
        bool, flag("also forecast compute and loss of pre-training from scratch", "--scaling-law")
    ] = False,
    quantize: Annotated[
        str | None, flag("plan LoRA on the model that `convert --quantize` would write: nf4 or int8", metavar="TYPE")
    ] = None,
    measure: Annotated[bool, flag("first measure device and disk again", "--measure")] = False,
    fill_disk_cache: Annotated[
        str | None,
        flag(
            "first write to the disk for this time, e.g. 2m, then measure again: many drives slow down when their "
            "write cache is full",
            "--fill-disk-cache",
            metavar="TIME",
            more=True,
        ),
    ] = None,
    nodes: Annotated[int, flag("machines like this one that share the run", "--nodes", metavar="N", min=1)] = 1,
    network: Annotated[
        str, flag("network rate between machines; auto: measure it, with one process per machine", metavar="RATE")
    ] = "10Gbit",
    nproc: Annotated[
        int | None, flag("with --network auto: measure between this many processes of this machine", min=1, more=True)
    ] = None,
    offline: Offline = False,
    quiet: Annotated[bool, flag("print nothing; exit code 0 if the run fits", "--quiet", "-q")] = False,
    as_json: Json = False,
) -> None:
    """Forecast the cost of a run before it starts.

    Compares memory and disk needed with those available, and forecasts seconds per step and the end. Without --data,
    every row has the maximum length. To plan for another card, name it: --device "RTX 4060 8GB".
    """
    from gptj_ft.cli.several import sharing

    if nproc not in (None, 1) and network != "auto":
        raise UsageError("--nproc needs --network auto; to plan for several machines use --nodes")
    with sharing(nproc) as group:
        if group.rank > 0:
            from gptj_ft.distributed.network import AUTO_RATE, measure_network

            if network == AUTO_RATE:
                measure_network(group)
            return
        out = Output(as_json, quiet)
        with out.activity():
            from gptj_ft import api
            from gptj_ft.cli.terminal.machines import show_machines
            from gptj_ft.cli.terminal.progress import TerminalReporter
            from gptj_ft.cli.terminal.tables import show_outlook, show_plan
            from gptj_ft.distributed.scale_out import SharedForecast

        resolved = resolve(options, config, assignments)
        with TerminalReporter(out.notes) as reporter:
            forecast = api.plan(
                resolved, measure_again=measure, nodes=nodes, network=network, offline=offline, reporter=reporter,
                group=group, quantize=quantize, fill_disk_cache=fill_disk_cache or 0.0,
            )  # fmt: skip

    def show(console: Console) -> None:
        if isinstance(forecast, SharedForecast):
            show_machines(console, forecast.machines, forecast.notes)
        else:
            show_plan(console, forecast.plan, forecast.notes, forecast.advice)
        if scaling_law:
            show_outlook(console, forecast.plan.outlook, forecast.published)

    out.finish(forecast.to_dict(), "", show)
    if forecast.problem and as_json:  # the JSON object has it
        print_note(f"gptj-ft: {forecast.problem}")
        raise typer.Exit(forecast.problem.exit_code)
    if forecast.problem:
        raise forecast.problem
