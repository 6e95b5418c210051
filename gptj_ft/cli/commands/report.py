"""The command `report`: write runs as pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gptj_ft.cli.options import Json, Quiet, complete_run, flag
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import UsageError


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="run folders; several are compared", autocompletion=complete_run)
    ],
    output: Annotated[
        Path | None, flag("page to write; of one run by default its report.html", metavar="FILE.html")
    ] = None,
    show_text: Annotated[bool, flag("with answers beside what was expected: texts of the rows", "--show-text")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a run as one page, or several side by side.

    The page has data, curves, scores and how to repeat the run; it needs no network.
    """
    from gptj_ft.cli.html.run_page import write_comparison, write_run_page
    from gptj_ft.config.run_folder import Run

    found = [Run(folder.expanduser()) for folder in runs]
    if len(found) == 1:
        if output is not None:
            raise UsageError("the page of one run is report.html in its folder: --output is for several runs")
        page = write_run_page(found[0], show_text)
    else:
        if show_text:
            raise UsageError("--show-text is for the page of one run")
        page = output or Path("comparison.html")
        write_comparison(found, page)
    Output(as_json, quiet).finish({"page": str(page)}, str(page), lambda console: console.print(str(page)))
