"""Fetch a model from the Hugging Face Hub: only what is needed, resumable, checked by hash."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gptj_ft.durable import SHARED_FILE, replace_text
from gptj_ft.errors import DataError, UsageError
from gptj_ft.home import home, make_home, part_of_home
from gptj_ft.hub import is_offline
from gptj_ft.hub_files import HubFile, fetch_files, is_there, writing
from gptj_ft.hub_models import Wanted, choose_files, read_config
from gptj_ft.origin import SOURCE, Origin, read_origin


@dataclass(frozen=True)
class DownloadReport:
    """What `download` put where.

    Attributes:
        folder: where the files are, or would be.
        repository: that they are of.
        commit: its revision.
        license: the repository's license tag; empty if it has none.
        files: what is needed of it.
        bytes: of all files together.
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
    wanted: Wanted = Wanted(),
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
        wanted: which model.
        target: where to; by default under `home.models`.
        offline: take what was fetched before, without a request.
        dry_run: list only; nothing is written.
        progress: called with bytes done and bytes in all.

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
        read_config(found)
    license_tag = next((tag.removeprefix("license:") for tag in found.tags if tag.startswith("license:")), "")
    origin = Origin(wanted.repository, found.commit, license_tag, wanted.revision, files)
    report = _report(folder, origin)
    if dry_run:
        return report
    with writing(folder):
        _claim(folder, origin)
    return _report(folder, origin, fetch_files(found, files, folder, progress), report.free_bytes)


def _report(folder: Path, origin: Origin, fetched: int = 0, free_bytes: int | None = None) -> DownloadReport:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free_bytes = shutil.disk_usage(there).free if free_bytes is None else free_bytes
    total = sum(file.bytes for file in origin.files)
    return DownloadReport(
        folder, origin.repository, origin.commit, origin.license, origin.files, total, fetched, free_bytes
    )


def _fetched_before(wanted: Wanted, folder: Path, reason: str) -> Origin:
    """Return what a folder holds.

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
