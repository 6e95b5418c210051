"""Download files of a Hub repository: only those asked for, resumable, checked by hash.

huggingface_hub lists and transfers. Its own `snapshot_download` starts a file anew after the program was stopped (its
partial files have random names), and GPT-J is one file of 24 GB: so partial files are named and kept here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from gptj_ft.errors import NetworkError, ResourceError, UsageError
from gptj_ft.system.files import SHARED_FILE, create_file, disk_errors, open_file, require_plain
from gptj_ft.system.hub import hub_api, hub_errors
from gptj_ft.system.machine import free_disk

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoSibling

LISTING_SECONDS = 30.0
_Kind = Literal["model", "dataset"]


@dataclass(frozen=True)
class HubFile:
    """File of a repository."""

    name: str  # in the local folder
    bytes: int
    digest: str  # SHA-256 of a large file, else git blob id (SHA-1)
    remote: str = ""  # name on the Hub; default: the same


@dataclass(frozen=True)
class Repository:
    """Repository of the Hub at a commit."""

    api: HfApi
    kind: _Kind
    name: str  # ``owner/name``
    commit: str  # of the requested revision
    files: Mapping[str, HubFile]  # by name
    tags: tuple[str, ...]
    card: Mapping[str, Any]  # metadata in the README of a data set

    def errors(self) -> AbstractContextManager[None]:
        return hub_errors(self.name, self.api.endpoint, self.kind)


def look_up(name: str, revision: str | None = None, kind: _Kind = "model", endpoint: str | None = None) -> Repository:
    """Look up a repository and its files; errors as `hub_errors`."""
    api = hub_api(endpoint)
    ask = api.dataset_info if kind == "dataset" else api.model_info
    with hub_errors(name, api.endpoint, kind):
        info = ask(name, revision=revision, files_metadata=True, timeout=LISTING_SECONDS)
        files = {sibling.rfilename: _described(sibling) for sibling in info.siblings or [] if _is_inside(sibling)}
        card = dict(vars(info.card_data)) if kind == "dataset" and info.card_data else {}
        return Repository(api, kind, name, str(info.sha), files, tuple(info.tags or ()), card)


def fetch_files(
    repository: Repository,
    files: Sequence[HubFile],
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Fetch files in order; a repeated call resumes an interrupted download.

    Args:
        folder: target, without files of another commit.
        progress: called with bytes done and total bytes.

    Returns: bytes received.

    Raises:
        UsageError: the folder cannot be written.
        NetworkError: no connection, no access, a server error, a damaged transfer.
        ResourceError: not enough disk space.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        require_plain(folder)  # partial files of an earlier download are appended to
        missing = [file for file in files if not is_fetched(folder, file)]
        fetched = sum(file.bytes - _partial_bytes(folder, file) for file in missing)
        _check_space(folder, fetched)
    total = sum(file.bytes for file in files)
    bar = _Bar(total - fetched, total, progress)
    for file in missing:
        with writing(folder), repository.errors():
            _fetch(repository, folder, file, bar)
    return fetched


def is_fetched(folder: Path, file: HubFile) -> bool:
    """Tell whether a file has been fetched into a folder."""
    # The size suffices: the hash was checked before the file got its name.
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.bytes


def writing(folder: Path) -> AbstractContextManager[None]:
    """Translate disk errors of a download folder, see `disk_errors`."""
    return disk_errors(folder, "make room, then type the same command again", UsageError)


def _described(sibling: RepoSibling) -> HubFile:
    digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
    return HubFile(sibling.rfilename, sibling.size or 0, digest or "")


def _is_inside(sibling: RepoSibling) -> bool:
    path = PurePosixPath(sibling.rfilename)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in sibling.rfilename


def _partial(folder: Path, file: HubFile) -> Path:
    return folder / f"{file.name}.partial"


def _partial_bytes(folder: Path, file: HubFile) -> int:
    path = _partial(folder, file)
    return min(path.stat().st_size, file.bytes) if path.is_file() else 0


def _check_space(folder: Path, needed: int) -> None:
    if (free := free_disk(folder)) < needed:
        raise ResourceError(
            f"the download needs {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free; "
            "make room, or set GPTJ_FT_HOME to a folder on another disk"
        )


def _fetch(repository: Repository, folder: Path, file: HubFile, bar: _Bar) -> None:
    """Fetch the rest of a file, check its hash, and rename it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    api, partial = repository.api, _partial(folder, file)
    start = _partial_bytes(folder, file)
    name, revision = file.remote or file.name, repository.commit
    url = hf_hub_url(repository.name, name, repo_type=repository.kind, revision=revision, endpoint=api.endpoint)
    headers = build_hf_headers(token=api.token, library_name=api.library_name)
    partial.parent.mkdir(parents=True, exist_ok=True)
    descriptor = open_file(partial, os.O_RDWR) if start else create_file(partial, SHARED_FILE)
    with os.fdopen(descriptor, "r+b") as content:
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
        # If the server ignored the range, http_get started again at offset 0: cut the rest of the old content.
        content.truncate()
        content.flush()
        os.fsync(content.fileno())
    if file.digest and _digest(partial, file) != file.digest:
        partial.unlink()
        raise NetworkError(f"{file.name} arrived damaged and was removed; type the same command again")
    # Only verified content gets the final name.
    partial.replace(folder / file.name)


def _digest(path: Path, file: HubFile) -> str:
    is_sha256 = len(file.digest) == 64
    # Git's blob id hashes a header with the size before the content.
    prefix = b"" if is_sha256 else f"blob {path.stat().st_size}\0".encode()
    with path.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.new("sha256" if is_sha256 else "sha1", prefix)).hexdigest()


class _Bar:
    """Replace huggingface_hub's progress bars by one sum over all files."""

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
