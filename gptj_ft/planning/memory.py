"""Forecast the memory and disk space of a placement, and size its buffers.

On an accelerator the ledger of a step adds up what layers allocate on the meta device (`WorkingMemory`). On a CPU,
where the C library's heap has holes, measured constants complete it (`constants`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.models.batch import rounded_up
from gptj_ft.models.layout import Kind
from gptj_ft.models.products import WIDE_NUMEL, WIDE_ROWS
from gptj_ft.planning.constants import (
    CAUSAL_HOLES,
    CONTEXT_BYTES,
    COUNTED_SAVED,
    DISK_STAGING_BYTES,
    FRAGMENTED_SHARE,
    FREE_SHARE,
    HEAP_SHARE,
    HOLES,
    HOLES_A_BLOCK,
    HOLES_BETWEEN_MAPPED,
    HOLES_IN_FP32,
    HOLES_OF_DROPOUT,
    HOLES_OF_WIDENING,
    LIBRARY_BYTES,
    LOGITS,
    MAPPED_BYTES,
    MOST_CAUSAL_HOLES,
    MOST_HOLES,
    PACKED_SHARES,
    PROCESS_BYTES,
    SAVED_PER_TOKEN,
    SYSTEM_BYTES,
    TOKEN_BYTES,
    UPDATE_COPIES,
    Z_LOSS_LOGITS,
)
from gptj_ft.planning.layer_cost import (
    LayerCost,
    LayerInput,
    embedding_cost,
    has_dropout,
    measure_blocks,
    measure_head,
)
from gptj_ft.planning.workload import Workload, exported_elements
from gptj_ft.streaming.activations import NUM_BUFFERS
from gptj_ft.streaming.buffers import PASS_TOKENS, BufferBudget, pool_shapes
from gptj_ft.streaming.moments import FORMS, form_of, num_bytes
from gptj_ft.streaming.split_master import LOW_BITS
from gptj_ft.streaming.stores.base import CHUNK_NUMEL
from gptj_ft.streaming.stores.placement import Place, Placement, training_dtypes
from gptj_ft.streaming.stores.quantized import NUM_THREADS, PIECE_BYTES
from gptj_ft.system.block_reader import STAGING_BYTES
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.machine import bf16_unit
from gptj_ft.system.units import gigabytes

RESTORED_BYTES = NUM_THREADS * PIECE_BYTES
BUFFERS = ((2, 48), (2, 24), (1, 16), (1, 6))  # gradients and chunks of a budget, the roomiest first
# The same beside an accelerator without a disk, and the chunks that a buffer holds. A disk's threads read small chunks
# in parallel, and its rate hides the program's time for each.
LARGE_BUFFERS = ((2, 12, 4), (2, 12, 2), (1, 8, 2), (1, 6, 1))


@dataclass(frozen=True)
class Free:
    """Free resources of the machine, in bytes."""

    device: int
    host: int
    disk: int
    is_shared: bool  # device and host are the same memory, as on a CPU

    @classmethod
    def of_accelerator(cls, device: int, host: int, disk: int) -> Free:
        """Return the free resources of a machine with an accelerator, without the system's reserve of host memory."""
        return cls(device, max(0, host - SYSTEM_BYTES), disk, is_shared=False)

    def capped(self, recipe: Recipe) -> Free:
        """Apply the caps of a recipe; on shared memory the smaller one."""
        device = _least(self.device, device_cap(recipe, self.is_shared))
        host = device if self.is_shared else _least(self.host, recipe.host_memory)
        return Free(device, host, _least(self.disk, recipe.disk_space), self.is_shared)


def _least(free: int, cap: int | None) -> int:
    return free if cap is None else min(free, cap)


def device_cap(recipe: Recipe, is_shared: bool) -> int | None:
    """Return the cap on the device's memory; on shared memory the smaller of both caps."""
    caps = (recipe.device_memory, recipe.host_memory if is_shared else None)
    return min((cap for cap in caps if cap is not None), default=None)


@dataclass(frozen=True)
class Need:
    """Needed and available bytes of one resource."""

    resource: str
    need: int
    have: int


class Requirements:
    """Needed and available bytes of every resource."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    have: Free

    @property
    def needs(self) -> list[Need]:
        """Needed and available bytes by resource."""
        have = self.have
        if have.is_shared:
            memory = [Need("memory", self.device_bytes + self.host_bytes, have.device)]
        else:
            memory = [
                Need("device memory", self.device_bytes, have.device),
                Need("host memory", self.host_bytes, have.host),
            ]
        return [*memory, Need("disk", self.disk_bytes, have.disk)]

    @property
    def lacking(self) -> list[Need]:
        """Resources that are too small."""
        return [each for each in self.needs if each.need > each.have]

    @property
    def lack(self) -> int:
        """Missing bytes over all resources; 0 if everything fits."""
        return sum(each.need - each.have for each in self.lacking)

    def shortage(self, free: Free) -> str:
        """Describe the missing bytes by resource; ``free`` are the resources without the caps of the recipe."""
        uncapped = {"disk": free.disk, "host memory": free.host}
        parts = []
        for each in self.lacking:
            limit = "free" if each.have == uncapped.get(each.resource, free.device) else "allowed"
            parts.append(f"{gigabytes(each.need)} of {each.resource}, {gigabytes(each.have)} is {limit}")
        return "it needs " + ", and ".join(parts)


@dataclass(frozen=True)
class MemoryForecast(Requirements):
    """Memory forecast of a placement, with its buffer budget; bytes."""

    placement: Placement
    device_bytes: int
    host_bytes: int
    disk_bytes: int  # at most, with a checkpoint and the tuned model
    have: Free
    budget: BufferBudget


def usable(device_bytes: int) -> int:
    """Return the part of an accelerator's free memory that tensors can use, in bytes."""
    return int((1 - FRAGMENTED_SHARE) * (device_bytes - LIBRARY_BYTES))


def reserve(tensor_bytes: int) -> int:
    """Return the memory that an accelerator needs in addition to tensors of this size, in bytes."""
    return math.ceil(tensor_bytes / (1 - FRAGMENTED_SHARE)) + LIBRARY_BYTES - tensor_bytes


def allocator_limit(device_bytes: int) -> int:
    """Return the limit of torch's allocator for a process that may take this much of an accelerator, in bytes."""
    return max(0, device_bytes - CONTEXT_BYTES)


