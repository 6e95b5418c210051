"""Fingerprint a model folder by samples of its files, or of its tensors, to notice that it is another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from gptj_ft.checkpoints.adapter import ADAPTER_WEIGHTS, base_folder
from gptj_ft.checkpoints.model_folder import Checkpoint, weights_of
from gptj_ft.errors import DataError
from gptj_ft.models.registry import Architecture
from gptj_ft.system.memory import bytes_of
from gptj_ft.system.paths import ADAPTER_CONFIG

_SAMPLES = 32  # of a file; another training has changed every one
SAMPLE_BYTES = 4096


def fingerprint(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sizes of a model folder's weight files and the XXH3-64 digests of pages from all over them, by name.

    The same of ``config.json``, which fits into the pages. Reading all of a model would take as long as a pass of
    training; so this finds another model or another type, and not each flipped bit.

    Raises:
        UsageError, DataError: as `model_folder.weights_of`.
    """
    weights = sorted({shard.path for shard in weights_of(folder).values()})
    return {path.name: _of_file(path) for path in (folder / "config.json", *weights)}


def tuned_fingerprint(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of a model folder; of an adapter, that of its files and of the model that it is for."""
    own = [folder / name for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS) if (folder / name).is_file()]
    return {**fingerprint(base_folder(folder)), **{path.name: _of_file(path) for path in own}}


def check_unchanged(folder: Path, began_with: dict[str, dict[str, Any]]) -> None:
    """Check that a model folder is the one that a run began with.

    Raises:
        DataError: it is not; names the first file that differs.
        UsageError: as `model_folder.weights_of`.
    """
    now = fingerprint(folder)
    for name in [*began_with, *now]:
        if now.get(name) != began_with.get(name):
            what = "is new" if name not in began_with else "is missing" if name not in now else "has changed"
            raise DataError(
                f"{folder / name} {what} since the run began, which would go on from another model: put the old one "
                "back, name the folder that holds it with --model, or start a new run"
            )


def sampled_digest(architecture: Architecture, checkpoint: Checkpoint) -> str:
    """Return the XXH3-128 digest of some rows of each tensor of a model, however they are divided into files.

    What comes with an adapter is not counted, nor what the model lacks.
    """
    digest, whole = xxhash.xxh3_128(), architecture.trained_whole
    for layer in range(len(architecture.skeleton)):
        for _, name in sorted(checkpoint.names_of(architecture, layer).items()):
            if name in whole or name not in checkpoint.names:
                continue
            entry = checkpoint.entry(name)
            count = entry.rows_in(SAMPLE_BYTES)
            digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
            for start in sorted({0, entry.rows // 2, max(0, entry.rows - count)}):
                digest.update(bytes_of(checkpoint.read(name, start, min(start + count, entry.rows))))
    return digest.hexdigest()


def _of_file(path: Path) -> dict[str, Any]:
    size, digest = path.stat().st_size, xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(sample * max(0, size - SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return {"bytes": size, "sampled_xxh3_64": digest.hexdigest()}
