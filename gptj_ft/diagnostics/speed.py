"""Measure a device: rates, overlap of computation and transfers at GPT-J's size, and memory under a cap."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.errors import ResourceError
from gptj_ft.models.batch import PackedBatch, most_padded
from gptj_ft.models.layout import Layout
from gptj_ft.models.registry import Architecture, families
from gptj_ft.planning.machine_profile import rates
from gptj_ft.planning.memory import Free, allocator_limit, recipe_dtypes
from gptj_ft.planning.plan import DoesNotFit, Plan, choose, forecast
from gptj_ft.planning.probe import Rates
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import fill_layer, open_for_training
from gptj_ft.streaming.step import train_step
from gptj_ft.system.accelerator import (
    CPU,
    empty_cache,
    free_and_total,
    has_streams,
    limit_memory,
    module_of,
    new_stream,
    on_stream,
    peak_device_memory,
    pin,
    synchronize,
)
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.machine import free_memory
from gptj_ft.system.memory import allocate
from gptj_ft.system.scratch import scratch_folder
from gptj_ft.system.units import gigabytes
from gptj_ft.training.restore import optimizer_config

WIDTHS = (4096, 2048, 1024, 512, 256)  # of blocks: GPT-J's first, then the widest that memory and time allow
TOKENS = (512, 2048, 8192)  # of a step
NUM_BLOCKS, VOCABULARY, CONTEXT = 3, 1024, 2048
LONGEST_ROW, MICRO_BATCH_TOKENS = 512, 2048
BYTES_PER_PARAMETER = 12  # weights, master weights, moments and gradient in the types of `Blocks.recipe`, rounded up
HOST_SHARE = 0.4  # of free memory, at most
FLOPS_PER_WEIGHT = 8.0  # per token, with recomputation
MAX_SECONDS = 30.0  # of all steps together, by the measured rates
WARM_UP, STEPS = 1, 2
CAP_SHARE = 0.8  # of the memory of a plan without a cap
LINK_BYTES = 256 * 2**20


def measure_rates(device: torch.device, folder: Path) -> dict[str, Any]:
    """Return the rates of products, memory, link and disk, measured unless known, and the link in both directions."""
    known = rates(device, folder)
    facts = {"compute": asdict(known.compute), "disk": asdict(known.disk), "is_disk_assumed": known.is_disk_assumed}
    return {**facts, **({"link": measure_link(device)} if has_streams(device) else {})}


def measure_link(device: torch.device) -> dict[str, float]:
    """Measure the link in bytes/s: from pageable memory, from and to locked memory, and both ways at once."""
    num_bytes = LINK_BYTES
    hosts = [allocate(num_bytes, torch.uint8, CPU) for _ in range(2)]
    devices = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [new_stream(device) for _ in range(2)]
    synchronize(device)

    def seconds(*copies: tuple[Tensor, Tensor]) -> float:
        # The best of three: other programs only slow a copy down.
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            for stream, (source, target) in zip(streams, copies, strict=False):
                with on_stream(stream):
                    target.copy_(source, non_blocking=True)
            synchronize(device)
            best = min(best, time.perf_counter() - start)
        return best

    results = {"pageable_to_device": num_bytes / seconds((hosts[0], devices[0]))}
    unpin = [pin(host, device) for host in hosts]
    into, out = (hosts[0], devices[0]), (devices[1], hosts[1])
    results |= {"is_locked": float(None not in unpin), "to_device": num_bytes / seconds(into)}
    results |= {"from_device": num_bytes / seconds(out), "both_at_once": 2 * num_bytes / seconds(into, out)}
    for undo in unpin:
        if undo is not None:
            undo()
    return results


@dataclass(frozen=True)
class Blocks:
    """Blocks of a GPT-J that are streamed from host memory."""

    device: torch.device
    width: int  # of the model; heads are as wide as GPT-J's
    precision: str
    tokens: Sequence[int] = TOKENS  # sizes of the measured steps

    @classmethod
    def fitting(cls, device: torch.device, precision: str, known: Rates) -> Blocks:
        """Choose the widest blocks that memory and time allow."""
        host = HOST_SHARE * free_memory(CPU)
        rate = known.compute.matmul(PRECISIONS[precision])
        tokens = (WARM_UP + STEPS) * sum(TOKENS)
        for width in WIDTHS:
            # A block has about 12 D^2 weights: 4 in attention, 8 in the MLP.
            weights, blocks = NUM_BLOCKS * 12 * width**2, cls(device, width, precision)
            is_quick = FLOPS_PER_WEIGHT * weights * tokens / rate < MAX_SECONDS
            if is_quick and BYTES_PER_PARAMETER * weights < host:
                with suppress(DoesNotFit):
                    blocks.plan(known, max(TOKENS))
                    return blocks
        raise ResourceError(f"too little memory, or too slow, for blocks of width {WIDTHS[-1]}")

    @property
    def architecture(self) -> Architecture:
        shape = {
            "vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": self.width, "n_layer": NUM_BLOCKS,
            "n_head": max(1, self.width // 256), "rotary_dim": 64,
        }  # fmt: skip
        family = families()["gptj"]
        return Architecture(family, family.read_config(shape), shape)

    def workload(self, tokens: int) -> Workload:
        layers, dtype = self.architecture.layers(), PRECISIONS[self.precision]
        return Workload(
            [Layout.of(layer) for layer in layers], self.width, dtype,
            StepTokens(min(MICRO_BATCH_TOKENS, tokens), tokens, tokens, tokens), None,
            rows=RowLengths(min(LONGEST_ROW, tokens)), layers=layers,
        )  # fmt: skip

    def batches(self, tokens: int) -> list[PackedBatch]:
        """Return a step of random rows as micro-batches on the device."""
        generator = torch.Generator().manual_seed(tokens)
        row = min(LONGEST_ROW, tokens)
        drawn = [torch.randint(0, VOCABULARY, (row,), generator=generator).tolist() for _ in range(tokens // row)]
        return [batch.to(self.device) for batch in micro_batches(drawn, [1] * len(drawn), MICRO_BATCH_TOKENS)]

    def recipe(self, cap: int | None = None) -> Recipe:
        """Return the options of a run from host memory; ``cap`` limits the device's memory, in bytes."""
        places = {"weights": "host", "optimizer_state": "host", "boundaries": "device"}
        types = {"moments": "bf16", "gradients": "bf16"}
        limits = {"micro_batch_tokens": MICRO_BATCH_TOKENS, "device_memory": cap}
        return Recipe.model_validate({**places, **types, **limits})

    def plan(self, known: Rates, tokens: int, cap: int | None = None) -> Plan:
        """Plan steps of ``tokens`` tokens; raise `DoesNotFit` if the cap is too low."""
        free = Free.of_accelerator(free_memory(self.device), free_memory(CPU), 10**15)
        return choose(self.recipe(cap), self.workload(tokens), free, known)

    @contextmanager
    def opened(self, plan: Plan) -> Iterator[OffloadedModel]:
        """Open the blocks with random weights under a plan."""
        recipe, most = self.recipe(), max(self.tokens)
        dtypes = recipe_dtypes(recipe, PRECISIONS[self.precision])
        with scratch_folder() as folder:
            model = open_for_training(
                self.architecture, plan.placement, dtypes, self.device, folder, plan.budget,
                boundary=boundary_layout(most_padded(most), self.width, -(-most // LONGEST_ROW)),
            )  # fmt: skip
            try:
                for layer in range(len(model.layers)):
                    fill_layer(model, layer, _fill)
                model.drain()
                yield model
            finally:
                model.close()
                # torch frees memory only when no name refers to it any more.
                del model
                empty_cache(self.device)


def _fill(name: str, view: Tensor) -> None:
    """Initialize a parameter; steps are timed, their numbers do not matter."""
    view.fill_(float(name.endswith("weight"))) if view.ndim == 1 else view.normal_(0.0, 0.02)


def take_steps(model: OffloadedModel, optimizer: AdamW, batches: Sequence[PackedBatch]) -> tuple[float, float]:
    """Run steps after a warm-up; return the seconds of a step, and the share of them that waited for the stores."""
    start = waited = 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            synchronize(model.device)
            start, waited = time.perf_counter(), model.meter.waited_seconds
        optimizer.begin_step(1e-5)
        train_step(model, optimizer, batches)
        optimizer.finish_step()
    synchronize(model.device)
    seconds = time.perf_counter() - start
    return seconds / STEPS, (model.meter.waited_seconds - waited) / seconds


def measure_overlap(blocks: Blocks, known: Rates) -> dict[str, Any]:
    """Measure steps of streamed blocks, and compare them with `bound_seconds`."""
    plan = blocks.plan(known, max(blocks.tokens))
    recipe = blocks.recipe().model_copy(update={"activations": plan.budget.num_kept_layers})
    rows, step = [], 0
    with blocks.opened(plan) as model:
        for tokens in blocks.tokens:
            workload = blocks.workload(tokens)
            planned = forecast(plan.placement, workload, recipe, known, plan.have)
            optimizer = AdamW(model, optimizer_config(recipe), step, planned.num_deferred)
            seconds, stall = take_steps(model, optimizer, blocks.batches(tokens))
            optimizer.flush()
            step = optimizer.step
            bound = bound_seconds(planned, known)
            rows.append(
                {
                    "tokens": tokens, "seconds": seconds, "bound_seconds": bound, "share": bound / seconds,
                    "forecast_seconds": planned.costs.seconds_per_step, "stall": stall,
                    "tokens_per_second": tokens / seconds,
                }
            )  # fmt: skip
    return {"width": blocks.width, "blocks": NUM_BLOCKS, "precision": blocks.precision, "steps": rows}


def bound_seconds(plan: Plan, known: Rates) -> float:
    """Return the lower bound of a step: in each pass the longest of computation and of the transfers each way."""
    if plan.timeline is not None:
        return plan.timeline.bound_by_pass
    costs = plan.costs
    into, out = costs.bytes_read_per_step, costs.bytes_written_per_step
    return max(costs.compute_seconds, into / known.compute.to_device, out / known.compute.from_device)


class CapExceeded(ResourceError):
    """A run used more of the device's memory than its cap."""


def measure_memory(blocks: Blocks, known: Rates, tokens: int) -> dict[str, Any]:
    """Train under an enforced cap on the device's memory; return the peak beside the forecast.

    Raises:
        CapExceeded: the run used more.
    """
    device = blocks.device
    blocks = replace(blocks, tokens=(tokens,))
    empty_cache(device)
    free, total = free_and_total(device)
    needed = blocks.plan(known, tokens).device_bytes
    plan, cap = _tightest(blocks, known, tokens, needed)
    if hasattr(module_of(device), "reset_peak_memory_stats"):
        module_of(device).reset_peak_memory_stats(device)
    # The driver itself needs part of the cap; torch's allocator gets the rest.
    limit = allocator_limit(cap)
    limit_memory(device, limit)
    try:
        with blocks.opened(plan) as model:
            optimizer = AdamW(model, optimizer_config(blocks.recipe()), num_deferred=0)
            take_steps(model, optimizer, blocks.batches(tokens))
            peak, left = peak_device_memory(device), free_and_total(device)[0]
            optimizer.flush()
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise ResourceError(f"out of memory under a cap of {gigabytes(cap)}, enough by the forecast") from error
    finally:
        # A limit of the whole memory lifts the cap for the rest of the process.
        limit_memory(device, total)
    results = {
        "cap": cap, "allocator_limit": limit, "forecast": plan.device_bytes, "allocated": peak.allocated,
        "reserved": peak.reserved, "driver": max(0, free - left), "tokens": tokens, "width": blocks.width,
    }  # fmt: skip
    if peak.reserved > limit:
        raise CapExceeded(f"{gigabytes(peak.reserved)} were taken under a cap of {gigabytes(cap)}")
    return results


def _tightest(blocks: Blocks, known: Rates, tokens: int, needed: int) -> tuple[Plan, int]:
    """Plan under a cap of 80 % of the needed memory, else of the needed memory; return the plan and its cap."""
    for cap in (int(CAP_SHARE * needed), needed):
        try:
            return blocks.plan(known, tokens, cap), cap
        except ResourceError:
            continue
    return blocks.plan(known, tokens), free_and_total(blocks.device)[0]
