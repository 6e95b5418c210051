"""The command line: its commands, and the only place that turns errors into exit codes.

A command's module is imported inside the command, so that `gptj-ft --help` imports no torch.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from gptj_ft import __version__
from gptj_ft.commands import answers, convert, data, evaluation, inventory, models, recipes, reports, runs, training
from gptj_ft.commands.terminal import print_json
from gptj_ft.errors import GptjFtError, ResourceError
from gptj_ft.hub import close_network

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(models.download)
app.command()(convert.convert)
app.command("prepare-data")(data.prepare_data)
app.command()(training.finetune)
app.command()(training.plan)
app.command()(evaluation.evaluate)
app.command()(answers.generate)
app.command()(reports.report)
app.add_typer(inventory.models_app, name="models")
app.add_typer(recipes.recipes_app, name="recipes")
app.add_typer(data.cache_app, name="cache")
app.add_typer(runs.runs_app, name="runs")


@app.callback(invoke_without_command=True)
def _global(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    """Fine-tune GPT-J 6B on the one machine you have, by weight streaming."""
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    # Private: libraries neither phone home nor look for newer files. `download` uses the network, and `fetched_rows`.
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    if "download" not in sys.argv[1:2]:
        close_network()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except GptjFtError as error:
        sys.exit(_fail(error))
    except (OSError, MemoryError, RuntimeError) as error:
        if out_of := _exhausted(error):
            sys.exit(_fail(ResourceError(f"{out_of} ran out: {error}; `gptj-ft plan` tells what a run needs")))
        raise


def _exhausted(error: Exception) -> str | None:
    """Name the resource that an error of the system or of torch says is used up."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk space"
    is_memory = isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)
    return "memory" if is_memory else None


def _fail(error: GptjFtError) -> int:
    if "--json" in sys.argv:
        print_json({"error": str(error), "exit_code": error.exit_code})
    text = f"gptj-ft: {error}"
    if sys.stderr.isatty():  # there the words of a long line would be torn apart
        from gptj_ft.screen import console_for, say

        say(console_for(), text)
    else:
        print(text, file=sys.stderr)
    return error.exit_code
