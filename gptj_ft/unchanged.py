"""Whether the weights that a run reads, and does not train, are still those that it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from gptj_ft.errors import DataError
from gptj_ft.formats.huggingface import weights_of

SAMPLES = 32  # of a file; another training has changed every one
SAMPLE_BYTES = 4096


def fingerprint(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size of each weight file of a model folder and the XXH3-64 digest of pages from all over it, by name.

    Reading all of a model would take as long as a pass of training; so this finds another model or another type, and
    not each flipped bit.

    Raises:
        UsageError, DataError: as `huggingface.weights_of`.
    """
    return {path.name: _of_file(path) for path in sorted({shard.path for shard in weights_of(folder).values()})}


def check_unchanged(folder: Path, began_with: dict[str, dict[str, Any]]) -> None:
    """Check that a model folder is the one that a run began with.

    Raises:
        DataError: it is not; names the first file that differs.
        UsageError: as `huggingface.weights_of`.
    """
    now = fingerprint(folder)
    for name in [*began_with, *now]:
        if now.get(name) != began_with.get(name):
            what = "is new" if name not in began_with else "is missing" if name not in now else "has changed"
            raise DataError(
                f"{folder / name} {what} since the run began; what it does not train is read from there, so that it "
                "would go on from another model: put the old one back, or start a new run"
            )


def _of_file(path: Path) -> dict[str, Any]:
    size, digest = path.stat().st_size, xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(sample * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return {"bytes": size, "sampled_xxh3_64": digest.hexdigest()}
