"""The command that writes: `generate`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gptj_ft.commands.terminal import as_tuple, console_for, print_json
from gptj_ft.errors import UsageError
from gptj_ft.options import Device, Json, Precision, Seed, Weights
from gptj_ft.recipe import Resolved, resolve


def generate(
    prompt: Annotated[str, typer.Argument(help="text for the model's prompt template; - reads standard input")],
    model: Annotated[
        str | None, typer.Option("--model", help="model or run; default: the newest run, else the download")
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Option("--field", metavar="NAME=TEXT", help="another field of the template")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", min=1)] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, help="0 is greedy")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=0)] = None,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="continue the text itself, without the template")] = False,
    device: Device = None,
    precision: Precision = None,
    weights: Weights = None,
    as_json: Json = False,
) -> None:
    """Write an answer; the prompt template and the settings come with the model."""
    from gptj_ft.generate import answer
    from gptj_ft.home import default_model, find_model

    folder = find_model(model) if model else default_model("generate")
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
    }
    flags: dict[str, Any] = {f"generation.{name}": value for name, value in sampling.items()}
    flags |= {"seed": seed, "device": device, "precision": precision, "weights": weights}
    options = for_model(folder, flags, None, None, plain=raw).recipe
    text = sys.stdin.read() if prompt == "-" else prompt
    result = answer(folder, options, text, field_texts(fields))
    if result.was_cut:
        console_for().print("the prompt was shortened to fit the model's context", highlight=False)
    if as_json:
        print_json({"model": str(folder), "prompt_tokens": result.prompt_tokens, "text": result.text})
    else:
        print(result.text)


def for_model(
    folder: Path,
    flags: Mapping[str, Any],
    config: Path | None,
    assignments: list[str] | None,
    plain: bool = False,
) -> Resolved:
    """Resolve options for a model: what it remembers of its training ranks as its recipe."""
    from gptj_ft.tuning import read_tuning

    tuning = None if plain else read_tuning(folder)
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
