"""The command `runs`: list, verify, clean or export runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.cli.help import Commands
from gptj_ft.cli.options import Json, Quiet, complete_run, flag
from gptj_ft.cli.terminal.output import Output, print_json
from gptj_ft.errors import DataError
from gptj_ft.system.plain_text import command_line

if TYPE_CHECKING:
    from rich.console import Console

runs_app = typer.Typer(cls=Commands, help="Runs: list, verify, clean or export them.")
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="run folder", autocompletion=complete_run)]


@runs_app.callback(invoke_without_command=True)
def runs(context: typer.Context, as_json: Json = False) -> None:
    """List the runs in runs/, or manage one."""
    if context.invoked_subcommand is None:
        list_runs(as_json=as_json)


@runs_app.command("list")
def list_runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER", help="runs or folders of runs; default: runs/")
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs with progress, losses and size."""
    from gptj_ft.cli.terminal.screen import console_for, table
    from gptj_ft.training.runs import find_runs, run_rows, summarize_run

    summaries = [summarize_run(run) for run in find_runs(folders or [])]
    if as_json:
        print_json({"runs": [summary.to_dict() for summary in summaries]})
    elif summaries:
        table(console_for(stderr=False), "", run_rows(summaries))
    else:
        print("no runs in runs/; start one with `gptj-ft finetune`")


@runs_app.command("verify")
def verify_run(run: RunFolder, quiet: Quiet = False, as_json: Json = False) -> None:
    """Check every file of a run for damage."""
    from gptj_ft.config.run_folder import Run
    from gptj_ft.system.units import gigabytes
    from gptj_ft.training.verify import verify

    out = Output(as_json, quiet)
    with out.bar("verifying") as advance:
        result = verify(Run(run.expanduser()), advance)
    checked = f"{result.files} files, {gigabytes(result.bytes)} checked: {len(result.problems) or 'no'} problems"
    problems = "\n".join(result.problems)
    lines = [*result.notes, *result.problems, checked]
    out.finish(result.to_dict(), problems, lambda console: console.print("\n".join(lines)))
    if result.problems:
        raise typer.Exit(DataError.exit_code)


@runs_app.command("clean")
def clean_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="run folders", autocompletion=complete_run)],
    dry_run: Annotated[bool, flag("list the files to remove and stop", "--dry-run")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Remove leftover files of runs.

    Removes state and checkpoints of finished runs and crashes, never a model or its metrics.
    """
    from gptj_ft.config.run_folder import Run
    from gptj_ft.system.units import gigabytes
    from gptj_ft.training.runs import leftovers, remove_leftovers

    lines = []
    with leftovers([Run(folder.expanduser()) for folder in runs]) as removable:
        for each in removable:
            lines += [f"{each.run}: {gigabytes(each.bytes)} {'would be' if dry_run else 'is'} freed"]
            lines += [f"  {path}" for path in each.paths]
        for each in removable if not dry_run else ():
            remove_leftovers(each)
    facts = {"dry_run": dry_run, "runs": [each.to_dict() for each in removable]}
    Output(as_json, quiet).finish(facts, "", lambda console: console.print("\n".join(lines)))


@runs_app.command("export")
def export_run(
    run: RunFolder,
    target: Annotated[Path, typer.Argument(metavar="DEST", help="new model folder")],
    checkpoint: Annotated[str, flag("checkpoint: step-000120, best or last", "--from", metavar="CHECKPOINT")] = "best",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Export a checkpoint as a model folder."""
    from gptj_ft.cli.terminal.screen import next_steps
    from gptj_ft.config.run_folder import Run
    from gptj_ft.training.export import export_checkpoint

    step = export_checkpoint(Run(run.expanduser()), checkpoint, target)

    def show(console: Console) -> None:
        console.print(f"model after {step} steps: {target}")
        next_steps(console, command_line("evaluate", target, "--data", "FILE"))

    Output(as_json, quiet).finish({"model": str(target), "step": step}, str(target), show)
