"""Read checkpoints of the Cerebras model zoo, releases 1.7 to 2.x: ``.mdl`` files, and ``.bin`` with the same names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from gptj_ft.checkpoints.foreign.cerebras_mdl import MdlFile, is_hdf5
from gptj_ft.checkpoints.foreign.cerebras_moments import has_cerebras_moments, open_cerebras_moments
from gptj_ft.checkpoints.foreign.cerebras_names import hugging_face_checkpoint, own_name
from gptj_ft.checkpoints.foreign.config import architecture_from, find_config, read_foreign_config
from gptj_ft.checkpoints.model_folder import WEIGHTS, Checkpoint, weights_of
from gptj_ft.checkpoints.source import CheckpointSource, OpenRequest
from gptj_ft.checkpoints.weight_file import Shard, open_shard
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import Family, architecture_of, families

TYPICAL = "transformer_decoder.layers."


def detect_cerebras(path: Path) -> bool:
    """Recognize an HDF5 file, or a folder whose weights have Cerebras' names.

    Raises:
        DataError: the folder's weights are damaged.
    """
    if path.is_dir() and any((path / name).is_file() for name in WEIGHTS):
        return any(TYPICAL in name for name in weights_of(path))
    return is_hdf5(path)


@contextmanager
def open_cerebras_source(request: OpenRequest) -> Iterator[CheckpointSource]:
    """Open a checkpoint with its architecture and optimizer state."""
    path = request.path
    config = request.config or find_config([path if path.is_dir() else path.parent])
    family = architecture_of(read_foreign_config(config), config).family if config else families()["gptj"]
    checkpoint, mdl = _open_tensors(path, family)
    opener = partial(open_cerebras_moments, mdl, family) if mdl and has_cerebras_moments(mdl) else None
    step = (mdl.step if mdl else None) or 0
    yield CheckpointSource(path, "cerebras", architecture_from(config, checkpoint), checkpoint, path, step, opener)


def _open_tensors(path: Path, family: Family) -> tuple[Checkpoint, MdlFile | None]:
    """Open a ``.mdl``, a ``.bin`` or a folder of ``.bin``; return the tensors, and the file if it is a ``.mdl``.

    Raises:
        DataError: the file is damaged.
    """
    mdl = MdlFile(path) if is_hdf5(path) else None
    if mdl is not None:
        shards: Mapping[str, Shard] = dict.fromkeys(mdl.parameters.entries, mdl.parameters)
    elif path.is_dir():
        shards = weights_of(path)
    elif path.is_file():
        shard = open_shard(path)
        shards = dict.fromkeys(shard.entries, shard)
    else:
        raise UsageError(f"{path} does not exist")
    _compare_copies(path, shards)
    return hugging_face_checkpoint(path, shards, family), mdl


def _compare_copies(path: Path, shards: Mapping[str, Shard]) -> None:
    """Check that the two copies of the last norm are equal; only one of them is converted."""
    own = {own_name(name): name for name in shards}
    for part in ("weight", "bias"):
        first, second = own.get(f"transformer_decoder.norm.{part}"), own.get(f"ln_f.{part}")
        if first and second and not torch.equal(shards[first].read(first), shards[second].read(second)):
            raise DataError(f"{path}: {first} and {second} are copies of one tensor, but they differ")
