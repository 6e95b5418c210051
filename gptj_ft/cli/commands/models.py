"""The command `models`: list or remove models in the home folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gptj_ft.cli.help import Commands
from gptj_ft.cli.options import Json, Quiet, flag
from gptj_ft.cli.terminal.output import Output, print_json, print_result

models_app = typer.Typer(cls=Commands, help="Models on this disk: list them, remove one.")


@models_app.callback(invoke_without_command=True)
def list_or_remove(context: typer.Context, as_json: Json = False) -> None:
    """List the models, or remove one."""
    if context.invoked_subcommand is None:
        list_models(as_json)


@models_app.command("list")
def list_models(as_json: Json = False) -> None:
    """List models: family, parameters, type, size, origin."""
    from gptj_ft.cli.terminal.screen import console_for, table
    from gptj_ft.system.paths import models as home_of_models
    from gptj_ft.training.inventory import model_rows, models_in_home

    entries = models_in_home()
    if as_json:
        print_json({"folder": str(home_of_models()), "models": [entry.to_dict() for entry in entries]})
    elif entries:
        table(console_for(stderr=False), "", model_rows(entries), right=(2, 4))
    else:
        print_result(f"no models in {home_of_models()}; `gptj-ft download` fetches GPT-J 6B")


@models_app.command("remove")
def remove_model(
    name: Annotated[str, typer.Argument(help="name of a model, see `gptj-ft models`")],
    dry_run: Annotated[bool, flag("list the files to remove and stop", "--dry-run")] = False,
    force: Annotated[bool, flag("remove even a model that a run needs", "--force")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Remove a model from the disk."""
    from gptj_ft.system.units import gigabytes
    from gptj_ft.training.inventory import find, remove_entry, runs_that_need

    entry = find(name)
    needed_by = [str(run.folder) for run in runs_that_need(Path(entry.folder))]
    if not dry_run:
        remove_entry(entry, force)
    freed = f"{entry.folder}: {gigabytes(entry.bytes)} {'would be' if dry_run else 'is'} freed"
    lines = [freed, *(f"needed by {run}" for run in needed_by)]
    facts = {"dry_run": dry_run, "needed_by": needed_by, **entry.to_dict()}
    Output(as_json, quiet).finish(facts, "", lambda console: console.print("\n".join(lines)))
