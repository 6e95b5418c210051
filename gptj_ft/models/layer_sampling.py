"""Choose the layers that each step of a run trains: all, or a few random blocks for some steps (LISA).

Source: https://arxiv.org/abs/2403.17919. Its authors' program (https://github.com/OptimalScale/LMFlow) draws blocks in
the same way, and trains embedding and head in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gptj_ft.config.options import Recipe
from gptj_ft.errors import UsageError
from gptj_ft.models.dropout import seed_of
from gptj_ft.models.layout import NO_PARAMETERS, Layout


@dataclass(frozen=True)
class EveryLayer:
    """Train every layer in each step."""

    def trains(self, layer: int, step: int) -> bool:
        """Tell whether a layer is trained in the step after ``step`` steps."""
        return True

    def last_step(self, layer: int, step: int) -> int:
        """Return the number of the last of ``step`` steps that trained a layer, from 1; 0: none.

        It is the stamp of the layer's file. A skipped fp16 step counts: it stamps the files of its layers, too.
        """
        return step

    def is_behind(self, layer: int, step: int, stamp: int | None) -> bool:
        """Tell whether a layer's file, by its stamp, lacks the update of the last of ``step`` steps."""
        return step > 0 and self.last_step(layer, step) == step and stamp == self.last_step(layer, step - 1)

    def allows(self, updates: Sequence[int] | None, step: int) -> bool:
        """Tell whether these can be the updates of each layer in ``step`` steps; ``None``: the same number for all."""
        return updates is None


EVERY_LAYER = EveryLayer()


@dataclass(frozen=True)
class FixedLayers(EveryLayer):
    """Train the same layers in each step; for forecasts."""

    layers: frozenset[int]

    def trains(self, layer: int, step: int) -> bool:
        return layer in self.layers

    def last_step(self, layer: int, step: int) -> int:
        return step if layer in self.layers else 0


@dataclass(frozen=True)
class SampledLayers(EveryLayer):
    """Train random blocks, new ones in each period; a pure function of seed and step."""

    num_layers: int  # of the model, with embedding and head
    seed: int
    num_blocks: int  # trained in a period
    period: int  # steps
    vocabulary_every: int  # embedding and head are trained in every n-th period, from the first

    def trains(self, layer: int, step: int) -> bool:
        return layer in _draw(self, step // self.period)

    def last_step(self, layer: int, step: int) -> int:
        for period in range((step - 1) // self.period, -1, -1):
            if layer in _draw(self, period):
                return min(step, (period + 1) * self.period)
        return 0

    def allows(self, updates: Sequence[int] | None, step: int) -> bool:
        return updates is not None and len(updates) == self.num_layers and max(updates) <= step

    @property
    def typical(self) -> list[tuple[float, FixedLayers]]:
        """Typical sets of layers and their shares of the steps: blocks at equal distances, with and without the ends.

        The lowest block decides where backward ends. On average a draw divides the blocks evenly.
        """
        top = self.num_layers - 1
        distance = top / (self.num_blocks + 1)
        blocks = frozenset(min(max(round(distance * (n + 1)), 1), top - 1) for n in range(self.num_blocks))
        if len(blocks) < self.num_blocks:  # nearly all blocks
            blocks = frozenset(range(1, self.num_blocks + 1))
        share = 1 / self.vocabulary_every
        sets = [(share, FixedLayers(blocks | {0, top})), (1 - share, FixedLayers(blocks))]
        return [each for each in sets if each[0]]


@lru_cache(maxsize=4096)
def _draw(sampled: SampledLayers, period: int) -> frozenset[int]:
    """Draw the layers of a period."""
    top = sampled.num_layers - 1
    # Hashes, not a generator's permutation, which may change with a version of Python or numpy.
    order = sorted(range(1, top), key=lambda layer: seed_of((sampled.seed, "sampled layers", period, layer)))
    ends = (0, top) if period % sampled.vocabulary_every == 0 else ()
    return frozenset((*order[: sampled.num_blocks], *ends))


def layouts_of_step(
    choice: EveryLayer, step: int, trained: Sequence[Layout], frozen: Sequence[Layout]
) -> tuple[Sequence[Layout], Sequence[Layout]]:
    """Return trained and frozen parameters of each layer in the step after ``step`` steps."""
    active = [choice.trains(layer, step) for layer in range(len(trained))]
    if all(active):
        return trained, frozen
    return (
        [layout if is_active else NO_PARAMETERS for layout, is_active in zip(trained, active, strict=True)],
        # Sampling is for full training: a layer with trained parameters has no frozen ones.
        [rest if is_active else whole for rest, whole, is_active in zip(frozen, trained, active, strict=True)],
    )


def layer_choice(recipe: Recipe, num_layers: int) -> EveryLayer:
    """Return the choice of layers of a run.

    Raises:
        UsageError: a period would train more blocks than the model has.
    """
    if recipe.method != "sampled":
        return EVERY_LAYER
    options, blocks = recipe.sampled, num_layers - 2
    if options.layers > blocks:
        raise UsageError(
            f"sampled.layers is {options.layers}, but the model has {blocks} blocks: use a smaller number, or "
            "--method full"
        )
    return SampledLayers(num_layers, recipe.seed, options.layers, options.period, options.vocabulary_every)
