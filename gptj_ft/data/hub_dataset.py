"""Download datasets of the Hugging Face Hub: a reference becomes a folder of files, pinned to a commit.

``hub:owner/name/config:split@revision``; everything after ``owner/name`` is optional. The files of one split go to
``datasets/owner--name@COMMIT/config/split/`` in `home`. A note next to them stores the resolved reference, so that it
works offline later. Only `fetch` uses the network.

File names and the dataset card tell configurations and splits, by rules like those of `datasets`. This library is not
used: it converts files to its own cache, losing file names and line numbers of rows, and its network access cannot be
confined to `open_network`, nor its downloads to private, resumable files.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from gptj_ft.data.readers.source import SUFFIXES
from gptj_ft.errors import NoSuchRevision, Unreachable, UsageError, did_you_mean, listed
from gptj_ft.system.atomic import replace_shared
from gptj_ft.system.compression import COMPRESSIONS
from gptj_ft.system.files import read_text, require_plain
from gptj_ft.system.hub import open_network
from gptj_ft.system.hub_download import HubFile, Repository, fetch_files, is_fetched, look_up, writing
from gptj_ft.system.lock import locked
from gptj_ft.system.paths import make_home, part_of_home
from gptj_ft.system.units import gigabytes

DEFAULT = "default"
TRAIN = "train"
FORMATS = ("parquet", "jsonl", "json", "csv", "tsv", "txt")  # best first
NOT_ROWS = {  # metadata files
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "manifest.json",
    "state.json",
}
SPLIT_WORDS = {
    TRAIN: {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}


@dataclass(frozen=True)
class RepositoryLayout:
    """Files of rows in a repository, by configuration and split."""

    configs: Mapping[str, Mapping[str, tuple[str, ...]]]  # configuration -> split -> file names of one format
    default: str | None  # default configuration; None: a reference must name one
    script: str  # name of a loading script, or ""

    def find(self, reference: Reference) -> tuple[str, tuple[str, ...]]:
        """Return a reference's configuration, and the files of its split; no files if they are missing."""
        config, repository = reference.config or self.default, reference.repository
        if config is None and self.configs:
            raise UsageError(
                f"{repository} has several configurations: {listed(self.configs)}; choose one, e.g. "
                f"hub:{repository}/{next(iter(self.configs))}"
            )
        return config or "", self.configs.get(config or "", {}).get(reference.split, ())

    def explain_missing(self, reference: Reference) -> str:
        """Explain why `find` returned no files, and list the existing splits."""
        repository, split = reference.repository, reference.split
        config = reference.config or self.default or ""
        if splits := self.configs.get(config):
            named = f"{repository}/{config}" if reference.config else repository
            return (
                f"{named} has no split '{split}'{did_you_mean(split, splits)}; there are {listed(splits)}: write "
                f"hub:{named}:{next(iter(splits))}"
            )
        usable = [name for name, parts in self.configs.items() if parts]
        if usable and config not in self.configs:
            return (
                f"{repository} has no configuration '{config}'{did_you_mean(config, usable)}; there are "
                f"{listed(usable)}: write hub:{repository}/{usable[0]}"
            )
        if self.script:
            return (
                f"{repository} has only a loading script ({self.script}), and code of datasets is never run: load it "
                "where you trust it (`datasets` below version 4), save it with `to_parquet`, and name the files"
            )
        where = f"configuration '{config}' of {repository}" if usable else repository
        return f"{where} has no files of rows ({', '.join(FORMATS)}); save it as one of these, and name the files"


def layout_of(repository: str, names: Iterable[str], card: Mapping[str, Any]) -> RepositoryLayout:
    """Find the files of rows in a repository.

    Args:
        repository: ``owner/name``.
        names: names of all its files.
        card: metadata of its README.
    """
    every = sorted(names)
    script = f"{repository.partition('/')[2]}.py"
    script = script if script in every else ""
    readable = [name for name in every if format_of(name)]
    entries = [entry for entry in _list_of(card.get("configs")) if isinstance(entry, Mapping)]
    if not entries:
        configs = _by_names(readable, may_be_unnamed=not script)
        return RepositoryLayout(configs, _default_of(configs), script)
    configs = {str(entry.get("config_name") or DEFAULT): _by_card(readable, entry) for entry in entries}
    chosen = next((str(entry.get("config_name")) for entry in entries if entry.get("default") is True), None)
    return RepositoryLayout(configs, chosen or _default_of(configs), script)


