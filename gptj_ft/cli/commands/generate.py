"""The command `generate`: answer a prompt, the rows of a file, or a conversation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gptj_ft.cli.options import (
    INFERENCE_OPTIONS,
    TUNED_RECIPE,
    Assignments,
    Config,
    Json,
    Nproc,
    Quiet,
    SetOptions,
    complete_model,
    flag,
    is_assigned,
    takes_options,
)
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import UsageError
from gptj_ft.system.streams import read_input


@takes_options(
    "generation.max_new_tokens",
    "generation.temperature",
    "generation.top_p",
    "generation.top_k",
    "generation.num_beams",
    "seed",
    "recipe",
    "map",
    "max_bad_rows",
    *INFERENCE_OPTIONS,
    meanings={"seed": "same seed, same samples", "recipe": TUNED_RECIPE},
    shown=("seed",),
)
def generate(
    *,
    prompt: Annotated[
        str | None, typer.Argument(help="text for the model's prompt template; - reads standard input")
    ] = None,
    model: Annotated[
        str | None, flag("model or run; default: the newest run, else the download", autocompletion=complete_model)
    ] = None,
    fields: Annotated[list[str] | None, flag("another field of the template", "--field", metavar="NAME=TEXT")] = None,
    rows: Annotated[Path | None, flag("rows to answer, in any format of --data", "--input", metavar="FILE")] = None,
    output: Annotated[
        Path | None, flag("with --input: JSON lines; the same command resumes it", metavar="FILE")
    ] = None,
    chat: Annotated[bool, flag("chat with the model; /help lists commands", "--chat")] = False,
    system: Annotated[str | None, flag("with --chat: system message")] = None,
    stream: Annotated[bool, flag("show the answer while it is generated", "--stream")] = False,
    num_return: Annotated[int, flag("number of different answers", min=1)] = 1,
    options: SetOptions,
    raw: Annotated[bool, flag("continue the text itself, without the template", "--raw")] = False,
    config: Config = None,
    assignments: Assignments = None,
    dry_run: Annotated[bool, flag("with --input: show the plan and stop", "--dry-run")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    nproc: Nproc = None,
) -> None:
    """Generate answers to a prompt, to rows, or in a chat.

    Prompt template and settings are those that the model was tuned with.
    """
    from gptj_ft.cli.several import check_has_rows, leading

    check_has_rows(nproc, rows)
    with leading(nproc) as workers:
        _check_kind(prompt, rows, output, chat)
        _check_options(rows, chat, stream, as_json, system, fields, num_return)
        if is_assigned("data", assignments):
            raise UsageError("--set data names rows to train on: name those to answer with --input FILE --output FILE")
        if dry_run and not rows:
            raise UsageError("--dry-run is for the rows of a file: add --input FILE --output FILE")
        text = None if rows or chat else read_input() if prompt == "-" or _is_piped(prompt) else prompt
        out = Output(as_json, quiet)
        with out.activity():
            from gptj_ft import api
            from gptj_ft.cli.terminal.answers import AnswerOutput, answer_file, answer_prompt, hold_chat
            from gptj_ft.generation.generator import GenerationSetup, check_num_return

        settings = {**options, "config": config}
        folder = api.named_model(model, "generate", settings, assignments)
        recipe = api.model_options(folder, settings, raw, assignments, writes=True).recipe
        check_num_return(recipe, num_return)
        if rows and output:
            with out.activity("reading the rows"):
                setup = GenerationSetup.of(folder, recipe, workers=workers)
                job = api.plan_file(rows, output, setup, num_return)
            answer_file(setup, job, rows, dry_run, out)
        elif chat:
            hold_chat(folder, recipe, system, out)
        else:
            answer_prompt(folder, recipe, str(text), field_texts(fields), AnswerOutput(num_return, stream, out))


def _is_piped(prompt: str | None) -> bool:
    return prompt is None and not sys.stdin.isatty()


def _check_kind(prompt: str | None, rows: Path | None, output: Path | None, chat: bool) -> None:
    """Check that there is exactly one of prompt, --input and --chat."""
    if sum((prompt is not None, rows is not None, chat)) > 1:
        raise UsageError("a prompt, --input and --chat exclude each other: use one")
    if (rows is None) != (output is None):
        raise UsageError("--input and --output go together: --input rows.jsonl --output out.jsonl")
    if not (prompt or rows or chat or not sys.stdin.isatty()):
        raise UsageError('nothing to answer: gptj-ft generate "prompt", or --input FILE --output FILE, or --chat')


def _check_options(
    rows: Path | None,
    chat: bool,
    stream: bool,
    as_json: bool,
    system: str | None,
    fields: list[str] | None,
    num_return: int,
) -> None:
    """Check that the options fit a prompt, the rows of a file, or a conversation."""
    if chat and (stream or as_json):
        raise UsageError("--chat always streams, and prints no JSON: leave out --stream and --json")
    if rows and stream:
        raise UsageError("--stream shows the answer to one prompt, not to the rows of --input: leave one out")
    if chat and num_return > 1:
        raise UsageError("--chat gives one answer to each message: leave out --num-return")
    if system is not None and not chat:
        raise UsageError("--system starts a conversation: add --chat, or leave it out")
    if fields and (rows or chat):
        raise UsageError("--field is for a single prompt: the rows of --input have fields in columns, --chat has none")


def field_texts(pairs: list[str] | None) -> dict[str, str]:
    """Parse the texts of --field by field."""
    values = {}
    for pair in pairs or ():
        name, separator, text = pair.partition("=")
        if not separator:
            raise UsageError(f"--field takes NAME=TEXT, not '{pair}'")
        values[name] = text
    return values
