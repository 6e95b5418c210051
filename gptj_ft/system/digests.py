"""Compute and check digests (XXH3-128, https://xxhash.com): of files, and of JSON objects that carry their own.

They detect what a disk, a copy or a careless edit has changed. They are no signature: an attacker can compute them,
too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from gptj_ft.errors import DataError
from gptj_ft.system.files import disk_errors, inside, open_file, read_text, replace_text
from gptj_ft.system.paths import ADAPTER_CONFIG

KEY = "xxh3_128"  # of everything else in the object
FOLDER_DIGESTS = "digests.json"  # of the files beside it
FREE = {FOLDER_DIGESTS, "README.md", "LICENSE", "source.json"}  # no number comes from them, and people edit them
_READ_BYTES = 1 << 20
LITTLE_BYTES = 4 << 30  # of weights that are compared before each use; of more, `runs verify` tells


def digest_of(value: object) -> str:
    """Return the digest of what JSON can hold, the same however the file has it spaced and ordered."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def digest_of_file(path: Path) -> str:
    """Return the digest of a file's content; takes as long as reading it.

    Raises:
        DataError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with os.fdopen(open_file(inside(path).resolve(), os.O_RDONLY), "rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _digest_in_folder(path: Path) -> str:
    """Return the digest of a file of a model folder; where the base of an adapter is may be changed in its file."""
    if path.name != ADAPTER_CONFIG:
        return digest_of_file(path)
    return digest_of({key: value for key, value in read_json(path).items() if key != "base_model_name_or_path"})


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with its own digest as last value."""
    return {**values, KEY: digest_of(values)}


def unsealed(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return an object without the digest that it carries, which is compared.

    Args:
        values: the object.
        path: its file, for messages.

    Raises:
        DataError: there is none, or it differs.
    """
    content = dict(values)
    found = content.pop(KEY, None)
    if found is None:
        raise DataError(f"{path} carries no digest: an earlier version of gptj-ft wrote it, or it is damaged")
    if found != digest_of(content):
        raise DataError(f"{path} is damaged: its digest is that of other values; put it back from a copy")
    return content


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a JSON file by an object and its digest, atomically and durably.

    Raises:
        ResourceError: the disk is full, or fails.
    """
    with disk_errors(path):
        replace_text(path, json.dumps(sealed(values), indent=2) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote.

    Raises:
        DataError: it is missing or damaged.
    """
    return unsealed(read_json(path), path)


def folder_digests(folder: Path, known: Mapping[str, str]) -> dict[str, Any]:
    """Compute the content of a model folder's ``digests.json``.

    Args:
        folder: the model folder, complete but for this file.
        known: digests of files that are known already, by name.
    """
    names = sorted(path.name for path in folder.iterdir() if path.name not in FREE)
    return sealed({"files": {name: known.get(name) or _digest_in_folder(folder / name) for name in names}})


def check_file(path: Path) -> None:
    """Compare a file with its digest, if its folder has digests.

    Raises:
        DataError: it differs.
    """
    expected = _digests_in(path.parent).get(path.name)
    if expected is not None and (not path.is_file() or _digest_in_folder(path) != expected):
        raise DataError(
            f"{path} is damaged, or was edited: it is not what was written. Put it back from a copy; to use the folder "
            f"as it is, remove {FOLDER_DIGESTS} from it"
        )


def check_weights(folder: Path) -> None:
    """Compare all files of a folder with their digests, if it has any and no more than `LITTLE_BYTES`.

    That is one more reading of them. Of a model as large as GPT-J it would be a noticeable part of a short command.

    Raises:
        DataError: one is not what was written.
    """
    sizes = [(folder / name).stat().st_size for name in _digests_in(folder) if (folder / name).is_file()]
    if sum(sizes) <= LITTLE_BYTES and (damage := damaged_files(folder)):
        raise DataError(damage[0])


def damaged_files(folder: Path) -> list[str]:
    """Return a line for each file of a folder that is not what was written; none if it has no digests."""
    lines = []
    try:
        for name in _digests_in(folder):
            try:
                check_file(folder / name)
            except DataError as error:
                lines.append(str(error))
    except DataError as error:
        lines.append(str(error))
    return lines


def _digests_in(folder: Path) -> dict[str, str]:
    path = folder / FOLDER_DIGESTS
    if not path.is_file():
        return {}
    files = read_sealed(path).get("files")
    if not isinstance(files, dict) or any(Path(name).name != name for name in files):
        raise DataError(f"{path} is not a list of digests")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        values = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except DataError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} does not hold an object")
    return values