@dataclass(frozen=True)
class WorkingMemory:
    """Memory that a step works in, without weights, state and buffers; bytes."""

    workload: Workload
    has_z_loss: bool = False
    boundaries_stay: bool = True  # inputs of recomputed layers stay on the device
    is_on_cpu: bool = False

    @cached_property
    def blocks(self) -> list[LayerCost]:
        """Cost of each block on the largest micro-batch."""
        workload = self.workload
        return measure_blocks(workload.layers, workload.layouts, self.micro_batch, workload.lowest_trained)

    @cached_property
    def micro_batch(self) -> LayerInput:
        """The largest micro-batch, of the longest rows."""
        workload = self.workload
        tokens = min(workload.step.micro_batch, workload.step.most)
        row = min(tokens, max(1, workload.rows.longest if workload.rows.longest > 1 else tokens))
        if self.is_on_cpu:
            row = tokens  # of several documents padded groups would be measured, copies that a CPU does not keep
        return LayerInput.of_rows(tokens, row, workload.width, workload.dtype)

    @cached_property
    def embedding(self) -> LayerCost:
        return embedding_cost(self.workload.layouts[0], self.micro_batch)

    @cached_property
    def head(self) -> LayerCost:
        return head_cost(self.workload, self.has_z_loss)

    @cached_property
    def forward_bytes(self) -> int:
        """Memory of a layer in a pass without gradients, or of the head when scoring."""
        return max(max(block.forward_bytes for block in self.blocks), self.head.forward_bytes)

    def kept_bytes(self, num_kept: int) -> int:
        """Return the memory of the top blocks' graphs over a whole step."""
        # Devices that compute in fp16 have no kernel for ragged attention: documents are joined by a copy.
        workload = self.workload
        joined = num_kept * self._hidden(workload.step.most) if workload.dtype == torch.float16 else 0
        return self.measured_kept_bytes(num_kept) + joined

    def measured_kept_bytes(self, num_kept: int) -> int:
        """Return the same without copies of attention, as on a CPU."""
        return sum(self._per_step(block.kept_bytes) for block in self.blocks[len(self.blocks) - num_kept :])

    def peak(self, num_kept: int) -> int:
        """Return the peak over the phases of `step.train_step`, with the graphs of the top blocks kept."""
        workload = self.workload
        micro, step = (self._hidden(tokens) for tokens in (self._micro_tokens, workload.step.most))
        passed, blocks = workload.num_backward_blocks, self.blocks
        recomputed, kept = blocks[: len(blocks) - num_kept], blocks[len(blocks) - num_kept :]
        # The inputs of kept blocks stay in any case, and so does the output of the top block.
        boundaries = (passed if self.boundaries_stay else num_kept + NUM_BUFFERS) * step
        graphs = self.kept_bytes(num_kept)
        # The input of the running layer, if it has no place among the boundaries.
        source = 0 if self.boundaries_stay and passed else step
        # Head: its inputs are freed as their gradients come, unless a kept graph holds them.
        phases = [boundaries + graphs + step + (step if num_kept else micro) + self.head.backward_bytes]
        phases += [boundaries + source + step - micro + block.forward_bytes for block in recomputed[-1:]]
        if kept:
            last = kept[-1]
            # While the top block runs on the last micro-batch: its graph is counted by `graph_bytes`.
            growing = graphs - self._per_step(last.kept_bytes) * micro // max(1, step)
            phases.append(boundaries + growing + step - micro + last.graph_bytes)
            phases.append(boundaries + graphs + 2 * step + last.backward_bytes - last.kept_bytes - micro)
        if passed > num_kept:
            # After the kept blocks: their graphs and inputs are free.
            below = (passed - num_kept if self.boundaries_stay else NUM_BUFFERS) * step
            phases.append(below + step + max(block.backward_bytes for block in recomputed[num_kept - passed :]))
        if workload.lowest_trained == 0:
            phases.append(step + self.embedding.backward_bytes)
        return max(phases) + TOKEN_BYTES * workload.step.most

    @property
    def _micro_tokens(self) -> int:
        return min(self.workload.step.micro_batch, self.workload.step.most)

    def _hidden(self, tokens: int) -> int:
        return self.workload.width * self.workload.dtype.itemsize * tokens

    def _per_step(self, num_bytes: int) -> int:
        return num_bytes * self.workload.step.most // self._micro_tokens


def head_cost(workload: Workload, has_z_loss: bool = False) -> LayerCost:
    """Return the cost of the head on its largest chunk; nothing if the head is not local."""
    if not workload.head_parameters:
        return LayerCost((), (), 0, 0, 0, 0)
    top, is_above_trained = len(workload.layers) - 1, len(workload.layers) - 1 > workload.lowest_trained
    chunk = LayerInput((largest_chunk(workload),), workload.width, workload.dtype)
    return measure_head(workload.layers[top], workload.layouts[top], chunk, has_z_loss, is_above_trained)


def largest_chunk(workload: Workload) -> int:
    """Return the most targets whose logits exist at once."""
    return min(workload.head_chunk, workload.step.micro_batch, workload.step.most)


