"""Download a model from the Hugging Face Hub: needed files only, resumable, verified by hash."""

from __future__ import annotations

import json
import re
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
from gptj_ft.system.hub_download import HubFile, Repository, fetch_files, is_fetched, look_up, writing
from gptj_ft.system.lock import LOCK, locked
from gptj_ft.system.machine import free_disk
from gptj_ft.system.paths import home, make_home, part_of_home
from gptj_ft.system.scratch import scratch_folder

Variant = Literal["fp32", "fp16"]
_CONFIG = "config.json"
_COMPANIONS = ("generation_config.json", "chat_template.jinja", *paths.TOKENIZER_FILES)
# Preferred first. A sharded model needs its index and the files that match the pattern.
_WEIGHTS = (
    ("model.safetensors", r"model\.safetensors"),
    ("model.safetensors.index.json", r"model-\d+-of-\d+\.safetensors"),
    ("pytorch_model.bin", r"pytorch_model\.bin"),
    ("pytorch_model.bin.index.json", r"pytorch_model-\d+-of-\d+\.bin"),
)
# Names of the types in torch. Branches use them, too: GPT-J's fp16 weights are on the branch float16.
BRANCHES: dict[Variant, str] = {"fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True)
class DownloadRequest:
    """Model to download."""

    repository: str = DEFAULT_REPOSITORY  # ``owner/name`` on the Hub
    revision: str | None = None  # branch, tag or commit; None: the main branch
    variant: Variant | None = None  # type of the weights; None: the revision's own
    endpoint: str | None = None  # the Hub's address; None: ``HF_ENDPOINT``, else https://huggingface.co

    def folder(self) -> Path:
        """Return the default folder; each variant has its own."""
        return paths.download_folder(self.repository + ("-fp16" if self.variant == "fp16" else ""))


def choose_files(request: DownloadRequest) -> tuple[Repository, tuple[HubFile, ...]]:
    """Return the repository at a commit, and its files to fetch; ``config.json`` comes last.

    Raises:
        NetworkError: see `look_up`.
    """
    repository = look_up(request.repository, request.revision, endpoint=request.endpoint)
    if request.variant is None:
        return repository, _needed_files(repository)
    if with_variant := _with_variant_files(repository, request.variant):
        return with_variant, _needed_files(with_variant)
    branch = BRANCHES[request.variant]
    if request.revision is None:
        try:
            repository = look_up(request.repository, branch, endpoint=request.endpoint)
            return repository, _needed_files(repository)
        except NoSuchRevision:
            pass
    files = _needed_files(repository)
    config = fetch_config(repository)
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stored != branch:
        raise UsageError(
            f"{request.repository} has no {request.variant} variant: its weights are {stored}, and it has neither a "
            f"branch {branch} nor files of that name; download it as it is, then `gptj-ft convert --dtype "
            f"{request.variant}`"
        )
    return repository, files


def fetch_config(repository: Repository) -> dict[str, Any]:
    """Fetch only a repository's ``config.json``, to check that the model is supported before fetching 24 GB.

    Raises:
        NetworkError: see `fetch_files`.
    """
    with scratch_folder() as temporary:
        fetch_files(repository, [repository.files[_CONFIG]], temporary)
        try:
            return dict(read_architecture(temporary).raw)
        except (UsageError, DataError) as error:
            raise UsageError(str(error).replace(str(temporary), repository.name)) from error


def _with_variant_files(repository: Repository, variant: Variant) -> Repository | None:
    """Return the repository with ``model.fp16.safetensors`` as its ``model.safetensors``; ``None`` if it has none."""
    for plain, _ in _WEIGHTS:
        stem, _, suffix = plain.partition(".")
        file = repository.files.get(f"{stem}.{variant}.{suffix}")
        if file is not None and not plain.endswith(".json"):
            others = {name: other for name, other in repository.files.items() if not _is_weights(name)}
            return replace(repository, files={**others, plain: replace(file, name=plain, remote=file.name)})
    return None


def _is_weights(name: str) -> bool:
    return any(name == first or re.fullmatch(pattern, name) for first, pattern in _WEIGHTS)


def _needed_files(repository: Repository) -> tuple[HubFile, ...]:
    files = repository.files
    chosen = next(((first, pattern) for first, pattern in _WEIGHTS if first in files), None)
    if chosen is None or _CONFIG not in files:
        lacking = _CONFIG if chosen else "weights in safetensors or PyTorch form"
        raise UsageError(f"{repository.name} is not a usable model: it has no {lacking}")
    first, pattern = chosen
    weights = [name for name in sorted(files) if name == first or re.fullmatch(pattern, name)]
    names = [*(name for name in _COMPANIONS if name in files), *weights, _CONFIG]
    return tuple(files[name] for name in names)


SOURCE = "source.json"


@dataclass(frozen=True)
class Origin:
    """Content of ``source.json``: the Hub repository of a folder's weights."""

    repository: str  # ``owner/name`` on the Hub
    commit: str
    license: str  # license tag; empty if the repository has none
    revision: str | None = None  # requested branch, tag or commit; None: the main branch
    files: tuple[HubFile, ...] = ()  # empty in a folder that was converted from a download

    def to_text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def read_origin(folder: Path) -> Origin | None:
    """Read ``source.json``; return ``None`` if there is none.

    Raises:
        DataError: the file is damaged.
    """
    path = folder / SOURCE
    if not path.is_file():
        return None
    try:
        values = json.loads(read_text(path))  # JSON lists of files become tuples of HubFile
        files = tuple(HubFile(**file) for file in values["files"])
        return Origin(**{**values, "files": files})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error!r}); remove the folder and fetch it again") from error


