"""Find the model that a command means, or choose the one that a run starts from; make the tiny random one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.models.supported import DEFAULTS, MODEL_TYPES, TINY_MODELS, unsupported_family
from gptj_ft.system.files import read_text
from gptj_ft.system.paths import (
    RUNS,
    download_folder,
    is_adapter,
    is_model,
    is_tuned,
    make_home,
    model_folder,
    models,
    newest_run,
    part_of_home,
)
from gptj_ft.system.plain_text import command_line

if TYPE_CHECKING:
    from gptj_ft.config.options import Recipe
    from gptj_ft.data.readers.source import Source


# Repositories of the Hub that have kept the names from before it had owners.
WITHOUT_OWNER = r"(bert|roberta|xlm-roberta|gpt2)(-[a-z-]+)?"


def find_model(name: str) -> Path:
    """Return the folder a user means by a model's, or an adapter's, name.

    In this order: a folder, a run folder (its ``model/``), a converted or downloaded model of that name.

    Raises:
        UsageError: there is none, or it is of a family that is not supported.
    """
    given = Path(name).expanduser()
    for folder in (given, given / "model", model_folder(name), download_folder(name)):
        if is_tuned(folder):
            _check_family(folder)
            return folder
    raise UsageError(_why_no_model(name, given))


def _why_no_model(name: str, given: Path) -> str:
    """Say why a name is none of a model, and what to type instead."""
    if given.suffix.lower() == ".gguf":
        return (
            f"{given}: GGUF files cannot be trained, nor turned back: name the folder of the model that it was made "
            "from (config.json and safetensors)"
        )
    if given.is_file():
        convert = command_line("convert", given)
        return f"{given} is a file; a model is a folder with config.json, or what `{convert}` makes of it"
    if (given / "recipe.yaml").is_file():
        return f"{given} has no tuned model yet; to finish that run: {command_line('finetune', '--resume', given)}"
    if given.is_dir():
        return f"{given} is not a model folder: it has no config.json"
    if given.parent.resolve() == RUNS.resolve():
        there = sorted(str(path.parent) for path in RUNS.glob("*/recipe.yaml"))
        return f"no such run '{name}'; there are: {', '.join(there) or 'none here'}{did_you_mean(name, there)}"
    if name in TINY_MODELS:
        return f"'{name}' is made of the rows that it is trained on: name the run or the model folder"
    known = [path.name for path in models().glob("*") if is_model(path)] if models().is_dir() else []
    hint = did_you_mean(name, [*known, *TINY_MODELS])
    owner, _, repository = name.partition("/")
    is_hub_name = all(re.fullmatch(r"\w[\w.-]*", part) for part in (owner, repository)) and not Path(owner).exists()
    is_hub_name = is_hub_name or re.fullmatch(WITHOUT_OWNER, name) is not None
    download = f"; to fetch it from the Hub type `gptj-ft download {name}`" if is_hub_name else ""
    return f"no model '{name}': neither a folder nor a model in {models()}{hint}{download}"


def _check_family(folder: Path) -> None:
    """Check that a model is of a supported family, before anything of it is read that another may have otherwise.

    Raises:
        UsageError: another family. A file that is no config is left to its reader.
    """
    path = folder / "config.json"
    try:
        config = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(config, dict) and config.get("model_type") not in MODEL_TYPES:
        raise unsupported_family(path, config.get("model_type"))


def default_download() -> Path | None:
    """Return the folder of the downloaded GPT-J 6B, in fp32 if possible; ``None`` if there is none."""
    return next(filter(is_model, map(download_folder, DEFAULTS)), None)


def downloaded_model() -> Path | None:
    """Return the default model, converted if possible, else as downloaded; ``None`` when there is neither."""
    return next(filter(is_model, map(model_folder, DEFAULTS)), None) or default_download()


def default_model(command: str) -> Path:
    """Return the newest run's model, else the downloaded model.

    Raises:
        UsageError: there is neither; says what to type.
    """
    run = newest_run()
    found = run / "model" if run else downloaded_model()
    if found is None:
        raise UsageError(
            f"nothing to {command} with yet: type `gptj-ft download` for GPT-J 6B, or try "
            "`gptj-ft finetune --model tiny --recipe summarization --data my.jsonl`"
        )
    return found


def choose_model(recipe: Recipe, source: Path | Source) -> Path:
    """Return the folder of the model to start from: the one named, else the downloaded one; a tiny one is made here.

    Raises:
        UsageError: there is none; says what to type.
    """
    if recipe.model in TINY_MODELS:
        return tiny_model(recipe, source)
    if recipe.model is not None:
        folder = find_model(recipe.model)
        if is_adapter(folder):
            raise UsageError(
                f"{folder} is an adapter; to train on from it, merge it first: "
                f"{command_line('convert', '--merge', folder)}"
            )
        return folder
    found = downloaded_model()
    if found is None:
        raise UsageError("no model is named and none is downloaded: type `gptj-ft download`, or try --model tiny first")
    return found


def tiny_model(recipe: Recipe, source: Path | Source) -> Path:
    """Return the tiny random model that belongs to some rows; make it, with a tokenizer of theirs, if it is new.

    Raises:
        UsageError: the rows are prepared and the model they were prepared for is gone.
    """
    from gptj_ft.data.dataset import load_dataset
    from gptj_ft.data.readers.records import read_rows
    from gptj_ft.data.readers.rows import Findings
    from gptj_ft.data.readers.source import FileOptions, identify

    name, source = recipe.model or "tiny", identify(source, FileOptions.of(recipe))
    digest = load_dataset(source.path).report.data_sha256 if source.is_prepared else source.sha256
    folder = models() / f"{name}-{digest[:12]}-{recipe.seed}"
    if not is_model(folder):
        if source.is_prepared:
            raise UsageError(
                f"{source.path} was prepared for another model than {folder}: prepare it again with --model {name}"
            )
        findings = Findings(recipe.max_bad_rows)
        rows = read_rows(source, findings)
        values = (value for row in rows for value in row.values.values())
        items = (item for value in values for item in (value if isinstance(value, list) else [value]))  # lists of words
        texts = (item for item in items if isinstance(item, str))
        from gptj_ft.checkpoints.tiny import make_tiny

        make_home()
        part_of_home("models")
        try:
            make_tiny(folder, texts, recipe.seed, model_type=TINY_MODELS[name])
        except UsageError:
            if not is_model(folder):  # of another process, that was first
                raise
    return folder
