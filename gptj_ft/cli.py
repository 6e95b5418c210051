"""The command line: parse, one call, print. The only place that turns errors into exit codes.

A command's module is imported inside the command, so that `gptj-ft --help` imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gptj_ft import __version__
from gptj_ft.errors import DataError, GptjFtError, ResourceError, UsageError
from gptj_ft.hub import close_network
from gptj_ft.options import (
    Activations,
    Assignments,
    BatchSize,
    Boundaries,
    Cache,
    Config,
    Data,
    Device,
    DeviceMemory,
    DiskSpace,
    Epochs,
    HostMemory,
    Json,
    Map,
    MaxBadRows,
    MaxLength,
    MaxSteps,
    MaxTime,
    Model,
    Offline,
    OnLong,
    OptimizerState,
    Precision,
    RecipeName,
    Seed,
    Weights,
    option_of,
)
from gptj_ft.recipe import Recipe, Resolved, resolve

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
recipes_app = typer.Typer(no_args_is_help=True, help="The presets: list them, show or copy one.")
app.add_typer(recipes_app, name="recipes")
cache_app = typer.Typer(no_args_is_help=True, help="Rows that are kept as tokens: list them, clear them.")
app.add_typer(cache_app, name="cache")
runs_app = typer.Typer(help="The runs: list, verify and clean them, export a checkpoint.")
app.add_typer(runs_app, name="runs")
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]


@app.callback(invoke_without_command=True)
def _global(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False,
) -> None:
    """Fine-tune GPT-J 6B on the one machine you have, by weight streaming."""
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def download(
    repository: Annotated[str | None, typer.Argument(help="Hub repository; default EleutherAI/gpt-j-6b")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="folder; default: in the home of models")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="branch, tag or commit")] = None,
    endpoint: Annotated[str | None, typer.Option("--endpoint", help="mirror; default HF_ENDPOINT or the Hub")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="never use the network")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show files and sizes only")] = False,
    as_json: Json = False,
) -> None:
    """Fetch a model from the Hub: the files that are needed, nothing else."""
    from dataclasses import asdict

    from gptj_ft.download import download as fetch
    from gptj_ft.home import DEFAULT_REPOSITORY
    from gptj_ft.machine import gigabytes

    with _bar("downloading", not as_json) as advance:
        report = fetch(
            repository or DEFAULT_REPOSITORY,
            output,
            revision=revision,
            endpoint=endpoint,
            offline=offline,
            dry_run=dry_run,
            progress=advance,
        )
    if as_json:
        _print_json(asdict(report))
        return
    for file in report.files:
        print(f"{gigabytes(file.bytes):>10}  {file.name}")
    verb = "would go into" if dry_run else "in"
    print(f"{gigabytes(report.bytes)} {verb} {report.folder}, revision {report.commit[:12]}\nnext: gptj-ft convert")


@app.command()
def convert(
    source: Annotated[
        Path | None, typer.Argument(metavar="[SRC]", help="Hugging Face folder; default: the download")
    ] = None,
    target: Annotated[
        Path | None, typer.Argument(metavar="[DEST]", help="model folder; default: in the home of models")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="keep, fp32, bf16 or fp16")] = "keep",
    as_json: Json = False,
) -> None:
    """Turn a checkpoint into a model folder: one shard per layer, which every other tool opens too."""
    from dataclasses import asdict

    from gptj_ft import home
    from gptj_ft.convert import convert as convert_model
    from gptj_ft.machine import gigabytes

    if source is None:
        source = home.download_folder(home.DEFAULT_REPOSITORY)
        if not home.is_model(source):
            raise UsageError(
                "no model is downloaded to convert: type `gptj-ft download`, or name a folder: `gptj-ft convert SRC`"
            )
    if target is None:
        target = home.model_folder(source.name.split("--")[-1])
    if dtype not in ("keep", "fp32", "bf16", "fp16"):
        raise UsageError(f"--dtype {dtype}: keep, fp32, bf16 or fp16")
    with _bar("converting", not as_json) as advance:
        report = convert_model(source, target, dtype, advance)  # type: ignore[arg-type]
    if as_json:
        _print_json({**asdict(report), "folder": str(target)})
    else:
        print(
            f"{target}: {report.tensors} tensors, {report.parameters:,} parameters, {gigabytes(report.bytes)} in "
            f"{report.dtype}, each compared with the source\n"
            "next: gptj-ft finetune --recipe summarization --data my.jsonl"
        )


@app.command("prepare-data")
def prepare_data(
    data: Annotated[str, option_of("data")],
    output: Annotated[Path | None, typer.Option("--output", help="new folder; default DATA.prepared")] = None,
    recipe: RecipeName = None,
    model: Model = None,
    map: Map = None,
    max_bad_rows: MaxBadRows = None,
    cache: Cache = None,
    max_length: MaxLength = None,
    on_long: OnLong = None,
    seed: Seed = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="mend what can be mended, in a new file beside DATA, and go on with that")
    ] = False,
    fixed: Annotated[
        Path | None, typer.Option("--fixed", metavar="FILE", help="with --fix: the new file; default NAME.fixed.jsonl")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="new file for counts and lengths: .json or .html")
    ] = None,
    show: Annotated[
        int | None,
        typer.Option(
            "--show", min=0, help="show so many rows as the model will see them [default 1]; in the --report, too"
        ),
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Turn rows into token ids: checked, masked, counted; `finetune --data` takes the folder."""
    flags = {name: value for name, value in locals().items() if name in Recipe.model_fields and value is not None}
    flags.pop("output", None)  # here that is the folder of the rows
    from gptj_ft.preparing import Targets, prepare_rows
    from gptj_ft.report import show_data, show_examples, show_fixes, show_lengths

    resolved = resolve(flags, config, _tuple(assignments))
    targets = Targets.of(data, output, fix, fixed, report, show or 0)
    resolved = _fetched(resolved, offline, as_json)
    bar = partial(_bar, "rows", not as_json)
    done = _asking(resolved, as_json, lambda its: prepare_rows(its.recipe, targets, bar))
    done.write()
    if as_json:
        _print_json(done.to_dict())
        return
    console = _console(stderr=False)
    if done.fixes:
        show_fixes(console, done.fixes)
    show_data(console, done.prepared.report)
    show_lengths(console, done.prepared, done.recipe)
    show_examples(console, done.prepared, done.tokenizer.decode, 1 if show is None else show)
    if report is not None:
        print(f"report: {report}")
    print(f"written to {targets.folder}\nnext: gptj-ft finetune --recipe {done.recipe.recipe} --data {targets.folder}")