@dataclass(frozen=True)
class DownloadReport:
    """Result of a download."""

    folder: Path
    repository: str  # ``owner/name`` on the Hub
    commit: str
    license: str  # license tag; empty if the repository has none
    files: tuple[HubFile, ...]  # needed files
    bytes: int  # their size
    fetched: int  # bytes transferred by this call
    free_bytes: int  # free disk space before the download


def download(
    request: DownloadRequest = DownloadRequest(),
    target: Path | None = None,
    *,
    offline: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DownloadReport:
    """Fetch config, tokenizer, and the weights as safetensors if the repository has them, else as ``.bin``.

    After an interruption the same call resumes; after success it fetches nothing. ``config.json`` comes last, because
    a folder without it is no model. The access token comes from ``HF_TOKEN`` only.

    Args:
        request: default: GPT-J 6B.
        target: folder to write; default: one under `paths.models`.
        offline: use an earlier download, without network requests.
        dry_run: list files only, write nothing.
        progress: callback of bytes done and total bytes.

    Raises:
        UsageError: offline and files are missing; no supported model or no such variant in the repository; or the
            folder holds something else or cannot be written.
        NetworkError: no connection, no such repository or revision, no access, a server error, a damaged transfer.
        ResourceError: not enough disk space.
    """
    folder = target or request.folder()
    if offline or is_offline():
        return _report(folder, _earlier_download(request, folder, "--offline" if offline else "HF_HUB_OFFLINE"))
    repository, files = choose_files(request)
    # config.json comes last: if it is there, an earlier call has checked it.
    if not is_fetched(folder, files[-1]):
        fetch_config(repository)
    license_tag = next((tag.removeprefix("license:") for tag in repository.tags if tag.startswith("license:")), "")
    origin = Origin(request.repository, repository.commit, license_tag, request.revision, files)
    report = _report(folder, origin)
    if dry_run:
        return report
    # Claim the folder before the first weight: a later call for another version must not mix files.
    with writing(folder):
        _check_claim(folder, origin)
        if folder.is_relative_to(home()):
            make_home()
            part_of_home("models")
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, "downloading into"):
        with writing(folder):
            _check_claim(folder, origin)
            replace_text(folder / SOURCE, origin.to_text(), SHARED_FILE)
        fetched = fetch_files(repository, files, folder, progress)
        (folder / LOCK).unlink(missing_ok=True)
    return _report(folder, origin, fetched, report.free_bytes)


def _report(folder: Path, origin: Origin, fetched: int = 0, free_bytes: int | None = None) -> DownloadReport:
    free_bytes = free_disk(folder) if free_bytes is None else free_bytes
    total = sum(file.bytes for file in origin.files)
    return DownloadReport(
        folder, origin.repository, origin.commit, origin.license, origin.files, total, fetched, free_bytes
    )


def _earlier_download(request: DownloadRequest, folder: Path, reason: str) -> Origin:
    """Return the origin of a complete earlier download."""
    origin, unless = read_origin(folder), f"and {reason} forbids fetching it; leave that out"
    if origin is None or origin.repository != request.repository or not origin.files:
        raise UsageError(f"{request.repository} is not in {folder}, {unless}")
    if request.revision not in (None, origin.revision) and not origin.commit.startswith(str(request.revision)):
        raise UsageError(f"revision {request.revision} is not in {folder}, {unless}")
    missing = [file for file in origin.files if not is_fetched(folder, file)]
    if missing:
        raise UsageError(
            f"{folder} lacks {missing[0].name}{f' and {len(missing) - 1} more' if missing[1:] else ''}, {unless}"
        )
    return origin


def _check_claim(folder: Path, origin: Origin) -> None:
    """Check that a folder is new, or that its ``source.json`` lists the same files."""
    try:
        before = read_origin(folder)
    except DataError:
        before = Origin("", "unknown", "")
    if before is not None and before.files != origin.files:
        raise UsageError(
            f"{folder} holds another version; to finish that one, name revision {before.commit}; for this one, name "
            "another folder or remove it"
        )
    if before is None and folder.is_dir() and any(path.name not in ("source.new", LOCK) for path in folder.iterdir()):
        raise UsageError(f"{folder} exists and is no download; name another folder or remove it")
