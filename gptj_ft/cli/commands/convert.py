"""The command `convert`: checkpoints in and out, and compared."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.checkpoints.base_model import default_download, downloaded_model, find_model
from gptj_ft.cli.options import Json, Quiet
from gptj_ft.cli.terminal.output import Output, print_note
from gptj_ft.errors import UsageError
from gptj_ft.system.plain_text import command_line
from gptj_ft.system.signals import stop_says

if TYPE_CHECKING:
    from rich.console import Console

    from gptj_ft.checkpoints.convert import Conversion, ConvertReport
    from gptj_ft.checkpoints.open import CheckpointFormat


def convert(
    source: Annotated[
        Path | None, typer.Argument(metavar="[SRC]", help="checkpoint: folder or file; default: the download")
    ] = None,
    target: Annotated[
        Path | None, typer.Argument(metavar="[DEST]", help="folder to write; default: in the home of models")
    ] = None,
    source_form: Annotated[str, typer.Option("--from", help="auto, huggingface, mesh or cerebras")] = "auto",
    to: Annotated[
        str, typer.Option("--to", help="folder (one shard per layer), huggingface (usual files) or mesh (slim)")
    ] = "folder",
    dtype: Annotated[str, typer.Option("--dtype", help="keep, fp32, bf16 or fp16")] = "keep",
    config: Annotated[
        Path | None, typer.Option("--config", help="shape of the model, in the JSON or YAML of any of these systems")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="folder whose tokenizer is copied; default: the source's")
    ] = None,
    shard_size: Annotated[str, typer.Option("--shard-size", help="of a file, with --to huggingface")] = "5GB",
    mesh_shards: Annotated[int, typer.Option("--mesh-shards", help="with --to mesh")] = 8,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="read every tensor back and compare it with its source")
    ] = True,
    check: Annotated[
        bool, typer.Option("--check", help="write nothing: compare the checkpoints SRC and DEST, tensor by tensor")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="REPO", help="send DEST, or SRC as it is, to the Hub: owner/name")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="with --push: for everybody to see")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="with --push: show what would be sent and stop")] = False,
    merge: Annotated[
        Path | None,
        typer.Option("--merge", metavar="ADAPTER", help="add an adapter; SRC is then the model that it is for"),
    ] = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="carry over Adam's moments, for a run that begins with them")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn a checkpoint into a model folder, or back.

    A model folder has one shard per layer, and every other tool opens it, too. Each tensor is compared with its source.
    """
    from gptj_ft.checkpoints.convert import Conversion
    from gptj_ft.checkpoints.formats.peft import base_folder
    from gptj_ft.system import paths

    out = Output(as_json, quiet)
    if check:
        _check(source, target, _form_of(source_form), config, out)
        return
    if push is None and (public or dry_run):
        raise UsageError("--public and --dry-run go with --push REPO")
    conversion = Conversion(
        form=_form_of(source_form),
        config=config,
        to=_one_of("--to", to, ("folder", "huggingface", "mesh")),  # type: ignore[arg-type]
        dtype=_one_of("--dtype", dtype, ("keep", "fp32", "bf16", "fp16")),  # type: ignore[arg-type]
        shard_bytes=_bytes_of(shard_size),
        mesh_shards=mesh_shards,
        tokenizer=tokenizer,
        verify=verify,
        merge=find_model(str(merge)) if merge is not None else None,
        with_optimizer=with_optimizer,
    )
    if conversion.merge is not None:
        source = source or base_folder(conversion.merge)
        target = target or conversion.merge.with_name(f"{conversion.merge.name}-merged")
    if push is not None and (target is None or dry_run or to == "mesh"):
        if source is None or target is not None or (dtype, to) != ("keep", "folder"):
            raise UsageError(
                "--push sends a model folder as it is: gptj-ft convert SRC --push REPO; to convert it first, name DEST"
            )
        send(find_model(str(source)), push, public, dry_run, out)
        return
    source = source or _downloaded()
    if target is None:
        paths.make_home()
        paths.part_of_home("models")
        target = paths.model_folder(source.name.split("--")[-1])
    report = _convert(source, target, conversion, out)
    if push is not None:
        send(target, push, public, dry_run, out)
        return
    facts = {**asdict(report), "folder": str(target)}
    out.finish(facts, str(target), lambda console: _show(console, target, report, to))


def _convert(source: Path, target: Path, conversion: Conversion, out: Output) -> ConvertReport:
    """Convert, and say before what, and afterwards what is odd about it."""
    from gptj_ft.checkpoints.convert import convert as convert_model
    from gptj_ft.cli.terminal.screen import panel, whole
    from gptj_ft.system.machine import free_disk
    from gptj_ft.system.units import gigabytes

    rows = [
        ("from", whole(str(source))),
        ("to", f"{whole(str(target))}, where {gigabytes(free_disk(target))} are free"),
        ("to stop", "Ctrl-C; the same command goes on where it was"),
    ]
    panel(out.notes, "The conversion", rows)
    with (
        stop_says(lambda: "stopped; what was converted is kept, and the same command goes on from there"),
        out.bar("converting") as advance,
    ):
        report = convert_model(source, target, conversion, advance)
    if report.not_finite:
        names = ", ".join(report.not_finite[:3]) + (" ..." if len(report.not_finite) > 3 else "")
        print_note(f"{source}: NaN or infinity in {len(report.not_finite)} tensors, as in the source: {names}")
    if report.has_left_moments:
        print_note(f"{source}: the optimizer's moments in it were left out; --with-optimizer keeps them")
    return report


