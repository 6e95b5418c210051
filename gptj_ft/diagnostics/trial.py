"""Train a small random model for a few steps in one configuration, to compare configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.models.batch import most_padded
from gptj_ft.models.registry import Architecture
from gptj_ft.models.trainable import select
from gptj_ft.streaming.activations import OffloadedActivations, boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import load_weights, open_for_training, open_frozen
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.base import LayerStore
from gptj_ft.streaming.stores.placement import Placement, open_boundaries, training_dtypes
from gptj_ft.system.accelerator import CPU
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.scratch import scratch_folder
from gptj_ft.training.restore import optimizer_config

LENGTHS, PROMPTS, MICRO_BATCH = (5, 17, 9, 30, 2, 11), (2, 3, 1, 10, 0, 5), 40  # tokens
PEAK_LR = 1e-3
CHUNK_NUMEL, NUM_CHUNKS = 1 << 17, 3  # so that a layer has more chunks than there are buffers
LORA: Mapping[str, Any] = {"method": "lora", "lora": {"rank": 4, "alpha": 6, "dropout": 0.0}}
RESIDENT = Placement("device", "device")

Wrap = Callable[[LayerStore], LayerStore]


@contextmanager
def single_thread() -> Iterator[None]:
    """Compute with one CPU thread: small products gain nothing from more, and wait for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class SmallModel:
    """A small model in a folder, and the rows of every step."""

    folder: Path
    documents: tuple[tuple[int, ...], ...]  # token ids of each row

    @classmethod
    def read(cls, folder: Path) -> SmallModel:
        """Read a model folder and draw random rows of its vocabulary."""
        vocabulary = read_architecture(folder).config.vocab_size
        generator = torch.Generator().manual_seed(1)
        drawn = (torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS)
        return cls(folder, tuple(map(tuple, drawn)))

    @cached_property
    def architecture(self) -> Architecture:
        return read_architecture(self.folder)


@dataclass(frozen=True)
class Trial:
    """Configuration for training a small model."""

    device: torch.device
    precision: str = "fp32"
    placement: Placement = RESIDENT
    num_kept: int = 0  # blocks whose activations are kept
    num_deferred: int = 0  # blocks whose updates are deferred
    is_clipped: bool = True  # updates wait for the global gradient norm
    is_lora: bool = False
    num_steps: int = 3

    @property
    def recipe(self) -> Recipe:
        clip = {} if self.is_clipped else {"clip_norm": None}
        return Recipe.model_validate({**(LORA if self.is_lora else {}), **clip})

    def __str__(self) -> str:
        more = [f"{self.num_kept} kept"] if self.num_kept else []
        more += [f"{self.num_deferred} deferred"] if self.num_deferred else []
        more += [] if self.is_clipped else ["no clipping"]
        return ", ".join([self.precision, str(self.placement), *more])


@dataclass(frozen=True)
class Outcome:
    """Numbers of a trial."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]  # gradient norms
    weights: Tensor  # trained parameters after the last step, fp32, on the CPU

    def difference(self, other: Outcome) -> str:
        """Describe the first different bit; empty if all are equal."""
        for name in ("losses", "norms"):
            for step, (a, b) in enumerate(zip(getattr(self, name), getattr(other, name), strict=True), 1):
                if a != b and not (a != a and b != b):  # NaN equals NaN: a skipped step in fp16
                    return f"{name[:-1].replace('losse', 'loss')} of step {step} is {a!r} instead of {b!r}"
        num_unequal = int((self.weights != other.weights).sum())
        return f"{num_unequal} of {self.weights.numel()} weights differ" if num_unequal else ""

    def relative_error(self, other: Outcome) -> float:
        """Return the largest relative difference of a loss."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True))


@contextmanager
def open_trial(
    model: SmallModel, trial: Trial, wrap: Wrap = lambda store: store
) -> Iterator[tuple[OffloadedModel, AdamW]]:
    """Open a small model for training, with its state in a temporary folder.

    Args:
        wrap: replacement of each store, see `streams.ShakenStore`.
    """
    architecture, recipe, device = model.architecture, trial.recipe, trial.device
    dtypes = training_dtypes(PRECISIONS[trial.precision])
    budget = BufferBudget(num_chunks=NUM_CHUNKS, chunk_numel=CHUNK_NUMEL, num_kept_layers=trial.num_kept)
    places = trial.placement
    on_device = replace(places, boundaries="device")
    with scratch_folder() as temporary, open_checkpoint(model.folder) as checkpoint:
        folder = temporary / "state"
        offloaded = open_for_training(
            architecture, on_device, dtypes, device, folder, budget,
            recipe.clip_norm is not None or places.is_durable, selection=select(architecture, recipe),
        )  # fmt: skip
        try:
            open_frozen(offloaded, architecture, checkpoint, places)
            load_weights(offloaded, architecture, checkpoint, recipe.seed)
            wrapped = {id(store): wrap(store) for store in offloaded.stores.values()}
            offloaded.stores.update({kind: wrapped[id(store)] for kind, store in offloaded.stores.items()})
            if places.boundaries != "device":
                layout = boundary_layout(most_padded(sum(LENGTHS)), architecture.config.n_embd, len(LENGTHS))
                num_layers, compute = len(offloaded.layers), offloaded.compute_dtype
                store = wrap(open_boundaries(places, [layout] * num_layers, compute, device, folder, CHUNK_NUMEL))
                offloaded.boundaries = OffloadedActivations(
                    store, layout.numel, CHUNK_NUMEL, compute, device, offloaded.meter
                )
            yield offloaded, AdamW(offloaded, optimizer_config(recipe), num_deferred=trial.num_deferred)
        finally:
            offloaded.close()


def take_step(model: SmallModel, offloaded: OffloadedModel, optimizer: AdamW) -> tuple[float, float]:
    """Run one optimizer step on all rows; return loss and gradient norm."""
    optimizer.begin_step(PEAK_LR)
    batches = [batch.to(offloaded.device) for batch in micro_batches(model.documents, PROMPTS, MICRO_BATCH)]
    loss = train_step(offloaded, optimizer, batches)
    return loss.mean, optimizer.finish_step()


def run(model: SmallModel, trial: Trial, wrap: Wrap = lambda store: store) -> Outcome:
    """Train a small model; arguments as in `open_trial`."""
    with open_trial(model, trial, wrap) as (offloaded, optimizer):
        losses, norms = zip(*(take_step(model, offloaded, optimizer) for _ in range(trial.num_steps)), strict=True)
        optimizer.flush()
        chunks = [
            chunk.float().to(CPU, copy=True)
            for layer in offloaded.trained
            for _, chunk in offloaded.read_chunks(offloaded.parameter, layer)
        ]
        return Outcome(losses, norms, torch.cat(chunks))