def format_of(name: str) -> str:
    """Return a file's format by its name; "" for unknown suffixes, hidden files and metadata."""
    path = PurePosixPath(name)
    if path.name in NOT_ROWS or any(part.startswith(".") for part in path.parts):
        return ""
    is_compressed = path.suffix.lower() in COMPRESSIONS
    format_ = SUFFIXES.get((PurePosixPath(path.stem) if is_compressed else path).suffix.lower(), "")
    return format_ if format_ in FORMATS else ""


def _default_of(configs: Mapping[str, object]) -> str | None:
    if len(configs) == 1:
        return next(iter(configs))
    return DEFAULT if DEFAULT in configs else None


def _by_card(names: list[str], entry: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return a configuration's splits by the patterns of the dataset card."""
    folder = str(entry.get("data_dir") or "").strip("/")
    inside = [name for name in names if not folder or name.startswith(f"{folder}/")]
    splits: dict[str, list[str]] = {}
    if entry.get("data_files") is None:
        for config in _by_names(inside, may_be_unnamed=True).values():
            for split, files in config.items():
                splits.setdefault(split, []).extend(files)
    for item in _list_of(entry.get("data_files")):
        one = item if isinstance(item, Mapping) else {"path": item}
        for pattern in _list_of(one.get("path")):
            parts = [part for part in f"{folder}/{pattern}".split("/") if part not in ("", ".")]
            matching = [name for name in inside if _matches(name.split("/"), parts)]
            splits.setdefault(str(one.get("split") or TRAIN), []).extend(matching)
    return {split: _of_best_format(files) for split, files in splits.items() if files}


def _by_names(names: list[str], may_be_unnamed: bool) -> dict[str, dict[str, tuple[str, ...]]]:
    """Infer configurations and splits from the names of files and folders.

    Folders that contain splits are configurations. If no name tells a split, all files are `TRAIN`, provided that
    ``may_be_unnamed``; text files are excluded then, as they may be licences.
    """
    configs: dict[str, dict[str, list[str]]] = {}
    for name in names:
        config, split = _split_of_path(name)
        if split:
            configs.setdefault(config, {}).setdefault(split, []).append(name)
    if not configs and may_be_unnamed:
        unnamed = [name for name in names if format_of(name) != "txt"]
        configs = {DEFAULT: {TRAIN: unnamed}} if unnamed else {}
    return {config: {s: _of_best_format(files) for s, files in splits.items()} for config, splits in configs.items()}


def _split_of_path(name: str) -> tuple[str, str]:
    """Infer configuration and split from a path; the split is "" if there is none.

    ``data/train-00000-of-00002.parquet``, ``en/validation.jsonl.gz``, ``dev/part-1.csv``, and the Hub's conversion:
    ``en/train/0000.parquet``.
    """
    *folders, file = name.split("/")
    sharded = re.fullmatch(r"(\w+)-\d{5}-of-\d{5}.*", file)
    if len(folders) == 2 and re.fullmatch(r"\d{4}\.parquet", file):
        split = folders.pop()
    elif sharded and folders == ["data"]:
        split = sharded[1]
    else:
        split = _split_in(file)
    # The innermost folder that names a split decides. The folders above it name the configuration.
    for index in range(len(folders) - 1, -1, -1):
        if split:
            break
        if split := _split_in(folders[index]):
            del folders[index:]
    return "/".join(folder for folder in folders if folder != "data") or DEFAULT, split


def _split_in(text: str) -> str:
    words = set(re.split(r"[-._ 0-9]+", text.lower()))
    return next((split for split, known in SPLIT_WORDS.items() if words & known), "")


def _of_best_format(names: Iterable[str]) -> tuple[str, ...]:
    """Return the files of the best format: a repository may have the same rows in several."""
    once = list(dict.fromkeys(names))
    best = min((FORMATS.index(format_of(name)) for name in once), default=0)
    return tuple(name for name in once if format_of(name) == FORMATS[best])


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Tell whether a path matches a pattern, both split at slashes; ``**`` matches any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _list_of(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


HUB_PREFIX = "hub:"
CONVERTED = "refs/convert/parquet"  # branch with the Hub's own conversion, as CONFIG/SPLIT/0000.parquet
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Reference:
    """A reference to rows on the Hub; an empty config means the default, an empty revision the main branch."""

    repository: str
    config: str
    split: str
    revision: str

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        return f"{HUB_PREFIX}{self.repository}{config}:{self.split}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True)
class ResolvedReference:
    """A reference resolved to a commit and its files."""

    pinned: str  # the reference with config and commit
    folder: str  # relative to `datasets`
    files: tuple[HubFile, ...]
    day: str  # day of the lookup


def is_reference(data: str) -> bool:
    """Tell whether a name refers to the Hub."""
    return data.startswith(HUB_PREFIX)


def parse_reference(data: str) -> Reference:
    """Parse a reference."""
    names, at, revision = data.removeprefix(HUB_PREFIX).partition("@")
    path, colon, split = names.partition(":")
    owner, *rest = path.split("/")
    if not (owner and rest and all(rest)) or bool(at) != bool(revision) or bool(colon) != bool(split):
        raise UsageError(
            f"'{data}' names no dataset: write hub:owner/name or hub:owner/name/config, then optionally :split and "
            "@revision"
        )
    return Reference(f"{owner}/{rest[0]}", "/".join(rest[1:]), split or TRAIN, revision)


def datasets() -> Path:
    """Return the folder of downloaded datasets."""
    return part_of_home("datasets")


def local_folder(data: str) -> Path:
    """Return the local folder of a reference, without using the network."""
    reference = parse_reference(data)
    note = _note(reference)
    if note is None:
        raise UsageError(f"{reference} is not on this machine; run the command once with network access")
    return datasets() / note.folder


def fetch(
    data: str, offline: bool, say: Callable[[str], None], progress: Callable[[int, int], None] | None = None
) -> str:
    """Download the rows of a reference, unless they are on this machine.

    If the Hub cannot be reached, use the files of the last lookup and say so.

    Args:
        offline: do not use the network.
        say: called with a sentence for the user.
        progress: called with bytes done and bytes in all.

    Returns:
        The reference with config and commit, for `local_folder`.
    """
    reference = parse_reference(data)
    note = _note(reference)
    # A commit never changes, so it needs no lookup. A branch may have moved.
    if note is not None and _COMMIT.fullmatch(reference.revision):
        return note.pinned
    with open_network() as is_open:
        if offline or not is_open:
            if note is None:
                why = "--offline" if offline else "HF_HUB_OFFLINE, which is set in the environment,"
                raise UsageError(f"{reference} has not been downloaded yet, and {why} forbids it")
            why = "offline"
        else:
            try:
                return _fetch(reference, say, progress).pinned
            except Unreachable as error:
                if note is None:
                    raise
                why = str(error).partition(";")[0]
    say(f"{why}: using {reference} as downloaded on {note.day}, {note.pinned}")
    return note.pinned


def _fetch(
    reference: Reference, say: Callable[[str], None], progress: Callable[[int, int], None] | None
) -> ResolvedReference:
    repository, config, files = _locate(reference)
    pinned = replace(reference, config=config, revision=repository.commit)
    at = f"{reference.repository.replace('/', '--')}@{repository.commit}"
    relative = f"{at}/{_segment(config)}/{_segment(reference.split)}"
    note = ResolvedReference(str(pinned), relative, files, time.strftime("%Y-%m-%d"))
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
    # Two notes: for the reference as typed, and for its commit, which needs no further lookup.
    with writing(datasets()):
        for name in {reference, pinned}:
            replace_shared(_note_file(name), json.dumps(asdict(note), indent=2) + "\n")
    return note


def _locate(reference: Reference) -> tuple[Repository, str, tuple[HubFile, ...]]:
    """Resolve a reference on the Hub to a repository at a commit, a configuration, and the files of the split.

    Files that the repository lacks may be in the Hub's conversion of its main branch.
    """
    name = reference.repository
    repository = look_up(name, reference.revision or None, "dataset")
    layout = layout_of(name, repository.files, repository.card)
    config, names = layout.find(reference)
    # The Hub converts the main branch only.
    if not names and not reference.revision:
        with suppress(NoSuchRevision):
            converted = look_up(name, CONVERTED, "dataset")
            conversion = layout_of(name, converted.files, {})
            config, names = conversion.find(reference)
            if names:
                repository = converted
            # Neither has the split. If only the conversion has rows at all, its splits are worth listing.
            elif not any(layout.configs.values()) and conversion.configs:
                layout = conversion
    if not names:
        raise UsageError(layout.explain_missing(reference))
    return repository, config, tuple(repository.files[name] for name in names)


def _note(reference: Reference) -> ResolvedReference | None:
    """Return the stored resolution of a reference, if its files still exist."""
    try:
        values = json.loads(read_text(_note_file(reference)))
        note = ResolvedReference(**{**values, "files": tuple(HubFile(**file) for file in values["files"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return note if _is_whole(note) else None


def _is_whole(note: ResolvedReference) -> bool:
    return all(is_fetched(datasets() / note.folder, file) for file in note.files)


def _note_file(reference: Reference) -> Path:
    return datasets() / f"{_segment(str(reference).removeprefix(HUB_PREFIX))}.json"


def _segment(name: str) -> str:
    """Quote a name as one path segment: unambiguous, not hidden, not leading outside."""
    quoted = quote(name, safe="@")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted
