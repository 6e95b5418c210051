"""Define the command line, and turn errors into exit codes.

Commands import their modules when they run, so `gptj-ft --help` does not import torch.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    search,
    watch,
)
from gptj_ft.cli.help import Command, Commands
from gptj_ft.cli.options import flag
from gptj_ft.cli.terminal.output import print_json, print_note
from gptj_ft.errors import GptjFtError, Interrupted, ResourceError, in_words, panic_in_words
from gptj_ft.system.hub import close_network
from gptj_ft.system.machine import bound_kernel_caches
from gptj_ft.system.paths import home_warning
from gptj_ft.system.signals import StopRequest
from gptj_ft.system.streams import lasting_streams

FIRST_RUN = "finetune --recipe summarization --data my.jsonl --model tiny"
STOPPED = "stopped; run the same command to resume or restart"
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=f"gptj-ft {FIRST_RUN}\ngptj-ft COMMAND --help",
)
START, DATA, PLAN, KEEP = "Start", "Data", "Plan and report", "Manage files"


def _add(group: str, command: Callable[..., None] | typer.Typer, *examples: str, name: str | None = None) -> None:
    """Add a command or an app with subcommands to a group of the help."""
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
    START, search.search, "search --recipe classification --data my.jsonl --max-steps 200",
    "search --recipe qa --data my.jsonl --lr 1e-5,3e-5,1e-4 --max-time 2h", "search --resume runs/search-1",
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
_add(PLAN, watch.watch, "watch", "watch runs/summarization-1 runs/summarization-2")
_add(KEEP, runs.runs_app, "runs list", "runs verify runs/summarization-1", name="runs")
_add(KEEP, models.models_app, "models list", "models remove tiny", name="models")


@app.callback(invoke_without_command=True)
def _global(version: Annotated[bool, flag("print the version and exit", "--version")] = False) -> None:
    """Fine-tune GPT-J 6B on your notes, questions or dialogues, on one machine.

    Weights stream through the device one layer at a time, so a model may be larger than its memory. Nothing leaves the
    machine.
    """
    if version:
        print(__version__)
        raise typer.Exit
    # Only the first rank prints.
    if os.environ.get("RANK", "0") == "0" and (warning := home_warning()):
        print_note(f"warning: {warning}")


def main() -> None:
    """Run the command line."""
    with lasting_streams(), StopRequest() as stop:
        # Privacy: libraries send no telemetry, check no updates. Only `download` and `fetched_rows` use the network.
        for name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
            os.environ[name] = "1"
        if "download" not in sys.argv[1:2]:
            close_network()
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        bound_kernel_caches()
        sys.exit(_run(stop))


@functools.cache
def command() -> Callable[..., Any]:
    """Build the click command once; building takes longer than many commands."""
    return typer.main.get_command(app)


def _run(stop: StopRequest) -> int:
    """Run the command in ``sys.argv``; return its exit code."""
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
        _report_unexpected(error)
        raise
    except Exception as error:
        if stop.has_become(error):
            return _fail(Interrupted(STOPPED))
        _report_unexpected(error)
        raise
    except BaseException as error:
        if panic := panic_in_words(error):
            return _fail(panic)
        if isinstance(error, SystemExit) and stop.requested:  # Typer turned the signal into an exit code
            return _fail(Interrupted(STOPPED))
        raise
    return 0


def _report_unexpected(error: Exception) -> None:
    """Print an error that is a bug as JSON, if asked for; Python prints its traceback."""
    if "--json" in sys.argv:
        print_json({"error": f"{type(error).__name__}: {error}", "exit_code": 1})


def _failed_resource(error: Exception) -> ResourceError | None:
    """Translate an error of the system or of torch into an error about memory, disk or device, or return ``None``."""
    text, plan = str(error), "`gptj-ft plan` forecasts the needs of a run"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"disk space ran out: {text}; {plan}")
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return ResourceError(f"memory ran out: {text}; {plan}")
    first = text.partition("\n")[0]
    if any(words in text for words in ("out of memory", "ALLOC_FAILED")):  # the latter is cuBLAS's
        tried = re.match(r".*?Tried to allocate [\d.]+ \w+", first)
        return ResourceError(
            f"device memory ran out: {tried[0] if tried else first}; close other programs that use the device, or "
            f"lower --device-memory; {plan}"
        )
    if type(error).__name__ == "AcceleratorError" or re.match(r"(CUDA|HIP) error|.*\bdevice (is )?lost\b", first):
        return ResourceError(f"the device failed: {first}; check it with `gptj-ft doctor`")
    return None


def _fail(error: GptjFtError, notes: Sequence[str] = ()) -> int:
    """Print an error with its notes; return the exit code."""
    message = "\n".join([str(error), *(notes or notes_of(error))])
    with StopRequest(on_first=lambda: None):  # a second signal must not cut off the message
        if "--json" in sys.argv:
            with suppress(OSError):  # stdout's disk may be full
                print_json({"error": message, "exit_code": error.exit_code})
        text = f"gptj-ft: {message}"
        if sys.stderr.isatty():  # a terminal would break long lines inside words
            from gptj_ft.cli.terminal.screen import console_for, say, whole

            lines = (whole(line) if line.startswith("gptj-ft ") else line for line in text.splitlines())
            say(console_for(), "\n".join(lines))
        else:
            print_note(text)
    return error.exit_code


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error, which say how to recover."""
    return list(getattr(error, "__notes__", ()))
