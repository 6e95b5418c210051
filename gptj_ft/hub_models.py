"""Which files of a model's repository on the Hub are needed: one form of the weights, in the type that is asked for."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gptj_ft import home
from gptj_ft.errors import DataError, NoSuchRevision, UsageError
from gptj_ft.families import read_architecture
from gptj_ft.hub_files import HubFile, Repository, fetch_files, look_up

Variant = Literal["fp32", "fp16"]
CONFIG = "config.json"
COMPANIONS = ("generation_config.json", *home.TOKENIZER_FILES)
# Best first; of a form in shards, the index and what the pattern matches.
WEIGHTS = (
    ("model.safetensors", r"model\.safetensors"),
    ("model.safetensors.index.json", r"model-\d+-of-\d+\.safetensors"),
    ("pytorch_model.bin", r"pytorch_model\.bin"),
    ("pytorch_model.bin.index.json", r"pytorch_model-\d+-of-\d+\.bin"),
)
# How torch names a variant, and so do branches: GPT-J's fp16 weights are on one called float16.
BRANCHES: dict[Variant, str] = {"fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True)
class Wanted:
    """What to fetch.

    Attributes:
        repository: ``owner/name`` on the Hub.
        revision: branch, tag or commit; the main branch by default.
        variant: the type of the weights; by default what the revision holds.
        endpoint: the Hub's address; ``HF_ENDPOINT``, else https://huggingface.co.
    """

    repository: str = home.DEFAULT_REPOSITORY
    revision: str | None = None
    variant: Variant | None = None
    endpoint: str | None = None

    def folder(self) -> Path:
        """Return where it goes if no folder is named; variants do not share one."""
        return home.download_folder(self.repository + ("-fp16" if self.variant == "fp16" else ""))


def choose_files(wanted: Wanted) -> tuple[Repository, tuple[HubFile, ...]]:
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
    config = read_config(found)
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stored != branch:
        raise UsageError(
            f"{wanted.repository} has no {wanted.variant} variant: its weights are {stored}, and neither a branch "
            f"{branch} nor a file is named so; download it as it is, then `gptj-ft convert --dtype {wanted.variant}`"
        )
    return found, files


def read_config(repository: Repository) -> dict[str, Any]:
    """Fetch a repository's ``config.json`` alone, and check that it is of a supported model.

    Raises:
        UsageError: it is none, which is better known before 24 GB than after.
        NetworkError: as `fetch_files`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        fetch_files(repository, [repository.files[CONFIG]], Path(temporary))
        try:
            return dict(read_architecture(Path(temporary)).raw)
        except (UsageError, DataError) as error:
            raise UsageError(str(error).replace(temporary, repository.name)) from error


def _named_after(repository: Repository, variant: Variant) -> Repository | None:
    """Return a repository with ``model.fp16.safetensors`` for ``model.safetensors``; ``None`` if there is none."""
    for plain, _ in WEIGHTS:
        stem, _, suffix = plain.partition(".")
        there = repository.files.get(f"{stem}.{variant}.{suffix}")
        if there is not None and not plain.endswith(".json"):
            others = {name: file for name, file in repository.files.items() if not _is_weights(name)}
            return replace(repository, files={**others, plain: replace(there, name=plain, remote=there.name)})
    return None


def _is_weights(name: str) -> bool:
    return any(name == first or re.fullmatch(pattern, name) for first, pattern in WEIGHTS)


def _needed(repository: Repository) -> tuple[HubFile, ...]:
    there = repository.files
    form = next(((first, pattern) for first, pattern in WEIGHTS if first in there), None)
    if form is None or CONFIG not in there:
        lacking = CONFIG if form else "weights in safetensors or PyTorch form"
        raise UsageError(f"{repository.name} is not a model that can be used: it has no {lacking}")
    first, pattern = form
    weights = [name for name in sorted(there) if name == first or re.fullmatch(pattern, name)]
    names = [*(name for name in COMPANIONS if name in there), *weights, CONFIG]
    return tuple(there[name] for name in names)