def _show(console: Console, target: Path, report: ConvertReport, to: str) -> None:
    """Show what was written, and what to type next."""
    from gptj_ft.cli.terminal.screen import next_steps, panel, say, whole
    from gptj_ft.system import paths
    from gptj_ft.system.units import gigabytes

    compared = "each compared with the source" if report.is_verified else "not compared with the source"
    rows = [
        ("model", whole(str(target))),
        ("tensors", f"{report.tensors}, {compared}"),
        ("parameters", f"{report.parameters:,} in {report.dtype}, {gigabytes(report.bytes)}"),
    ]
    if report.updates is not None:
        rows.append(("optimizer", f"its moments after {report.updates:,} updates, with which a run begins"))
    panel(console, "Converted", rows)
    if to == "mesh":
        return
    if any((target / name).is_file() for name in paths.TOKENIZER_FILES):
        model = () if target == downloaded_model() else ("--model", target)
        next_steps(console, command_line("finetune", "--recipe", "summarization", "--data", "my.jsonl", *model))
    else:
        say(console, "the source has no tokenizer: copy one's files there, or repeat with --tokenizer FOLDER")


def _downloaded() -> Path:

    source = default_download()
    if source is None:
        raise UsageError(
            "no model is downloaded to convert: type `gptj-ft download`, or name a folder: `gptj-ft convert SRC`"
        )
    return source


def _check(
    first: Path | None, second: Path | None, form: CheckpointFormat | None, config: Path | None, out: Output
) -> None:
    """Compare two checkpoints."""
    from tempfile import TemporaryDirectory

    from gptj_ft.checkpoints.compare import compare
    from gptj_ft.checkpoints.open import open_source
    from gptj_ft.cli.terminal.screen import say
    from gptj_ft.system import paths

    if first is None or second is None:
        raise UsageError("--check needs two checkpoints: gptj-ft convert --check A B")
    with (
        TemporaryDirectory(dir=paths.make_home(), prefix="unpacked-") as scratch,
        open_source(first, form, config, Path(scratch) / "a") as a,
        open_source(second, None, config, Path(scratch) / "b") as b,
        out.bar("comparing") as advance,
    ):
        found = compare(a, b, advance)
    types = found.types[0] if found.types[0] == found.types[1] else f"{found.types[0]} as {found.types[1]}"
    text = f"{second} is {first}: {found.tensors} tensors, {found.parameters:,} parameters in {types}, bit for bit"
    out.finish(asdict(found), "", lambda console: say(console, text))


def _form_of(name: str) -> CheckpointFormat | None:
    named = _one_of("--from", name, ("auto", "huggingface", "mesh", "cerebras"))
    return None if named == "auto" else named  # type: ignore[return-value]


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(f"{option} {value}: {', '.join(choices[:-1])} or {choices[-1]}")
    return value


def _bytes_of(size: str) -> int:
    from pydantic import TypeAdapter, ValidationError

    from gptj_ft.config.options import Size

    try:
        return TypeAdapter(Size).validate_python(size)
    except ValidationError as error:
        raise UsageError(f"--shard-size {size}: {error.errors()[0]['msg']}") from error


def send(folder: Path, repository: str, is_public: bool, dry_run: bool, out: Output) -> None:
    """Send a model folder to the Hub, or with ``dry_run`` only say what would go."""
    from gptj_ft.checkpoints.push import files_left_out, files_to_push, push
    from gptj_ft.cli.terminal.screen import console_for, say
    from gptj_ft.system.units import gigabytes

    parcels = files_to_push(folder)
    kept, total = files_left_out(folder, parcels), sum(parcel.bytes for parcel in parcels)
    files = [{"name": each.name, "bytes": each.bytes, "left_out": each.left_out} for each in parcels]
    facts = {"dry_run": dry_run, "folder": str(folder), "repository": repository, "public": is_public, "bytes": total}
    facts |= {"files": files, "stays": kept}
    # What goes to others is said, with --json, too; in a dry run it is the result.
    notes = console_for(quiet=out.is_quiet or (dry_run and out.as_json))
    for each in parcels:
        without = f"  without {', '.join(each.left_out)}" if each.left_out else ""
        notes.print(f"{gigabytes(each.bytes):>10}  {each.name}{without}")
    if kept:
        say(notes, f"stays here: {', '.join(kept)}", "  ")
    who = "public" if is_public else "private"
    notes.print(f"{gigabytes(total)} of {folder} {'would go' if dry_run else 'go'} to {repository}, {who}")
    if dry_run:
        out.finish(facts, "", lambda console: None)
        return
    with out.bar("sending") as advance:
        pushed = push(parcels, repository, is_public=is_public, progress=advance)
    what = f"{pushed.url}, {'private' if pushed.is_private else 'public'}, commit {pushed.commit[:12]}"
    out.finish({**facts, **asdict(pushed)}, pushed.url, lambda console: console.print(what))
