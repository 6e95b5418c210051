"""What a run will cost, before it starts: placement, memory, disk, time. Refuses what cannot fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gptj_ft.errors import ResourceError
from gptj_ft.progress import gigabytes as gigabytes
from gptj_ft.recipe import Recipe
from gptj_ft.stores import Kind, Layout
from gptj_ft.stores.placement import Place, Placement, training_dtypes
from gptj_ft.streaming import HEAD_CHUNK_BYTES

PROCESS_BYTES = 500 * 2**20  # the interpreter, torch, transformers, the rows
SAVED_PER_TOKEN = 20  # tensors of [tokens, width] that one block keeps for its backward, the MLP's counted by 4
MATMUL_SHARE = 0.75  # of the measured rate that a whole step reaches
DISK_RATE = 0.5e9  # bytes/s, assumed for a plain SSD
FASTEST_FIRST: list[tuple[Place, Place]] = [
    ("device", "device"),
    ("device", "host"),
    ("host", "device"),
    ("host", "host"),
    ("device", "disk"),
    ("host", "disk"),
    ("disk", "device"),
    ("disk", "host"),
    ("disk", "disk"),
]


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
        num_steps: optimizer steps; ``None`` while there are no rows to count.
    """

    layouts: Sequence[Layout]
    width: int
    dtype: torch.dtype
    micro_batch_tokens: int
    step_tokens: int
    mean_step_tokens: float
    mean_step_targets: float
    num_steps: int | None

    @property
    def flops(self) -> float:
        """FLOPs of an average step: 2 per weight and token forward, 4 backward, 2 more where a block is recomputed."""
        blocks = sum(layout.num_parameters for layout in self.layouts[1:-1])
        return 8.0 * blocks * self.mean_step_tokens + 6.0 * self.layouts[-1].num_parameters * self.mean_step_targets

    @property
    def num_parameters(self) -> int:
        return sum(layout.num_parameters for layout in self.layouts)


@dataclass(frozen=True)
class Free:
    """What the machine has, in bytes; on a CPU, device and host are the same memory."""

    device: int
    host: int
    disk: int
    is_shared: bool