@dataclass(frozen=True)
class _Demand:
    """A placement of a workload, to be fitted into memory."""

    placement: Placement
    workload: Workload
    recipe: Recipe
    stored: Mapping[Kind, torch.dtype]

    @property
    def hidden_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.workload.width * self.workload.dtype.itemsize

    def buffers_within(self, free: int, on_accelerator: bool = False) -> tuple[BufferBudget, int]:
        """Return the roomiest buffer budget that fits, else the leanest, and its bytes."""
        ahead = self.recipe.read_ahead
        budgets = [BufferBudget(ahead, *numbers) for numbers in BUFFERS]
        if on_accelerator and "disk" not in map(self.placement.of, self.stored):
            budgets = [
                BufferBudget(ahead, gradients, chunks, chunks_at_once=number)
                for gradients, chunks, number in LARGE_BUFFERS
            ]
        copied = UPDATE_COPIES * torch.float32.itemsize if on_accelerator else 0
        largest = max(CHUNK_NUMEL, *(layout.numel for layout in self.workload.layouts))
        sizes = [self._buffer_bytes(each) + copied * min(each.update_numel, largest) for each in budgets]
        fitting = (each for each in zip(budgets, sizes, strict=True) if each[1] <= free)
        return next(fitting, (budgets[-1], sizes[-1]))

    def _buffer_bytes(self, budget: BufferBudget) -> int:
        """Return the bytes of the pools that a run needs on the device, and of the scratch memory of updates."""
        fp32, placement, stored, workload = torch.float32, self.placement, self.stored, self.workload
        shapes = pool_shapes(budget, workload.layouts, workload.frozen, stored, "grad" in stored)
        streamed = [kind for kind in stored if placement.of(kind) != "device"]
        chunked = [kind for kind in streamed if kind != "weight"]
        needed: list[str] = ["weights", *chunked] if "weight" in streamed else [*chunked]
        if "grad" in streamed or stored.get("grad") != fp32:
            needed += ["gradients", "tied gradient"]
        if workload.frozen_elements and placement.of("frozen") != "device":
            needed.append("frozen")
        # One for the clipped gradient, one for each narrow kind, which AdamW widens to fp32, and one for master weights
        # that are restored or rounded.
        scratch = (
            1 + sum(stored[kind] != fp32 for kind in {*chunked} - {LOW_BITS}) + (stored["weight"] == torch.bfloat16)
        ) + form_of(stored["exp_avg"]).num_scratch
        chunk = min(budget.update_numel, max(layout.numel for layout in workload.layouts))
        return sum(shapes[name].num_bytes for name in needed) + scratch * chunk * fp32.itemsize

    def most_kept(self, fits: Callable[[int], bool]) -> int:
        """Return the number of blocks that keep their graphs: the recipe's, or as many as fit."""
        activations, most = self.recipe.activations, self.workload.num_backward_blocks
        if isinstance(activations, int):
            return min(activations, most)
        if activations == "auto":
            return max((kept for kept in range(most + 1) if fits(kept)), default=0)
        return {"keep": most, "recompute": 0}[activations]

    def pass_tokens(self, free: int) -> int:
        """Return the tokens of a validation pass that keeps inputs and outputs of a layer in this many bytes."""
        return min(PASS_TOKENS, max(free // self.token_bytes, self.workload.step.micro_batch))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in a validation: a layer's input and output."""
        return 2 * self.hidden_bytes + TOKEN_BYTES


def forecast_memory(placement: Placement, workload: Workload, recipe: Recipe, have: Free) -> MemoryForecast:
    """Forecast the memory of a placement, and choose its buffer budget."""
    dtypes, stored = recipe_dtypes(recipe, workload.dtype), stored_kinds(placement, workload, recipe)
    total, largest = workload.stored_elements, max(layout.numel for layout in workload.layouts)
    by_place = placement.bytes_by_place(stored, [layout.numel for layout in workload.layouts])
    for layer, layout in enumerate(workload.frozen):
        if (place := placement.of("frozen", layer)) != "disk":
            by_place[place] += layout.bytes_in(place, workload.dtype)
    if workload.frozen_elements and placement.of("frozen") == "disk":  # they stay in the model folder
        by_place["host"] += STAGING_BYTES
    if any(workload.restored(placement)):
        # On a CPU, codes in memory are used where they are.
        by_place["device"] += RESTORED_BYTES if not have.is_shared or placement.of("frozen") == "disk" else 0
    by_place[placement.boundaries] += workload.boundary_bytes()
    demand = _Demand(placement, workload, recipe, stored)
    is_measured = bool(workload.layers) and not have.is_shared
    device, budget = (_on_accelerator if is_measured else _on_cpu)(demand, by_place, have)
    if not have.is_shared and "disk" in (placement.of(kind) for kind in stored):
        by_place["host"] += DISK_STAGING_BYTES
    state = sum(num_bytes(total, dtype) for kind, dtype in dtypes.items() if kind != "grad")
    # A run on disk is its own checkpoint and replaces a layer at a time. Others write a checkpoint before they remove
    # the previous one.
    layer = sum(num_bytes(largest, dtype) for dtype in dtypes.values())
    kept = kept_checkpoints(recipe, (workload.num_steps or 0) + workload.steps_done)
    saved = (2 * layer if placement.is_durable else 2 * state) + exported_elements(recipe, workload) * 4 + kept * state
    if recipe.mirror:  # each checkpoint has a mirror of another machine; a run on disk has one of its state
        saved += (2 + kept + placement.is_durable) * state
    return MemoryForecast(placement, device, by_place["host"] + PROCESS_BYTES, by_place["disk"] + saved, have, budget)


def _on_accelerator(demand: _Demand, by_place: Mapping[Place, int], have: Free) -> tuple[int, BufferBudget]:
    """Return the bytes that a run needs on an accelerator, and its buffer budget."""
    workload, stays = demand.workload, demand.placement.boundaries == "device"
    working, free = WorkingMemory(workload, demand.recipe.z_loss > 0, stays), usable(have.device)
    # `working` counts the inputs of recomputed layers, as far as they stay.
    resident = by_place["device"] - (workload.boundary_bytes() if stays else 0)
    # Buffers first: they let transfers overlap. Kept activations get the rest.
    budget, buffers = demand.buffers_within(free - resident - working.peak(0), on_accelerator=True)
    kept = demand.most_kept(lambda kept: resident + buffers + working.peak(kept) <= free)
    needed = resident + buffers + working.peak(kept)
    # A validation may use the working memory of a step, and the free rest.
    validating = resident + buffers + working.forward_bytes
    pass_tokens = demand.pass_tokens(max(needed, free) - validating)
    needed = max(needed, validating + demand.token_bytes * min(pass_tokens, workload.validation.tokens))
    return needed + reserve(needed), replace(budget, num_kept_layers=kept, pass_tokens=pass_tokens)


def _on_cpu(demand: _Demand, by_place: Mapping[Place, int], have: Free) -> tuple[int, BufferBudget]:
    """Return the bytes that a run needs for the computation on a CPU, and its buffer budget."""
    placement, workload, hidden = demand.placement, demand.workload, demand.hidden_bytes
    rows, stays = workload.step.most_rows, placement.boundaries == "device"
    working = WorkingMemory(workload, is_on_cpu=True)
    graph = _saved_per_token(working) * hidden * min(rounded_up(workload.step.micro_batch), rows)
    activations = graph + workload.weights_bytes(workload.micro_batch_pairs) + workload.bucket_bytes
    # Hidden states in addition to the boundaries: the head's input, its gradient and a block's output.
    step = 3 * hidden * rows
    away = 0 if stays else NUM_BUFFERS * hidden * rows
    head = (Z_LOSS_LOGITS if demand.recipe.z_loss else LOGITS) * workload.logits_bytes
    if workload.widens:
        head += workload.logits_bytes  # their gradient in fp32
        activations += _widened_bytes(workload)
    # Recomputed causal blocks leave holes in the heap, in which logits find room.
    holes = 0 if workload.step.pairs else min(MOST_CAUSAL_HOLES, int(CAUSAL_HOLES * graph))
    fixed = by_place["device"] + activations + step + away + max(head, holes)
    packed = 0.0
    if have.is_shared and workload.dtype != torch.float32:
        packed = PACKED_SHARES[bf16_unit()]
    host = by_place["host"] + PROCESS_BYTES if have.is_shared else 0
    free = int((have.device - host) / (1 + packed)) - fixed
    budget, buffers = demand.buffers_within(free)
    room = int(FREE_SHARE * (free - buffers))
    kept = demand.most_kept(lambda kept: _kept_bytes_on_cpu(working, kept) <= room)
    graphs = _kept_bytes_on_cpu(working, kept)
    device = fixed + buffers + graphs
    if kept:  # kept graphs fill the holes
        device -= max(0, holes - head)
    if kept == workload.num_backward_blocks and workload.dtype == torch.float32 and not workload.step.pairs:
        # No block runs again: the logits are gone when backward needs its memory. Not measured in 16 bits.
        device -= min(activations, head)
    if workload.step.pairs:
        device += min(MOST_HOLES, HOLES * graph) if kept < workload.num_backward_blocks else 0
        device += int(HEAP_SHARE * device)
    # A validation may use the hidden states and kept graphs of a step, and some of the free memory.
    reused = step + graphs + (workload.boundary_bytes() if stays else 0)
    pass_tokens = demand.pass_tokens(reused + max(0, room - graphs))
    device += max(0, demand.token_bytes * min(pass_tokens, workload.validation.tokens) - reused)
    device += int(packed * device)
    # The head's logits come when forward has kept everything, then the gradients of a block.
    forward_bytes = have.device - head - activations if kept and have.is_shared else None
    return device, replace(budget, num_kept_layers=kept, pass_tokens=pass_tokens, forward_bytes=forward_bytes)


def _widened_bytes(workload: Workload) -> int:
    """Return the bytes of what a product of bf16 matrices takes in fp32: its left side, and a block of its weight."""
    shapes = [shape for layouts in workload.whole_layers[1:-1] for each in layouts for shape in each.shapes.values()]
    widest = max((max(shape) for shape in shapes if len(shape) == 2), default=0)
    rows = min(rounded_up(workload.step.micro_batch), workload.step.most_rows)
    return 4 * widest * (rows + WIDE_ROWS) + 4 * rows * (WIDE_ROWS + WIDE_NUMEL // workload.width)


def _saved_per_token(working: WorkingMemory) -> int:
    """Return the tensors of [tokens, width] that are alive in one block's backward on a CPU."""
    workload = working.workload
    if not workload.layers or workload.step.pairs:
        return SAVED_PER_TOKEN
    # Gated MLPs and wide heads need more than the blocks to which the constant was fitted.
    hidden_bytes = working.micro_batch.tokens * workload.width * workload.dtype.itemsize
    # Its graph, since backward's peak depends on the weights' gradients, too.
    measured = max(block.kept_bytes for block in working.blocks)
    return SAVED_PER_TOKEN + max(0, measured // hidden_bytes - COUNTED_SAVED)


def _kept_bytes_on_cpu(working: WorkingMemory, kept: int) -> int:
    """Return the memory of the top blocks' graphs over a whole step on a CPU, in bytes.

    Graphs of causal blocks are measured: 13 to 16 tensors per token, 8 to 10 with adapters. Holes between them in the
    heap come on top, more per block as more blocks are kept. Graphs of encoders count as 20 tensors.
    """
    workload = working.workload
    rows, of_token = workload.step.most_rows, workload.width * workload.dtype.itemsize
    if kept and workload.layers and not workload.step.pairs:
        mlp_bytes = 4 * of_token * min(workload.step.micro_batch, rows)
        most = HOLES_IN_FP32 if workload.dtype == torch.float32 else SAVED_PER_TOKEN
        holes = HOLES_BETWEEN_MAPPED if mlp_bytes >= MAPPED_BYTES else min(HOLES_A_BLOCK * kept, most)
        holes += HOLES_OF_DROPOUT * has_dropout(workload.layers[1]) + HOLES_OF_WIDENING * workload.widens
        graphs = math.ceil(working.measured_kept_bytes(kept) * rows / workload.step.most)
        return graphs + int(kept * holes * of_token * rows)
    return kept * (SAVED_PER_TOKEN * of_token * rows + workload.weights_bytes(workload.step.pairs))


def kept_checkpoints(recipe: Recipe, num_steps: int) -> int:
    """Count the checkpoints that a run keeps at most, without the latest one."""
    regular = num_steps // recipe.save_every if recipe.save_every else 0
    newest = regular if recipe.num_newest_kept is None else min(regular, recipe.num_newest_kept)
    return newest + recipe.keeps_best


def keeps_gradients(recipe: Recipe, placement: Placement, dtype: torch.dtype) -> bool:
    """Tell whether gradients have a store: they wait for the global norm, for an overflow check, or for a restart."""
    return recipe.clip_norm is not None or dtype == torch.float16 or placement.is_durable


def stored_kinds(placement: Placement, workload: Workload, recipe: Recipe) -> dict[Kind, torch.dtype]:
    """Return the kinds of a training run that have a store, and their types."""
    keeps = keeps_gradients(recipe, placement, workload.dtype)
    return {kind: dtype for kind, dtype in recipe_dtypes(recipe, workload.dtype).items() if kind != "grad" or keeps}


def recipe_dtypes(recipe: Recipe, compute: torch.dtype) -> dict[Kind, torch.dtype]:
    """Return the kinds of a training run with these options, and their types."""
    return training_dtypes(compute, FORMS[recipe.moments].dtype, PRECISIONS[recipe.gradients], recipe.master)
