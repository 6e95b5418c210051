"""Choose the parameters of a model that a run trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial

from torch import nn

from gptj_ft.config.options import Recipe
from gptj_ft.errors import UsageError, did_you_mean
from gptj_ft.models import lora
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Layout, tied_parameters
from gptj_ft.models.registry import Architecture


@dataclass(frozen=True)
class Selection:
    """Layouts of the trained and the frozen parameters of each layer."""

    build: Callable[[], Sequence[nn.Module]]  # builds the layers on the ``meta`` device
    trained: Sequence[Layout]  # parameters with gradients, moments and a place in checkpoints; may be empty
    frozen: Sequence[Layout]  # all other parameters
    adapters: Mapping[str, lora.Rank] = field(default_factory=dict)  # by Hugging Face's names of linear layers

    @classmethod
    def of(cls, build: Callable[[], Sequence[nn.Module]], is_trained: Callable[[int, str], bool]) -> Selection:
        """Select the parameters for which ``is_trained(layer, name)`` is true."""
        trained, frozen = [], []
        for index, layer in enumerate(build()):
            homes = {name: (index, name) for name, _ in layer.named_parameters()}
            # A tied parameter is trained if its source is.
            homes |= {name: (TIED_SOURCE_LAYER, tie.source) for name, tie in tied_parameters(layer).items()}
            chosen = {name for name, home in homes.items() if is_trained(*home)}
            trained.append(Layout.of(layer, chosen))
            frozen.append(Layout.of(layer, homes.keys() - chosen, copies=True))
        return cls(build, trained, frozen)


def select(architecture: Architecture, recipe: Recipe) -> Selection:
    """Select the parameters that a recipe trains."""
    if recipe.method == "lora":
        if recipe.train:
            raise UsageError("train selects parameters for --method full; with --method lora use lora.targets")
        options = recipe.lora
        scaling = options.alpha / (math.sqrt(options.rank) if options.rslora else options.rank)
        rank = lora.Rank(options.rank, scaling, "trained" if options.dora else None)
        adapters = dict.fromkeys(_targets(architecture, options.targets), rank)
        _check_rank(architecture, adapters, options.rank)
        return adapted(architecture, adapters, architecture.trained_whole, options.dropout)
    if recipe.method == "sampled" and recipe.train:
        raise UsageError("train selects parameters for --method full; --method sampled trains all, a few at a time")
    names = locate_parameters(architecture)
    patterns = recipe.train or ("*",)
    trained = {names[name] for name in (*match(patterns, names, "--train", "parameter"), *architecture.new)}
    return Selection.of(architecture.layers, lambda *position: position in trained)


def _check_rank(architecture: Architecture, adapters: Iterable[str], rank: int) -> None:
    """Refuse a rank above that of every adapted weight: all of its products have a lower one."""
    modules = lora.linear_layers(architecture)
    weights = [architecture.skeleton[layer].get_submodule(local) for layer, local in map(modules.__getitem__, adapters)]
    most = max((min(lora.widths(weight)) for weight in weights), default=rank)
    if rank > most:
        raise UsageError(
            f"lora.rank: {rank:,} is more than any adapted weight of this model can use: at most {most:,}; "
            "--method full trains whole weights"
        )


def _targets(architecture: Architecture, patterns: Sequence[str]) -> list[str]:
    """Return the linear layers of ``lora.targets``, in order."""
    names = lora.targets_in(architecture)
    if not patterns:
        return [name for name in names if name.rpartition(".")[2] in lora.QUERIES_AND_VALUES]
    others = [pattern for pattern in patterns if pattern != lora.ALL_LINEAR]
    chosen = set(match(others, names, "--set lora.targets", "linear layer"))
    chosen |= set(lora.in_blocks(architecture) if lora.ALL_LINEAR in patterns else ())
    return [name for name in names if name in chosen]


def locate_parameters(architecture: Architecture) -> dict[str, tuple[int, str]]:
    """Return each parameter's layer and name inside it, by Hugging Face's name."""
    layers = architecture.skeleton
    return {
        architecture.family.name_of(index, local, len(layers)): (index, local)
        for index, layer in enumerate(layers)
        for local, _ in layer.named_parameters()
    }


def adapted(
    architecture: Architecture, adapters: Mapping[str, lora.Rank], whole: Collection[str] = (), dropout: float = 0.0
) -> Selection:
    """Select the adapters of some linear layers, and parameters trained in full.

    Args:
        adapters: linear layers with an adapter, by Hugging Face's names.
        whole: names of parameters trained in full: PEFT's ``modules_to_save``.
        dropout: dropout rate of the adapters' inputs.
    """
    build, positions = partial(lora.adapted_layers, architecture, adapters, dropout), locate_parameters(architecture)
    chosen = {positions[name] for name in whole}
    selection = Selection.of(build, lambda *position: position in chosen or lora.is_adapter_parameter(position[1]))
    return replace(selection, adapters=adapters)


def match(patterns: Sequence[str], names: Iterable[str], option: str, kind: str) -> list[str]:
    """Return the names that match any pattern, in order; fail for a pattern without a match.

    Args:
        patterns: shell patterns (``*``, ``?``, ``[0-7]``; ``*`` matches dots too) for whole names, or for endings after
            a dot: ``h.2[0-7].*`` matches ``transformer.h.20.ln_1.weight``.
        option: name of the option with the patterns, for messages.
        kind: kind of the names, for messages.
    """
    names = list(names)
    matches = set()
    for pattern in patterns:
        matching = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not matching:
            hint = did_you_mean(pattern, dict.fromkeys(each for name in names for each in _patterns_of(name)))
            raise UsageError(
                f"{option} '{pattern}' matches no {kind} of this model{hint}; there are {names[0]} to {names[-1]}"
            )
        matches |= matching
    return [name for name in names if name in matches]


def _patterns_of(name: str) -> Iterator[str]:
    """Yield the patterns that match a name: its endings, complete or with ``*`` for the last parts."""
    parts = name.split(".")
    for start in range(len(parts)):
        yield ".".join(parts[start:])
        yield from (".".join([*parts[start:end], "*"]) for end in range(start + 1, len(parts)))
