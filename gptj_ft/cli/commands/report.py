"""The command `report`: write an HTML page on a run, or compare runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gptj_ft.cli.options import Json, Quiet, complete_run, flag
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import UsageError


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="run folders; several runs are compared", autocompletion=complete_run),
    ],
    output: Annotated[
        Path | None,
        flag(
            "new page [default: report.html in the run folder; of several runs, comparison.html]", metavar="FILE.html"
        ),
    ] = None,
    show_text: Annotated[bool, flag("include answers and reference texts of rows", "--show-text")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write an HTML page on a run, or compare runs.

    The page shows data, curves, scores and the commands to repeat the run. It needs no network.
    """
    from gptj_ft.cli.html.run_page import write_comparison, write_run_page
    from gptj_ft.config.run_folder import Run

    opened = [Run(folder.expanduser()) for folder in runs]
    if len(opened) == 1:
        page = write_run_page(opened[0], show_text, output)
    else:
        if show_text:
            raise UsageError("--show-text needs a single run")
        page = output or Path("comparison.html")
        write_comparison(opened, page)
    Output(as_json, quiet).finish({"page": str(page)}, str(page), lambda console: console.print(str(page)))
