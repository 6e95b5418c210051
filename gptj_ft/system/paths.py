"""Locate models and runs: the home folder, names in it, kinds of folders, the newest run."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from gptj_ft.errors import DataError, GptjFtError
from gptj_ft.system.atomic import replace_shared
from gptj_ft.system.files import keep_folder, read_text
from gptj_ft.system.plain_text import quoted

RUNS = Path("runs")
SEARCH = "search.json"  # in the folder of a search
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
    """Return the home folder; make it, private to its owner, if it does not exist."""
    folder = home()
    if not folder.is_dir():  # it may be a link to another disk
        keep_folder(folder)
    return folder


def home_warning() -> str | None:
    """Describe a home folder that other users may change: they could replace models, rows and the run to use."""
    folder = home()
    try:
        status = folder.stat()
    except OSError:
        return None
    if not hasattr(os, "geteuid"):  # no POSIX permissions
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to another user, who can replace models in it; set GPTJ_FT_HOME to one of yours"
    # In a sticky folder others cannot rename or remove files.
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        others = "every user" if status.st_mode & 0o002 else "its group"
        return f"{folder} can be written by {others}, who could replace models in it: chmod go-w {quoted(folder)}"
    return None


def part_of_home(name: str) -> Path:
    """Return a folder in the home that may be written to; raise `DataError` if it is a link, which may lead anywhere.

    The home folder itself may be a link.
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

    A repository without an owner gets a prefix that converted models do not use: ``models/hub--bert-base-uncased``.
    """
    return models() / (repository.replace("/", "--") if "/" in repository else f"hub--{repository}")


def model_folder(repository: str) -> Path:
    """Return the folder of the converted model of a Hub repository: ``models/gpt-j-6b``."""
    return models() / repository.split("/")[-1]


def name_in_home(folder: Path) -> str:
    """Return the name by which `find_model` finds a model in the home; empty for a folder outside it."""
    return folder.name if folder.resolve().parent == models().resolve() else ""


def is_model(folder: Path) -> bool:
    """Tell whether a folder looks like a model (it has a ``config.json``)."""
    return (folder / "config.json").is_file()


def is_adapter(folder: Path) -> bool:
    """Tell whether a folder looks like an adapter in PEFT's format."""
    return (folder / ADAPTER_CONFIG).is_file() and not is_model(folder)


def is_tuned(folder: Path) -> bool:
    """Tell whether a folder is the result of a run: a model or an adapter."""
    return is_model(folder) or is_adapter(folder)


def is_search(folder: Path) -> bool:
    """Tell whether a folder is that of a search for option values."""
    return (folder / SEARCH).is_file()


def written_at(folder: Path) -> float | None:
    """Return when a model or adapter was written, in seconds since 1970; ``None`` if the folder is neither."""
    marker = folder / (ADAPTER_CONFIG if is_adapter(folder) else "config.json")
    return marker.stat().st_mtime if marker.is_file() else None


def remember_run(run: Path) -> None:
    """Note the newest finished run for `generate` and `evaluate`; ignore errors."""
    _note("newest-run", run)


def remember_start(run: Path) -> None:
    """Note the newest started run for `watch`; ignore errors."""
    _note("started-run", run)


def _note(name: str, run: Path) -> None:
    with suppress(OSError, GptjFtError):
        replace_shared(make_home() / name, f"{run.resolve()}\n")


def _noted(name: str) -> list[Path]:
    """Return the run in a note; empty if there is none, or an unreadable or impossible path in it."""
    with suppress(OSError, ValueError, GptjFtError):
        noted = Path(read_text(home() / name).strip())
        return [noted] if noted.is_dir() else []
    return []


def newest_run() -> Path | None:
    """Return the newest run with a model, from the note of `remember_run` and from ``./runs``."""
    candidates = [*_noted("newest-run"), *_in_runs()]
    finished = [run for run in candidates if is_tuned(run / "model")]
    return max(finished, key=lambda run: written_at(run / "model") or 0.0, default=None)


def newest_started() -> Path | None:
    """Return the run that wrote metrics last, or has started since; from the notes and from ``./runs``."""
    written = {}
    for run in (*_noted("started-run"), *_noted("newest-run"), *_in_runs()):
        files = [path for name in ("recipe.yaml", "metrics.jsonl") if (path := run / name).is_file()]
        if files and run.name[:1] != ".":
            written[run] = max(path.stat().st_mtime for path in files)
    return max(written, key=lambda run: written[run], default=None)


def _in_runs() -> list[Path]:
    return list(RUNS.glob("*")) if RUNS.is_dir() else []
