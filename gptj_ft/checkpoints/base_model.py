"""Find models by name, choose the model that a run starts from, and make tiny random models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.models.supported import DEFAULTS, TINY_MODELS, check_supported
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


# Repositories on the Hub that are older than its owner/name scheme.
WITHOUT_OWNER = r"(bert|roberta|xlm-roberta|gpt2)(-[a-z-]+)?"


def find_model(name: str) -> Path:
    """Find the folder of a model or adapter by its name or path.

    Candidates, in this order: the folder itself, ``model/`` of a run folder, those of `in_home`. A GGUF file is
    converted at its first use.

    Raises:
        UsageError: no such model, or its family is not supported.
        DataError: a GGUF file or a ``source.json`` is damaged.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        return gguf_folder(path)
    for folder in chain((path, path / "model"), in_home(name)):
        if is_tuned(folder):
            _check_family(folder)
            return folder
    raise UsageError(_explain_missing(name, path))


def in_home(name: str) -> Iterator[Path]:
    """Yield the folders in the home of models that a name may stand for: a converted model, a downloaded one.

    A converted model has the name ``owner/name`` only if it comes from that repository. A path stands for none.
    """
    if re.fullmatch(r"[^/.~][^/]*(/[^/]+)?", name):
        folder = model_folder(name)
        if "/" not in name or _is_of(folder, name):
            yield folder
        yield download_folder(name)


def _is_of(folder: Path, repository: str) -> bool:
    """Tell whether a folder's weights come from a repository on the Hub."""
    from gptj_ft.checkpoints.download import read_origin  # slow to import

    origin = read_origin(folder)
    return origin is not None and origin.repository == repository


def gguf_folder(path: Path) -> Path:
    """Return the model folder made from a GGUF file; convert it at its first use, into the home of models.

    Raises:
        UsageError: an architecture, a quantization or a tokenizer that is not supported.
        DataError: the file is truncated or damaged, or a part of it is missing.
        ResourceError: not enough disk space.
    """
    from gptj_ft.checkpoints.convert import Conversion, convert
    from gptj_ft.checkpoints.fingerprint import sampled_file
    from gptj_ft.checkpoints.gguf.header import files_of_gguf
    from gptj_ft.system.digests import digest_of

    parts = [part for part in files_of_gguf(path) if part.is_file()]
    samples = [{**sampled_file(part), "changed": part.stat().st_mtime_ns} for part in parts]
    folder = models() / f"{path.stem}-{digest_of(samples)[:12]}"
    if not is_model(folder):
        make_home()
        part_of_home("models")
        try:
            convert(path, folder, Conversion(format="gguf"))
        except UsageError:
            if not is_model(folder):  # else another process was faster
                raise
    return folder


def _explain_missing(name: str, path: Path) -> str:
    """Explain why a name is not a model, and suggest the next command."""
    if path.is_file():
        convert = command_line("convert", path)
        return f"{path} is a file; a model is a folder with config.json: convert it with `{convert}`"
    if (path / "recipe.yaml").is_file():
        return f"{path} has no tuned model yet; to finish that run: {command_line('finetune', '--resume', path)}"
    if path.is_dir():
        return f"{path} is not a model folder: it has no config.json"
    if path.parent.resolve() == RUNS.resolve():
        runs = sorted(str(file.parent) for file in RUNS.glob("*/recipe.yaml"))
        return f"no such run '{name}'; there are: {', '.join(runs) or 'none here'}{did_you_mean(name, runs)}"
    if name in TINY_MODELS:
        return f"'{name}' is created from the rows that a run trains it on: name that run or its model folder"
    known = [path.name for path in models().glob("*") if is_model(path)] if models().is_dir() else []
    hint = did_you_mean(name, [*known, *TINY_MODELS])
    owner, _, repository = name.partition("/")
    is_hub_name = all(re.fullmatch(r"\w[\w.-]*", part) for part in (owner, repository)) and not Path(owner).exists()
    is_hub_name = is_hub_name or re.fullmatch(WITHOUT_OWNER, name) is not None
    repository = name if is_hub_name else _published_repository(name)
    download = f"; to fetch it from the Hub type `gptj-ft download {repository}`" if repository else ""
    return f"no model '{name}': neither a folder nor a model in {models()}{hint}{download}"


