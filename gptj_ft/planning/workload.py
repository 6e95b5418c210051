"""Describe the workload of a run: the model's layouts, tokens per step, and the FLOPs of a pass.

Reading, writing and computing go on side by side, so a pass takes as long as the slowest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from gptj_ft.models.batch import BUCKET_PAIRS, most_filled, padded_length, rounded_up
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Layout
from gptj_ft.planning.flops import Flops, count_flops
from gptj_ft.planning.probe import ComputeRates
from gptj_ft.streaming.step import HEAD_CHUNK_BYTES

# What is no matrix product takes as long as its tensors take through memory. Counted in GPT-J's block, in tensors of
# [tokens, width] read or written, an MLP's counted by 4: norms, rotation, GELU, sums; backward takes twice as many.
TOUCHED = 44
TOUCHED_LOGITS = 12  # tensors of [targets, vocabulary], fp32: softmax, loss and their gradients
SUMMED = 3  # passes over a gradient by which autograd adds that of a micro-batch
ONCE_A_STEP = 6  # and those once a step that set it to zero, four times as slow as a copy, and take its norm
INNER = 4  # times as wide as the model is its MLP
WEIGHT_BYTES = 4 + 1  # of an attention weight that is dropped or not: in fp32, and whether it stays
WEIGHT_COPIES = 4  # of the weights that are computed with at once: scores, weights, those that stay, gradients


@dataclass(frozen=True)
class SecondsByTokens:
    """Seconds of a layer by the tokens of a micro-batch: some in any case, and some for each token."""

    fixed: float
    per_token: float

    def at(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a layer on a micro-batch, as they were measured.

    Attributes:
        forward: forward pass without a graph; for the head, by its targets.
        backward: seconds of training beside one such pass.
    """

    forward: SecondsByTokens
    backward: SecondsByTokens


