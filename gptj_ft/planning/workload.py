"""Describe the workload of a run: the model's layouts, the tokens of its steps, its FLOPs and timed seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from gptj_ft.config.options import Recipe
from gptj_ft.models.batch import BUCKET_PAIRS, most_padded, padded_length, rounded_up
from gptj_ft.models.layer_sampling import EVERY_LAYER, EveryLayer, SampledLayers, layouts_of_step
from gptj_ft.models.layout import NO_PARAMETERS, TIED_SOURCE_LAYER, Layout
from gptj_ft.models.products import Products
from gptj_ft.planning.constants import WEIGHT_BYTES, WEIGHT_COPIES
from gptj_ft.planning.flops import Flops, count_flops
from gptj_ft.streaming.step import HEAD_CHUNK_BYTES
from gptj_ft.streaming.stores.placement import Place, Placement
from gptj_ft.streaming.vocabulary import TILE_BYTES

FP32_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class StepTokens:
    """Tokens of the optimizer steps of a run."""

    micro_batch: int  # maximum of a micro-batch
    most: int  # maximum of a step
    mean: float
    targets: float  # mean number of target tokens
    micro_batches: float = 0.0  # mean number; 0: the fewest that hold the mean tokens
    fillers: float = 0.0  # mean number of padding tokens, see `step.pad_batches`
    most_targets: int = 0  # maximum of a micro-batch; 0: one per token
    pairs: int = 0
    """Token pairs within a document in the largest step, padding included; 0: causal kernels keep no weights."""

    @property
    def num_micro_batches(self) -> float:
        """Mean number of micro-batches."""
        return max(1.0, self.micro_batches or math.ceil(self.mean / self.micro_batch))

    @property
    def computed(self) -> float:
        """Mean number of computed tokens, padding included."""
        return self.mean + self.fillers

    @property
    def micro_batch_mean(self) -> float:
        """Mean number of computed tokens of a micro-batch."""
        return self.computed / self.num_micro_batches

    @property
    def most_rows(self) -> int:
        """Rows of hidden states in the largest step, padding included."""
        return most_padded(self.most) if self.fillers else self.most

    def scaled(self, share: Fraction, longest_row: int) -> StepTokens:
        """Return the tokens of steps that are this many times as large, with at least one row."""
        up, down = share.numerator, share.denominator
        return replace(
            self,
            # An exact fraction: `ceil` of a rounded product could be one too many.
            most=max(longest_row, math.ceil(self.most * share)),
            mean=self.mean * up / down,
            targets=self.targets * up / down,
            micro_batches=self.micro_batches * up / down,
            fillers=self.fillers * up / down,
            pairs=math.ceil(self.pairs * share),
        )


class RowLengths(NamedTuple):
    """Lengths of the rows, in tokens."""

    longest: int = 1  # a micro-batch never splits a row
    typical: int = 0  # averaged over tokens; 0: the longest
    attended: float = 0.0  # mean attended tokens per token; 0: half of the longest row


class Validation(NamedTuple):
    """Tokens of one validation."""

    tokens: int = 0
    targets: int = 0


class SecondsByTokens(NamedTuple):
    """Seconds of a layer as a line over the tokens of a micro-batch."""

    fixed: float
    per_token: float

    def at(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens


class LayerTimes(NamedTuple):
    """Seconds of a layer on a micro-batch; for the head, over its targets."""

    forward: SecondsByTokens  # without a graph
    backward: SecondsByTokens  # training, less one such pass


class ModelTimes(NamedTuple):
    """Seconds of all layers in the data type of the computation: measured, or computed from their kernels."""

    layers: tuple[LayerTimes, ...] = ()  # empty: not known yet
    gain: float = 0.0  # speed in bf16 relative to fp32; 0: not compared
    load: float = 0.0  # of the cores by other programs, when the layers were timed
    products_gain: float = 1.0  # speed of the chosen backward products relative to oneDNN's alone


class TypicalStep(NamedTuple):
    """A typical step of a run."""

    share: float  # of the steps
    choice: EveryLayer  # its trained layers
    workload: Workload  # in which all other layers are frozen


@dataclass(frozen=True)
class Workload:
    """Workload of a training run."""

    layouts: Sequence[Layout]  # trained parameters of each layer
    width: int  # of the hidden states
    dtype: torch.dtype  # of the computation
    step: StepTokens
    num_steps: int | None  # remaining optimizer steps; None: not counted yet
    rows: RowLengths = field(default=RowLengths())
    validation: Validation = field(default=Validation())
    frozen: Sequence[Layout] = ()  # frozen parameters of each layer; empty: every parameter is trained
    layers: Sequence[nn.Module] = field(default=(), compare=False, repr=False)
    """Layers on the meta device, for measuring kernels and saved tensors."""
    times: ModelTimes = field(default=ModelTimes())
    context: int = 2048  # of the model, in tokens
    products: Products | None = None  # libraries of the matrix products; None: not chosen yet
    dropped_heads: int = 0  # heads whose attention weights are kept for backward; 0: no attention dropout
    choice: EveryLayer = EVERY_LAYER  # layers that each step trains
    steps_done: int = 0  # before a run was resumed

    @cached_property
    def typical_steps(self) -> list[TypicalStep]:
        """Typical steps; one, if all steps train the same layers. The first trains embedding and head."""
        if not isinstance(self.choice, SampledLayers):
            return [TypicalStep(1.0, self.choice, self)]
        frozen = self.frozen or [NO_PARAMETERS] * len(self.layouts)
        steps = []
        for share, layers in self.choice.typical:
            own, rest = layouts_of_step(layers, 0, self.layouts, frozen)
            steps.append(TypicalStep(share, layers, replace(self, layouts=own, frozen=rest, choice=layers)))
        return steps

    @cached_property
    def whole_layers(self) -> list[list[Layout]]:
        """Layouts of each layer: trained parameters, then frozen ones."""
        if not self.frozen:
            return [[layout] for layout in self.layouts]
        return [list(both) for both in zip(self.layouts, self.frozen, strict=True)]

    @cached_property
    def model_layouts(self) -> list[Layout]:
        """Layout of each layer with all of its parameters."""
        if not self.frozen:
            return list(self.layouts)
        return [
            replace(rest, shapes={**own.shapes, **rest.shapes}, tied=own.tied, numel=own.numel + rest.numel)
            for own, rest in zip(self.layouts, self.frozen, strict=True)
        ]

    @cached_property
    def lowest_trained(self) -> int:
        """The layer at which backward ends."""
        return next((index for index, layout in enumerate(self.layouts) if layout.numel), 0)

    @property
    def num_backward_blocks(self) -> int:
        return len(self.layouts) - 1 - max(1, self.lowest_trained)

    @property
    def vocabulary(self) -> int:
        return max((shape[0] for layout in self.whole_layers[-1] for shape in layout.used_shapes.values()), default=0)

    @property
    def frozen_elements(self) -> int:
        """Frozen elements of all layers, padding included."""
        return sum(layout.numel for layout in self.frozen)

    def frozen_per_pass(self, placement: Placement) -> dict[Place, int]:
        """Return the bytes of frozen weights that a pass loads, by place off the device."""
        moved: dict[Place, int] = {}
        for layer, layout in enumerate(self.frozen):
            place = placement.of("frozen", layer)
            if place != "device" and not self._is_by_rows(layer):
                moved[place] = moved.get(place, 0) + layout.bytes_in(place, self.dtype)
        return moved

    def restored(self, placement: Placement) -> list[int]:
        """Return the elements of quantized matrices whose values a pass restores, of each layer."""
        if not self.frozen:
            return [0] * len(self.layouts)
        are_whole = [
            placement.of("frozen", layer) != "device" and not self._is_by_rows(layer)
            for layer in range(len(self.frozen))
        ]
        return [
            layout.stored.quantized if layout.stored is not None and is_whole else 0
            for layout, is_whole in zip(self.frozen, are_whole, strict=True)
        ]

    def _is_by_rows(self, layer: int) -> bool:
        """Tell whether a pass loads only a few rows of a layer off the device: of a frozen embedding."""
        return layer == TIED_SOURCE_LAYER and not self.layouts[TIED_SOURCE_LAYER].shapes

    @cached_property
    def num_parameters(self) -> int:
        return sum(layout.num_parameters for both in self.whole_layers for layout in both)

    @cached_property
    def num_trained(self) -> int:
        return sum(layout.num_parameters for layout in self.layouts)

    @property
    def head_parameters(self) -> int:
        """Parameters that the head computes with, tied ones included; 0: the head is not local."""
        return sum(layout.num_used for layout in self.whole_layers[-1])

    @cached_property
    def stored_elements(self) -> int:
        """Trained elements of all layers, padding included."""
        return sum(layout.numel for layout in self.layouts)

    @cached_property
    def lent_elements(self) -> int:
        """Elements that a pass reads once more, because another layer is tied to them."""
        return sum(self.layouts[TIED_SOURCE_LAYER].numel for layout in self.layouts if layout.tied)

    def flops(self) -> Flops:
        """Count the FLOPs of a mean step."""
        return count_flops(self.layouts, self.step.mean, self.step.targets, frozen=self.frozen)

    def boundary_bytes(self, kept: int = 0) -> int:
        """Return the size of the layer inputs of the largest step that are saved for recomputation."""
        return max(0, self.num_backward_blocks - kept) * self.width * self.dtype.itemsize * self.step.most_rows

    @property
    def widens(self) -> bool:
        """Whether bf16 matrices are multiplied in fp32."""
        return self.products is not None and self.products.widens and self.dtype == torch.bfloat16

    @property
    def head_chunk(self) -> int:
        """Targets whose logits the head computes at once."""
        return max(1, HEAD_CHUNK_BYTES // (FP32_BYTES * max(1, self.vocabulary)))

    @property
    def logits_bytes(self) -> int:
        """Most fp32 logits that exist at once on a CPU, in training or a validation."""
        whole = FP32_BYTES * self.vocabulary * self.most_logits
        # Training has a tile's logits and gradients; a validation takes chunks of whole rows.
        return max(2 * TILE_BYTES, whole) if self.layouts[-1].tiles else whole

    @property
    def most_logits(self) -> int:
        """Most targets whose logits exist at once on a CPU, in training or a validation."""
        targets = max(self.step.most_targets or self.step.micro_batch, self.validation.targets)
        return min(self.head_chunk, rounded_up(min(targets, self.step.micro_batch)))

    def weights_bytes(self, pairs: int) -> int:
        """Return the size of a block's attention weights that are kept for backward, for this many token pairs."""
        return WEIGHT_BYTES * self.dropped_heads * pairs

    @property
    def micro_batch_pairs(self) -> int:
        """Most token pairs within documents in a micro-batch."""
        return min(self.step.pairs, self.step.micro_batch * padded_length(self.rows.longest))

    @property
    def bucket_bytes(self) -> int:
        """Size of temporary attention weights under dropout, for the documents that are computed together."""
        return WEIGHT_COPIES * 4 * self.dropped_heads * max(BUCKET_PAIRS, padded_length(self.rows.longest) ** 2)

    def with_step(self, **changes: float) -> Workload:
        """Return a copy with other tokens per step."""
        return replace(self, step=replace(self.step, **changes))  # type: ignore[arg-type]

    @property
    def layer_seconds(self) -> float:
        """Seconds of all layers in a mean step, with recomputation."""
        return self.forward_seconds + self.backward_seconds(kept=0)

    @property
    def forward_seconds(self) -> float:
        """Seconds of embedding and blocks in forward, in a mean step."""
        tokens = self.step.micro_batch_mean
        return self.step.num_micro_batches * sum(each.forward.at(tokens) for each in self.times.layers[:-1])

    def backward_seconds(self, kept: int) -> float:
        """Return the seconds of all layers in backward; ``kept`` blocks are not recomputed."""
        passed, top = self.times.layers[self.lowest_trained : -1], len(self.times.layers) - 1
        again = self.times.layers[max(1, self.lowest_trained) : max(1, top - kept)]
        tokens = self.step.micro_batch_mean
        blocks = sum(each.backward.at(tokens) for each in passed) + sum(each.forward.at(tokens) for each in again)
        return self.step.num_micro_batches * blocks + self.head_seconds(self.step.targets, trains=True)

    def head_seconds(self, targets: float, trains: bool) -> float:
        """Return the seconds of the head: on the targets of a mean step, or on any number in chunks."""
        if not targets:
            return 0.0
        head = self.times.layers[-1]
        chunks = self.step.num_micro_batches if trains else 1
        chunks *= math.ceil(targets / chunks / self.head_chunk)
        lines = (head.forward, head.backward) if trains else (head.forward,)
        return sum(chunks * line.at(targets / chunks) for line in lines)


def exported_elements(recipe: Recipe, workload: Workload) -> int:
    """Count the elements that a run exports: a model, an adapter, or both."""
    whole = workload.stored_elements + workload.frozen_elements
    return whole if recipe.method != "lora" or recipe.lora.merge else workload.stored_elements
