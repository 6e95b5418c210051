"""Run an optimizer step of a model of any size without data; record a byte ledger and a trace.

    from support.accelerator.ghost import GPTJ_6B, GhostBatch, ghost_step
    ledger, trace = ghost_step(GPTJ_6B, Placement("host", "host"), BufferBudget(2, 24), GhostBatch(16384, 1024, 2048))
    seconds = replay(trace, RATES["RTX 4060 8GB"]).seconds

The real schedule runs with all layers, threads and buffers; only floating point data is missing. It needs a separate
process.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support import accelerator
from support.accelerator.replay import Trace, read_trace
from support.accelerator.simulation import show

GPTJ_6B: Mapping[str, Any] = {
    "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_head": 16, "n_layer": 28, "rotary_dim": 64,
}  # fmt: skip


@dataclass(frozen=True)
class GhostBatch:
    """The rows of a step, all of one length."""

    tokens: int = 16384  # of the step
    row_tokens: int = 1024
    micro_batch_tokens: int = 4096
    prompt_tokens: int = 1  # tokens at each row's start that are not trained on


@dataclass(frozen=True)
class Ledger:
    """Device memory of a step, in bytes."""

    peak: int  # most that was allocated at once
    before: int  # allocated when the step began
    at_peak: list[tuple[int, str]] = field(repr=False)
    """Bytes alive at the peak, by allocating line, largest first."""
    num_operations: int = 0


def forget_tensors() -> None:
    """Drop tensors that the package caches from an earlier simulation."""
    from gptj_ft.models import attention, dropout, linear, rotary
    from gptj_ft.streaming.moments import form, int8

    for cached in (
        dropout._column_keys,
        rotary._frequencies,
        rotary._inv_freq,
        attention.takes_ragged,
        linear._ones,
        form._noise,
        int8._pairs,
        int8._cells,
    ):
        cached.cache_clear()
    gc.collect()


def ghost_step(
    shape: Mapping[str, Any],
    placement: Any,
    budget: Any,
    batch: GhostBatch = GhostBatch(),
    options: Mapping[str, Any] = {},
    *,
    num_deferred: int = 0,
    family: str = "gptj",
    compute: torch.dtype = torch.bfloat16,
    warm_up: int = 1,
    ghost: bool = True,
) -> tuple[Ledger, Trace]:
    """Run optimizer steps without numbers; return the ledger and the trace of the last.

    Args:
        shape: fields of the model's ``config.json``.
        placement: a `Placement` on device and host; disks are not modelled.
        budget: a `BufferBudget`; ``num_kept_layers`` says how many blocks are kept.
        batch: rows of the step.
        options: options of the recipe, as `config.resolve.build` takes them: ``moments``, ``gradients``,
            ``clip_norm``, ``method``, ``lora``, ``train``.
        num_deferred: blocks whose updates are deferred.
        family: type of the model.
        compute: type of the computation.
        warm_up: steps before the one that counts; after the first the pools are filled and updates are pending.
        ghost: without numbers; with them, for small shapes, the ledger is the same.
    """
    accelerator.install()
    simulation = accelerator.start("eager", ghost=ghost, total_bytes=1 << 50)
    from gptj_ft.config.resolve import build
    from gptj_ft.data.batches import micro_batches
    from gptj_ft.models.registry import Architecture, families
    from gptj_ft.models.trainable import select
    from gptj_ft.planning.memory import keeps_gradients
    from gptj_ft.streaming.activations import boundary_layout
    from gptj_ft.streaming.adamw import AdamW
    from gptj_ft.streaming.open import open_for_training
    from gptj_ft.streaming.step import train_step
    from gptj_ft.streaming.stores import host
    from gptj_ft.streaming.stores.device import DeviceStore
    from gptj_ft.streaming.stores.placement import training_dtypes
    from gptj_ft.system.dtypes import PRECISIONS
    from gptj_ft.training.restore import optimizer_config

    forget_tensors()

    def nowhere(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    recipe, device = build(dict(options)), torch.device(accelerator.NAME, 0)
    kind = families()[family]
    architecture = Architecture(kind, kind.read_config(dict(shape)), dict(shape))
    selection = select(architecture, recipe)
    dtypes = training_dtypes(compute, PRECISIONS[recipe.moments], PRECISIONS[recipe.gradients])
    num_rows = batch.tokens // batch.row_tokens
    boundary = boundary_layout(batch.tokens, shape["n_embd"], num_rows)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, shape["vocab_size"], (num_rows, batch.row_tokens), generator=generator).tolist()
    with ExitStack() as context:
        if ghost:
            context.enter_context(patch.object(host, "allocate", nowhere))
            context.enter_context(patch.object(host, "pin", lambda *_: lambda: None))
        # The order of issue is that of one thread, as on a device.
        context.enter_context(torch.autograd.set_multithreading_enabled(False))
        model = open_for_training(
            architecture, placement, dtypes, device, Path("none"), budget,
            keeps_gradients(recipe, placement, compute), boundary, selection,
        )  # fmt: skip
        if any(layout.numel for layout in model.frozen):
            store = DeviceStore if placement.of("frozen") == "device" else host.HostStore
            model.stores["frozen"] = store(model.frozen, {"frozen": compute}, device)
        optimizer = AdamW(model, optimizer_config(recipe), step=1, num_deferred=num_deferred)
        packed = micro_batches(rows, [batch.prompt_tokens] * num_rows, batch.micro_batch_tokens)
        batches = [each.to(device) for each in packed]
        memory, before = simulation.devices[0], 0
        for step in range(warm_up + 1):
            if step == warm_up:
                simulation.trace, before = [], memory.allocated
                memory.peak, simulation.at_peak = memory.allocated, simulation.by_site.copy()
            optimizer.begin_step(1e-5)
            train_step(model, optimizer, batches)
            optimizer.finish_step()
        recorded, simulation.trace = simulation.trace or [], None
        trace = read_trace(recorded)
        alive = [(size, show(at)) for at, size in simulation.at_peak.most_common() if size]
        ledger = Ledger(memory.peak, before, alive, sum(event.action == "put" for event in trace))
        model.close()
    return ledger, trace
