"""The command that brings models in: `download`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gptj_ft.commands.terminal import bar, print_json
from gptj_ft.errors import UsageError
from gptj_ft.options import Json


def download(
    repository: Annotated[str | None, typer.Argument(help="Hub repository; default EleutherAI/gpt-j-6b")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="folder; default: in the home of models")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="branch, tag or commit")] = None,
    variant: Annotated[
        str | None, typer.Option("--variant", help="fp32 or fp16 (GPT-J's takes half the space); default: as published")
    ] = None,
    endpoint: Annotated[str | None, typer.Option("--endpoint", help="mirror; default HF_ENDPOINT or the Hub")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="take what was fetched before; no network")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show files and sizes only")] = False,
    as_json: Json = False,
) -> None:
    """Fetch a model from the Hub: the files that are needed, nothing else."""
    from dataclasses import asdict

    from gptj_ft.download import download as fetch
    from gptj_ft.home import DEFAULT_REPOSITORY, default_download
    from gptj_ft.hub_models import Wanted
    from gptj_ft.machine import gigabytes

    if variant not in (None, "fp32", "fp16"):
        raise UsageError(f"--variant {variant}: fp32 or fp16")
    wanted = Wanted(repository or DEFAULT_REPOSITORY, revision, variant, endpoint)  # type: ignore[arg-type]
    with bar("downloading", not as_json) as advance:
        report = fetch(wanted, output, offline=offline, dry_run=dry_run, progress=advance)
    if as_json:
        print_json(asdict(report))
        return
    for file in report.files:
        print(f"{gigabytes(file.bytes):>10}  {file.remote or file.name}")
    print(f"{report.repository}, revision {report.commit[:12]}, license {report.license or 'not stated'}")
    if dry_run:
        print(f"{gigabytes(report.bytes)} would go into {report.folder}, where {gigabytes(report.free_bytes)} are free")
        return
    print(f"{gigabytes(report.bytes)} in {report.folder}\nnext: gptj-ft convert", end="")
    print("" if report.folder == default_download() else f" {report.folder}")