@app.command()
def finetune(
    recipe: RecipeName = None,
    data: Data = None,
    val_data: Annotated[str | None, option_of("val_data")] = None,
    map: Map = None,
    max_bad_rows: MaxBadRows = None,
    cache: Cache = None,
    model: Model = None,
    output: Annotated[str | None, option_of("output")] = None,
    method: Annotated[str | None, option_of("method")] = None,
    lr: Annotated[float | None, option_of("lr")] = None,
    epochs: Epochs = None,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    on_long: OnLong = None,
    seed: Seed = None,
    device: Device = None,
    precision: Precision = None,
    weights: Weights = None,
    optimizer_state: OptimizerState = None,
    activations: Activations = None,
    boundaries: Boundaries = None,
    max_time: MaxTime = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk_space: DiskSpace = None,
    validate_every: Annotated[int | None, option_of("validate_every")] = None,
    save_every: Annotated[int | None, option_of("save_every")] = None,
    keep: Annotated[str | None, option_of("keep")] = None,
    export: Annotated[str | None, option_of("export")] = None,
    config: Config = None,
    assignments: Assignments = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what it will cost and stop")] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="go on with a run; needs nothing else")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="CHECKPOINT", help="with --resume: step-000120, best or last")
    ] = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model: every parameter, by weight streaming."""
    began = time.monotonic()
    flags = {name: value for name, value in locals().items() if name in Recipe.model_fields and value is not None}
    from dataclasses import asdict

    from gptj_ft import finetune as command
    from gptj_ft.data.tokenizer import load_tokenizer
    from gptj_ft.report import show_data, show_examples, show_plan, show_training

    console = _console(quiet=as_json)
    if start is not None and resume is None:
        raise UsageError("--from names a checkpoint of a run: add --resume RUN")
    if resume is not None:
        prepared = command.resumed(resume, flags, config, _tuple(assignments), start)
    else:
        resolved = _fetched(resolve(flags, config, _tuple(assignments)), offline, as_json)
        prepared = _asking(resolved, as_json, command.fresh)
        show_data(console, prepared.report)
        if console.is_terminal:  # a log gets no text of the user's
            show_examples(console, prepared.rows[0], load_tokenizer(prepared.session.model).decode, 1)
    show_plan(console, prepared.session.plan)
    if dry_run:
        if as_json:
            _print_json(prepared.session.plan.to_dict())
        return
    result = command.execute(prepared, console, as_json, began)
    if as_json:
        _print_json(asdict(result))
        return
    show_training(_console(stderr=False), result)


@app.command()
def plan(
    recipe: RecipeName = None,
    data: Data = None,
    model: Model = None,
    epochs: Epochs = None,
    max_steps: MaxSteps = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    device: Device = None,
    precision: Precision = None,
    weights: Weights = None,
    optimizer_state: OptimizerState = None,
    activations: Activations = None,
    boundaries: Boundaries = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk_space: DiskSpace = None,
    config: Config = None,
    assignments: Assignments = None,
    measure: Annotated[bool, typer.Option("--measure", help="measure device and disk again, first")] = False,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Tell what a run will cost, before it starts; without --data, for rows of the greatest length."""
    flags = {name: value for name, value in locals().items() if name in Recipe.model_fields and value is not None}
    from gptj_ft import finetune as command
    from gptj_ft.report import show_plan

    forecast = command.forecast(_fetched(resolve(flags, config, _tuple(assignments)), offline, as_json), measure)
    if as_json:
        _print_json(forecast.to_dict())
    else:
        show_plan(_console(stderr=False), forecast)


