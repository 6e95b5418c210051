"""Compare GPT-J 6B on one GPU: streamed from host RAM under a memory cap, and entirely on the device.

Random weights, bf16 computation with fp32 master weights, AdamW, clipping on; moments and waiting gradients in bf16 in
every variant, so that the same numbers are computed. For each variant and number of tokens per step: tokens/s of steady
steps, share of the time that the device stood still for the stores, peak device memory. First, on a tiny model, that
placements give the same bits on this device.

    python benchmarks/gpu.py --caps 8,24 --tokens 4096,16384,65536

Needs torch >= 2.11, transformers >= 5.17, safetensors and pydantic, about 110 GB of host RAM, and less than 9 minutes.

It has not been run yet: no GPU was available.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.models.attention import takes_ragged
from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.layout import Layout
from gptj_ft.models.registry import Architecture, families
from gptj_ft.planning.flops import count_flops
from gptj_ft.planning.memory import Free
from gptj_ft.planning.plan import Plan, choose
from gptj_ft.planning.probe import ASSUMED_DISK, Rates, measure_compute
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import fill_layer, open_for_training
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.system.machine import free_memory
from gptj_ft.training.restore import optimizer_config

# EleutherAI/gpt-j-6b's config.json.
SHAPE = {"vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_head": 16, "n_layer": 28, "rotary_dim": 64}
TINY = {"vocab_size": 503, "n_positions": 128, "n_embd": 256, "n_head": 1, "n_layer": 3, "rotary_dim": 64}
ROW = 1024  # tokens a document, all of them but the first trained on
WARM_UP = 1
STEPS = 3


def architecture(shape: dict[str, int]) -> Architecture:
    """Return a GPT-J of a shape."""
    family = families()["gptj"]
    return Architecture(family, family.read_config(shape), shape)


def filled(stack: OffloadedModel) -> OffloadedModel:
    """Give a stack random weights."""
    generator = torch.Generator(stack.device).manual_seed(0)

    def fill(name: str, view: torch.Tensor) -> None:
        view.normal_(0, 0.02, generator=generator) if view.ndim > 1 else view.fill_(name.endswith("weight"))

    for layer in range(len(stack.layers)):
        fill_layer(stack, layer, fill)
    stack.drain()
    return stack


def batches_of(tokens: int, row: int, vocabulary: int, budget: int, device: torch.device) -> list[PackedBatch]:
    """Return micro-batches of random documents."""
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, vocabulary, (row,), generator=generator).tolist() for _ in range(tokens // row)]
    return [batch.to(device) for batch in micro_batches(documents, [1] * len(documents), budget)]


def check_placements(device: torch.device) -> None:
    """Train a tiny model in several placements; every loss must be bit-identical."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, curves = architecture(TINY), {}
    boundary = boundary_layout(256, TINY["n_embd"], 4)
    with tempfile.TemporaryDirectory() as folder:
        for places in (("device",) * 3, ("host",) * 3, ("device", "host", "device"), ("disk",) * 3):
            place, recipe = Placement(*places), Recipe()  # type: ignore[arg-type]
            if "disk" in places and not has_xxhash():
                continue
            stack = open_for_training(
                model, place, training_dtypes(torch.bfloat16), device, Path(folder) / "-".join(places),
                BufferBudget(num_chunks=3, chunk_numel=2048, num_kept_layers=1), boundary=boundary,
            )  # fmt: skip
            optimizer = AdamW(filled(stack), optimizer_config(recipe))
            curves[str(place)] = []
            for _ in range(4):
                optimizer.begin_step(1e-3)
                loss = train_step(stack, optimizer, batches_of(256, 64, TINY["vocab_size"], 128, device))
                curves[str(place)].append((loss.total, optimizer.finish_step()))
            stack.close()
    torch.use_deterministic_algorithms(False)
    print(json.dumps({"check": "placements", "are_equal": len(set(map(str, curves.values()))) == 1, "curves": curves}))


