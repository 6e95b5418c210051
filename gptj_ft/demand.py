"""What a run asks of the machine: how many tokens of how large a model, and the FLOPs and bytes of each pass.

Reading, writing and computing go on side by side, so a pass takes as long as the slowest of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from gptj_ft.measure import Rates
from gptj_ft.meters import Flops, count_flops
from gptj_ft.stores import Kind, Layout
from gptj_ft.stores.placement import Place, Placement

NOTHING: Mapping[Place, int] = {}
MATMUL_SHARE = 0.9  # of the measured rate that a pass reaches: norms, attention and GELU are not matrix products


@dataclass(frozen=True)
class Load:
    """What a run asks of the machine.

    Attributes:
        layouts: of each layer of the model.
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

    def flops(self, kept: int = 0) -> Flops:
        """Count the FLOPs of an average step, where ``kept`` blocks are not recomputed."""
        return count_flops(self.layouts, self.mean_step_tokens, self.mean_step_targets, kept)

    def boundary_bytes(self, kept: int = 0) -> int:
        """Bytes of the inputs of all blocks but the last ``kept``, in the step with the most tokens."""
        return (len(self.layouts) - 2 - kept) * self.width * self.dtype.itemsize * self.step_tokens

    @cached_property
    def num_parameters(self) -> int:
        return sum(layout.num_parameters for layout in self.layouts)

    @cached_property
    def block_parameters(self) -> int:
        return sum(layout.num_parameters for layout in self.layouts[1:-1])

    @property
    def head_parameters(self) -> int:
        return self.layouts[-1].num_parameters

    @cached_property
    def stored_elements(self) -> int:
        """Elements of one kind over all layers, padding included."""
        return sum(layout.numel for layout in self.layouts)


@dataclass(frozen=True)
class Pass:
    """One pass over the layers: what is computed, and which bytes go from and to each place off the device.

    Attributes:
        flops: of matrix products.
        updated: bytes that AdamW reads and writes in the device's memory.
        read: bytes, by place.
        written: bytes, by place.
    """

    flops: float = 0.0
    updated: int = 0
    read: Mapping[Place, int] = field(default_factory=dict)
    written: Mapping[Place, int] = field(default_factory=dict)

    def plus(self, read: Mapping[Place, int] = NOTHING, written: Mapping[Place, int] = NOTHING) -> Pass:
        """Return the pass with more bytes read and written."""
        return replace(self, read=_added(self.read, read), written=_added(self.written, written))

    def compute_seconds(self, dtype: torch.dtype, rates: Rates) -> float:
        """Return the seconds of the computation alone."""
        return self.flops / (rates.compute.matmul(dtype) * MATMUL_SHARE) + self.updated / rates.compute.memory

    def transfer_seconds(self, rates: Rates) -> float:
        """Return the seconds of the transfers alone: over the disk, and beside that over the link."""
        disk = rates.disk.seconds(self.read.get("disk", 0), self.written.get("disk", 0))
        arriving = sum(self.read.values()) / rates.compute.to_device
        leaving = sum(self.written.values()) / rates.compute.from_device
        return max(disk, arriving, leaving)

    def seconds(self, dtype: torch.dtype, rates: Rates) -> float:
        """Return the seconds of the pass."""
        return max(self.compute_seconds(dtype, rates), self.transfer_seconds(rates))


def training_passes(
    placement: Placement, load: Load, stored: Mapping[Kind, torch.dtype], kept: int = 0, is_late: bool = False
) -> tuple[Pass, Pass]:
    """Return the forward and the backward pass of an average step.

    Where gradients are stored, the update waits for the next forward pass; else backward applies it. A late update is
    applied in both and written by the second. Layer inputs off the device go there in forward and come back later.
    """
    forward, backward = _passes_of_state(placement, load, stored, kept, is_late)
    if placement.boundaries == "device":
        return forward, backward
    away: dict[Place, int] = {
        placement.boundaries: round(load.boundary_bytes(kept) * load.mean_step_tokens / load.step_tokens)
    }
    return forward.plus(written=away), backward.plus(read=away)


def _passes_of_state(
    placement: Placement, load: Load, stored: Mapping[Kind, torch.dtype], kept: int, is_late: bool
) -> tuple[Pass, Pass]:
    elements, defers = load.stored_elements, "grad" in stored
    state = state_kinds(stored)
    # A master copy makes the weights anew: they are not read for an update.
    old = tuple(kind for kind in state if kind != "weight" or "master" not in state)
    updated = elements * (sum(stored[kind].itemsize for kind in (*old, *state)) + torch.float32.itemsize)
    forward_flops = 2.0 * load.block_parameters * load.mean_step_tokens
    backward_flops = load.flops(kept).hardware - forward_flops

    def moved(*kinds: Kind) -> dict[Place, int]:
        return bytes_moved(placement, {kind: stored[kind] for kind in kinds}, elements)

    if defers and is_late:
        return (
            Pass(forward_flops, updated, read=moved(*old, "grad")),
            Pass(backward_flops, updated, read=moved(*old, "grad"), written=moved(*state, "grad")),
        )
    if defers:
        return (
            Pass(forward_flops, updated, read=moved(*old, "grad"), written=moved(*state)),
            Pass(backward_flops, read=moved("weight"), written=moved("grad")),
        )
    return (
        Pass(forward_flops, read=moved("weight")),
        Pass(backward_flops, updated, read=moved(*state), written=moved(*state)),
    )


def _added(some: Mapping[Place, int], more: Mapping[Place, int]) -> dict[Place, int]:
    return {place: some.get(place, 0) + more.get(place, 0) for place in {**some, **more}}


def state_kinds(stored: Mapping[Kind, torch.dtype]) -> tuple[Kind, ...]:
    """Return the kinds that an update changes and a checkpoint holds."""
    return tuple(kind for kind in stored if kind != "grad")


def bytes_moved(placement: Placement, kinds: Mapping[Kind, torch.dtype], elements: int) -> dict[Place, int]:
    """Return the bytes of some kinds by place, where that is not the device."""
    moved: dict[Place, int] = {}
    for kind, dtype in kinds.items():
        if (place := placement.of(kind)) != "device":
            moved[place] = moved.get(place, 0) + elements * dtype.itemsize
    return moved