@dataclass(frozen=True)
class Workload:
    """Workload of a training run."""

    layouts: Sequence[Layout]
    """Trained parameters of each layer."""
    width: int
    """Width of the hidden states."""
    dtype: torch.dtype
    """Data type of the computation."""
    micro_batch_tokens: int
    """Maximal tokens of a micro-batch."""
    step_tokens: int
    """Maximal tokens of an optimizer step."""
    mean_step_tokens: float
    mean_step_targets: float
    """Target tokens of an average step."""
    num_steps: int | None
    """Remaining optimizer steps; ``None`` before the rows are counted."""
    longest_row: int = 1
    """Tokens of the longest row; a micro-batch never splits a row."""
    validation_tokens: int = 0
    validation_targets: int = 0
    context: int = 2048
    """Context length of the model, in tokens."""
    attended: float = 0.0
    """Mean attended tokens per token; 0: half of the longest row."""
    typical_row: int = 0
    """Row length averaged over tokens; 0: the longest row."""
    step_pairs: int = 0
    """Token pairs within a document in the largest step, padding included; 0: causal kernels keep no weights."""
    dropped_heads: int = 0
    """Heads of a block whose dropped attention weights are kept for backward; 0: no attention dropout."""
    frozen: Sequence[Layout] = ()
    """Frozen parameters of each layer; empty: every parameter is trained."""
    layers: Sequence[nn.Module] = field(default=(), compare=False, repr=False)
    """Layers on the ``meta`` device, for measuring kernels and saved tensors."""
    mean_micro_batches: float = 0.0
    """Micro-batches of an average step; 0: the fewest that hold its tokens."""
    mean_step_fillers: float = 0.0
    """Filler tokens of an average step, see `PackedBatch.filled`."""
    most_targets: int = 0
    """Maximal targets of a micro-batch; 0: one per token."""
    times: tuple[LayerTimes, ...] = ()
    """Measured times of each layer in ``dtype``; empty: computed from rates."""
    speed_in_half: float = 0.0
    """Speed of the layers in bf16 relative to fp32; 0: not compared."""

    @cached_property
    def whole_layers(self) -> list[list[Layout]]:
        """Layouts of each layer: trained parameters, then frozen ones."""
        return (
            [list(both) for both in zip(self.layouts, self.frozen, strict=True)]
            if self.frozen
            else [[layout] for layout in self.layouts]
        )

    @cached_property
    def model_layouts(self) -> list[Layout]:
        """Layout of each layer, trained or not."""
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
        """Blocks that backward passes."""
        return len(self.layouts) - 1 - max(1, self.lowest_trained)

    @property
    def vocabulary(self) -> int:
        return max((shape[0] for layout in self.whole_layers[-1] for shape in layout.used_shapes.values()), default=0)

    @property
    def frozen_elements(self) -> int:
        """Elements that are not trained, over all layers, padding included."""
        return sum(layout.numel for layout in self.frozen)

    @cached_property
    def frozen_per_pass(self) -> list[int]:
        """Elements of each layer that come to the device as often as it is passed; of an embedding come a few rows."""
        sizes = [layout.numel for layout in self.frozen]
        return sizes if self.layouts[TIED_SOURCE_LAYER].shapes else [0, *sizes[1:]]

    def flops(self, kept: int = 0) -> Flops:
        """Count the FLOPs of an average step, where ``kept`` blocks are not recomputed."""
        return count_flops(self.layouts, self.mean_step_tokens, self.mean_step_targets, kept, self.frozen)

    def boundary_bytes(self, kept: int = 0) -> int:
        """Compute the bytes of the inputs of all blocks in backward but the last ``kept``, in the largest step."""
        return max(0, self.num_backward_blocks - kept) * self.width * self.dtype.itemsize * self.most_step_rows

    @cached_property
    def num_parameters(self) -> int:
        return sum(layout.num_parameters for both in self.whole_layers for layout in both)

    @cached_property
    def num_trained(self) -> int:
        return sum(layout.num_parameters for layout in self.layouts)

    @cached_property
    def block_parameters(self) -> int:
        return sum(layout.num_parameters for both in self.whole_layers[1:-1] for layout in both)

    @property
    def head_parameters(self) -> int:
        """Parameters that the head computes with, those that it shares with the embedding included; 0: none here."""
        return sum(layout.num_used for layout in self.whole_layers[-1])

    @cached_property
    def stored_elements(self) -> int:
        """Elements of one kind over all layers, padding included."""
        return sum(layout.numel for layout in self.layouts)

    @cached_property
    def lent_elements(self) -> int:
        """Elements of one kind in the layers that are read once more for those that are tied to them."""
        return sum(self.layouts[TIED_SOURCE_LAYER].numel for layout in self.layouts if layout.tied)

    @property
    def micro_batches(self) -> float:
        """Micro-batches of an average step."""
        return max(1.0, self.mean_micro_batches or math.ceil(self.mean_step_tokens / self.micro_batch_tokens))

    @property
    def computed_tokens(self) -> float:
        """Tokens that are computed in an average step, those of no document included."""
        return self.mean_step_tokens + self.mean_step_fillers

    @property
    def most_step_rows(self) -> int:
        """Rows of hidden states in the largest step: its tokens, and what its micro-batches are filled up with."""
        return most_filled(self.step_tokens) if self.mean_step_fillers else self.step_tokens

    @property
    def most_logits(self) -> int:
        """Most targets whose logits there are at once on a CPU, in training or a validation."""
        targets = max(self.most_targets or self.micro_batch_tokens, self.validation_targets)
        return min(self.head_chunk, rounded_up(min(targets, self.micro_batch_tokens)))

    @property
    def micro_batch_mean(self) -> float:
        """Tokens that are computed in an average micro-batch."""
        return self.computed_tokens / self.micro_batches

    @property
    def head_chunk(self) -> int:
        """Most targets whose logits the head computes at once."""
        return max(1, HEAD_CHUNK_BYTES // (torch.float32.itemsize * max(1, self.vocabulary)))

    def documents_of(self, tokens: int) -> tuple[int, ...]:
        """Return the lengths of documents like those of the run, of so many tokens together."""
        row = min(tokens, self.typical_row or self.longest_row)
        number, rest = divmod(tokens, row)
        return (row,) * number + ((rest,) if rest else ())

    @property
    def forward_seconds(self) -> float:
        """Seconds of the blocks in forward on an average step, as timed; 0: they were not."""
        return self.micro_batches * sum(each.forward.at(self.micro_batch_mean) for each in self.times[1:-1])

    def backward_seconds(self, kept: int) -> float:
        """Compute the seconds of the head and of the blocks in backward; ``kept`` of them are not computed again."""
        if not self.times:
            return 0.0
        passed = self.times[max(1, self.lowest_trained) : -1]
        again = passed[: max(0, len(passed) - kept)]
        tokens = self.micro_batch_mean
        blocks = sum(each.backward.at(tokens) for each in passed) + sum(each.forward.at(tokens) for each in again)
        return self.micro_batches * blocks + self.head_seconds(self.mean_step_targets, trains=True)

    @property
    def layer_seconds(self) -> float:
        """Seconds of all layers on an average step, as timed, blocks computed again in backward."""
        return self.forward_seconds + self.backward_seconds(kept=0)

    def head_seconds(self, targets: float, trains: bool) -> float:
        """Compute the seconds of the head, as timed, on the targets of an average step, or on as many in chunks."""
        if not targets:
            return 0.0
        head = self.times[-1]
        chunks = self.micro_batches if trains else 1
        chunks *= math.ceil(targets / chunks / self.head_chunk)
        lines = (head.forward, head.backward) if trains else (head.forward,)
        return sum(chunks * line.at(targets / chunks) for line in lines)

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states of an average micro-batch."""
        return self.width * self.dtype.itemsize * min(self.micro_batch_tokens, self.mean_step_tokens)

    def weights_bytes(self, pairs: int) -> int:
        """Compute the bytes of the attention weights that a block keeps for backward, of so many pairs of tokens."""
        return WEIGHT_BYTES * self.dropped_heads * pairs

    @property
    def micro_batch_pairs(self) -> int:
        """Most pairs of tokens that attend to each other in a micro-batch."""
        return min(self.step_pairs, self.micro_batch_tokens * padded_length(self.longest_row))

    @property
    def bucket_bytes(self) -> int:
        """Bytes of what attention whose weights are dropped makes on the way, for the documents computed together."""
        return WEIGHT_COPIES * 4 * self.dropped_heads * max(BUCKET_PAIRS, padded_length(self.longest_row) ** 2)

    def seconds_between_products(self, rates: ComputeRates) -> float:
        """Compute the seconds of the blocks' operations between products with weights, in one pass over a step."""
        tokens = (len(self.layouts) - 2) * self.mean_step_tokens
        touched = TOUCHED * tokens * self.width * self.dtype.itemsize / rates.memory_for(self.hidden_bytes)
        activated = INNER * tokens * self.width / rates.gelu
        attended = 4.0 * tokens * self.width * (self.attended or self.longest_row / 2) / rates.attention
        return touched + activated + attended

    def times_again(self, kept: int) -> float:
        """Count backward's repetitions of forward's operations between products: twice, and once more unless kept."""
        blocks, passed = len(self.layouts) - 2, self.num_backward_blocks
        return (2.0 * passed + max(0, passed - kept)) / max(1, blocks)

    @property
    def touched_by_backward(self) -> float:
        """Bytes that the head and the sums of gradients read and write, as far as they are in no measured time."""
        if self.times:
            return ONCE_A_STEP * torch.float32.itemsize * self.num_trained
        logits = TOUCHED_LOGITS * self.vocabulary * torch.float32.itemsize * self.mean_step_targets
        micro_batches = -(-self.mean_step_tokens // self.micro_batch_tokens)
        sums = (SUMMED * micro_batches + ONCE_A_STEP) * torch.float32.itemsize * self.num_trained
        return logits + sums
