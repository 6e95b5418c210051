"""What a run asks of the machine: how many tokens of how large a model, and the FLOPs and bytes of each pass.

Reading, writing and computing go on side by side, so a pass takes as long as the slowest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from gptj_ft.models.layout import TIED_SOURCE_LAYER, Kind, Layout
from gptj_ft.planning.flops import Flops, count_flops
from gptj_ft.planning.probe import ComputeRates, Rates
from gptj_ft.streaming.model import BufferBudget
from gptj_ft.streaming.stores.placement import Place, Placement

NOTHING: Mapping[Place, int] = {}
# What is no matrix product takes as long as its tensors take through memory. Counted in GPT-J's block, in tensors of
# [tokens, width] read or written, an MLP's counted by 4: norms, rotation, GELU, sums; backward takes twice as many.
TOUCHED = 44
TOUCHED_LOGITS = 12  # tensors of [targets, vocabulary], fp32: softmax, loss and their gradients
SUMMED = 3  # passes over a gradient by which autograd adds that of a micro-batch
WHOLE = 6  # and those once a step that set it to zero, four times as slow as a copy, and take its norm
INNER = 4  # times as wide as the model is its MLP


@dataclass(frozen=True)
class Workload:
    """What a run asks of the machine.

    Attributes:
        layouts: of what is trained in each layer of the model.
        width: of the hidden states.
        dtype: of the computation.
        micro_batch_tokens: most tokens computed at once.
        step_tokens: most tokens in one optimizer step.
        mean_step_tokens: tokens of an average step.
        mean_step_targets: those of them that carry a target.
        num_steps: optimizer steps to do; ``None`` while there are no rows to count.
        longest_row: tokens of the longest row, which no micro-batch divides.
        validation_tokens: tokens of the validation rows.
        validation_targets: those of them that carry a target.
        context: tokens that the model was made for.
        attended: tokens that a token attends to, on average over the tokens; 0: half of the longest row.
        frozen: layouts of what is not trained in each layer; none: everything is trained.
    """

    layouts: Sequence[Layout]
    width: int
    dtype: torch.dtype
    micro_batch_tokens: int
    step_tokens: int
    mean_step_tokens: float
    mean_step_targets: float
    num_steps: int | None
    longest_row: int = 1
    validation_tokens: int = 0
    validation_targets: int = 0
    context: int = 2048
    attended: float = 0.0
    frozen: Sequence[Layout] = ()

    @cached_property
    def whole_layers(self) -> list[list[Layout]]:
        """The layouts of each layer: of what is trained of it, and of the rest."""
        return (
            [list(both) for both in zip(self.layouts, self.frozen, strict=True)]
            if self.frozen
            else [[layout] for layout in self.layouts]
        )

    @cached_property
    def model_layouts(self) -> list[Layout]:
        """What each layer holds, trained or not."""
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
        return max(shape[0] for layout in self.whole_layers[-1] for shape in layout.used_shapes.values())

    @property
    def frozen_elements(self) -> int:
        """Elements that are not trained, over all layers, padding included."""
        return sum(layout.numel for layout in self.frozen)

    @cached_property
    def frozen_per_pass(self) -> list[int]:
        """Elements of each layer that come to the device as often as it is passed; of an embedding come a few rows."""
        sizes = [layout.numel for layout in self.frozen]
        return sizes if self.layouts[TIED_SOURCE_LAYER].shapes else [0, *sizes[1:]]

    def frozen_reads(self, slots: int) -> tuple[int, int]:
        """Elements that forward and backward read of what is not trained, beside what is still in so many slots."""
        sizes, lowest = self.frozen_per_pass, self.lowest_trained
        there = {layer for layer in range(lowest, len(sizes)) if sizes[layer]}
        kept = set(sorted(there)[:slots])
        up = sum(size for layer, size in enumerate(sizes) if layer not in kept)
        return up, sum(sizes[lowest : max(0, len(sizes) - slots)])

    def flops(self, kept: int = 0) -> Flops:
        """Count the FLOPs of an average step, where ``kept`` blocks are not recomputed."""
        return count_flops(self.layouts, self.mean_step_tokens, self.mean_step_targets, kept, self.frozen)

    def boundary_bytes(self, kept: int = 0) -> int:
        """Bytes of the inputs of all blocks that backward passes but the last ``kept``, in the largest step."""
        return max(0, self.num_backward_blocks - kept) * self.width * self.dtype.itemsize * self.step_tokens

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
        """Parameters that the head computes with, those that it shares with the embedding included."""
        return sum(layout.num_used for layout in self.whole_layers[-1])

    @cached_property
    def stored_elements(self) -> int:
        """Elements of one kind over all layers, padding included."""
        return sum(layout.numel for layout in self.layouts)

    @cached_property
    def lent_elements(self) -> int:
        """Elements of one kind in the layers that are read once more for those that borrow from them."""
        return sum(self.layouts[TIED_SOURCE_LAYER].numel for layout in self.layouts if layout.tied)

    def elements_without(self, bottom: int = 0, top: int = 0) -> int:
        """Elements of one kind in the layers but the lowest and the highest few."""
        return sum(layout.numel for layout in self.layouts[bottom : max(bottom, len(self.layouts) - top)])

    @property
    def late_elements(self) -> int:
        """Elements of one kind in the blocks whose updates can be late: all but the last."""
        return self.elements_without(bottom=1, top=2)

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states of an average micro-batch."""
        return self.width * self.dtype.itemsize * min(self.micro_batch_tokens, self.mean_step_tokens)

    def seconds_between_products(self, rates: ComputeRates) -> float:
        """Return how long the blocks' operations between products with weights take in one pass over a step."""
        tokens = (len(self.layouts) - 2) * self.mean_step_tokens
        touched = TOUCHED * tokens * self.width * self.dtype.itemsize / rates.memory_for(self.hidden_bytes)
        activated = INNER * tokens * self.width / rates.gelu
        attended = 4.0 * tokens * self.width * (self.attended or self.longest_row / 2) / rates.attention
        return touched + activated + attended

    def times_again(self, kept: int) -> float:
        """Return how often backward does what forward does between products: twice, and once more if not kept."""
        blocks, passed = len(self.layouts) - 2, self.num_backward_blocks
        return (2.0 * passed + max(0, passed - kept)) / max(1, blocks)

    @property
    def touched_by_backward(self) -> float:
        """Bytes that the head and the sums of gradients read and write."""
        logits = TOUCHED_LOGITS * self.vocabulary * torch.float32.itemsize * self.mean_step_targets
        micro_batches = -(-self.mean_step_tokens // self.micro_batch_tokens)
        sums = (SUMMED * micro_batches + WHOLE) * torch.float32.itemsize * self.num_trained
        return logits + sums


@dataclass(frozen=True)
class Pass:
    """One pass over the layers: what is computed, and which bytes go from and to each place off the device.

    Attributes:
        flops: of matrix products.
        updated: bytes that AdamW reads and writes in the device's memory.
        touched: bytes that the operations between products read and write there, in tensors as large as the weights.
        times: how often that is done which the blocks do between products; backward's counts twice.
        read: bytes, by place.
        written: bytes, by place.
    """

    flops: float = 0.0
    updated: int = 0
    touched: float = 0.0
    times: float = 0.0
    read: Mapping[Place, int] = field(default_factory=dict)
    written: Mapping[Place, int] = field(default_factory=dict)

    def plus(self, read: Mapping[Place, int] = NOTHING, written: Mapping[Place, int] = NOTHING) -> Pass:
        """Return the pass with more bytes read and written."""
        return replace(self, read=_added(self.read, read), written=_added(self.written, written))

    def compute_seconds(self, load: Workload, rates: Rates) -> float:
        """Return the seconds of the computation alone; on a CPU, with the work that transfers make for it."""
        compute = rates.compute
        between = (self.updated + self.touched) / compute.memory + self.times * load.seconds_between_products(compute)
        moving = rates.disk.cpu_seconds(self.read.get("disk", 0), self.written.get("disk", 0)) if rates.on_cpu else 0.0
        return self.flops / compute.matmul(load.dtype, load.width) + between + moving

    def transfer_seconds(self, rates: Rates) -> float:
        """Return the seconds of the transfers alone: over the disk, and beside that over the link."""
        disk = rates.disk.seconds(self.read.get("disk", 0), self.written.get("disk", 0))
        arriving = sum(self.read.values()) / rates.compute.to_device
        leaving = sum(self.written.values()) / rates.compute.from_device
        return max(disk, arriving, leaving)

    def seconds(self, load: Workload, rates: Rates) -> float:
        """Return the seconds of the pass."""
        return max(self.compute_seconds(load, rates), self.transfer_seconds(rates))


def training_passes(
    placement: Placement,
    load: Workload,
    stored: Mapping[Kind, torch.dtype],
    budget: BufferBudget,
    is_late: bool = False,
) -> tuple[Pass, Pass]:
    """Return the forward and the backward pass of an average step.

    Where gradients are stored, the update waits for the next forward pass; else backward applies it. A late update is
    applied in both and written by the second. Layer inputs off the device go there in forward and come back later.
    """
    forward, backward = passes_of_state(placement, load, stored, budget, is_late)
    forward = forward.plus(read=bytes_moved(placement, {"weight": stored["weight"]}, load.lent_elements))
    kept = budget.num_kept_layers
    up, down = load.frozen_reads(budget.read_ahead + 1)
    frozen: dict[Kind, torch.dtype] = {"frozen": load.dtype}
    forward = forward.plus(read=bytes_moved(placement, frozen, up))
    backward = backward.plus(read=bytes_moved(placement, frozen, down))
    if placement.boundaries == "device":
        return forward, backward
    away: dict[Place, int] = {
        placement.boundaries: round(load.boundary_bytes(kept) * load.mean_step_tokens / load.step_tokens)
    }
    return forward.plus(written=away), backward.plus(read=away)


def passes_of_state(
    placement: Placement, load: Workload, stored: Mapping[Kind, torch.dtype], budget: BufferBudget, is_late: bool
) -> tuple[Pass, Pass]:
    """Return the same without the bytes of layer inputs and of what is not trained."""
    elements, defers, kept = load.stored_elements, "grad" in stored, budget.num_kept_layers
    state = state_kinds(stored)
    # A master copy makes the weights anew: they are not read for an update.
    old = tuple(kind for kind in state if kind != "weight" or "master" not in state)
    updated = _bytes_to_update(stored, old)
    forward_flops = 2.0 * load.block_parameters * load.mean_step_tokens
    backward_flops = load.flops(kept).hardware - forward_flops

    # What the last layers of a pass have left in buffers, the next pass finds there.
    slots, sums = budget.read_ahead + 1, budget.num_gradients + bool(load.lent_elements)
    pool = budget.num_chunks * budget.chunk_numel
    starting = {kind: load.elements_without(bottom={"weight": slots, "grad": sums}.get(kind, 0)) for kind in stored}
    returning = load.elements_without(top=slots)
    if elements <= pool:
        starting |= {kind: 0 for kind in state if kind != "weight"}

    def moved(counted: int | Mapping[Kind, int], *kinds: Kind) -> dict[Place, int]:
        return bytes_moved(placement, {kind: stored[kind] for kind in kinds}, counted)

    up = Pass(forward_flops, times=1.0)
    down = Pass(backward_flops, touched=load.touched_by_backward, times=load.times_again(kept))
    if defers and is_late:
        late, bottom, kinds = load.late_elements, load.layouts[0].numel, tuple(dict.fromkeys(("weight", *old)))
        # Going down, the late blocks are read as they were before forward has updated them; not so gradients.
        again = dict.fromkeys(old, late)
        again["weight"] = load.elements_without(top=min(slots, 2)) - (0 if "weight" in old else late)
        again["grad"] = late - min(late, max(0, pool - (elements - late - bottom)))
        # Coming from there, forward finds what the pool has beside the parts of the embedding.
        found = min(late, max(0, pool - bottom))
        starting |= {kind: elements - found for kind in old if kind != "weight"}
        return (
            replace(
                up,
                updated=updated * elements,
                read=moved(starting, *old, "grad"),
                written=moved(elements - late, *state),
            ),
            replace(
                down,
                updated=updated * late,
                read=moved(again, *kinds, "grad"),
                written=_added(moved(late, *state), moved(elements, "grad")),
            ),
        )
    if defers:
        return (
            replace(
                up,
                updated=updated * elements,
                read=moved(starting, *old, "grad"),
                written=moved(elements, *state),
            ),
            replace(down, read=moved(returning, "weight"), written=moved(elements, "grad")),
        )
    others = [kind for kind in state if kind != "weight"]
    return (
        replace(up, read=moved(starting, "weight")),
        replace(
            down,
            updated=updated * elements,
            read=_added(moved(returning, "weight"), moved(elements, *others)),
            written=moved(elements, *state),
        ),
    )


def _bytes_to_update(stored: Mapping[Kind, torch.dtype], old: Sequence[Kind]) -> int:
    """Bytes that an update reads and writes in the device's memory, per element.

    A gradient that had to wait is clipped into a copy; what is not fp32 becomes that first, and moments are rounded
    with noise (see `optimizer.round_stochastically`): the noise is read and added, and the lower bits are masked.
    """
    fp32, noise = torch.float32.itemsize, torch.int32.itemsize
    size = 2 * fp32 * len(old) + (3 if "grad" in stored else 1) * fp32
    for kind in (*old, "grad"):
        if (narrow := stored.get(kind, torch.float32).itemsize) < fp32:
            size += narrow + fp32 + (0 if kind == "grad" else 4 * fp32 + noise + fp32 + narrow)
    if "weight" not in old:
        size += fp32 + stored["weight"].itemsize  # the master copy, rounded to weights
    return size


def _added(some: Mapping[Place, int], more: Mapping[Place, int]) -> dict[Place, int]:
    return {place: some.get(place, 0) + more.get(place, 0) for place in {**some, **more}}


def state_kinds(stored: Mapping[Kind, torch.dtype]) -> tuple[Kind, ...]:
    """Return the kinds that an update changes and a checkpoint holds."""
    return tuple(kind for kind in stored if kind != "grad")


def bytes_moved(
    placement: Placement, kinds: Mapping[Kind, torch.dtype], elements: int | Mapping[Kind, int]
) -> dict[Place, int]:
    """Return the bytes of so many elements of some kinds, or of each kind its own, by place but the device."""
    moved: dict[Place, int] = {}
    for kind, dtype in kinds.items():
        if (place := placement.of(kind)) != "device":
            number = elements if isinstance(elements, int) else elements[kind]
            moved[place] = moved.get(place, 0) + number * dtype.itemsize
    return moved
