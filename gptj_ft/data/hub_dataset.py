"""Rows from a data set on the Hugging Face Hub: a name -> a folder of files, fetched once, known by its commit.

``hub:owner/name/config:split@revision``; what comes behind ``owner/name`` may be left out. The files of one part go to
``datasets/owner--name@COMMIT/config/split/`` in `home`; a note beside tells what a name stood for when it was last
looked up, so that it can be used without a network. Only `fetch` uses one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import quote

from gptj_ft.data.hub_layout import TRAIN, Layout, Part, layout_of
from gptj_ft.errors import NoSuchRevision, Unreachable, UsageError
from gptj_ft.system.files import read_text, replace_text, require_plain
from gptj_ft.system.hub import open_network
from gptj_ft.system.hub_download import HubFile, Repository, fetch_files, is_there, look_up, writing
from gptj_ft.system.lock import locked
from gptj_ft.system.paths import make_home, part_of_home
from gptj_ft.system.units import gigabytes

PREFIX = "hub:"
# The branch to which the Hub converts data sets by itself, as CONFIG/SPLIT/0000.parquet.
CONVERTED = "refs/convert/parquet"
COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Reference:
    """What a user names: an empty config is the default one, an empty revision the main branch."""

    repository: str
    config: str
    split: str
    revision: str

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        return f"{PREFIX}{self.repository}{config}:{self.split}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class Note:
    """What a reference stood for.

    Attributes:
        pinned: the same with config and commit.
        folder: where its files are, below `datasets`.
        files: which.
        day: when it was looked up.
    """

    pinned: str
    folder: str
    files: tuple[HubFile, ...]
    day: str


def is_reference(data: str) -> bool:
    """Tell whether rows are named on the Hub."""
    return data.startswith(PREFIX)


def parse(data: str) -> Reference:
    """Read a name.

    Raises:
        UsageError: it is none.
    """
    names, at, revision = data.removeprefix(PREFIX).partition("@")
    path, colon, split = names.partition(":")
    owner, *rest = path.split("/")
    if not (owner and rest and all(rest)) or bool(at) != bool(revision) or bool(colon) != bool(split):
        raise UsageError(
            f"'{data}' names no data set: write hub:owner/name or hub:owner/name/config, :split and @revision behind it"
        )
    return Reference(f"{owner}/{rest[0]}", "/".join(rest[1:]), split or TRAIN, revision)


def datasets() -> Path:
    """Return the folder in which data sets of the Hub are kept."""
    return part_of_home("datasets")


def local_folder(data: str) -> Path:
    """Return the folder of files that a name stands for; uses no network.

    Raises:
        UsageError: it has not been fetched.
    """
    reference = parse(data)
    note = _note(reference)
    if note is None:
        raise UsageError(f"{reference} is not on this machine, and must be fetched once with a network")
    return datasets() / note.folder


def fetch(
    data: str,
    offline: bool,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Fetch the rows that a name stands for now, unless they are here; where the Hub cannot be reached, those it stood
    for when it was last looked up will do, which is said.

    Args:
        data: the name.
        offline: use no network.
        say: called with a sentence for the user.
        progress: called with bytes done and bytes in all.

    Returns: the name with config and commit, for `local_folder`.

    Raises:
        UsageError: no such config or split, no rows in the data set, or nothing fetched yet without a network.
        NetworkError: no access, a fault of the server, a damaged transfer; no connection, and nothing fetched yet.
        ResourceError: the disk is full.
    """
    reference = parse(data)
    note = _note(reference)
    if note is not None and COMMIT.fullmatch(reference.revision):
        return note.pinned
    with open_network() as is_open:
        if offline or not is_open:
            if note is None:
                why = "--offline" if offline else "HF_HUB_OFFLINE, which is set in the environment,"
                raise UsageError(f"{reference} has not been fetched yet, and {why} forbids it")
            why = "offline"
        else:
            try:
                return _fetch(reference, say, progress).pinned
            except Unreachable as error:
                if note is None:
                    raise
                why = str(error).partition(";")[0]
    say(f"{why}: {reference} is taken as fetched on {note.day}, {note.pinned}")
    return note.pinned


def _fetch(reference: Reference, say: Callable[[str], None], progress: Callable[[int, int], None] | None) -> Note:
    repository, part = _locate(reference)
    files = tuple(repository.files[name] for name in part.files)
    pinned = replace(reference, config=part.config, revision=repository.commit)
    at = f"{reference.repository.replace('/', '--')}@{repository.commit}"
    note = Note(str(pinned), f"{at}/{_segment(part.config)}/{_segment(part.split)}", files, time.strftime("%Y-%m-%d"))
    folder = datasets() / note.folder
    size = gigabytes(sum(file.bytes for file in files))
    say(f"{reference} is {note.pinned}: {len(files)} file{'s' * (len(files) != 1)}, {size}")
    if not _is_whole(note):
        with writing(folder):
            make_home()
            folder.mkdir(parents=True, exist_ok=True)
            require_plain(folder)
        with locked(folder, "fetching"):
            fetch_files(repository, files, folder, progress)
    with writing(datasets()):
        for name in {reference, pinned}:
            replace_text(_note_file(name), json.dumps(asdict(note), indent=2) + "\n")
    return note


def _locate(reference: Reference) -> tuple[Repository, Part]:
    """Ask the Hub which files are meant: of the repository, else of the Hub's conversion of its main branch.

    Raises:
        UsageError: none; says what there is.
    """
    name, config, split = reference.repository, reference.config, reference.split
    repository = look_up(name, reference.revision or None, "dataset")
    layout = layout_of(name, repository.files, repository.card)
    if part := layout.find(name, config, split):
        return repository, part
    if not reference.revision:
        converted, conversion = _conversion(name)
        if converted and (part := conversion.find(name, config, split)):
            return converted, part
        if not any(layout.configs.values()) and conversion.configs:
            layout = conversion
    raise UsageError(layout.what_is_missing(name, config, split))


def _conversion(name: str) -> tuple[Repository | None, Layout]:
    try:
        repository = look_up(name, CONVERTED, "dataset")
    except NoSuchRevision:
        return None, layout_of(name, (), {})
    return repository, layout_of(name, repository.files, {})


def _note(reference: Reference) -> Note | None:
    """Return what a reference stood for, if its files are still there."""
    try:
        values = json.loads(read_text(_note_file(reference)))
        note = Note(**{**values, "files": tuple(HubFile(**file) for file in values["files"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return note if _is_whole(note) else None


def _is_whole(note: Note) -> bool:
    return all(is_there(datasets() / note.folder, file) for file in note.files)


def _note_file(reference: Reference) -> Path:
    return datasets() / f"{_segment(str(reference).removeprefix(PREFIX))}.json"


def _segment(name: str) -> str:
    """Return a name as one part of a path, of which no other name can be the same; never hidden, nor a way out."""
    quoted = quote(name, safe="@")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted
