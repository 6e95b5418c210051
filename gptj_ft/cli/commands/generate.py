"""The command that writes: `generate`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gptj_ft.cli.options import (
    Assignments,
    Config,
    Device,
    DeviceMemory,
    HelpAll,
    HostMemory,
    Json,
    Map,
    MaxBadRows,
    Precision,
    Quiet,
    TunedRecipeName,
    Weights,
    complete_model,
    option_of,
)
from gptj_ft.cli.terminal.output import Output, as_tuple, print_note, print_result
from gptj_ft.config.options import Generation, Recipe
from gptj_ft.config.resolve import Resolved, resolve
from gptj_ft.errors import UsageError
from gptj_ft.models.supported import TINY_MODELS
from gptj_ft.system.plain_text import command_line
from gptj_ft.system.signals import every_ctrl_c

if TYPE_CHECKING:
    from rich.console import Console

    from gptj_ft.generation.batch import BatchJob
    from gptj_ft.generation.generator import GenerationSetup


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="text for the model's prompt template; - reads standard input")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="model or run; default: the newest run, else the download", autocompletion=complete_model
        ),
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Option("--field", metavar="NAME=TEXT", help="another field of the template")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option("--input", metavar="FILE", help="rows to answer, of any form that --data takes")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="with --input: JSON lines; the same command goes on with it"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="talk with the model; /help says how")] = False,
    system: Annotated[str | None, typer.Option("--system", help="with --chat: what the model is told first")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="show the answer while it is written")] = False,
    num_return: Annotated[int, typer.Option("--num-return", min=1, help="so many different answers")] = 1,
    max_new_tokens: Annotated[int | None, option_of("generation.max_new_tokens")] = None,
    temperature: Annotated[float | None, option_of("generation.temperature")] = None,
    top_p: Annotated[float | None, option_of("generation.top_p", more=True)] = None,
    top_k: Annotated[int | None, option_of("generation.top_k", more=True)] = None,
    num_beams: Annotated[int | None, option_of("generation.num_beams", more=True)] = None,
    seed: Annotated[int | None, option_of("seed", "same seed, same samples")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text itself, without the template")] = False,
    recipe: TunedRecipeName = None,
    map: Map = None,
    max_bad_rows: MaxBadRows = None,
    device: Device = None,
    precision: Precision = None,
    weights: Weights = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    config: Config = None,
    assignments: Assignments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="with --input: show what it will take and stop")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
    help_all: HelpAll = False,
) -> None:
    """Write answers to a prompt, to rows, or in a conversation.

    The prompt's template and the settings are those that the model was tuned with.
    """
    given = dict(locals())
    named = ("max_new_tokens", "temperature", "top_p", "top_k", "num_beams", "seed", "recipe", "map", "max_bad_rows",
             "device", "precision", "weights", "device_memory", "host_memory")  # fmt: skip
    flags = {f"generation.{x}" if x in Generation.model_fields else x: given[x] for x in named}
    text = None if rows or chat else sys.stdin.read() if prompt == "-" or _is_piped(prompt) else prompt
    _check_kind(prompt, rows, output, chat, stream or as_json)
    if dry_run and not rows:
        raise UsageError("--dry-run tells what the rows of a file take: add --input FILE --output FILE")
    from gptj_ft.checkpoints.base_model import default_model, find_model

    out = Output(as_json, quiet)
    with out.activity():
        from gptj_ft.generation.batch import plan_batch
        from gptj_ft.generation.generator import GenerationSetup, check_num_return

    folder = find_model(model) if model else default_model("generate")
    options = for_model(folder, flags, config, assignments, plain=raw).recipe
    check_num_return(options, num_return)
    if rows and output:
        with out.activity("reading the rows"):
            setup = GenerationSetup.of(folder, options)
            planned = plan_batch(setup, rows, output, num_return)
        _answer_file(setup, planned, rows, dry_run, out)
    elif chat:
        _talk(folder, options, system, out)
    else:
        _answer(folder, options, str(text), field_texts(fields), Shown(num_return, stream, out))


@dataclass(frozen=True)
class Shown:
    """How answers are shown: how many, while they are written, where."""

    num_return: int
    stream: bool
    out: Output


def _is_piped(prompt: str | None) -> bool:
    return prompt is None and not sys.stdin.isatty()


def _check_kind(prompt: str | None, rows: Path | None, output: Path | None, chat: bool, shows: bool) -> None:
    """Check that one kind of question is asked, and asked whole."""
    if sum((prompt is not None, rows is not None, chat)) > 1:
        raise UsageError("a prompt, --input and --chat are three ways of asking: use one")
    if (rows is None) != (output is None):
        raise UsageError("--input and --output go together: --input rows.jsonl --output out.jsonl")
    if not (prompt or rows or chat or not sys.stdin.isatty()):
        raise UsageError('nothing to answer: gptj-ft generate "prompt", or --input FILE --output FILE, or --chat')
    if chat and shows:
        raise UsageError("--chat shows its answers as they are written, and no JSON: leave out --stream and --json")


def _answer(folder: Path, options: Recipe, text: str, more: Mapping[str, str], shown: Shown) -> None:
    from gptj_ft.generation.generator import GenerationSetup, fill_fields, open_generator

    if shown.stream and (shown.out.as_json or shown.num_return > 1 or options.generation.num_beams > 1):
        raise UsageError("--stream shows one answer as it comes: not with --json, --num-return or beams")
    values = fill_fields(options, text, more)
    with ExitStack() as opened:
        with shown.out.activity("loading the model"):
            generator = opened.enter_context(open_generator(GenerationSetup.of(folder, options)))
        with nullcontext() if shown.stream else shown.out.activity("writing"):
            result = generator.write(values, shown.num_return, _show if shown.stream else None)
    if result.was_cut:
        shown.out.notes.print(f"the prompt was shortened to {result.prompt_tokens} tokens, to fit")
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
            shown.out.notes.print("(cut: the tiny model only shows the steps; --quiet shows all that it writes)")

    shown.out.finish(facts, numbered(result.texts), show)


def _is_tiny(folder: Path) -> bool:
    """Tell whether a model is one that `--model tiny` made, or was tuned from one."""
    from gptj_ft.checkpoints.metadata import read_metadata

    tuning = read_metadata(folder)
    names = (folder.name, tuning.base_model if tuning else "")
    return any(re.fullmatch(rf"({'|'.join(TINY_MODELS)})-[0-9a-f]{{12}}-\d+", name) for name in names)


def _cut(texts: Sequence[str], console: Console) -> list[str]:
    """Return as much of each text as two lines take."""
    from gptj_ft.cli.terminal.screen import width_of, wrapped

    return ["\n".join(wrapped(text, width_of(console))[:2]) for text in texts]


def _answer_file(setup: GenerationSetup, planned: BatchJob, rows: Path, dry_run: bool, out: Output) -> None:
    from gptj_ft.cli.terminal.screen import next_steps, panel, whole
    from gptj_ft.cli.terminal.tables import show_reading
    from gptj_ft.generation.batch import run_batch
    from gptj_ft.generation.generator import open_generator

    folder, output, plan = setup.folder, planned.output, planned.plan
    about = [("model", whole(str(folder))), ("rows", whole(str(rows))), ("answers", f"in {whole(str(output))}")]
    if dry_run:
        out.finish(plan.to_dict(), "", lambda console: show_reading(console, "The answers", about, plan))
        return
    show_reading(out.notes, "The answers", about, plan)
    with open_generator(setup, plan.weights) as generator, out.bar("answering", "rows") as advance:
        done = run_batch(generator, planned, advance)
    for where, problem in done.bad if not out.is_quiet else ():
        print_note(f"{where}: {problem}")
    facts = {"model": str(folder), "output": str(output), "rows": done.rows, "found": done.found,
             "shortened": done.cut, "bad": len(done.bad)}  # fmt: skip
    there = f", {done.found:,} of them were there" if done.found else ""
    notes = [f"{done.cut:,} prompts were shortened"] * bool(done.cut) + [f"{len(done.bad):,} bad rows"] * bool(done.bad)

    def show(console: Console) -> None:
        shown = [("rows", "; ".join([f"{done.rows:,}{there}", *notes])), ("answers", whole(str(output)))]
        panel(console, "Answered", shown)
        recipe = setup.recipe
        if recipe.metrics:
            words = ("--predictions", output, "--data", rows, "--recipe", recipe.recipe)
            next_steps(console, command_line("evaluate", *words))

    out.finish(facts, str(output), show)


def _talk(folder: Path, options: Recipe, system: str | None, out: Output) -> None:
    from gptj_ft.generation.chat import HELP, check_is_chat, run_chat
    from gptj_ft.generation.generator import GenerationSetup, open_generator

    check_is_chat(options)

    with ExitStack() as opened:
        with out.activity("loading the model"):
            generator = opened.enter_context(open_generator(GenerationSetup.of(folder, options)))
        opened.enter_context(every_ctrl_c())
        print_note(HELP)
        run_chat(generator, _typed_lines(), system, _show, print_note)


def _typed_lines() -> Iterator[str]:
    """Yield what is typed, line by line, until it ends; of a pipe, its lines."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and what was typed before
    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _show(text: str) -> None:
    print_result(text, end="")


def for_model(
    folder: Path,
    flags: Mapping[str, Any],
    config: Path | None,
    assignments: list[str] | None,
    plain: bool = False,
) -> Resolved:
    """Resolve options for a model: what it remembers of its training ranks as its recipe."""
    from gptj_ft.checkpoints.metadata import read_metadata

    tuning = None if plain else read_metadata(folder)
    base = (f"model {folder}", tuning.template) if tuning else None
    return resolve(flags, config, as_tuple(assignments), base=base)


def field_texts(pairs: list[str] | None) -> dict[str, str]:
    """Read the texts that --field gives to the template's fields."""
    values = {}
    for pair in pairs or ():
        name, separator, text = pair.partition("=")
        if not separator:
            raise UsageError(f"--field takes NAME=TEXT, not '{pair}'")
        values[name] = text
    return values
