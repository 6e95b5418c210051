"""Fetch a model from the Hugging Face Hub: only what is needed, resumable, checked by hash.

huggingface_hub lists and transfers. Its own `snapshot_download` starts a file anew after the program was stopped (its
partial files have random names), and GPT-J is one file of 24 GB: so partial files are named and kept here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptj_ft import home
from gptj_ft.errors import NetworkError, ResourceError, UsageError
from gptj_ft.hub import hub_errors

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

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
LISTING_SECONDS = 30.0


@dataclass(frozen=True)
class HubFile:
    """A file of a repository; `digest` is its SHA-256 (large files) or its git blob id, SHA-1."""

    name: str
    bytes: int
    digest: str


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
    api = _api(endpoint)
    folder = target or home.download_folder(repository)
    with hub_errors(repository, api.endpoint):
        info = api.model_info(repository, revision=revision, files_metadata=True, timeout=LISTING_SECONDS)
    files, commit = _needed(repository, info), str(info.sha)
    license_tag = next((tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")), "")
    total = sum(file.bytes for file in files)
    if dry_run:
        return DownloadReport(folder, files, commit, license_tag, total, fetched=0)
    with _writing(folder):
        source = {"repository": repository, "revision": revision, "commit": commit, "license": license_tag}
        _claim(folder, source, files)
        missing = [file for file in files if not _is_there(folder, file)]
        fetched = sum(file.bytes - _partial_bytes(folder, file) for file in missing)
        _check_space(folder, fetched)
    bar = _Bar(total - fetched, total, progress)
    for file in missing:
        with _writing(folder), hub_errors(repository, api.endpoint):
            _fetch(api, repository, commit, folder, file, bar)
    return DownloadReport(folder, files, commit, license_tag, total, fetched)


def _api(endpoint: str | None) -> HfApi:
    # No telemetry: neither library versions in the user agent nor look-ups of who is calling. huggingface_hub reads its
    # environment when it is first imported, which may have been long ago.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi, constants

    constants.HF_HUB_DISABLE_TELEMETRY = True
    # False, for None would look for a stored login.
    token = os.environ.get("HF_TOKEN") or False
    address = endpoint or os.environ.get("HF_ENDPOINT") or None
    return HfApi(endpoint=address.rstrip("/") if address else None, token=token, library_name="gptj-ft")


def _needed(repository: str, info: ModelInfo) -> tuple[HubFile, ...]:
    """Return the files to fetch, ``config.json`` last."""
    there = {}
    for sibling in info.siblings or []:
        digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        there[sibling.rfilename] = HubFile(sibling.rfilename, sibling.size or 0, digest or "")
    form = next(((first, pattern) for first, pattern in WEIGHTS if first in there), None)
    if form is None or CONFIG not in there:
        lacking = CONFIG if form else "weights in safetensors or PyTorch form"
        raise UsageError(f"{repository} is not a model that can be used: it has no {lacking}")
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


def _is_there(folder: Path, file: HubFile) -> bool:
    # Its hash was checked before it got its name, and `_claim` made sure that it is of this version.
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.bytes


def _partial(folder: Path, file: HubFile) -> Path:
    return folder / f"{file.name}.partial"


def _partial_bytes(folder: Path, file: HubFile) -> int:
    path = _partial(folder, file)
    return min(path.stat().st_size, file.bytes) if path.is_file() else 0


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"the download needs {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free; "
            "make room, or set GPTJ_FT_HOME to a folder on another disk"
        )


def _fetch(api: HfApi, repository: str, commit: str, folder: Path, file: HubFile, bar: _Bar) -> None:
    """Fetch the rest of a file, check its hash, and give it its name."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    partial = _partial(folder, file)
    start = _partial_bytes(folder, file)
    url = hf_hub_url(repository, file.name, revision=commit, endpoint=api.endpoint)
    headers = build_hf_headers(token=api.token, library_name=api.library_name)
    with partial.open("r+b" if start else "wb") as content:
        content.seek(start)
        http_get(
            url,
            content,
            resume_size=start,
            headers=headers,
            expected_size=file.bytes,
            displayed_filename=file.name,
            tqdm_class=lambda **settings: bar,  # type: ignore[arg-type]
        )
        content.truncate()
        content.flush()
        os.fsync(content.fileno())
    if file.digest and _digest(partial, file) != file.digest:
        partial.unlink()
        raise NetworkError(f"{file.name} arrived damaged and was removed; type the same command again")
    partial.replace(folder / file.name)


def _digest(path: Path, file: HubFile) -> str:
    is_sha256 = len(file.digest) == 64
    # Git hashes a file behind a line that says its size.
    prefix = b"" if is_sha256 else f"blob {path.stat().st_size}\0".encode()
    with path.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.new("sha256" if is_sha256 else "sha1", prefix)).hexdigest()


class _Bar:
    """Stands in for huggingface_hub's progress bars and adds up all files."""

    def __init__(self, done: int, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.done, self.total, self.progress = done, total, progress

    def update(self, num_bytes: float | None = 1) -> None:
        self.done += int(num_bytes or 0)
        if self.progress is not None:
            self.progress(self.done, self.total)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"disk full while writing {folder}; make room, then type the same command again"
            ) from error
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from error
