"""One file per architecture; `family_of` finds the one a model folder needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from gptj_ft.errors import DataError, UsageError
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Layout
from gptj_ft.models.supported import unsupported_family
from gptj_ft.system.digests import check_file
from gptj_ft.system.files import read_text, require_plain

# Where a tensor of a checkpoint belongs: ("embed" | "block" | "head", name inside that layer).
Home = tuple[str, str]
PREFIX = "transformer."  # of all names but the head's; files of a model that was saved without its head lack it
LARGEST = {"n_layer": 10_000}  # ten times what anybody has trained; making so many takes seconds
TRUNK = frozenset({"wte", "wpe", "h", "ln_f"})  # what comes after it


@dataclass(frozen=True)
class Leaf:
    """A tensor that another system's checkpoint has in parts: mesh-transformer-jax's shards, Cerebras' q, k and v.

    Attributes:
        name: Hugging Face's, ``{}`` for the number of the block.
        join: how the parts make the tensor, as Hugging Face has it: one after the other along the first axis
            (``rows``) or the second (``columns``), ``sum``, or ``first``: that of shard 0 counts. ``added``: summed,
            and the sum added to every row of the tensor.
        is_transposed: whether each part has its axes the other way round.
    """

    name: str
    join: Literal["rows", "columns", "sum", "first", "added"]
    is_transposed: bool = False


@dataclass(frozen=True)
class Family:
    """An architecture.

    Attributes:
        model_type: Hugging Face's name for it.
        class_name: name of `transformers`' causal language model, for ``architectures`` in ``config.json``.
        read_config: ``config.json`` as a dictionary -> the family's config; refuses what would compute something else.
        build_layers: config -> the layers, ``Embed``, the blocks, ``Head``, on the ``meta`` device.
        keys: Hugging Face's tensor name -> its home; ``{}`` stands for the block number; ``None`` is dropped on
            purpose.
        mesh: mesh-transformer-jax's (module, parameter) -> tensor; empty where that has no such model.
        cerebras: name in a Cerebras checkpoint -> Hugging Face's, with what makes several one if it is made of them,
            in the order of the table, which is that in which the parameters were made; ``None`` is dropped on purpose.
        lora_targets: the linear layers that get adapters unless others are named: by the ends of their names.
    """

    model_type: str
    class_name: str
    read_config: Callable[[Mapping[str, Any]], Any]
    build_layers: Callable[[Any], list[nn.Module]]
    keys: Mapping[str, Home | None]
    mesh: Mapping[tuple[str, str], Leaf] = field(default_factory=dict)
    cerebras: Mapping[str, str | Leaf | None] = field(default_factory=dict)
    lora_targets: tuple[str, ...] = ()

    def locate(self, name: str, num_layers: int) -> tuple[int, str] | None:
        """Return (layer, name inside it) of a checkpoint's tensor; ``None`` if it is dropped on purpose.

        Args:
            name: Hugging Face's name, e.g. ``transformer.h.3.mlp.fc_in.weight``.
            num_layers: layers of the model, embedding and head included.

        Raises:
            KeyError: the architecture has no such tensor.
        """
        number = re.search(r"\.(\d+)\.", name)
        home = self.keys[name.replace(number[0], ".{}.", 1) if number else name]
        if home is None:
            return None
        part, local = home
        index = {"embed": 0, "head": num_layers - 1}.get(part) if part != "block" else int(number[1]) + 1  # type: ignore[index]
        if index is None or (part == "block" and index >= num_layers - 1):
            raise KeyError(name)
        return index, local

    def name_of(self, layer: int, local: str, num_layers: int) -> str:
        """Return Hugging Face's name of a layer's tensor: the inverse of `locate`."""
        part = "embed" if layer == 0 else "head" if layer == num_layers - 1 else "block"
        return self._names[part, local].format(layer - 1)

    @cached_property
    def _names(self) -> dict[Home, str]:
        return {home: name for name, home in self.keys.items() if home is not None}


@dataclass(frozen=True)
class Architecture:
    """A family with one model's config: what a model folder's ``config.json`` says."""

    family: Family
    config: Any
    raw: Mapping[str, Any]

    def layers(self) -> list[nn.Module]:
        """Return the layers on the ``meta`` device, in streaming order."""
        return self.family.build_layers(self.config)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for users on how this model is treated here."""
        rates = {key: value for key, value in self.raw.items() if key.endswith("_pdrop") and value}
        if not rates:
            return ()
        named = ", ".join(f"{key} {value}" for key, value in rates.items())
        return (f"dropout in config.json ({named}) is not applied: training here is without",)

    def ties(self) -> dict[str, str]:
        """Return the names of tensors that are others once more: a tied head's, and the embedding's that it is."""
        layers, name_of = self.layers(), self.family.name_of
        return {
            name_of(index, local, len(layers)): name_of(TIED_SOURCE_LAYER, loan.source, len(layers))
            for index, layer in enumerate(layers)
            for local, loan in Layout.of(layer).tied.items()
        }


def check_numbers(config: Any) -> None:
    """Refuse numbers in a config that no model has: what is made from them could take all memory, or fail anywhere.

    Raises:
        DataError: names the first of them.
    """
    for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "d_inner"):
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value <= LARGEST.get(name, 2**31):
            name = "n_inner" if name == "d_inner" else name
            raise DataError(f"{name} must be a positive integer that a model can have, not {value!r}")
    epsilon = config.layer_norm_epsilon
    if type(epsilon) not in (int, float) or not 0 <= epsilon < 1:
        raise DataError(f"layer_norm_epsilon must be a number from 0 to 1, not {epsilon!r}")


def full_name(name: str) -> str:
    """Return a tensor's name in a whole model, given that in a file of whichever form."""
    return PREFIX + name if name.partition(".")[0] in TRUNK else name


def families() -> dict[str, Family]:
    """Return the supported architectures by ``model_type``."""
    from gptj_ft.models import gpt2, gptj

    return {family.model_type: family for family in (gptj.FAMILY, gpt2.FAMILY)}


def read_architecture(folder: Path) -> Architecture:
    """Read a model folder's ``config.json``.

    Raises:
        UsageError: there is none, or it names an architecture that is not supported.
        DataError: it is not JSON, contradicts the architecture, is not what was written, or the folder has a link to
            elsewhere.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{folder} is not a model folder: it has no config.json")
    require_plain(folder)
    try:
        check_file(path)
        raw = json.loads(read_text(path))
    except DataError:
        raise
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise DataError(f"{path}: expected an object, found {type(raw).__name__}")
    return architecture_of(raw, path)


def architecture_of(raw: Mapping[str, Any], path: Path) -> Architecture:
    """Return the architecture that a config describes.

    Args:
        raw: content of ``config.json``.
        path: file that it was read from.

    Raises:
        UsageError: an architecture that is not supported.
        DataError: it contradicts the architecture.
    """
    model_type, known = str(raw.get("model_type")), families()
    if model_type not in known:
        raise unsupported_family(path, raw.get("model_type"))
    family = known[model_type]
    for name in ("dtype", "torch_dtype"):  # `transformers` believes them when it writes texts
        if raw.get(name) is not None and not isinstance(getattr(torch, str(raw[name]), None), torch.dtype):
            raise DataError(f"{path}: {name} {raw[name]!r} is no type of numbers")
    try:
        return Architecture(family, family.read_config(raw), raw)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
