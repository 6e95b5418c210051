"""The command `prove`: train in little memory, kill, resume, and compare the bits."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated, Literal

import typer

from gptj_ft.cli.options import Json, Quiet, flag, parse_size_flag
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import GptjFtError
from gptj_ft.system.signals import stop_message

PROOF_STOPPED = "stopped; the proof is incomplete and its files are removed"


def prove(
    size: Annotated[
        Literal["1.3B", "350M", "124M", "tiny"], flag("parameters of the model; tiny takes a minute")
    ] = "1.3B",
    output: Annotated[Path | None, flag("new folder [default: prove-N]", metavar="FOLDER")] = None,
    memory: Annotated[
        str | None, flag("memory limit, e.g. 4GiB [default: by size; 3GiB for 1.3B]", metavar="SIZE")
    ] = None,
    steps: Annotated[int | None, flag("optimizer steps [default: by size; 4 for 1.3B]", min=3)] = None,
    precision: Annotated[Literal["fp32", "bf16"], flag("compute type")] = "fp32",
    keep: Annotated[bool, flag("keep models, runs and logs", "--keep")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Prove on this machine that training from disk is exact.

    Trains a random model with all state on disk, in a control group with little memory if one can be created. Kills
    and resumes it, and compares it with the same steps in RAM if RAM suffices. Exit code 0 only if every bit is equal.
    """
    out = Output(as_json, quiet)
    with out.activity():
        from gptj_ft import api
        from gptj_ft.cli.html.proof_page import sections, write_proof
        from gptj_ft.cli.terminal.progress import TerminalReporter
        from gptj_ft.cli.terminal.screen import panel, say
        from gptj_ft.diagnostics.proof import ProofRequest

    folder = output or next(name for number in count(1) if not (name := Path(f"prove-{number}")).exists())
    request = ProofRequest(
        size, folder, steps, None if memory is None else parse_size_flag("--memory", memory), precision, keep
    )
    with stop_message(lambda: PROOF_STOPPED), TerminalReporter(out.notes) as reporter:
        proof = api.prove(request, reporter=reporter)
    pages = write_proof(proof, folder)
    facts = {**proof.to_dict(), "pages": [str(page) for page in pages]}

    def show(console: object) -> None:
        from rich.console import Console

        assert isinstance(console, Console)
        for title, rows in sections(proof).items():
            panel(console, title, rows.items())
        say(console, f"\n{proof.verdict}")
        console.print(f"pages: {', '.join(map(str, pages))}", soft_wrap=True)

    out.finish(facts, proof.verdict, show)
    if not proof.holds:
        raise typer.Exit(GptjFtError.exit_code)