@app.command()
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
    options = _for_model(folder, flags, config, assignments).recipe
    rows = data_path(_fetched_rows(data, offline, as_json)) if data else default_rows(folder)
    other = choose_baseline(folder, baseline)
    if other is None and baseline == "auto" and not as_json:
        _console().print("no baseline: what this model was tuned from is not there; --baseline names one")
    with _bar("baseline", not as_json and other is not None) as advance:
        before = evaluate_model(other, options, rows, limit, advance) if other else None
    with _bar("model", not as_json) as advance:
        after = evaluate_model(folder, options, rows, limit, advance)
    if as_json:
        texts = show > 0
        _print_json({"model": after.to_dict(texts), "baseline": before.to_dict(texts) if before else None})
        return
    console = _console(stderr=False)
    show_evaluation(console, after, before)
    show_samples(console, after, before, show)


@app.command()
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
    options = _for_model(folder, flags, None, None, plain=raw).recipe
    text = sys.stdin.read() if prompt == "-" else prompt
    result = answer(folder, options, text, _assignments(fields))
    if result.was_cut:
        _console().print("the prompt was shortened to fit the model's context", highlight=False)
    if as_json:
        _print_json({"model": str(folder), "prompt_tokens": result.prompt_tokens, "text": result.text})
    else:
        print(result.text)


@cache_app.command("list")
def list_cache(as_json: Json = False) -> None:
    """List the prepared data that is kept, the largest first."""
    from gptj_ft.data.cache import cache, kept
    from gptj_ft.machine import gigabytes

    found = kept()
    if as_json:
        rows = [{"folder": str(x.folder), "bytes": x.bytes, "files": x.files, "rows": x.rows} for x in found]
        _print_json({"folder": str(cache()), "kept": rows})
        return
    for each in found:
        print(f"{gigabytes(each.bytes):>10}  {each.rows:>10,} rows  {', '.join(each.files[:2]) or 'damaged'}")
    print(f"{gigabytes(sum(each.bytes for each in found))} in {cache()}")


