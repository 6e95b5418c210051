"""The command `convert`: convert, compare and push checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptj_ft.checkpoints.base_model import default_download, find_model
from gptj_ft.cli.options import Json, Quiet, flag, parse_size_flag
from gptj_ft.cli.terminal.output import Output
from gptj_ft.errors import UsageError
from gptj_ft.system import paths

if TYPE_CHECKING:
    from gptj_ft.checkpoints.convert import Conversion
    from gptj_ft.checkpoints.source import FormatName


def convert(
    source: Annotated[
        Path | None, typer.Argument(metavar="[SRC]", help="checkpoint: folder or file; default: the downloaded model")
    ] = None,
    target: Annotated[
        Path | None, typer.Argument(metavar="[DEST]", help="new folder; default: a folder in the home of models")
    ] = None,
    source_form: Annotated[
        str, flag("format of SRC: auto, huggingface, mesh, cerebras, tensorflow or gguf", "--from")
    ] = "auto",
    to: Annotated[
        str, flag("format of DEST: folder (one shard per layer), huggingface (usual files), mesh (slim) or gguf")
    ] = "folder",
    dtype: Annotated[str, flag("type of the weights: keep, fp32, bf16, fp16 or, with --to gguf, q8_0")] = "keep",
    quantize: Annotated[
        str | None,
        flag(
            "quantize the blocks' matrices as bitsandbytes does, nf4 or int8, or keep the codes of a GGUF file: keep",
            metavar="TYPE",
        ),
    ] = None,
    config: Annotated[Path | None, flag("model configuration, as JSON or YAML of any of these systems")] = None,
    tokenizer: Annotated[Path | None, flag("folder of the tokenizer to copy; default: SRC")] = None,
    shard_size: Annotated[str, flag("with --to huggingface: maximum size of a file")] = "5GB",
    mesh_shards: Annotated[int, flag("with --to mesh: number of shards")] = 8,
    verify: Annotated[bool, flag("read every tensor back and compare it with SRC", "--verify/--no-verify")] = True,
    check: Annotated[bool, flag("only compare the checkpoints SRC and DEST, tensor by tensor", "--check")] = False,
    push: Annotated[
        str | None, flag("upload DEST, or SRC without conversion, to the Hub as owner/name", metavar="REPO")
    ] = None,
    public: Annotated[bool, flag("with --push: make the repository public", "--public")] = False,
    dry_run: Annotated[bool, flag("with --push: list the files to upload and stop", "--dry-run")] = False,
    merge: Annotated[Path | None, flag("merge an adapter into its base model, SRC", metavar="ADAPTER")] = None,
    any_base: Annotated[
        bool, flag("with --merge: SRC is another model than the adapter's, such as the unquantized one", "--any-base")
    ] = False,
    average: Annotated[
        list[Path] | None, flag("average SRC with this checkpoint or adapter; may be repeated", metavar="CHECKPOINT")
    ] = None,
    with_optimizer: Annotated[
        bool, flag("also convert Adam's moments; a run can start from them", "--with-optimizer")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to a model folder, or back.

    A model folder has one shard per layer and opens in every other tool. Each tensor is compared with its source.
    """
    from gptj_ft.checkpoints.convert import Conversion
    from gptj_ft.checkpoints.open import find_source
    from gptj_ft.checkpoints.push import check_push
    from gptj_ft.cli.terminal.checkpoints import compare_checkpoints, run_conversion, send_model, show_conversion

    out = Output(as_json, quiet)
    if check:
        compare_checkpoints(source, target, _form_of(source_form), config, out)
        return
    if any_base and merge is None:
        raise UsageError("--any-base needs --merge ADAPTER")
    if push is None and (public or dry_run):
        raise UsageError("--public and --dry-run need --push REPO")
    if push is not None and to in ("mesh", "gguf"):
        raise UsageError(f"--push uploads model folders: leave out --to {to}")
    conversion = Conversion(
        format=_form_of(source_form),
        config=config,
        to=_one_of("--to", to, ("folder", "huggingface", "mesh", "gguf")),  # type: ignore[arg-type]
        dtype=_one_of("--dtype", dtype, ("keep", "fp32", "bf16", "fp16", "q8_0")),  # type: ignore[arg-type]
        quantize=None if quantize is None else _one_of("--quantize", quantize, ("nf4", "int8", "keep")),  # type: ignore[arg-type]
        shard_bytes=parse_size_flag("--shard-size", shard_size),
        mesh_shards=mesh_shards,
        tokenizer=tokenizer,
        verify=verify,
        merge=find_model(str(merge)) if merge is not None else None,
        any_base=any_base,
        average=tuple(find_model(str(each)) for each in average or ()),
        with_optimizer=with_optimizer,
    )
    source, target = _named_or_implied(source, target, conversion)
    if push is not None and (target is None or dry_run):
        changes = (dtype, to) != ("keep", "folder") or any((quantize, config, tokenizer, with_optimizer))
        if source is None or target is not None or changes:
            raise UsageError(
                "--push without DEST uploads SRC unchanged: gptj-ft convert SRC --push REPO; name DEST to convert"
            )
        send_model(find_model(str(source)), push, public, dry_run, out)
        return
    source = source or _downloaded()
    target = _complete(target, source, conversion)
    if push is not None:
        check_push(push)  # not only after the conversion, which may take long
    report = run_conversion(find_source(source), target, conversion, out)
    if push is not None:
        send_model(target, push, public, dry_run, out)
        return
    facts = {**asdict(report), "folder": str(target)}
    out.finish(facts, str(target), lambda console: show_conversion(console, target, report, to))


def _named_or_implied(
    source: Path | None, target: Path | None, conversion: Conversion
) -> tuple[Path | None, Path | None]:
    """Complete SRC and DEST with what ``--average`` and ``--merge`` imply.

    Raises:
        UsageError: only one checkpoint to average.
    """
    if conversion.average:
        if source is None:
            raise UsageError("--average needs two checkpoints: gptj-ft convert --average CHECKPOINT SRC [DEST]")
        source = find_model(str(source))
        return source, target or source.with_name(f"{source.name}-average")
    if conversion.merge is None:
        return source, target
    if conversion.to == "gguf" and target is None:
        source, target = None, source  # the base model follows from the adapter: the only name is the file's
    from gptj_ft.checkpoints.adapter import base_folder

    merged = conversion.merge.with_name(f"{conversion.merge.name}-merged")
    return source or base_folder(conversion.merge), target or merged


def _complete(target: Path | None, source: Path, conversion: Conversion) -> Path:
    """Return DEST, by default a folder in the home of models that is named after the source."""
    if target is None:
        paths.make_home()
        paths.part_of_home("models")
        suffix = {None: "", "keep": "-codes"}.get(conversion.quantize, f"-{conversion.quantize}")
        target = paths.model_folder(source.name.split("--")[-1].removesuffix(".gguf") + suffix)
    return target if conversion.to != "gguf" or target.suffix == ".gguf" else target.with_name(f"{target.name}.gguf")


def _downloaded() -> Path:
    source = default_download()
    if source is None:
        raise UsageError("no model to convert: run `gptj-ft download`, or name a checkpoint: `gptj-ft convert SRC`")
    return source


def _form_of(name: str) -> FormatName | None:
    named = _one_of("--from", name, ("auto", "huggingface", "mesh", "cerebras", "tensorflow", "gguf"))
    return None if named == "auto" else named  # type: ignore[return-value]


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(f"{option} {value}: expected {', '.join(choices[:-1])} or {choices[-1]}")
    return value
