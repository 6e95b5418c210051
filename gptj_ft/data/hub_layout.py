"""Which files of a data set's repository are the rows of a configuration and split: by its card, else by their names.

The card's form: https://huggingface.co/docs/hub/datasets-manual-configuration; names without one:
https://huggingface.co/docs/hub/datasets-data-files-configuration. Nothing in a repository is ever run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from gptj_ft.data.readers.compression import PACKED
from gptj_ft.data.readers.detect import SUFFIXES
from gptj_ft.errors import UsageError, did_you_mean

DEFAULT = "default"
TRAIN = "train"
FORMATS = ("parquet", "jsonl", "json", "csv", "tsv", "txt")  # best first
# Files of metadata that a repository may hold beside its rows.
NOT_ROWS = {
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
NAMES_SHOWN = 20


@dataclass(frozen=True)
class Part:
    """A split of a configuration, and the names of its files."""

    config: str
    split: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Where the rows of a repository are.

    Attributes:
        configs: configuration -> split -> names of files, all of one format.
        default: the configuration that is meant when none is named; ``None``: one has to be named.
        script: the name of a loading script, or empty.
    """

    configs: Mapping[str, Mapping[str, tuple[str, ...]]]
    default: str | None
    script: str

    def find(self, repository: str, config: str, split: str) -> Part | None:
        """Return a part; ``None`` if it is not here.

        Raises:
            UsageError: no configuration is named and there are several; names them.
        """
        name = config or self.default
        if name is None and self.configs:
            first = next(iter(self.configs))
            raise UsageError(
                f"{repository} has several configurations: {_listed(self.configs)}; choose one, e.g. "
                f"hub:{repository}/{first}"
            )
        files = self.configs.get(name or "", {}).get(split, ())
        return Part(name or "", split, files) if files else None

    def what_is_missing(self, repository: str, config: str, split: str) -> str:
        """Say why `find` found nothing, and what there is."""
        name = config or self.default or ""
        splits = self.configs.get(name)
        if splits:
            suffix = f"/{name}" if config else ""
            first = next(iter(splits))
            return (
                f"{repository}{suffix} has no split '{split}'{did_you_mean(split, splits)}; there are "
                f"{_listed(splits)}: write hub:{repository}{suffix}:{first}"
            )
        usable = [config for config, parts in self.configs.items() if parts]
        if usable and name not in self.configs:
            return (
                f"{repository} has no configuration '{name}'{did_you_mean(name, usable)}; there are {_listed(usable)}: "
                f"write hub:{repository}/{usable[0]}"
            )
        if self.script:
            return (
                f"{repository} has only a loading script ({self.script}), and no code of a data set is run here: load "
                "it where you trust it (`datasets` below version 4), save it with `to_parquet`, and name the files"
            )
        where = f"configuration '{name}' of {repository}" if usable else repository
        return f"{where} has no files of rows ({', '.join(FORMATS)}); save it as one of these, and name the files"


def layout_of(repository: str, names: Iterable[str], card: Mapping[str, Any]) -> Layout:
    """Find the rows of a repository.

    Args:
        repository: ``owner/name``.
        names: of all its files.
        card: the metadata of its README.
    """
    every = sorted(names)
    script = f"{repository.partition('/')[2]}.py"
    script = script if script in every else ""
    readable = [name for name in every if format_of(name)]
    entries = [entry for entry in _list_of(card.get("configs")) if isinstance(entry, Mapping)]
    if not entries:
        configs = _by_names(readable, may_be_unnamed=not script)
        return Layout(configs, _default_of(configs), script)
    configs = {str(entry.get("config_name") or DEFAULT): _by_card(readable, entry) for entry in entries}
    chosen = next((str(entry.get("config_name")) for entry in entries if entry.get("default") is True), None)
    return Layout(configs, chosen or _default_of(configs), script)


def format_of(name: str) -> str:
    """Return the format of rows that a name tells; empty for what is read by nobody, hidden or metadata."""
    path = PurePosixPath(name)
    if path.name in NOT_ROWS or any(part.startswith(".") for part in path.parts):
        return ""
    packed = path.suffix.lower() in PACKED
    format_ = SUFFIXES.get((PurePosixPath(path.stem) if packed else path).suffix.lower(), "")
    return format_ if format_ in FORMATS else ""


def _default_of(configs: Mapping[str, object]) -> str | None:
    if len(configs) == 1:
        return next(iter(configs))
    return DEFAULT if DEFAULT in configs else None


def _by_card(names: list[str], entry: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the splits of a configuration as the card has it: patterns, by split or for `TRAIN`."""
    folder = str(entry.get("data_dir") or "").strip("/")
    inside = [name for name in names if not folder or name.startswith(f"{folder}/")]
    splits: dict[str, list[str]] = {}
    if entry.get("data_files") is None:
        for found in _by_names(inside, may_be_unnamed=True).values():
            for split, files in found.items():
                splits.setdefault(split, []).extend(files)
    for item in _list_of(entry.get("data_files")):
        one = item if isinstance(item, Mapping) else {"path": item}
        for pattern in _list_of(one.get("path")):
            parts = [part for part in f"{folder}/{pattern}".split("/") if part not in ("", ".")]
            meant = [name for name in inside if _matches(name.split("/"), parts)]
            splits.setdefault(str(one.get("split") or TRAIN), []).extend(meant)
    return {split: _of_the_best_format(files) for split, files in splits.items() if files}


def _by_names(names: list[str], may_be_unnamed: bool) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return configurations and splits by names of files and folders.

    Folders in which splits are named are configurations. Where no split is named at all, everything is `TRAIN`, if that
    may be; but a lone text file may be a licence.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name in names:
        config, split = _place(name)
        if split:
            found.setdefault(config, {}).setdefault(split, []).append(name)
    if not found and may_be_unnamed:
        unnamed = [name for name in names if format_of(name) != "txt"]
        found = {DEFAULT: {TRAIN: unnamed}} if unnamed else {}
    return {config: {s: _of_the_best_format(files) for s, files in splits.items()} for config, splits in found.items()}


def _place(name: str) -> tuple[str, str]:
    """Return configuration and split that a path tells; an empty split if none.

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
    for index in range(len(folders) - 1, -1, -1):
        if split:
            break
        if split := _split_in(folders[index]):
            del folders[index:]
    return "/".join(folder for folder in folders if folder != "data") or DEFAULT, split


def _split_in(text: str) -> str:
    words = set(re.split(r"[-._ 0-9]+", text.lower()))
    return next((split for split, known in SPLIT_WORDS.items() if words & known), "")


def _of_the_best_format(names: Iterable[str]) -> tuple[str, ...]:
    """Return the files of one format: repositories hold the same rows in several."""
    once = list(dict.fromkeys(names))
    best = min((FORMATS.index(format_of(name)) for name in once), default=0)
    return tuple(name for name in once if format_of(name) == FORMATS[best])


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Tell whether a path matches a pattern, both as lists of their parts; ``**`` stands for any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _list_of(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - NAMES_SHOWN} more" if len(every) > NAMES_SHOWN else ""
    return ", ".join(every[:NAMES_SHOWN]) + more
