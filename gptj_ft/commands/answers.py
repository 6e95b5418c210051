"""The commands that use a model: `evaluate` and `generate`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gptj_ft.commands.terminal import as_tuple, bar, console_for, fetched_rows, print_json
from gptj_ft.errors import UsageError
from gptj_ft.options import Assignments, Config, Data, Device, Json, Offline, Precision, RecipeName, Seed, Weights
from gptj_ft.recipe import Resolved, resolve


def evaluate(
    model: Annotated[str | None, typer.Argument(help="model or run; default: the newest run")] = None,
    data: Data = None,
    recipe: RecipeName = None,
    baseline: Annotated[
        str, typer.Option("--baseline", help="model to compare with; auto: what it was tuned from; none")
    ] = "auto",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="use the first rows only")] = None,
    show: Annotated[int, typer.Option("--show", min=0, help="print this many answers beside what was expected")] = 0,
    device: Device = None,
    precision: Precision = None,
    weights: Weights = None,
    config: Config = None,
    assignments: Assignments = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Measure a model, and beside it the one it was tuned from: loss, perplexity and the recipe's scores."""
    from gptj_ft.evaluate import choose_baseline, default_rows, evaluate_model
    from gptj_ft.home import default_model, find_model
    from gptj_ft.inputs import data_path
    from gptj_ft.report import show_evaluation, show_samples

    folder = find_model(model) if model else default_model("evaluate")
    flags = {"recipe": recipe, "device": device, "precision": precision, "weights": weights}
    options = for_model(folder, flags, config, assignments).recipe
    rows = data_path(fetched_rows(data, offline, as_json)) if data else default_rows(folder)
    other = choose_baseline(folder, baseline)
    if other is None and baseline == "auto" and not as_json:
        console_for().print("no baseline: what this model was tuned from is not there; --baseline names one")
    with bar("baseline", not as_json and other is not None) as advance:
        before = evaluate_model(other, options, rows, limit, advance) if other else None
    with bar("model", not as_json) as advance:
        after = evaluate_model(folder, options, rows, limit, advance)
    if as_json:
        texts = show > 0
        print_json({"model": after.to_dict(texts), "baseline": before.to_dict(texts) if before else None})
        return
    console = console_for(stderr=False)
    show_evaluation(console, after, before)
    show_samples(console, after, before, show)


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
