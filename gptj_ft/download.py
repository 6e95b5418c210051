"""Fetch a model from the Hugging Face Hub: only what is needed, resumable, checked by hash."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptj_ft import home
from gptj_ft.errors import UsageError
from gptj_ft.hub_files import HubFile, Repository, fetch_files, look_up, writing

SOURCE = "source.json"
CONFIG = "config.json"
COMPANIONS = ("generation_config.json", *home.TOKENIZER_FILES)
# Best first; of a form in shards, the index and what the pattern matches.
WEIGHTS = (
    ("model.safetensors", r"model\.safetensors"),
    ("model.safetensors.index.json", r"model-\d+-of-\d+\.safetensors"),
    ("pytorch_model.bin", r"pytorch_model\.bin"),
    ("pytorch_model.bin.index.json", r"pytorch_model-\d+-of-\d+\.bin"),
)


@dataclass(frozen=True)
class DownloadReport:
    """What `download` put where.

    Attributes:
        folder: where the files are, or would be.
        files: what is needed of the repository.
        commit: the revision they are of.
        license: the repository's license tag; empty if it has none.
        bytes: of all files together.
        fetched: bytes that came over the network this time.
    """

    folder: Path
    files: tuple[HubFile, ...]
    commit: str
    license: str
    bytes: int
    fetched: int


def download(
    repository: str = home.DEFAULT_REPOSITORY,
    target: Path | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
    *,
    offline: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DownloadReport:
    """Fetch config, tokenizer and one form of the weights (safetensors if there are any, else ``.bin``).

    Repeated after an interruption it goes on where it stopped; repeated after success it fetches nothing.
    ``config.json`` comes last: a folder without it is no model. A token is taken from ``HF_TOKEN`` only.

    Args:
        repository: ``owner/name`` on the Hub.
        target: where to; by default under `home.models`.
        revision: branch, tag or commit; the main branch by default.
        endpoint: the Hub's address; ``HF_ENDPOINT``, else https://huggingface.co.
        offline: refuse.
        dry_run: list only; nothing is written.
        progress: called with bytes done and bytes in all.

    Raises:
        UsageError: offline, no model in the repository, or a folder that holds something else or cannot be written.
        NetworkError: no connection, no such repository or revision, no access, a server's fault, a damaged transfer.
        ResourceError: not enough space on the disk.
    """
    if offline:
        raise UsageError(f"cannot download {repository} with --offline; leave it out, or name a model folder")
    folder = target or home.download_folder(repository)
    found = look_up(repository, revision, endpoint=endpoint)
    files, commit = _needed(found), found.commit
    license_tag = next((tag.removeprefix("license:") for tag in found.tags if tag.startswith("license:")), "")
    total = sum(file.bytes for file in files)
    if dry_run:
        return DownloadReport(folder, files, commit, license_tag, total, fetched=0)
    with writing(folder):
        source = {"repository": repository, "revision": revision, "commit": commit, "license": license_tag}
        _claim(folder, source, files)
    fetched = fetch_files(found, files, folder, progress)
    return DownloadReport(folder, files, commit, license_tag, total, fetched)


def _needed(repository: Repository) -> tuple[HubFile, ...]:
    """Return the files to fetch, ``config.json`` last."""
    there = repository.files
    form = next(((first, pattern) for first, pattern in WEIGHTS if first in there), None)
    if form is None or CONFIG not in there:
        lacking = CONFIG if form else "weights in safetensors or PyTorch form"
        raise UsageError(f"{repository.name} is not a model that can be used: it has no {lacking}")
    first, pattern = form
    weights = [name for name in sorted(there) if name == first or re.fullmatch(pattern, name)]
    names = [*(name for name in COMPANIONS if name in there), *weights, CONFIG]
    return tuple(there[name] for name in names)


def _claim(folder: Path, source: Mapping[str, Any], files: Iterable[HubFile]) -> None:
    """Write ``source.json``, or check that the one there is of the same files.

    Raises:
        UsageError: the folder holds another version, or something else.
    """
    path, listed = folder / SOURCE, [asdict(file) for file in files]
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            same, commit = before["files"] == listed, before["commit"]
        except (ValueError, KeyError, TypeError):
            same, commit = False, "unknown"
        if not same:
            raise UsageError(
                f"{folder} holds another version; to finish that one name revision {commit}, "
                "for this one name another folder or remove it"
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} exists and is no download; name another folder or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".partial")
    written.write_text(json.dumps({**source, "files": listed}, indent=2) + "\n", encoding="utf-8")
    written.replace(path)
