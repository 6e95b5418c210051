"""Read checkpoints of the Cerebras model zoo, releases 1.7 to 2.x: ``.mdl``, and ``.bin`` with the same names.

Every tensor is named by its path: ``model.transformer_decoder.layers.0.norm1.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gptj_ft.checkpoints.formats.cerebras_hdf5 import MODEL_PREFIX, MdlFile, is_hdf5
from gptj_ft.checkpoints.formats.tensor_info import Shard, TensorInfo
from gptj_ft.checkpoints.formats.weight_file import open_shard
from gptj_ft.checkpoints.model_folder import Checkpoint, weights_of
from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.registry import Family, Leaf
from gptj_ft.system.memory import contiguous

TYPICAL = "transformer_decoder.layers."


def has_cerebras_names(folder: Path) -> bool:
    """Tell whether the weights of a folder go by Cerebras' names.

    Raises:
        UsageError, DataError: as `model_folder.weights_of`.
    """
    return any(TYPICAL in name for name in weights_of(folder))


def open_cerebras(path: Path, family: Family) -> tuple[Checkpoint, MdlFile | None]:
    """Open a ``.mdl``, a ``.bin`` or a folder of it: its tensors under Hugging Face's names, and the ``.mdl``.

    Raises:
        UsageError: no such file, or h5py is not installed.
        DataError: damaged; or a tensor that is there twice, as some are, is another the second time.
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
    return checkpoint_of(path, shards, family), mdl


def checkpoint_of(path: Path, shards: Mapping[str, Shard], family: Family) -> Checkpoint:
    """Return tensors that go by Cerebras' names under Hugging Face's.

    Args:
        path: name in messages.
        shards: file of each tensor, by its name in there.
        family: architecture of the model.

    Raises:
        DataError: one that is made of several lacks some.
    """
    return Checkpoint(path, _joined(path, shards, family), partial(_our_name, family))


def own_name(name: str) -> str:
    """Return a name without what stands before all of them: once since 1.9, before twice, in a .bin not at all."""
    return re.sub(rf"^({re.escape(MODEL_PREFIX)})+", "", name)


def pattern_of(own: str) -> tuple[str, str]:
    """Return a name with ``{}`` for the number of its block, and that number."""
    number = re.search(r"\.layers\.(\d+)\.", own)
    return (own.replace(number[0], ".layers.{}.", 1), number[1]) if number else (own, "")


class JoinedShard:
    """Tensor joined from several, side by side, or transposed from one."""

    def __init__(self, leaf: Leaf, parts: Sequence[tuple[Shard, str]]) -> None:
        self.path, self._leaf, self._parts = parts[0][0].path, leaf, parts
        found = [shard.entries[name] for shard, name in parts]
        shape = list(found[0].shape)  # theirs, along whose first axis they lie side by side
        for entry, (_, name) in zip(found, parts, strict=True):
            if entry.shape[1:] != found[0].shape[1:] or entry.dtype != found[0].dtype or not entry.shape:
                raise DataError(f"{self.path}: {name} is of another shape or type than what belongs to it")
        shape[0] = sum(entry.rows for entry in found)
        self.entries: Mapping[str, TensorInfo] = {
            leaf.name: TensorInfo(found[0].dtype, tuple(shape[::-1] if leaf.is_transposed else shape))
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        whole = torch.cat([shard.read(own) for shard, own in self._parts])
        return contiguous(whole.t() if self._leaf.is_transposed else whole)[start:stop]

    def rows_at_once(self, name: str) -> int:
        return self.entries[name].rows


def _joined(path: Path, shards: Mapping[str, Shard], family: Family) -> dict[str, Shard]:
    """Return the shards by the names in them, but those of tensors in parts joined, by Hugging Face's names."""
    apart, order = dict(shards), list(family.cerebras)
    groups: dict[Leaf, list[tuple[int, Shard, str]]] = {}
    for name, shard in shards.items():
        pattern, number = pattern_of(own_name(name))
        leaf = family.cerebras.get(pattern)
        if isinstance(leaf, Leaf):
            del apart[name]
            here = replace(leaf, name=leaf.name.format(number))
            groups.setdefault(here, []).append((order.index(pattern), shard, name))
    joined: dict[str, Shard] = {}
    for leaf, parts in groups.items():
        pattern, _ = pattern_of(own_name(parts[0][2]))
        expected = sum(other == family.cerebras[pattern] for other in family.cerebras.values())
        if len(parts) != expected:
            raise DataError(f"{path}: {leaf.name} is made of {expected} tensors, and {len(parts)} of them are there")
        joined[leaf.name] = JoinedShard(leaf, [(shard, name) for _, shard, name in sorted(parts, key=lambda it: it[0])])
    return {**apart, **joined}


def _our_name(family: Family, name: str) -> str | None:
    own = own_name(name)
    pattern, number = pattern_of(own)
    ours = family.cerebras.get(pattern, own)  # if it is no tensor of the family, whoever checks it will say so
    assert not isinstance(ours, Leaf), "these have been joined"
    return ours and ours.format(number)


def _compare_copies(path: Path, shards: Mapping[str, Shard]) -> None:
    """Check that the copies of the last norm, of which one is left out, are the same."""
    own = {own_name(name): name for name in shards}
    for part in ("weight", "bias"):
        first, second = own.get(f"transformer_decoder.norm.{part}"), own.get(f"ln_f.{part}")
        if first and second and not torch.equal(shards[first].read(first), shards[second].read(second)):
            raise DataError(f"{path}: {first} and {second} should be the same, and are not")