def _published_repository(name: str) -> str:
    """Return the repository of a published model that is named without its owner, else an empty string."""
    from gptj_ft.models.published import find_published  # imports torch

    published = find_published(name)
    return published.repository if published else ""


def _check_family(folder: Path) -> None:
    """Check that a model's family is supported, before reading family-specific fields.

    Raises:
        UsageError: another family.
    """
    path = folder / "config.json"
    try:
        config = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return  # `read_architecture` reports it
    if isinstance(config, dict):
        check_supported(path, config)


def default_download() -> Path | None:
    """Return the folder of the downloaded GPT-J 6B, preferably in fp32."""
    return next(filter(is_model, map(download_folder, DEFAULTS)), None)


def downloaded_model() -> Path | None:
    """Return the folder of GPT-J 6B, preferably converted, else as downloaded."""
    return next(filter(is_model, map(model_folder, DEFAULTS)), None) or default_download()


def default_model(command: str) -> Path:
    """Return the newest run's model, else the downloaded model."""
    run = newest_run()
    folder = run / "model" if run else downloaded_model()
    if folder is None:
        raise UsageError(
            f"no model to {command} with yet: type `gptj-ft download` for GPT-J 6B, or try "
            "`gptj-ft finetune --model tiny --recipe summarization --data my.jsonl`"
        )
    return folder


def is_config(name: str) -> bool:
    """Tell whether a model's name is that of a ``config.json``, which stands for random weights."""
    path = Path(name).expanduser()
    return path.suffix == ".json" and path.is_file()


def choose_model(recipe: Recipe, source: Source | None) -> Path:
    """Return the folder of the model to start from: the named one, else the downloaded one. Create a random one.

    Raises:
        UsageError: no such model.
    """
    if recipe.model in TINY_MODELS:
        assert source is not None, "a tiny model is made from rows"
        return tiny_model(recipe, source)
    if recipe.model is not None and is_config(recipe.model):
        from gptj_ft.checkpoints.initial_model import initial_model

        return initial_model(Path(recipe.model).expanduser(), recipe.seed)
    if recipe.model is not None:
        folder = find_model(recipe.model)
        if is_adapter(folder):
            raise UsageError(
                f"{folder} is an adapter; to continue training from it, merge it first: "
                f"{command_line('convert', '--merge', folder)}"
            )
        return folder
    downloaded = downloaded_model()
    if downloaded is None:
        raise UsageError("no model is named and none is downloaded: type `gptj-ft download`, or try --model tiny first")
    return downloaded


def tiny_model(recipe: Recipe, source: Source) -> Path:
    """Return the folder of the tiny random model for some rows; create it with a tokenizer trained on them.

    Raises:
        UsageError: the rows are prepared, and the model they were prepared for is gone.
    """
    from gptj_ft.data.columns import is_unicode
    from gptj_ft.data.dataset import load_dataset
    from gptj_ft.data.readers.records import read_rows
    from gptj_ft.data.readers.rows import Findings

    name = recipe.model or "tiny"
    digest = load_dataset(source.path).report.data_sha256 if source.is_prepared else source.sha256
    # The tokenizer is trained on the rows, so other rows make another model.
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
        texts = (item for item in items if isinstance(item, str) and is_unicode(item))
        from gptj_ft.checkpoints.tiny import make_tiny

        make_home()
        part_of_home("models")
        try:
            make_tiny(folder, texts, recipe.seed, model_type=TINY_MODELS[name])
        except UsageError:
            if not is_model(folder):  # else another process was faster
                raise
    return folder
