"""The command `search`: compare runs that differ in some options, and choose the best."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gptj_ft.cli.options import (
    PLACEMENT_OPTIONS,
    Assignments,
    Config,
    Json,
    Offline,
    Quiet,
    SetOptions,
    flag,
    takes_options,
)
from gptj_ft.cli.terminal.output import Output, asking
from gptj_ft.config.resolve import Resolved, resolve
from gptj_ft.errors import GptjFtError, UsageError

if TYPE_CHECKING:
    from gptj_ft.training.search import PreparedSearch, SearchResult

OUTPUT = "folder of the search; one that was stopped is resumed [default: runs/search-N]"


@takes_options(
    "recipe", "data", "model", "map", "val_data", "output", "method", "epochs", "max_steps", "batch_size",
    "max_length", "max_time", "train", "seed", "on_long", "max_bad_rows", "cache", "validate_every", "save_every",
    *PLACEMENT_OPTIONS,
    meanings={"output": OUTPUT},
)  # fmt: skip
def search(
    options: SetOptions,
    config: Config = None,
    assignments: Assignments = None,
    lr: Annotated[
        str | None,
        flag("learning rates to compare [default: six, from a tenth to 30 times the recipe's]", metavar="A,B,C"),
    ] = None,
    over: Annotated[
        list[str] | None,
        flag("values of another option to compare; several give every combination", metavar="KEY=A,B,C"),
    ] = None,
    by: Annotated[str, flag("score that decides, on the validation rows", metavar="SCORE")] = "loss",
    dry_run: Annotated[bool, flag("forecast the cost and stop", "--dry-run")] = False,
    resume: Annotated[Path | None, flag("resume a search; needs no other option", metavar="FOLDER")] = None,
    verbose: Annotated[bool, flag("show FLOPs, bytes moved and measured rates", "--verbose", "-v")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    offline: Offline = False,
) -> None:
    """Find the best learning rate by runs that stop early.

    All candidates train on the same rows with their full schedules. After a ninth of the steps the best third trains
    on, at least two; others stop if they are worse by more than their interval, or by the budget. The best is a
    finished run.
    """
    began = time.monotonic()
    from gptj_ft.system.signals import stop_message

    with stop_message(lambda: "stopped; nothing was trained yet"):
        out = Output(as_json, quiet)
        with out.activity():
            from gptj_ft import api
            from gptj_ft.cli.terminal.data_tables import show_rows
            from gptj_ft.cli.terminal.progress import TerminalReporter
            from gptj_ft.cli.terminal.search_tables import show_search, show_search_plan
            from gptj_ft.training.loop import Session
            from gptj_ft.training.search_space import parse_over
        notes = out.notes
        reporter = TerminalReporter(notes, verbose)
        values = parse_over([*([f"lr={lr}"] if lr is not None else []), *(over or [])])

        def prepared(resolved: Resolved) -> PreparedSearch:
            with reporter:
                return api.prepare_search(
                    resolved, over=values, by=by, resume=resume, offline=offline, reporter=reporter
                )

        if resume is not None and (values or set(options) - {"max_time"} or config or assignments):
            raise UsageError("--resume takes the options of the search from its folder; only --max-time may be added")
        ready = asking(resolve(options, config, assignments), out, prepared)
        if ready.first is not None:
            show_rows(notes, ready.first, None)
        if dry_run:
            costs = {"plan": ready.first.setup.plan.to_dict()} if ready.first is not None else {}
            facts = {**ready.plan.facts(), **costs}
            out.finish(facts, "", lambda console: show_search_plan(console, ready, verbose))
            return
        show_search_plan(notes, ready, verbose)
        result = ready.run(reporter, Session(began, owns_process=True))
        page = _write_page(result, notes.print)
        out.finish({**result.to_dict(), "page": page}, result.model, lambda console: show_search(console, result, page))


def _write_page(result: SearchResult, say: Callable[[str], None]) -> str:
    """Write the pages of the best run and of all candidates; report errors instead of raising them."""
    from gptj_ft.cli.html.run_page import write_comparison, write_page
    from gptj_ft.config.run_folder import Run

    folders = {each.name: Path(result.folder) / each.folder for each in result.plan.candidates}
    runs = [Run(folders[standing.candidate]) for _, standing in result.standings]
    page = Path(result.folder) / "report.html"
    write_page(Run(Path(result.run)), say)
    try:
        page.unlink(missing_ok=True)  # of an earlier session
        write_comparison([run for run in runs if run.recipe_file.is_file()], page)
    except (GptjFtError, OSError) as error:
        say(f"could not write the page: {error}")
        return ""
    return str(page)