@cache_app.command("clear")
def clear_cache(as_json: Json = False) -> None:
    """Remove all of it; runs have their own copies."""
    from gptj_ft.data.cache import clear
    from gptj_ft.machine import gigabytes

    freed = clear()
    if as_json:
        _print_json({"freed_bytes": freed})
    else:
        print(f"{gigabytes(freed)} freed")


@recipes_app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """List the presets."""
    from gptj_ft.recipe import load_preset, preset_names

    abouts = {name: load_preset(name).get("about", "") for name in preset_names()}
    if as_json:
        _print_json(abouts)
    else:
        for name, about in abouts.items():
            print(f"{name:24} {about}")


@recipes_app.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="a preset")], assignments: Assignments = None, as_json: Json = False
) -> None:
    """Show every option of a preset and where each value comes from."""
    from gptj_ft.recipe import dump

    resolved = resolve({"recipe": name}, None, _tuple(assignments))
    if as_json:
        _print_json(resolved.recipe.to_dict())
    else:
        print(dump(resolved.recipe, resolved.origins), end="")


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="a preset")],
    target: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="new file; default NAME.yaml")] = None,
) -> None:
    """Write a preset to a file of yours, to be changed and given to --config."""
    from gptj_ft.recipe import preset_file

    target = target or Path(f"{name}.yaml")
    if target.exists():
        raise UsageError(f"{target} exists, and is not overwritten: name another file")
    text = preset_file(name).read_text(encoding="utf-8")
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from error
    print(f"{target}\nnext: change it, then gptj-ft finetune --config {target} --data FILE")


@runs_app.callback(invoke_without_command=True)
def runs(context: typer.Context, as_json: Json = False) -> None:
    """List the runs in runs/, or do something with one."""
    if context.invoked_subcommand is None:
        list_runs(as_json=as_json)


@runs_app.command("list")
def list_runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="runs or folders of runs; default: runs/")
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs: how far each is, its validation loss before and after, its size."""
    from gptj_ft.runs import describe, find_runs, summarize

    summaries = [summarize(run) for run in find_runs(folders or [])]
    if as_json:
        _print_json({"runs": [summary.to_dict() for summary in summaries]})
    else:
        print(describe(summaries) if summaries else "no runs here; `gptj-ft finetune` makes one")


@runs_app.command("verify")
def verify_run(run: RunFolder, as_json: Json = False) -> None:
    """Read every file of a run and compare it with what was written."""
    from gptj_ft.machine import gigabytes
    from gptj_ft.run import Run
    from gptj_ft.verify import verify

    with _bar("verifying", not as_json) as advance:
        found = verify(Run(run.expanduser()), advance)
    if as_json:
        _print_json(found.to_dict())
    else:
        print("".join(f"{problem}\n" for problem in found.problems), end="")
        print(f"{found.files} files, {gigabytes(found.bytes)} checked: {len(found.problems) or 'no'} problems")
    if found.problems:
        raise typer.Exit(DataError.exit_code)


@runs_app.command("clean")
def clean_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run folders")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would go and stop")] = False,
    as_json: Json = False,
) -> None:
    """Remove state and checkpoints of finished runs, and what crashes left behind; never a model or its metrics."""
    from gptj_ft.machine import gigabytes
    from gptj_ft.run import Run
    from gptj_ft.runs import leftovers, remove

    with leftovers([Run(folder.expanduser()) for folder in runs]) as found:
        for each in found if not as_json else ():
            print(f"{each.run}: {gigabytes(each.bytes)} {'would be' if dry_run else 'is'} freed")
            print("".join(f"  {path}\n" for path in each.paths), end="")
        for each in found if not dry_run else ():
            remove(each)
    if as_json:
        _print_json({"dry_run": dry_run, "runs": [each.to_dict() for each in found]})


@runs_app.command("export")
def export_run(
    run: RunFolder,
    target: Annotated[Path, typer.Argument(metavar="DEST", help="model folder")],
    checkpoint: Annotated[str, typer.Option("--from", metavar="CHECKPOINT", help="step-000120, best or last")] = "best",
    as_json: Json = False,
) -> None:
    """Write a kept checkpoint as a model folder."""
    from gptj_ft.export import export_checkpoint
    from gptj_ft.run import Run

    step = export_checkpoint(Run(run.expanduser()), checkpoint, target)
    if as_json:
        _print_json({"model": str(target), "step": step})
    else:
        print(f"model after {step} steps: {target}\nnext: gptj-ft evaluate {target} --data FILE")


def main() -> None:
    """Run the command line."""
    # Private: libraries neither phone home nor look for newer files. `download` uses the network, and `_fetched_rows`.
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ[name] = "1"
    if "download" not in sys.argv[1:2]:
        close_network()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except GptjFtError as error:
        sys.exit(_fail(error))
    except (OSError, MemoryError, RuntimeError) as error:
        if out_of := _exhausted(error):
            sys.exit(_fail(ResourceError(f"{out_of} ran out: {error}; `gptj-ft plan` tells what a run needs")))
        raise


def _exhausted(error: Exception) -> str | None:
    """Name the resource that an error of the system or of torch says is used up."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk space"
    is_memory = isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)
    return "memory" if is_memory else None


