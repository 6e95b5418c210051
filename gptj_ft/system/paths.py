"""Where models and runs are kept, and which one is meant when none is named."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from gptj_ft.errors import DataError, GptjFtError, UsageError, did_you_mean
from gptj_ft.system.files import keep_folder, read_text, replace_text
from gptj_ft.system.plain_text import command_line, one_line

DEFAULT_REPOSITORY = "EleutherAI/gpt-j-6b"
DEFAULTS = (DEFAULT_REPOSITORY, f"{DEFAULT_REPOSITORY}-fp16")  # as `download --variant fp16` calls its folder
RUNS = Path("runs")
TINY_MODELS = {"tiny": "gptj", "tiny-gpt2": "gpt2"}  # made from the rows of a run; name -> ``model_type``
MODEL_TYPES = ("gptj", "gpt2")  # those that `families` has
# What a tokenizer may consist of, in Hugging Face's form.
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)


def home() -> Path:
    """Return ``GPTJ_FT_HOME``, else ``gptj-ft`` in the platform's cache folder."""
    if named := os.environ.get("GPTJ_FT_HOME"):
        return Path(named).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gptj-ft"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "gptj-ft"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gptj-ft"


def make_home() -> Path:
    """Make the home folder, for its owner alone, if it is not there; return it.

    Raises:
        OSError: it cannot be made.
    """
    folder = home()
    if not folder.is_dir():  # it may be a link to another disk
        keep_folder(folder)
    return folder


def part_of_home(name: str) -> Path:
    """Return a folder of the home that is written to; it may not be there yet.

    Raises:
        DataError: it is a link, which may lead anywhere if the home was received; the home itself may be named by one.
    """
    folder = home() / name
    if folder.is_symlink():
        raise DataError(
            f"{folder} is a link to {folder.readlink()}, and nothing is written through it: "
            "to have all on another disk, set GPTJ_FT_HOME to a folder there"
        )
    return folder


def models() -> Path:
    """Return the folder in which `download` and `convert` put models."""
    return home() / "models"


def download_folder(repository: str) -> Path:
    """Return where the snapshot of a Hub repository goes: ``models/EleutherAI--gpt-j-6b``."""
    return models() / repository.replace("/", "--")


def model_folder(repository: str) -> Path:
    """Return where the converted form of a Hub repository goes: ``models/gpt-j-6b``."""
    return models() / repository.split("/")[-1]


def name_in_home(folder: Path) -> str:
    """Return the name of a model folder that `find_model` knows it by from anywhere; empty if it lies elsewhere."""
    return folder.name if folder.resolve().parent == models().resolve() else ""


def is_model(folder: Path) -> bool:
    """Tell whether a folder looks like a model (it has a ``config.json``)."""
    return (folder / "config.json").is_file()


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder looks like an adapter in PEFT's format."""
    return (folder / ADAPTER_CONFIG).is_file() and not is_model(folder)


def is_tuned(folder: Path) -> bool:
    """Tell whether a folder is what a run ends with: a model, or an adapter for one."""
    return is_model(folder) or is_adapter(folder)


def written_at(folder: Path) -> float | None:
    """Return when a model or adapter was written, seconds since 1970; ``None`` if there is none."""
    marker = folder / (ADAPTER_CONFIG if is_adapter(folder) else "config.json")
    return marker.stat().st_mtime if marker.is_file() else None


def find_model(name: str) -> Path:
    """Return the folder a user means by a model's, or an adapter's, name.

    In this order: a folder, a run folder (its ``model/``), a converted or downloaded model of that name.

    Raises:
        UsageError: there is none, or it is of a family that is not supported.
    """
    given = Path(name).expanduser()
    for folder in (given, given / "model", model_folder(name), download_folder(name)):
        if is_tuned(folder):
            check_family(folder)
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
    known = [path.name for path in models().glob("*") if is_model(path)] if models().is_dir() else []
    hint = did_you_mean(name, [*known, *TINY_MODELS])
    owner, _, repository = name.partition("/")
    is_hub_name = all(re.fullmatch(r"\w[\w.-]*", part) for part in (owner, repository)) and not Path(owner).exists()
    download = f"; to fetch it from the Hub type `gptj-ft download {name}`" if is_hub_name else ""
    return f"no model '{name}': neither a folder nor a model in {models()}{hint}{download}"


def check_family(folder: Path) -> None:
    """Check that a model is of a supported family, before anything of it is read that another may have otherwise.

    Raises:
        UsageError: it is of another one. What is no config is left to those who read it.
    """
    path = folder / "config.json"
    try:
        config = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(config, dict) and config.get("model_type") not in MODEL_TYPES:
        raise other_family(path, config.get("model_type"))


def other_family(config: Path, model_type: object) -> UsageError:
    """Return the error for a model that is not of a supported family."""
    what = f"this is a {one_line(str(model_type))} model" if model_type else "it names no model_type"
    return UsageError(
        f"{config}: {what}; supported: {', '.join(MODEL_TYPES)} (GPT-J, GPT-2, Cerebras-GPT)\n"
        "for other models there are TRL, LLaMA-Factory, Axolotl and, on a Mac, mlx-lm"
    )


def default_download() -> Path | None:
    """Return what `download` has fetched of GPT-J 6B, in fp32 if possible; ``None`` if nothing."""
    return next(filter(is_model, map(download_folder, DEFAULTS)), None)


def downloaded_model() -> Path | None:
    """Return the default model, converted if possible, else as downloaded; ``None`` when there is neither."""
    return next(filter(is_model, map(model_folder, DEFAULTS)), None) or default_download()


def remember_run(run: Path) -> None:
    """Note the newest finished run, so that `generate` and `evaluate` find it from any folder; if it can be noted."""
    with suppress(OSError, GptjFtError):
        replace_text(make_home() / "newest-run", f"{run.resolve()}\n")


def newest_run() -> Path | None:
    """Return the newest run that holds a model: the one last remembered, or one in ``./runs``."""
    candidates = []
    with suppress(OSError, ValueError):  # none was noted, or it cannot be read, or it is no name that a folder can have
        noted = Path(read_text(home() / "newest-run").strip())
        candidates += [noted] if is_tuned(noted / "model") else []
    candidates += RUNS.glob("*") if RUNS.is_dir() else []
    finished = [run for run in candidates if is_tuned(run / "model")]
    return max(finished, key=lambda run: written_at(run / "model") or 0.0, default=None)


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
