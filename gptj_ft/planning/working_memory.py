"""Forecast the memory of an accelerator that a training step works in: hidden states, graphs, logits, at their peak.

Nothing is estimated but the lengths of documents: layers are run on the ``meta`` device, and the phases of
`step.train_step` are added up from what each was seen to take and keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from gptj_ft.planning.layer_cost import LayerCost, LayerInput, embedding_cost, measure_blocks, measure_head
from gptj_ft.planning.workload import Workload
from gptj_ft.streaming.activations import NUM_BUFFERS
from gptj_ft.streaming.step import HEAD_CHUNK_BYTES

CONTEXT_BYTES = 400 * 10**6  # the device's context, and kernels that are loaded when they are first used
LIBRARY_BYTES = CONTEXT_BYTES + 200 * 10**6  # and workspaces of products, which come from torch's allocator
FRAGMENTED_SHARE = 0.03  # of the memory, that an allocator cannot use while shapes change from batch to batch
TOKEN_BYTES = 3 * 8  # id, position and target of a token


def usable(device_bytes: int) -> int:
    """Return the usable share of an accelerator's free memory, in bytes."""
    return int((1 - FRAGMENTED_SHARE) * (device_bytes - LIBRARY_BYTES))


def reserve(tensor_bytes: int) -> int:
    """Return the memory held back on an accelerator, in bytes."""
    return math.ceil(tensor_bytes / (1 - FRAGMENTED_SHARE)) + LIBRARY_BYTES - tensor_bytes


def allocator_limit(device_bytes: int) -> int:
    """Return the limit of torch's allocator where the process may take so many bytes of an accelerator, in bytes."""
    return max(0, device_bytes - CONTEXT_BYTES)


@dataclass(frozen=True)
class WorkingMemory:
    """Memory that a step works in, by the number of blocks whose activations are kept; bytes.

    Attributes:
        load: workload, with its layers.
        has_z_loss: whether the loss has a z-loss.
        boundaries_stay: whether the inputs of recomputed layers stay on the device.
    """

    load: Workload
    has_z_loss: bool = False
    boundaries_stay: bool = True

    @cached_property
    def blocks(self) -> list[LayerCost]:
        """Cost of each block on the largest micro-batch."""
        workload = self.load
        return measure_blocks(workload.layers, workload.layouts, micro_batch(workload), workload.lowest_trained)

    @cached_property
    def embedding(self) -> LayerCost:
        """Cost of the embedding on the largest micro-batch."""
        return embedding_cost(self.load.layouts[0], micro_batch(self.load))

    @cached_property
    def head(self) -> LayerCost:
        """Cost of the head on its largest chunk."""
        return head_cost(self.load, self.has_z_loss)

    @cached_property
    def forward_bytes(self) -> int:
        """Memory that a layer takes in a pass without gradients, and the head on what is scored."""
        return max(max(block.forward_bytes for block in self.blocks), self.head.forward_bytes)

    def kept_bytes(self, num_kept: int) -> int:
        """Compute the memory that the graphs of the last blocks keep over a whole step, in bytes."""
        # Devices that are to compute in fp16 have no kernel for ragged attention: documents are joined by a copy.
        joined = num_kept * self._hidden(self.load.step.most) if self.load.dtype == torch.float16 else 0
        return self.measured_kept_bytes(num_kept) + joined

    def measured_kept_bytes(self, num_kept: int) -> int:
        """Compute the same by the layers' own code alone, as it is on a CPU."""
        return sum(self._per_step(block.kept_bytes) for block in self.blocks[len(self.blocks) - num_kept :])

    def peak(self, num_kept: int) -> int:
        """Return the most that a step takes beside weights, state and their buffers."""
        workload = self.load
        micro, step = (self._hidden(tokens) for tokens in (self._micro_tokens, workload.step.most))
        passed, blocks = workload.num_backward_blocks, self.blocks
        recomputed, kept = blocks[: len(blocks) - num_kept], blocks[len(blocks) - num_kept :]
        # The inputs of kept blocks stay in any case; so does, then, what the last block gives.
        boundaries = (passed if self.boundaries_stay else num_kept + NUM_BUFFERS) * step
        graphs = self.kept_bytes(num_kept)
        source = 0 if self.boundaries_stay or not passed else step  # of a layer whose input has left the device
        if not passed:
            source = step
        phases = [boundaries + self._peak_of_head(graphs, num_kept, micro, step)]
        phases += [boundaries + source + step - micro + block.forward_bytes for block in recomputed[-1:]]
        if kept:
            last = kept[-1]
            growing = graphs - self._per_step(last.kept_bytes) * micro // max(1, step)
            phases.append(boundaries + growing + step - micro + last.graph_bytes)
            phases.append(boundaries + graphs + 2 * step + last.backward_bytes - last.kept_bytes - micro)
        if passed > num_kept:
            below = (passed - num_kept if self.boundaries_stay else NUM_BUFFERS) * step
            phases.append(below + step + max(block.backward_bytes for block in recomputed[num_kept - passed :]))
        if workload.lowest_trained == 0:
            phases.append(step + self.embedding.backward_bytes)
        return max(phases) + TOKEN_BYTES * workload.step.most

    def _peak_of_head(self, graphs: int, num_kept: int, micro: int, step: int) -> int:
        """Compute the peak of the head: its inputs leave as their gradients come, unless a kept graph has them."""
        return graphs + step + (step if num_kept else micro) + self.head.backward_bytes

    @property
    def _micro_tokens(self) -> int:
        return min(self.load.step.micro_batch, self.load.step.most)

    def _hidden(self, tokens: int) -> int:
        return self.load.width * self.load.dtype.itemsize * tokens

    def _per_step(self, num_bytes: int) -> int:
        return num_bytes * self.load.step.most // self._micro_tokens


def micro_batch(workload: Workload) -> LayerInput:
    """Return the largest micro-batch, as full of documents as possible."""
    tokens = min(workload.step.micro_batch, workload.step.most)
    row = min(tokens, max(1, workload.rows.longest if workload.rows.longest > 1 else tokens))
    number, rest = divmod(tokens, row)
    return LayerInput((row,) * number + ((rest,) if rest else ()), workload.width, workload.dtype)


def head_cost(workload: Workload, has_z_loss: bool = False) -> LayerCost:
    """Return the cost of the head on its largest chunk; nothing, where it is on another machine."""
    if not workload.head_parameters:
        return LayerCost((), (), 0, 0, 0, 0)
    top = len(workload.layers) - 1
    return measure_head(
        workload.layers[top], workload.layouts[top], head_chunk(workload), has_z_loss, top > workload.lowest_trained
    )


def head_chunk(workload: Workload) -> LayerInput:
    """Return the largest chunk of targets whose logits the head computes at once."""
    most = max(1, HEAD_CHUNK_BYTES // (torch.float32.itemsize * max(1, workload.vocabulary)))
    return LayerInput((min(most, workload.step.micro_batch, workload.step.most),), workload.width, workload.dtype)
