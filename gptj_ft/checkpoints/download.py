"""Fetch a model from the Hugging Face Hub: only what is needed, resumable, checked by hash."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.errors import DataError, NoSuchRevision, UsageError
from gptj_ft.models.supported import DEFAULT_REPOSITORY
from gptj_ft.system import paths
from gptj_ft.system.files import SHARED_FILE, read_text, replace_text
from gptj_ft.system.hub import is_offline
from gptj_ft.system.hub_download import HubFile, Repository, fetch_files, is_there, look_up, writing
from gptj_ft.system.machine import free_disk
from gptj_ft.system.paths import home, make_home, part_of_home

Variant = Literal["fp32", "fp16"]
_CONFIG = "config.json"
_COMPANIONS = ("generation_config.json", *paths.TOKENIZER_FILES)
# Best first; of a form in shards, the index and what the pattern matches.
_WEIGHTS = (
    ("model.safetensors", r"model\.safetensors"),
    ("model.safetensors.index.json", r"model-\d+-of-\d+\.safetensors"),
    ("pytorch_model.bin", r"pytorch_model\.bin"),
    ("pytorch_model.bin.index.json", r"pytorch_model-\d+-of-\d+\.bin"),
)
# How torch names a variant, and so do branches: GPT-J's fp16 weights are on one called float16.
BRANCHES: dict[Variant, str] = {"fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True)
class DownloadRequest:
    """Request of a download.

    Attributes:
        repository: ``owner/name`` on the Hub.
        revision: branch, tag or commit; the main branch by default.
        variant: type of the weights; default: the revision's own.
        endpoint: the Hub's address; ``HF_ENDPOINT``, else https://huggingface.co.
    """

    repository: str = DEFAULT_REPOSITORY
    revision: str | None = None
    variant: Variant | None = None
    endpoint: str | None = None

    def folder(self) -> Path:
        """Return the default folder; variants do not share one."""
        return paths.download_folder(self.repository + ("-fp16" if self.variant == "fp16" else ""))


def choose_files(wanted: DownloadRequest) -> tuple[Repository, tuple[HubFile, ...]]:
    """Return a repository at a commit, and which of its files to fetch, ``config.json`` last.

    Raises:
        UsageError: it is no model, or has no such variant.
        NetworkError: as `look_up`.
    """
    found = look_up(wanted.repository, wanted.revision, endpoint=wanted.endpoint)
    if wanted.variant is None:
        return found, _needed(found)
    if named := _named_after(found, wanted.variant):
        return named, _needed(named)
    branch = BRANCHES[wanted.variant]
    if wanted.revision is None:
        try:
            found = look_up(wanted.repository, branch, endpoint=wanted.endpoint)
            return found, _needed(found)
        except NoSuchRevision:
            pass
    files = _needed(found)
    config = fetch_config(found)
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stored != branch:
        raise UsageError(
            f"{wanted.repository} has no {wanted.variant} variant: its weights are {stored}, and neither a branch "
            f"{branch} nor a file is named so; download it as it is, then `gptj-ft convert --dtype {wanted.variant}`"
        )
    return found, files


def fetch_config(repository: Repository) -> dict[str, Any]:
    """Fetch a repository's ``config.json`` alone, and check that it is of a supported model.

    Raises:
        UsageError: it is none, which is better known before 24 GB than after.
        NetworkError: as `fetch_files`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        fetch_files(repository, [repository.files[_CONFIG]], Path(temporary))
        try:
            return dict(read_architecture(Path(temporary)).raw)
        except (UsageError, DataError) as error:
            raise UsageError(str(error).replace(temporary, repository.name)) from error


def _named_after(repository: Repository, variant: Variant) -> Repository | None:
    """Return a repository with ``model.fp16.safetensors`` for ``model.safetensors``; ``None`` if there is none."""
    for plain, _ in _WEIGHTS:
        stem, _, suffix = plain.partition(".")
        there = repository.files.get(f"{stem}.{variant}.{suffix}")
        if there is not None and not plain.endswith(".json"):
            others = {name: file for name, file in repository.files.items() if not _is_weights(name)}
            return replace(repository, files={**others, plain: replace(there, name=plain, remote=there.name)})
    return None


def _is_weights(name: str) -> bool:
    return any(name == first or re.fullmatch(pattern, name) for first, pattern in _WEIGHTS)


def _needed(repository: Repository) -> tuple[HubFile, ...]:
    there = repository.files
    form = next(((first, pattern) for first, pattern in _WEIGHTS if first in there), None)
    if form is None or _CONFIG not in there:
        lacking = _CONFIG if form else "weights in safetensors or PyTorch form"
        raise UsageError(f"{repository.name} is not a model that can be used: it has no {lacking}")
    first, pattern = form
    weights = [name for name in sorted(there) if name == first or re.fullmatch(pattern, name)]
    names = [*(name for name in _COMPANIONS if name in there), *weights, _CONFIG]
    return tuple(there[name] for name in names)


SOURCE = "source.json"


