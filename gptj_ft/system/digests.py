"""Compute and check the checksums (XXH3-128, https://xxhash.com) of files, and of JSON objects that contain their own.

They detect damage by a disk, a copy or a careless edit. They are no signature: an attacker can compute them, too.
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

KEY = "xxh3_128"  # of a JSON object's checksum
FOLDER_DIGESTS = "digests.json"  # checksums of the other files in its folder
UNCHECKED = {FOLDER_DIGESTS, "README.md", "LICENSE", "source.json"}  # people edit these, and they change no number
_READ_BYTES = 1 << 20
MAX_CHECKED_BYTES = 4 << 30  # of weights that are checked at each use; `runs verify` checks larger models


def digest_of(value: object) -> str:
    """Return the checksum of a JSON value, independent of spaces and the order of keys."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def digest_of_file(path: Path) -> str:
    """Return the checksum of a file's content."""
    digest = xxhash.xxh3_128()
    try:
        with os.fdopen(open_file(inside(path).resolve(), os.O_RDONLY), "rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _digest_in_folder(path: Path) -> str:
    """Return the checksum of a file of a model folder; users may change an adapter's path to its base model."""
    if path.name != ADAPTER_CONFIG:
        return digest_of_file(path)
    return digest_of({key: value for key, value in read_json(path).items() if key != "base_model_name_or_path"})


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with its checksum as last value."""
    return {**values, KEY: digest_of(values)}


def unsealed(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Verify and remove the checksum of an object; ``path`` is its file, for messages.

    Raises:
        DataError: the checksum is missing or wrong.
    """
    content = dict(values)
    checksum = content.pop(KEY, None)
    if checksum is None:
        raise DataError(f"{path} has no checksum: an earlier version of gptj-ft wrote it, or it is damaged")
    if checksum != digest_of(content):
        raise DataError(f"{path} is damaged: its checksum does not match; restore it from a copy")
    return content


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a JSON file by an object with its checksum, atomically and durably."""
    with disk_errors(path):
        replace_text(path, json.dumps(sealed(values), indent=2) + "\n")


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a file from `write_sealed`; raise `DataError` if it is missing or damaged."""
    return unsealed(read_json(path), path)


def folder_digests(folder: Path, known: Mapping[str, str]) -> dict[str, Any]:
    """Compute the content of a complete model folder's ``digests.json``; ``known`` has checksums by file name."""
    # Sorted, so that the same files give the same checksum file.
    names = sorted(path.name for path in folder.iterdir() if path.name not in UNCHECKED)
    return sealed({"files": {name: known.get(name) or _digest_in_folder(folder / name) for name in names}})


def check_file(path: Path) -> None:
    """Compare a file with its checksum, if its folder has checksums; raise `DataError` if it differs."""
    expected = _digests_in(path.parent).get(path.name)
    if expected is not None and (not path.is_file() or _digest_in_folder(path) != expected):
        raise DataError(
            f"{path} is damaged, or was edited: its checksum does not match. Restore it from a copy; to use the folder "
            f"as it is, remove {FOLDER_DIGESTS} from it"
        )


def check_weights(folder: Path) -> None:
    """Compare the files of a folder of at most `MAX_CHECKED_BYTES` with their checksums; raise `DataError` on damage.

    Reading a model as large as GPT-J once more would take a noticeable part of a short command.
    """
    sizes = [(folder / name).stat().st_size for name in _digests_in(folder) if (folder / name).is_file()]
    if sum(sizes) <= MAX_CHECKED_BYTES and (damage := damaged_files(folder)):
        raise DataError(damage[0])


def damaged_files(folder: Path) -> list[str]:
    """Return a line for each damaged file of a folder with checksums."""
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
        raise DataError(f"{path} is not a list of checksums")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise `DataError` if it is missing or damaged."""
    try:
        values = json.loads(read_text(path))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except DataError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path} does not contain a JSON object")
    return values
