"""Which parameters of a model a run trains, and which it leaves as they are."""

from __future__ import annotations

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
    """The layers of a model and, for each of them, where what is trained of it lies, and where the rest.

    Attributes:
        build: makes the layers, on the ``meta`` device.
        trained: layouts of what has gradients, moments and a place in checkpoints; empty where that is nothing.
        frozen: layouts of the other parameters.
        adapters: the linear layers that have one, by Hugging Face's names; then these are what is trained.
    """

    build: Callable[[], Sequence[nn.Module]]
    trained: Sequence[Layout]
    frozen: Sequence[Layout]
    adapters: Mapping[str, lora.Rank] = field(default_factory=dict)

    @classmethod
    def of(cls, build: Callable[[], Sequence[nn.Module]], is_trained: Callable[[int, str], bool]) -> Selection:
        """Return the selection in which those parameters are trained of which layer and name say so."""
        trained, frozen = [], []
        for index, layer in enumerate(build()):
            homes = {name: (index, name) for name, _ in layer.named_parameters()}
            homes |= {name: (TIED_SOURCE_LAYER, tie.source) for name, tie in tied_parameters(layer).items()}
            chosen = {name for name, home in homes.items() if is_trained(*home)}
            trained.append(Layout.of(layer, chosen))
            frozen.append(Layout.of(layer, homes.keys() - chosen, copies=True))
        return cls(build, trained, frozen)


def select(architecture: Architecture, recipe: Recipe) -> Selection:
    """Select the parameters that a recipe trains.

    Raises:
        UsageError: a pattern that matches nothing.
    """
    if recipe.method == "lora":
        if recipe.train:
            raise UsageError(
                "train chooses what of the model is trained, with --method full; with lora use lora.targets"
            )
        targets = recipe.lora.targets or architecture.family.lora_targets
        chosen = match(targets, lora.targets_in(architecture), "--set lora.targets", "linear layer")
        rank = lora.Rank(recipe.lora.rank, recipe.lora.alpha / recipe.lora.rank)
        return adapted(architecture, dict.fromkeys(chosen, rank), architecture.trained_whole, recipe.lora.dropout)
    names = places_of(architecture)
    patterns = recipe.train or ("*",)
    trained = {names[name] for name in (*match(patterns, names, "--train", "parameter"), *architecture.new)}
    return Selection.of(architecture.layers, lambda *place: place in trained)


def places_of(architecture: Architecture) -> dict[str, tuple[int, str]]:
    """Return the layer and the name in it of each parameter, by Hugging Face's name."""
    layers = architecture.skeleton
    return {
        architecture.family.name_of(index, local, len(layers)): (index, local)
        for index, layer in enumerate(layers)
        for local, _ in layer.named_parameters()
    }


def adapted(
    architecture: Architecture, adapters: Mapping[str, lora.Rank], whole: Collection[str] = (), dropout: float = 0.0
) -> Selection:
    """Return a model with adapters on some of its linear layers, of which only these are trained.

    Args:
        architecture: architecture of the model.
        adapters: the linear layers that have one, by Hugging Face's names.
        whole: names of parameters that are trained, too: PEFT's ``modules_to_save``.
        dropout: dropout probability of the adapters' inputs.
    """
    build, places = partial(lora.adapted_layers, architecture, adapters, dropout), places_of(architecture)
    chosen = {places[name] for name in whole}
    selection = Selection.of(build, lambda *place: place in chosen or lora.is_adapter_parameter(place[1]))
    return replace(selection, adapters=adapters)


def match(patterns: Sequence[str], names: Iterable[str], option: str, what: str) -> list[str]:
    """Return the names that a pattern matches, in their order.

    Args:
        patterns: shell patterns (``*``, ``?``, ``[0-7]``; ``*`` goes across dots) for whole names, or for what follows
            any dot in them: ``h.2[0-7].*`` matches ``transformer.h.20.ln_1.weight``.
        names: dotted.
        option: name of the option that has the patterns.
        what: is named.

    Raises:
        UsageError: a pattern that matches no name; says which name is like it.
    """
    names = list(names)
    found = set()
    for pattern in patterns:
        matching = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
        if not matching:
            hint = did_you_mean(pattern, dict.fromkeys(each for name in names for each in _patterns_of(name)))
            raise UsageError(
                f"{option} '{pattern}' matches no {what} of this model{hint}; there are {names[0]} to {names[-1]}"
            )
        found |= matching
    return [name for name in names if name in found]


def _patterns_of(name: str) -> Iterator[str]:
    """Yield the patterns that match a name: its endings, whole or with ``*`` for the last parts."""
    parts = name.split(".")
    for start in range(len(parts)):
        yield ".".join(parts[start:])
        yield from (".".join([*parts[start:end], "*"]) for end in range(start + 1, len(parts)))