@dataclass(frozen=True)
class Plan:
    """A forecast; bytes and seconds."""

    placement: Placement
    precision: str
    num_parameters: int
    num_steps: int | None
    tokens_per_step: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    bytes_read_per_step: int
    bytes_written_per_step: int
    flops_per_step: float
    seconds_per_step: float

    @property
    def seconds(self) -> float | None:
        return None if self.num_steps is None else self.seconds_per_step * self.num_steps

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast for `--json`."""
        return {**asdict(self), "seconds": self.seconds}


def choose(recipe: Recipe, load: Load, free: Free, rate: float) -> Plan:
    """Return the plan of the fastest placement that fits and that the recipe allows.

    Args:
        recipe: its ``weights`` and ``optimizer_state`` fix a place or leave it ``auto``.
        load: what the run asks for.
        free: what the machine has.
        rate: FLOP/s of a matrix product in the type of the computation.

    Raises:
        ResourceError: nothing allowed fits; says by how much, and the two knobs that help most.
    """
    plans = [forecast(placement, load, recipe, rate) for placement in candidates(recipe, free)]
    for plan in plans:
        if not shortage(plan, free):
            return plan
    leanest = plans[-1]
    resource, lack = shortage(leanest, free) or ("", "")
    raise ResourceError(f"does not fit: with {leanest.placement} it {lack}; try {_knobs(resource, recipe)}")


def candidates(recipe: Recipe, free: Free) -> list[Placement]:
    """Return the placements that the recipe allows, fastest first.

    Where the device is the CPU, "host" is its own memory with a copy on top, and only for those who ask for it.
    """

    def allows(choice: str, place: Place) -> bool:
        return choice == place or (choice == "auto" and not (free.is_shared and place == "host"))

    return [
        Placement(weights, state)
        for weights, state in FASTEST_FIRST
        if allows(recipe.weights, weights) and allows(recipe.optimizer_state, state)
    ]


def forecast(placement: Placement, load: Load, recipe: Recipe, rate: float) -> Plan:
    """Compute what a placement costs."""
    dtypes = training_dtypes(load.dtype)
    stored = {kind: dtype for kind, dtype in dtypes.items() if kind != "grad" or keeps_gradients(recipe, placement)}
    total = sum(layout.numel for layout in load.layouts)
    largest = max(layout.numel for layout in load.layouts)
    by_place: dict[Place, int] = {"device": 0, "host": 0, "disk": 0}
    slots = 0
    for kind, dtype in dtypes.items():
        if kind in stored:
            by_place[placement.of(kind)] += total * dtype.itemsize
        if kind not in stored or placement.of(kind) != "device":
            slots += (recipe.read_ahead + 1) * largest * dtype.itemsize
    biggest_matrix = max(shape.numel() for layout in load.layouts for shape in layout.shapes.values())
    hidden = load.width * load.dtype.itemsize
    activations = SAVED_PER_TOKEN * hidden * min(load.micro_batch_tokens, load.step_tokens)
    boundaries = (len(load.layouts) + 1) * hidden * load.step_tokens
    # Logits of a chunk, their softmax and their gradient.
    vocabulary = max(shape[0] for shape in load.layouts[-1].shapes.values())
    head = 3 * min(HEAD_CHUNK_BYTES, 4 * vocabulary * load.micro_batch_tokens)
    device = by_place["device"] + slots + biggest_matrix * 4 + activations + boundaries + head
    state = total * sum(dtype.itemsize for kind, dtype in dtypes.items() if kind != "grad")
    # A run on disk is its own checkpoint and replaces a layer at a time; others write one before they remove one.
    saved = (largest * 16 if placement.is_durable else 2 * state) + total * 4
    saved += kept_checkpoints(recipe, load.num_steps) * state
    reads, writes = _traffic(placement, stored, total)
    moved = sum(size for place, size in (*reads, *writes) if place == "disk")
    return Plan(
        placement=placement,
        precision={torch.float32: "fp32", torch.bfloat16: "bf16"}[load.dtype],
        num_parameters=load.num_parameters,
        num_steps=load.num_steps,
        tokens_per_step=load.mean_step_tokens,
        device_bytes=device,
        host_bytes=by_place["host"] + PROCESS_BYTES,
        disk_bytes=by_place["disk"] + saved,
        bytes_read_per_step=sum(size for _, size in reads),
        bytes_written_per_step=sum(size for _, size in writes),
        flops_per_step=load.flops,
        seconds_per_step=max(load.flops / (rate * MATMUL_SHARE), moved / DISK_RATE),
    )


def kept_checkpoints(recipe: Recipe, num_steps: int | None) -> int:
    """Return how many checkpoints a run keeps at most, beside the one that it would resume from."""
    regular = (num_steps or 0) // recipe.save_every if recipe.save_every else 0
    newest = regular if recipe.num_newest_kept is None else min(regular, recipe.num_newest_kept)
    return newest + recipe.keeps_best


def keeps_gradients(recipe: Recipe, placement: Placement) -> bool:
    """Tell whether gradients have a store: to wait for the global norm, or to survive a crash."""
    return recipe.clip_norm is not None or placement.is_durable


def shortage(plan: Plan, free: Free) -> tuple[str, str] | None:
    """Return what a plan lacks, memory or disk, and a sentence that says how much; ``None`` if it fits."""
    memory = plan.device_bytes + plan.host_bytes
    if free.is_shared and memory > free.device:
        return "memory", f"needs {gigabytes(memory)} of memory, {gigabytes(free.device)} is free"
    if not free.is_shared and plan.device_bytes > free.device:
        return "memory", f"needs {gigabytes(plan.device_bytes)} on the device, {gigabytes(free.device)} is free"
    if not free.is_shared and plan.host_bytes > free.host:
        return "memory", f"needs {gigabytes(plan.host_bytes)} of host memory, {gigabytes(free.host)} is free"
    if plan.disk_bytes > free.disk:
        return "disk", f"needs {gigabytes(plan.disk_bytes)} of disk, {gigabytes(free.disk)} is free"
    return None


def _traffic(
    placement: Placement, dtypes: dict[Kind, torch.dtype], total: int
) -> tuple[list[tuple[Place, int]], list[tuple[Place, int]]]:
    """Bytes that a step reads from and writes to places that are not the device."""
    reads: list[tuple[Place, int]] = []
    writes: list[tuple[Place, int]] = []
    for kind, dtype in dtypes.items():
        place, size = placement.of(kind), total * dtype.itemsize
        if place != "device":
            reads.append((place, 2 * size if kind == "weight" else size))  # weights: forward and backward
            writes.append((place, size))
    return reads, writes


def _knobs(resource: str, recipe: Recipe) -> str:
    """Name the two options that help most."""
    if resource == "disk":
        return "--output on a larger disk, or --weights and --optimizer-state elsewhere"
    if "auto" != recipe.weights != "disk" or "auto" != recipe.optimizer_state != "disk":
        return "--weights auto --optimizer-state auto, which stream what does not fit"
    return f"--batch-size below {recipe.batch_size}, or --max-length below {recipe.max_length}"
