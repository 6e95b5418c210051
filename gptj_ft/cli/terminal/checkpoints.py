"""Convert, compare and upload checkpoints, and show the results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from gptj_ft import api
from gptj_ft.checkpoints.architecture import is_quantized, read_architecture
from gptj_ft.checkpoints.base_model import downloaded_model
from gptj_ft.checkpoints.compare import diff_checkpoints
from gptj_ft.checkpoints.convert import Conversion, ConvertReport
from gptj_ft.checkpoints.convert import convert as convert_model
from gptj_ft.checkpoints.open import find_source, open_source
from gptj_ft.checkpoints.push import files_left_out, files_to_push, push
from gptj_ft.checkpoints.source import FormatName
from gptj_ft.cli.terminal.output import Output, print_note
from gptj_ft.cli.terminal.screen import console_for, next_steps, panel, say, whole
from gptj_ft.cli.terminal.tables import ask
from gptj_ft.errors import UsageError, listed
from gptj_ft.models.registry import NAMES_SHOWN
from gptj_ft.system import paths
from gptj_ft.system.machine import free_disk
from gptj_ft.system.plain_text import command_line, quoted
from gptj_ft.system.scratch import scratch_folder
from gptj_ft.system.signals import stop_message
from gptj_ft.system.units import gigabytes


def run_conversion(source: Path, target: Path, conversion: Conversion, out: Output) -> ConvertReport:
    """Convert a checkpoint; show the plan first and warnings afterwards."""
    resumes = conversion.to != "gguf" and not paths.is_adapter(source)
    rows = [
        ("from", whole(str(source))),
        ("to", f"{whole(str(target))} ({gigabytes(free_disk(target))} free)"),
        ("to stop", f"Ctrl-C; the same command {'resumes' if resumes else 'starts again'}"),
    ]
    panel(out.notes, "The conversion", rows)
    kept = "converted files are kept" if resumes else "nothing is kept"
    with (
        stop_message(lambda: f"stopped; {kept}; run the same command to {'resume' if resumes else 'start again'}"),
        out.bar("converting") as advance,
    ):
        report = convert_model(source, target, conversion, advance)
    if report.not_finite:
        names = ", ".join(report.not_finite[:3]) + (" ..." if len(report.not_finite) > 3 else "")
        print_note(f"{source}: {len(report.not_finite)} tensors contain NaN or infinity (copied unchanged): {names}")
    if report.has_left_moments:
        print_note(f"{source}: the optimizer's moments were not converted; --with-optimizer converts them")
    return report


def show_conversion(console: Console, target: Path, report: ConvertReport, to: str) -> None:
    """Show the converted model and the next command."""
    compared = "each compared with the source" if report.is_verified else "not compared with the source"
    rows = [
        ("model", whole(str(target))),
        ("tensors", f"{report.tensors}, {compared}"),
        ("parameters", f"{report.parameters:,} in {report.dtype}, {gigabytes(report.bytes)}"),
    ]
    if report.left_out:
        rows.append(("left out", f"{listed(report.left_out, NAMES_SHOWN)}: no supported task uses them"))
    if report.missing:
        rows.append(
            ("missing", f"{listed(report.missing, NAMES_SHOWN)}: a run that needs them initializes them at random")
        )
    if report.updates is not None:
        rows.append(("optimizer", f"moments after {report.updates:,} updates; a run starts from them"))
    panel(console, "Converted", rows)
    if to == "mesh":
        return
    if to == "gguf":
        file, description = quoted(target), target.with_suffix(".Modelfile")
        if description.is_file():
            served = f"ollama create {quoted(target.stem.lower())} -f {quoted(description)}"
            next_steps(console, f"llama-server --model {file}", served)
        else:
            next_steps(console, f"llama-server --model BASE.gguf --lora {file}")
        return
    if paths.is_adapter(target):
        next_steps(console, command_line("evaluate", target, "--data", "test.jsonl"))
        return
    if any((target / name).is_file() for name in paths.TOKENIZER_FILES):
        next_steps(console, *_uses(target, has_all=not report.missing))
    else:
        say(
            console,
            "the source has no tokenizer: repeat with --tokenizer FOLDER, or copy its files into the folder",
        )


def _uses(folder: Path, has_all: bool) -> tuple[str, ...]:
    """Return the next commands for a converted model: use its trained head, or train it."""
    architecture = read_architecture(folder)
    if architecture.task is not None and has_all:
        recipe = api.model_options(folder, {}).recipe
        return ask(recipe, folder), command_line("evaluate", folder, "--data", "test.jsonl")
    model = () if folder == downloaded_model() else ("--model", folder)
    recipe_name = "classification" if architecture.family.is_encoder else "summarization"
    method = ("--method", "lora") if is_quantized(folder) else ()
    return (command_line("finetune", "--recipe", recipe_name, "--data", "my.jsonl", *model, *method),)


def compare_checkpoints(
    first: Path | None, second: Path | None, format: FormatName | None, config: Path | None, out: Output
) -> None:
    """Compare two checkpoints."""
    if first is None or second is None:
        raise UsageError("--check needs two checkpoints: gptj-ft convert --check SRC DEST")
    with (
        scratch_folder(paths.make_home()) as scratch,
        open_source(find_source(first), format, config, scratch / "a") as a,
        open_source(find_source(second), None, config, scratch / "b") as b,
        out.bar("comparing") as advance,
    ):
        result = diff_checkpoints(a, b, advance)
    types = result.types[0] if result.types[0] == result.types[1] else f"{result.types[0]} as {result.types[1]}"
    text = f"{second} equals {first} bit for bit: {result.tensors} tensors, {result.parameters:,} parameters in {types}"
    out.finish(asdict(result), "", lambda console: say(console, text))


def send_model(folder: Path, repository: str, is_public: bool, dry_run: bool, out: Output) -> None:
    """Upload a model folder to the Hub; with ``dry_run``, only list the files."""
    parcels = files_to_push(folder)
    kept, total = files_left_out(folder, parcels), sum(parcel.bytes for parcel in parcels)
    files = [{"name": each.name, "bytes": each.bytes, "left_out": each.left_out} for each in parcels]
    facts = {"dry_run": dry_run, "folder": str(folder), "repository": repository, "public": is_public, "bytes": total}
    facts |= {"files": files, "stays": kept}
    # Uploads are listed even with --json; on a dry run the list is the result.
    notes = console_for(quiet=out.is_quiet or (dry_run and out.as_json))
    for each in parcels:
        without = f"  without {', '.join(each.left_out)}" if each.left_out else ""
        notes.print(f"{gigabytes(each.bytes):>10}  {each.name}{without}")
    if kept:
        say(notes, f"not uploaded: {', '.join(kept)}", "  ")
    visibility = "public" if is_public else "private"
    notes.print(
        f"{'would upload' if dry_run else 'uploading'} {gigabytes(total)} of {folder} to {repository}, {visibility}"
    )
    if dry_run:
        out.finish(facts, "", lambda console: None)
        return
    with out.bar("uploading") as advance:
        pushed = push(parcels, repository, is_public=is_public, progress=advance)
    line = f"{pushed.url}, {'private' if pushed.is_private else 'public'}, commit {pushed.commit[:12]}"
    out.finish({**facts, **asdict(pushed)}, pushed.url, lambda console: console.print(line))
