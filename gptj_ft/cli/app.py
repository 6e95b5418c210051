"""The command line: its commands, and the only place that turns errors into exit codes.

A command's module is imported inside the command, so that `gptj-ft --help` imports no torch.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.main

from gptj_ft import __version__
from gptj_ft.cli.commands import (
    cache,
    convert,
    doctor,
    download,
    evaluate,
    finetune,
    generate,
    models,
    plan,
    predict,
    prepare_data,
    prove,
    recipes,
    report,
    runs,
)
from gptj_ft.cli.help import Command, Commands
from gptj_ft.cli.options import flag
from gptj_ft.cli.terminal.output import print_json, print_note
from gptj_ft.errors import GptjFtError, Interrupted, ResourceError, in_words
from gptj_ft.system.hub import close_network
from gptj_ft.system.machine import bound_kernel_caches
from gptj_ft.system.signals import StopRequest
from gptj_ft.system.streams import lasting_streams

FIRST_RUN = "finetune --recipe summarization --data my.jsonl --model tiny"
STOPPED = "stopped; the same command goes on, or begins again"
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=f"gptj-ft {FIRST_RUN}\ngptj-ft COMMAND --help",
)
START, DATA, PLAN, KEEP = "Start", "Data", "Plan and report", "Keep house"


def _add(group: str, command: Callable[..., None] | typer.Typer, *examples: str, name: str | None = None) -> None:
    """Add a command, or one that has commands below it, to a group of the help."""
    epilog = "\n".join(f"gptj-ft {example}" for example in examples)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, rich_help_panel=group, epilog=epilog)
    else:
        app.command(name, cls=Command, rich_help_panel=group, epilog=epilog)(command)


_add(START, download.download, "download --dry-run", "download --variant fp16")
_add(START, convert.convert, "convert", "convert runs/summarization-1 my-model --to huggingface")
_add(
    START, finetune.finetune, "finetune --recipe summarization --data my.jsonl", FIRST_RUN,
    "finetune --resume runs/summarization-1",
)  # fmt: skip
_add(
    START,
    evaluate.evaluate,
    "evaluate runs/summarization-1",
    "evaluate my-model --data test.jsonl --report scores.html",
)
_add(
    START, generate.generate, 'generate "a text to be summarized"', "generate --input rows.jsonl --output answers.jsonl"
)
_add(
    START, predict.predict, 'predict "a text to be labelled"',
    "predict --input rows.csv --output labels.jsonl --keep id",
)  # fmt: skip
_add(DATA, prepare_data.prepare_data, "prepare-data --recipe summarization --data my.csv --show 3")
_add(DATA, recipes.recipes_app, "recipes show summarization", name="recipes")
_add(DATA, cache.cache_app, "cache list", name="cache")
_add(PLAN, plan.plan, "plan --recipe summarization --host-memory 16GB")
_add(PLAN, doctor.doctor, "doctor", "doctor --device cuda:1 --json")
_add(PLAN, prove.prove, "prove", "prove --size 124M --output my-proof")
_add(PLAN, report.report, "report runs/summarization-1", "report runs/summarization-1 runs/summarization-2")
_add(KEEP, runs.runs_app, "runs list", "runs verify runs/summarization-1", name="runs")
_add(KEEP, models.models_app, "models list", "models remove tiny", name="models")


@app.callback(invoke_without_command=True)
def _global(version: Annotated[bool, flag("print the version and exit", "--version")] = False) -> None:
    """Teach GPT-J 6B your notes, questions or dialogues, on the one machine you have.

    Weights pass through the device one layer at a time; what is trained may be larger than its memory. Nothing leaves
    the machine.
    """
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    with lasting_streams(), StopRequest() as stop:
        # Private: libraries neither phone home nor look for newer files. `download` and `fetched_rows` use the network.
        for name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
            os.environ[name] = "1"
        if "download" not in sys.argv[1:2]:
            close_network()
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        bound_kernel_caches()
        sys.exit(_run(stop))


@functools.cache
def command() -> Callable[..., Any]:
    """Return all commands as one, made of their functions: that takes longer than many of them."""
    return typer.main.get_command(app)


def _run(stop: StopRequest) -> int:
    """Run the command that was typed; return its exit code."""
    try:
        command()(prog_name="gptj-ft")
    except GptjFtError as error:
        return _fail(error)
    except (OSError, MemoryError, RuntimeError) as error:
        if failure := _failed_resource(error):
            return _fail(failure, notes_of(error))
        if isinstance(error, OSError) and (known := in_words(error)):
            return _fail(known, notes_of(error))
        if stop.has_become(error):
            return _fail(Interrupted(STOPPED))
        raise
    except Exception as error:
        if stop.has_become(error):
            return _fail(Interrupted(STOPPED))
        raise
    except SystemExit:
        if stop.requested:  # Typer has made an exit code of it
            return _fail(Interrupted(STOPPED))
        raise
    return 0


def _failed_resource(error: Exception) -> ResourceError | None:
    """Return the resource error behind an error of the system or of torch: memory, disk or device; or ``None``."""
    text, plan = str(error), "`gptj-ft plan` tells what a run needs"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"disk space ran out: {text}; {plan}")
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return ResourceError(f"memory ran out: {text}; {plan}")
    first = text.partition("\n")[0]
    if any(words in text for words in ("out of memory", "ALLOC_FAILED")):  # the latter is what cuBLAS says
        tried = re.match(r".*?Tried to allocate [\d.]+ \w+", first)
        return ResourceError(
            f"device memory ran out: {tried[0] if tried else first}; other programs may have taken some: free it, or "
            f"lower --device-memory; {plan}"
        )
    if type(error).__name__ == "AcceleratorError" or re.match(r"(CUDA|HIP) error|.*\bdevice (is )?lost\b", first):
        return ResourceError(f"the device failed: {first}; `gptj-ft doctor` tells whether it works")
    return None


def _fail(error: GptjFtError, notes: Sequence[str] = ()) -> int:
    """Say what went wrong, and what to do next; return the exit code."""
    message = "\n".join([str(error), *(notes or notes_of(error))])
    with StopRequest(on_first=lambda: None):  # it is being said how to go on
        if "--json" in sys.argv:
            print_json({"error": message, "exit_code": error.exit_code})
        text = f"gptj-ft: {message}"
        if sys.stderr.isatty():  # there the words of a long line would be torn apart
            from gptj_ft.cli.terminal.screen import console_for, say, whole

            lines = (whole(line) if line.startswith("gptj-ft ") else line for line in text.splitlines())
            say(console_for(), "\n".join(lines))
        else:
            print_note(text)
    return error.exit_code


def notes_of(error: BaseException) -> list[str]:
    """Return the notes that were added to an error on its way here: how to go on after it."""
    return list(getattr(error, "__notes__", ()))
