"""Map Cerebras' tensor names to Hugging Face's.

A tensor is named by its path: ``model.transformer_decoder.layers.0.norm1.weight``. `Family.cerebras` has the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from gptj_ft.checkpoints.foreign.cerebras_mdl import MODEL_PREFIX
from gptj_ft.checkpoints.foreign.joined import JoinedShard
from gptj_ft.checkpoints.model_folder import Checkpoint
from gptj_ft.checkpoints.weight_file import Shard
from gptj_ft.errors import DataError
from gptj_ft.models.registry import Family, Leaf


def hugging_face_checkpoint(path: Path, shards: Mapping[str, Shard], family: Family) -> Checkpoint:
    """Return tensors that have Cerebras' names under Hugging Face's.

    Args:
        path: name in messages.
        shards: file of each tensor, by Cerebras' name.

    Raises:
        DataError: a part of a tensor is missing.
    """
    return Checkpoint(path, _join_parts(path, shards, family), partial(_hugging_face_name, family))


def own_name(name: str) -> str:
    """Return a name without its prefix: releases since 1.9 write it once, older ones twice, and .bin files never."""
    return re.sub(rf"^({re.escape(MODEL_PREFIX)})+", "", name)


def pattern_of(own: str) -> tuple[str, str]:
    """Split a name into a pattern with ``{}`` for the block number, and that number.

    >>> pattern_of("transformer_decoder.layers.7.norm1.bias")
    ('transformer_decoder.layers.{}.norm1.bias', '7')
    """
    number = re.search(r"\.layers\.(\d+)\.", own)
    return (own.replace(number[0], ".layers.{}.", 1), number[1]) if number else (own, "")


def _join_parts(path: Path, shards: Mapping[str, Shard], family: Family) -> dict[str, Shard]:
    """Join the tensors that Hugging Face stores as one (q, k and v); leave the others as they are."""
    single, order = dict(shards), list(family.cerebras)
    groups: dict[Leaf, list[tuple[int, Shard, str]]] = {}
    for name, shard in shards.items():
        pattern, number = pattern_of(own_name(name))
        leaf = family.cerebras.get(pattern)
        if isinstance(leaf, Leaf):
            del single[name]
            numbered = replace(leaf, name=leaf.name.format(number))
            groups.setdefault(numbered, []).append((order.index(pattern), shard, name))
    joined: dict[str, Shard] = {}
    for leaf, parts in groups.items():
        pattern, _ = pattern_of(own_name(parts[0][2]))
        expected = sum(other == family.cerebras[pattern] for other in family.cerebras.values())
        if len(parts) != expected:
            raise DataError(f"{path}: {leaf.name} consists of {expected} tensors, but the file has {len(parts)}")
        joined[leaf.name] = JoinedShard(leaf, [(shard, name) for _, shard, name in sorted(parts, key=lambda it: it[0])])
    return {**single, **joined}


def _hugging_face_name(family: Family, name: str) -> str | None:
    own = own_name(name)
    pattern, number = pattern_of(own)
    target = family.cerebras.get(pattern, own)  # `check_tensors` reports a name that is not in the table
    assert not isinstance(target, Leaf), "_join_parts has replaced these"
    return target and target.format(number)