def has_xxhash() -> bool:
    """Tell whether the disk store can run: its digests need xxhash."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return False
    return True


def plan_for(cap: float | None, load: Workload, rates: Rates, device: torch.device, budget: int) -> Plan:
    """Return the placement: on the device without a cap, in host RAM under one."""
    place = "device" if cap is None else "host"
    recipe = Recipe(
        weights=place, optimizer_state=place, moments="bf16", gradients="bf16", micro_batch_tokens=budget,
        device_memory=None if cap is None else int(cap * 1e9),
    )  # fmt: skip
    free = Free(free_memory(device), free_memory(torch.device("cpu")), 10**15, is_shared=False)
    return choose(recipe, load, free, rates)


def run_variant(cap: float | None, arguments: argparse.Namespace, rates: Rates, device: torch.device) -> None:
    """Train some steps for each number of tokens; print the measurements."""
    model = architecture({**SHAPE, "n_layer": arguments.layers})
    layouts = [Layout.of(layer) for layer in model.layers()]
    tokens_of_steps = [int(word) for word in arguments.tokens.split(",")]
    load = Workload(
        layouts, SHAPE["n_embd"], torch.bfloat16, StepTokens(arguments.micro_batch, *[max(tokens_of_steps)] * 3), None
    )
    plan = plan_for(cap, load, rates, device, arguments.micro_batch)
    begin = time.perf_counter()
    stack = open_for_training(
        model, plan.placement, training_dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16), device, Path(),
        plan.budget, boundary=boundary_layout(max(tokens_of_steps), SHAPE["n_embd"], max(tokens_of_steps) // ROW),
    )  # fmt: skip
    late = plan.costs.num_deferred
    optimizer = AdamW(filled(stack), optimizer_config(Recipe(moments="bf16", gradients="bf16")), num_deferred=late)
    filling = time.perf_counter() - begin
    for tokens in tokens_of_steps:
        batches = batches_of(tokens, ROW, SHAPE["vocab_size"], arguments.micro_batch, device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds, losses, waited = [], [], stack.meter.waited_seconds
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                waited = stack.meter.waited_seconds
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            optimizer.begin_step(1e-5)
            losses.append(train_step(stack, optimizer, batches).mean)
            optimizer.finish_step()
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        steady = sum(seconds[WARM_UP:])
        flops = count_flops(layouts, tokens, tokens, plan.budget.num_kept_layers)
        say(
            cap=cap, tokens=tokens, placement=str(plan.placement), kept=plan.budget.num_kept_layers, num_deferred=late,
            seconds=seconds, losses=losses, tokens_per_second=STEPS * tokens / steady,
            mfu=STEPS * flops.model / steady / rates.compute.bf16,
            stall=(stack.meter.waited_seconds - waited) / steady,
            device_peak_bytes=torch.cuda.max_memory_allocated(device),
            device_reserved_bytes=torch.cuda.max_memory_reserved(device),
            forecast_bytes=plan.device_bytes, forecast_seconds=plan.costs.seconds_per_step, filling=filling,
        )  # fmt: skip
    stack.close()
    del stack, optimizer
    gc.collect()
    torch.cuda.empty_cache()


def say(**facts: Any) -> None:
    """Print a JSON line."""
    print(json.dumps(facts), flush=True)


def main() -> None:
    """Run all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caps", default="24,8", help="caps of device memory in GB; a run without cap comes on top")
    parser.add_argument("--tokens", default="4096,16384,65536")
    parser.add_argument("--micro-batch", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=SHAPE["n_layer"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here")
    device = torch.device("cuda", torch.cuda.current_device())
    rates = Rates(measure_compute(device), ASSUMED_DISK)
    say(
        device=torch.cuda.get_device_name(device), torch=torch.__version__, rates=vars(rates.compute),
        ragged_attention=takes_ragged(device, torch.bfloat16, SHAPE["n_embd"] // SHAPE["n_head"]),
    )  # fmt: skip
    check_placements(device)
    for cap in (None, *map(float, arguments.caps.split(","))):
        run_variant(cap, arguments, rates, device)


if __name__ == "__main__":
    main()