@dataclass(frozen=True)
class Origin:
    """The content of ``source.json``.

    Attributes:
        repository: ``owner/name`` on the Hub.
        commit: commit that was fetched.
        license: the repository's license tag; empty if it has none.
        revision: branch, tag or commit that was asked for; ``None``: the main branch.
        files: files of a download; empty in a folder that was made from one.
    """

    repository: str
    commit: str
    license: str
    revision: str | None = None
    files: tuple[HubFile, ...] = ()

    def to_text(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self), indent=2) + "\n"


def read_origin(folder: Path) -> Origin | None:
    """Read the origin of a folder's weights; ``None`` if it names none.

    Raises:
        DataError: it is damaged.
    """
    path = folder / SOURCE
    if not path.is_file():
        return None
    try:
        values = json.loads(read_text(path))
        files = tuple(HubFile(**file) for file in values["files"])
        return Origin(**{**values, "files": files})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error!r}); remove the folder and fetch it again") from error


@dataclass(frozen=True)
class DownloadReport:
    """Result of a download.

    Attributes:
        folder: folder of the files, also if nothing was fetched.
        repository: ``owner/name`` on the Hub.
        commit: commit of the files.
        license: the repository's license tag; empty if it has none.
        files: files that are needed of it.
        bytes: size of all files.
        fetched: bytes that came over the network this time.
        free_bytes: room on the disk, before.
    """

    folder: Path
    repository: str
    commit: str
    license: str
    files: tuple[HubFile, ...]
    bytes: int
    fetched: int
    free_bytes: int


def download(
    wanted: DownloadRequest = DownloadRequest(),
    target: Path | None = None,
    *,
    offline: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DownloadReport:
    """Fetch config, tokenizer and one form of the weights (safetensors if there are any, else ``.bin``).

    Repeated after an interruption it goes on where it stopped; repeated after success it fetches nothing.
    ``config.json`` comes last: a folder without it is no model. A token is taken from ``HF_TOKEN`` only.

    Args:
        wanted: the request; default: GPT-J 6B.
        target: folder to write; default: one under `paths.models`.
        offline: use what was fetched before, without a request; default false.
        dry_run: list files only, write nothing; default false.
        progress: callback of bytes done and total bytes; default: none.

    Raises:
        UsageError: offline and not all is there, no supported model in the repository, no such variant, or a folder
            that holds something else or cannot be written.
        NetworkError: no connection, no such repository or revision, no access, a server's fault, a damaged transfer.
        ResourceError: not enough space on the disk.
    """
    folder = target or wanted.folder()
    if offline or is_offline():
        return _report(folder, _fetched_before(wanted, folder, "--offline" if offline else "HF_HUB_OFFLINE"))
    found, files = choose_files(wanted)
    if not is_there(folder, files[-1]):
        fetch_config(found)
    license_tag = next((tag.removeprefix("license:") for tag in found.tags if tag.startswith("license:")), "")
    origin = Origin(wanted.repository, found.commit, license_tag, wanted.revision, files)
    report = _report(folder, origin)
    if dry_run:
        return report
    with writing(folder):
        _claim(folder, origin)
    return _report(folder, origin, fetch_files(found, files, folder, progress), report.free_bytes)


def _report(folder: Path, origin: Origin, fetched: int = 0, free_bytes: int | None = None) -> DownloadReport:
    free_bytes = free_disk(folder) if free_bytes is None else free_bytes
    total = sum(file.bytes for file in origin.files)
    return DownloadReport(
        folder, origin.repository, origin.commit, origin.license, origin.files, total, fetched, free_bytes
    )


def _fetched_before(wanted: DownloadRequest, folder: Path, reason: str) -> Origin:
    """Return the origin of a model that was fetched before.

    Raises:
        UsageError: not the model that is wanted, or not all of it.
    """
    origin, unless = read_origin(folder), f"and {reason} forbids to fetch it; leave that out"
    if origin is None or origin.repository != wanted.repository or not origin.files:
        raise UsageError(f"{wanted.repository} is not in {folder}, {unless}")
    if wanted.revision not in (None, origin.revision) and not origin.commit.startswith(str(wanted.revision)):
        raise UsageError(f"revision {wanted.revision} is not in {folder}, {unless}")
    missing = [file for file in origin.files if not is_there(folder, file)]
    if missing:
        raise UsageError(
            f"{folder} lacks {missing[0].name}{f' and {len(missing) - 1} more' if missing[1:] else ''}, {unless}"
        )
    return origin


def _claim(folder: Path, origin: Origin) -> None:
    """Write ``source.json``, or check that the one there is of the same files.

    Raises:
        UsageError: the folder holds another version, or something else.
    """
    try:
        before = read_origin(folder)
    except DataError:
        before = Origin("", "unknown", "")
    if before is not None and before.files != origin.files:
        raise UsageError(
            f"{folder} holds another version; to finish that one name revision {before.commit}, "
            "for this one name another folder or remove it"
        )
    if before is None and folder.is_dir() and any(path.name != "source.new" for path in folder.iterdir()):
        raise UsageError(f"{folder} exists and is no download; name another folder or remove it")
    if folder.is_relative_to(home()):
        make_home()
        part_of_home("models")
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / SOURCE, origin.to_text(), SHARED_FILE)