def _fail(error: GptjFtError) -> int:
    if "--json" in sys.argv:
        _print_json({"error": str(error), "exit_code": error.exit_code})
    print(f"gptj-ft: {error}", file=sys.stderr)
    return error.exit_code


def _for_model(
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
    return resolve(flags, config, _tuple(assignments), base=base)


def _fetched(resolved: Resolved, offline: bool, as_json: bool) -> Resolved:
    """Fetch the rows that a recipe names on the Hub, if it does; in the recipe they are known by their commit then."""
    named = {key: getattr(resolved.recipe, key) for key in ("data", "val_data")}
    pinned = {key: _fetched_rows(data, offline, as_json) for key, data in named.items() if data is not None}
    return replace(resolved, recipe=resolved.recipe.model_copy(update=pinned))


def _fetched_rows(data: str, offline: bool, as_json: bool) -> str:
    """Return what names the rows on this machine: what the user wrote, but of what is on the Hub, fetched now."""
    from gptj_ft.data.hub_rows import fetch, is_reference

    if not is_reference(data):
        return data
    with _bar("downloading", not as_json) as advance:
        return fetch(data, offline, lambda text: _console().print(text, highlight=False, markup=False), advance)


def _asking(resolved: Resolved, as_json: bool, work: Callable[[Resolved], T]) -> T:
    """Do what needs the columns of the data; on a terminal, ask for those that are not clear."""
    from gptj_ft.data.fields import UnknownColumn

    while True:
        try:
            return work(resolved)
        except UnknownColumn as error:
            if as_json or not error.choices or not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise
            print(str(error).partition("\n")[0], file=sys.stderr)
            question = f"column for '{error.field}' ({', '.join(error.choices)})"
            while (column := typer.prompt(question, err=True).strip()) not in error.choices:
                pass
            columns = {**resolved.recipe.map, error.field: column}
            recipe = resolved.recipe.model_copy(update={"map": columns})
            resolved = Resolved(recipe, {**resolved.origins, "map": "asked"})


def _tuple(assignments: list[str] | None) -> tuple[str, ...]:
    return tuple(assignments or ())


def _assignments(pairs: list[str] | None) -> dict[str, str]:
    values = {}
    for pair in pairs or ():
        name, separator, text = pair.partition("=")
        if not separator:
            raise UsageError(f"--field takes NAME=TEXT, not '{pair}'")
        values[name] = text
    return values


def _console(stderr: bool = True, quiet: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, quiet=quiet, soft_wrap=True)


@contextmanager
def _bar(what: str, visible: bool) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar on a terminal; yield what moves it: (done, total if it is known)."""
    from rich.progress import Progress

    console = _console()
    with Progress(console=console, transient=True, disable=not (visible and console.is_terminal)) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False, default=str))
