"""The command `prepare-data`: check and tokenize rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gptj_ft.cli.options import Assignments, Config, Json, Offline, Quiet, SetOptions, flag, option_of, takes_options
from gptj_ft.cli.terminal.output import Output, asking
from gptj_ft.config.resolve import Resolved, resolve
from gptj_ft.errors import UsageError
from gptj_ft.system.signals import stop_message

if TYPE_CHECKING:
    from gptj_ft.training.prepare_command import Preparation


@takes_options("recipe", "model", "map", "max_length", "max_bad_rows", "cache", "on_long", "seed")
def prepare_data(
    *,
    data: Annotated[str, option_of("data")],
    output: Annotated[Path | None, flag("new folder; default DATA.prepared")] = None,
    options: SetOptions,
    fix: Annotated[bool, flag("write a repaired copy of DATA next to it, and use that", "--fix")] = False,
    fixed: Annotated[
        Path | None, flag("with --fix: name of the repaired file; default NAME.fixed.jsonl", metavar="FILE")
    ] = None,
    report: Annotated[
        Path | None, flag("new report file with counts and lengths: .json or .html", metavar="FILE")
    ] = None,
    show: Annotated[
        int | None,
        flag("show this many rows as the model reads them, also in --report [default 1; in a log 0]", min=0),
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
    offline: Offline = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check and tokenize rows.

    Each row is kept, or reported with its file and line. Pass the new folder to `finetune --data`.
    """
    out = Output(as_json, quiet)
    with out.activity():
        from gptj_ft import api
        from gptj_ft.cli.html import check_report_path
        from gptj_ft.cli.html.data_page import DATA_SUFFIXES, write_preparation
        from gptj_ft.cli.terminal.data_tables import show_preparation
        from gptj_ft.cli.terminal.progress import TerminalReporter

    resolved = resolve({**options, "data": data}, config, assignments)
    if report is not None:
        check_report_path(report, DATA_SUFFIXES)
    if fixed is not None and not fix:
        raise UsageError("--fixed needs --fix: it names the repaired file")
    reporter = TerminalReporter(out.notes)

    def prepared(its: Resolved) -> Preparation:
        with reporter:
            return api.prepare(data, output, its, fixed=fixed or fix, offline=offline, reporter=reporter)

    done = asking(resolved, out, prepared)
    if report is not None:
        with stop_message(done.targets.stopped):
            write_preparation(report, done, show or 0)
    folder = str(done.targets.folder)
    out.finish(done.to_dict(), folder, lambda console: show_preparation(console, done, report, show))
