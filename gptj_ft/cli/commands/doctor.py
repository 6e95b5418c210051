"""The command `doctor`: check a machine and its device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gptj_ft.cli.options import Json, Quiet, flag, option_of
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import UsageError
from gptj_ft.system.files import SHARED_FILE, disk_errors, read_text, replace_text

FILE = Path("doctor.json")


def doctor(
    device: Annotated[str, option_of("device")] = "auto",
    output: Annotated[Path | None, flag("report [default: doctor.json, none with --json]", metavar="FILE.json")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check that this machine and its device train rightly.

    Numbers against transformers and the CPU, streams, speed, memory: under a minute on a CPU, two minutes on an
    accelerator. The report is made to be sent: it names no people, machines, folders or files.
    """
    out, file = Output(as_json, quiet), output or (None if as_json else FILE)
    if file is not None:
        _check_replaceable(file)
    with out.activity():
        from gptj_ft import api
        from gptj_ft.cli.terminal.progress import TerminalReporter

    with TerminalReporter(out.notes) as reporter:
        found = api.doctor(device, reporter=reporter)
    facts = found.to_dict()
    if file is not None:
        with disk_errors(file, "name another place with --output", UsageError):
            replace_text(file, json.dumps(facts, indent=2) + "\n", SHARED_FILE)
    out.finish(facts, found.verdict[0], lambda console: console.print("\n".join(found.verdict)))
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _check_replaceable(file: Path) -> None:
    """Check that a file is not there, or is the report of another check-up.

    Raises:
        UsageError: it is something else.
    """
    if not file.exists():
        return
    try:
        is_report = "verdict" in json.loads(read_text(file))
    except (ValueError, TypeError):
        is_report = False
    if not is_report:
        raise UsageError(f"{file} exists and is no report of this command: name another --output")
