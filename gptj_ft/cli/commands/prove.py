"""The command `prove`: training in little memory, killed and resumed, with equal bits."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated, Literal

import typer

from gptj_ft.cli.options import Json, Quiet, flag
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import GptjFtError, UsageError
from gptj_ft.system.signals import stop_says

PROOF_STOPPED = "stopped; nothing is proven, and the files of the proof are removed"


def prove(
    size: Annotated[
        Literal["1.3B", "350M", "124M", "tiny"], flag("parameters; tiny shows in a minute what is done")
    ] = "1.3B",
    output: Annotated[Path | None, flag("new folder [default: prove-N]", metavar="FOLDER")] = None,
    memory: Annotated[
        str | None, flag("memory of the control group, e.g. 4GiB [default: the size's, 3GiB of 1.3B]", metavar="SIZE")
    ] = None,
    steps: Annotated[int | None, flag("optimizer steps [default: the size's, 4 of 1.3B]", min=3)] = None,
    precision: Annotated[Literal["fp32", "bf16"], flag("type of the computation")] = "fp32",
    keep: Annotated[bool, flag("keep models, runs and logs", "--keep")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Prove on this machine that training from disk is exact.

    A random model, all of its parameters trained with their state on disk, in a control group of little memory where
    one may be made; killed and resumed; compared with the same steps in RAM, where there is enough. Exit code 0 only
    if every bit is equal.
    """
    out = Output(as_json, quiet)
    with out.activity():
        from gptj_ft import api
        from gptj_ft.cli.html.proof_page import sections, write_proof
        from gptj_ft.cli.terminal.progress import TerminalReporter
        from gptj_ft.cli.terminal.screen import panel, say
        from gptj_ft.training.proof import ProofRequest

    folder = output or next(name for number in count(1) if not (name := Path(f"prove-{number}")).exists())
    request = ProofRequest(size, folder, steps, _bytes_of(memory), precision, keep)
    with stop_says(lambda: PROOF_STOPPED), TerminalReporter(out.notes) as reporter:
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


def _bytes_of(size: str | None) -> int | None:
    """Read a size such as ``3GiB``.

    Raises:
        UsageError: it is none.
    """
    from pydantic_core import PydanticCustomError

    from gptj_ft.config.options import parse_size

    try:
        return None if size is None else int(str(parse_size(size)))
    except PydanticCustomError as error:
        raise UsageError(f"--memory {size}: {error.message()}") from error
