"""Fingerprint a model by samples of its files or tensors, to detect that a run's model was replaced."""

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

_SAMPLES = 32  # pages per file; further training changes all of them
SAMPLE_BYTES = 4096


def fingerprint(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and XXH3-64 digest of sampled pages for ``config.json`` and each weight file, by file name.

    It detects another model or another type, but not every flipped bit.

    Raises:
        UsageError, DataError: see `model_folder.weights_of`.
    """
    # Samples, because reading the whole model takes as long as one pass of training.
    weights = sorted({shard.path for shard in weights_of(folder).values()})
    return {path.name: sampled_file(path) for path in (folder / "config.json", *weights)}


def tuned_fingerprint(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of a model; for an adapter, of its own files and of its base model."""
    own = [folder / name for name in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS) if (folder / name).is_file()]
    return {**fingerprint(base_folder(folder)), **{path.name: sampled_file(path) for path in own}}


def check_unchanged(folder: Path, at_start: dict[str, dict[str, Any]]) -> None:
    """Check that a model folder still has the fingerprint of the run's start."""
    now = fingerprint(folder)
    for name in [*at_start, *now]:
        if now.get(name) != at_start.get(name):
            change = "is new" if name not in at_start else "is missing" if name not in now else "has changed"
            raise DataError(
                f"{folder / name} {change} since the run began, so it would resume from another model: restore the old "
                "file, name the folder that holds it with --model, or start a new run"
            )


def sampled_digest(architecture: Architecture, checkpoint: Checkpoint) -> str:
    """Return the XXH3-128 digest of some rows of each tensor of a model, independent of its files.

    Tensors that an adapter replaces, and optional tensors that the model lacks, do not count.
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


def sampled_file(path: Path) -> dict[str, Any]:
    """Return size and XXH3-64 digest of sampled pages of a file."""
    size, digest = path.stat().st_size, xxhash.xxh3_64()
    try:
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                # Evenly spaced, including the first and the last page.
                file.seek(sample * max(0, size - SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return {"bytes": size, "sampled_xxh3_64": digest.hexdigest()}
