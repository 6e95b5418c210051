"""The command `watch`: show the page of a run while it trains, or several runs side by side."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.cli.options import Json, Quiet, complete_run, flag
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from gptj_ft.system.signals import StopRequest

LOOK_SECONDS = 0.2
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")  # without one, webbrowser would start a browser in the terminal


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="run folders, several on one page, or a search's; default: the newest",
            autocompletion=complete_run,
        ),
    ] = None,
    output: Annotated[Path | None, flag("with several runs: page [default: watch.html]", metavar="FILE.html")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show the page of a run while it trains.

    Opens it in a browser if there is a display, and prints its place. Several runs share a page, which is rewritten
    until they end or you press Ctrl-C.
    """
    from gptj_ft.cli.html.watched_page import LEAST_WAIT, WatchedPage
    from gptj_ft.config.run_folder import Run
    from gptj_ft.system.paths import newest_started
    from gptj_ft.system.signals import StopRequest

    named = runs or [run for run in [newest_started()] if run]
    if not named:
        raise UsageError("no runs in runs/; name a run folder: gptj-ft watch RUN")
    folders = dict.fromkeys(run for folder in named for run in _runs_in(folder.expanduser()))
    page = WatchedPage.of([Run(folder) for folder in folders], output)
    out = Output(as_json, quiet)
    with StopRequest(on_first=lambda: None) as stop:
        if not page.is_complete:
            page.write(LEAST_WAIT if page.is_followed else 0.0)
        link = page.path.resolve().as_uri()
        is_open = not (as_json or quiet) and _open(link)
        facts = {"page": str(page.path), "link": link, "runs": [str(folder) for folder in folders]}
        out.finish(facts, str(page.path), partial(_show, page.path, link, is_open))
        if page.is_followed:
            out.notes.print("the page follows the runs until they end, or until Ctrl-C", highlight=False)
            page.follow(partial(_wait, stop))


def _runs_in(folder: Path) -> list[Path]:
    """Return the run folders of a search, or the folder itself."""
    from gptj_ft.system.paths import is_search

    if not is_search(folder):
        return [folder]
    from gptj_ft.training.search import started_runs  # loads torch's and transformers' modules

    return started_runs(folder)


def _show(page: Path, link: str, is_open: bool, console: Console) -> None:
    console.print(str(page), highlight=False, markup=False, soft_wrap=True)
    opened = "opened in your browser: " if is_open else "open it in a browser: "
    console.print(f"{opened}{link}", highlight=False, markup=False, soft_wrap=True)


def _open(link: str) -> bool:
    """Open a page in a browser if there is a display; return whether a browser was started."""
    if sys.platform not in ("darwin", "win32") and not any(os.environ.get(name) for name in DISPLAYS):
        return False
    try:
        return webbrowser.open(link)
    except (OSError, webbrowser.Error):
        return False


def _wait(stop: StopRequest, seconds: float) -> bool:
    """Wait, unless a signal has asked to stop; return whether none has."""
    end = time.monotonic() + seconds
    while not stop.requested and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
    return not stop.requested
