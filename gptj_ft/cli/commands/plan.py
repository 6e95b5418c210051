"""The command `plan`: forecast what a run will cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.cli.options import PLACEMENT_OPTIONS, Assignments, Config, Given, Json, Offline, flag, takes_options
from gptj_ft.cli.terminal.output import Output, print_note
from gptj_ft.config.resolve import resolve
from gptj_ft.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


@takes_options("recipe", "data", "model", "epochs", "max_steps", "batch_size", "max_length", *PLACEMENT_OPTIONS)
def plan(
    options: Given,
    config: Config = None,
    assignments: Assignments = None,
    scaling_law: Annotated[
        bool, flag("tell what a pre-training from scratch would take and reach, too", "--scaling-law")
    ] = False,
    measure: Annotated[bool, flag("measure device and disk again, first", "--measure")] = False,
    nodes: Annotated[int, flag("machines like this one that share the run", "--nodes", metavar="N", min=1)] = 1,
    network: Annotated[
        str, flag("rate of the network between them; auto: measured, by one process a machine", metavar="RATE")
    ] = "10Gbit",
    nproc: Annotated[
        int | None, flag("with --network auto: processes of this machine, between which it measures", min=1, more=True)
    ] = None,
    offline: Offline = False,
    quiet: Annotated[bool, flag("print nothing: the exit code tells if it fits", "--quiet", "-q")] = False,
    as_json: Json = False,
) -> None:
    """Tell what a run will cost, before it starts.

    Memory and disk that it needs beside what there is, seconds a step, the time it ends. Without --data, for rows of
    the greatest length. For a card that is not here, name it: --device "RTX 4060 8GB".
    """
    from gptj_ft.cli.several import sharing

    if nproc not in (None, 1) and network != "auto":
        raise UsageError("--nproc is for what measures the network: add --network auto, or name machines by --nodes")
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
            from gptj_ft.distributed.forecast import SharedForecast

        resolved = resolve(options, config, assignments)
        with TerminalReporter(out.notes) as reporter:
            forecast = api.plan(
                resolved, measure_again=measure, nodes=nodes, network=network, offline=offline, reporter=reporter,
                group=group,
            )  # fmt: skip

    def show(console: Console) -> None:
        if isinstance(forecast, SharedForecast):
            show_machines(console, forecast.machines, forecast.notes)
        else:
            show_plan(console, forecast.plan, forecast.notes)
        if scaling_law:
            show_outlook(console, forecast.plan.outlook, forecast.published)

    out.finish(forecast.to_dict(), "", show)
    if forecast.problem and as_json:  # said in the one object that is printed
        print_note(f"gptj-ft: {forecast.problem}")
        raise typer.Exit(forecast.problem.exit_code)
    if forecast.problem:
        raise forecast.problem
