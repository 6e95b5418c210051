"""Show generated answers to a prompt, to the rows of a file, or in a chat."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gptj_ft import api
from gptj_ft.checkpoints.metadata import read_metadata
from gptj_ft.cli.terminal.output import Output, print_note, print_result
from gptj_ft.cli.terminal.progress import TerminalReporter
from gptj_ft.cli.terminal.screen import next_steps, panel, whole, width_of, wrapped
from gptj_ft.cli.terminal.tables import show_reading, show_threads
from gptj_ft.config.options import Recipe
from gptj_ft.errors import UsageError
from gptj_ft.evaluation.generate import BatchJob
from gptj_ft.generation.chat import HELP, check_is_chat, run_chat
from gptj_ft.generation.generator import GenerationSetup, check_unicode, fill_fields
from gptj_ft.models.supported import TINY_MODELS
from gptj_ft.system.plain_text import command_line
from gptj_ft.system.signals import every_ctrl_c
from gptj_ft.system.streams import input_lines


@dataclass(frozen=True)
class AnswerOutput:
    """Form of the answers to one prompt."""

    num_return: int  # answers per prompt
    stream: bool  # print while generating
    out: Output


def answer_prompt(folder: Path, recipe: Recipe, text: str, fields: Mapping[str, str], shown: AnswerOutput) -> None:
    """Answer one prompt, and print the answers.

    Args:
        recipe: template and generation settings.
        fields: texts of the other fields of the template.
        shown: number and form of the answers.

    Raises:
        UsageError: the template lacks a field, or the answers cannot be streamed.
        DataError: a text is not valid Unicode.
    """
    if shown.stream and (shown.out.as_json or shown.num_return > 1 or recipe.generation.num_beams > 1):
        raise UsageError("--stream prints one answer while it is generated; remove --json, --num-return or beam search")
    fill_fields(recipe, text, fields)  # report wrong fields before loading the model
    with shown.out.activity("loading the model"):
        model = api.open_model(GenerationSetup.of(folder, recipe))
    with model, nullcontext() if shown.stream else shown.out.activity("writing"):
        result = model.generate(text, shown.num_return, fields, _show if shown.stream else None)
    if result.was_cut:
        shown.out.notes.print(f"the prompt was cut to {result.prompt_tokens} tokens to fit")
    if shown.stream:
        print()
        return
    facts = {"model": str(folder), "prompt_tokens": result.prompt_tokens, "shortened": result.was_cut,
             "text": result.texts[0], "texts": result.texts}  # fmt: skip
    one = shown.num_return == 1

    def numbered(texts: Sequence[str]) -> str:
        return "\n".join(text if one else f"[{number}] {text}" for number, text in enumerate(texts, 1))

    def show(console: Console) -> None:
        texts = _cut(result.texts, console) if console.is_terminal and _is_tiny(folder) else result.texts
        print_result(numbered(texts))
        if texts != result.texts:
            shown.out.notes.print("(abridged: a tiny model writes noise; --quiet prints all of it)")

    shown.out.finish(facts, numbered(result.texts), show)


def _is_tiny(folder: Path) -> bool:
    """Tell whether a model is a random one of `--model tiny`, or tuned from one."""
    tuning = read_metadata(folder)
    names = (folder.name, tuning.base_model if tuning else "")
    return any(re.fullmatch(rf"({'|'.join(TINY_MODELS)})-[0-9a-f]{{12}}-\d+", name) for name in names)


def _cut(texts: Sequence[str], console: Console) -> list[str]:
    """Return the first two lines of each text, as wrapped on the console."""
    return ["\n".join(wrapped(text, width_of(console))[:2]) for text in texts]


def answer_file(setup: GenerationSetup, job: BatchJob, rows: Path, dry_run: bool, out: Output) -> None:
    """Answer the rows of a file; on a dry run, only show the memory needed."""
    folder, output, plan = setup.folder, job.output, job.plan
    about = [("model", whole(str(folder))), ("rows", whole(str(rows))), ("answers", f"in {whole(str(output))}")]
    if dry_run:
        out.finish(plan.to_dict(), "", lambda console: show_reading(console, "The answers", about, plan))
        return
    show_reading(out.notes, "The answers", about, plan)
    show_threads(out.notes, setup.recipe, setup.workers.group)
    with TerminalReporter(out.notes) as reporter:
        done = api.run_file(setup, job, reporter)
    for where, problem in done.bad if not out.is_quiet else ():
        print_note(f"{where}: {problem}")
    facts = {"model": str(folder), "output": str(output), "rows": done.rows, "found": done.resumed,
             "shortened": done.cut, "bad": len(done.bad)}  # fmt: skip
    resumed = f", {done.resumed:,} of them by an earlier session" if done.resumed else ""
    notes = [f"{done.cut:,} prompts were shortened"] * bool(done.cut) + [f"{len(done.bad):,} bad rows"] * bool(done.bad)

    def show(console: Console) -> None:
        shown = [("rows", "; ".join([f"{done.rows:,}{resumed}", *notes])), ("answers", whole(str(output)))]
        panel(console, "Answered", shown)
        recipe = setup.recipe
        if recipe.metrics and job.has_references:
            words = ("--predictions", output, "--data", rows, "--recipe", recipe.recipe)
            next_steps(console, command_line("evaluate", *words))

    out.finish(facts, str(output), show)


def hold_chat(folder: Path, recipe: Recipe, system: str | None, out: Output) -> None:
    """Answer typed messages in a conversation.

    Raises:
        UsageError: the model was not tuned for conversations.
        DataError: the system message is not valid Unicode.
    """
    check_is_chat(recipe)
    check_unicode("the system message", system or "")
    with out.activity("loading the model"):
        setup = GenerationSetup.of(folder, recipe)
        model = api.open_model(setup)
    with model, api.fixed_seed(recipe.seed, setup.device), every_ctrl_c():
        print_note(HELP)
        run_chat(model.generator, _typed_lines(), system, _show, print_note)


def _typed_lines() -> Iterator[str]:
    """Yield the lines of a terminal or a pipe."""
    if not sys.stdin.isatty():
        yield from input_lines()
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history
    while True:
        try:
            line = input("> ")
            line.encode()  # see `input_lines`
        except UnicodeError:
            print_note("(left out, because it is not text in the encoding of this terminal)")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        else:
            yield line


def _show(text: str) -> None:
    print_result(text, end="")
