"""The command `download`: fetch a model from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.cli.options import Json, Quiet, flag
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import UsageError
from gptj_ft.system.plain_text import command_line
from gptj_ft.system.signals import stop_message

if TYPE_CHECKING:
    from rich.console import Console

    from gptj_ft.checkpoints.download import DownloadReport


def download(
    repository: Annotated[
        str | None, typer.Argument(help="repository on the Hub, owner/name; default EleutherAI/gpt-j-6b")
    ] = None,
    output: Annotated[Path | None, flag("new folder; default: a folder in the home of models")] = None,
    revision: Annotated[str | None, flag("branch, tag or commit")] = None,
    variant: Annotated[str | None, flag("fp32 or fp16 (half the size); default: as published")] = None,
    endpoint: Annotated[str | None, flag("URL of a mirror; default: HF_ENDPOINT, else the Hub")] = None,
    offline: Annotated[bool, flag("use the fetched copy, without network", "--offline")] = False,
    dry_run: Annotated[bool, flag("list files and sizes and stop", "--dry-run")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Download GPT-J 6B or another model from the Hub.

    Only the needed files are downloaded. The same command resumes a stopped download.
    """
    from dataclasses import asdict

    from gptj_ft.checkpoints.download import DownloadRequest
    from gptj_ft.checkpoints.download import download as fetch
    from gptj_ft.models.supported import DEFAULT_REPOSITORY

    if variant not in (None, "fp32", "fp16"):
        raise UsageError(f"--variant {variant}: expected fp32 or fp16")
    wanted = DownloadRequest(repository or DEFAULT_REPOSITORY, revision, variant, endpoint)  # type: ignore[arg-type]
    out = Output(as_json, quiet)
    with (
        stop_message(lambda: "stopped; fetched files are kept; run the same command to resume"),
        out.bar("downloading") as advance,
    ):
        report = fetch(wanted, output, offline=offline, dry_run=dry_run, progress=advance)
    out.finish(asdict(report), str(report.folder), lambda console: _show(console, report, dry_run))


def _show(console: Console, report: DownloadReport, dry_run: bool) -> None:
    """Show the files, their folder and the next command."""
    from gptj_ft.checkpoints.base_model import default_download
    from gptj_ft.cli.terminal.screen import next_steps, panel, table, whole
    from gptj_ft.system.units import gigabytes

    files = [(gigabytes(file.bytes), file.remote or file.name) for file in report.files]
    table(console, "", [("size", "file"), *files], right=(0,))
    rows = [
        ("repository", f"{report.repository}, revision {report.commit[:12]}"),
        ("license", report.license or "not stated"),
    ]
    if dry_run:
        free = f"{gigabytes(report.free_bytes)} are free"
        panel(console, "", [*rows, ("disk", f"{gigabytes(report.bytes)} would go into {report.folder}, where {free}")])
        return
    panel(console, "Downloaded", [*rows, ("size", gigabytes(report.bytes)), ("folder", whole(str(report.folder)))])
    next_steps(console, command_line("convert", *([] if report.folder == default_download() else [report.folder])))
