"""Locate models and runs: the home folder, names in it, what a folder looks like, the newest run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from gptj_ft.errors import DataError, GptjFtError
from gptj_ft.system.files import keep_folder, read_text, replace_text

RUNS = Path("runs")
ADAPTER_CONFIG = "adapter_config.json"
# Files of a tokenizer in Hugging Face's form.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
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
    """Return the folder of a Hub repository's snapshot: ``models/EleutherAI--gpt-j-6b``.

    One without an owner goes where no converted model has its name: ``models/hub--bert-base-uncased``.
    """
    return models() / (repository.replace("/", "--") if "/" in repository else f"hub--{repository}")


def model_folder(repository: str) -> Path:
    """Return the folder of a Hub repository's converted form: ``models/gpt-j-6b``."""
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
