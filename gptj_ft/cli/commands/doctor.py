"""The command `doctor`: check a machine and its device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gptj_ft.cli.options import Json, Quiet, flag, option_of
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import UsageError
from gptj_ft.system.atomic import replace_shared, require_writable
from gptj_ft.system.files import SHARED_FILE, disk_errors, read_text

FILE = Path("doctor.json")


def doctor(
    device: Annotated[str, option_of("device")] = "auto",
    output: Annotated[
        Path | None, flag("report file [default: doctor.json; none with --json]", metavar="FILE.json")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check that training works on this machine and its device.

    Compares results with transformers and the CPU, and checks streams, speed and memory, in a minute on a CPU and two
    on an accelerator. The report is safe to share: it names no person, machine, folder or file.
    """
    out, file = Output(as_json, quiet), output or (None if as_json else FILE)
    if file is not None:
        _check_replaceable(file)
        require_writable(file)
    with out.activity():
        from gptj_ft import api
        from gptj_ft.cli.terminal.progress import TerminalReporter

    with TerminalReporter(out.notes) as reporter:
        diagnosis = api.doctor(device, reporter=reporter)
    facts = diagnosis.to_dict()
    if file is not None:
        with disk_errors(file, "choose another --output", UsageError):
            replace_shared(file, json.dumps(facts, indent=2) + "\n", SHARED_FILE)
    out.finish(facts, diagnosis.verdict[0], lambda console: console.print("\n".join(diagnosis.verdict)))
    if diagnosis.exit_code:
        raise typer.Exit(diagnosis.exit_code)


def _check_replaceable(file: Path) -> None:
    """Check that a file is missing or is an older report, so that it may be replaced."""
    if not file.exists():
        return
    try:
        is_report = "verdict" in json.loads(read_text(file))
    except (ValueError, TypeError):
        is_report = False
    if not is_report:
        raise UsageError(f"{file} exists and is not a report of `gptj-ft doctor`: choose another --output")
