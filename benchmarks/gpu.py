"""Train GPT-J 6B on one GPU: streamed from host RAM under memory caps, entirely on the device, and by other programs.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --variants device,24,8,transformers,fsdp --tokens 16384
    python benchmarks/gpu.py --variants 24 --tokens 65536 --steps 2

Random weights, rows of 1,024 tokens, bf16 computation, AdamW, clipping on. Variants:

    device        everything on the device
    24, 8         weights and state in host RAM, this many GB of device memory, enforced
    transformers  a plain loop: weights, gradients and state in bf16 on the device, `AdamW(fused=True)`, 4 rows a
                  micro-batch without checkpointing if memory allows, else all rows with it
    fsdp          torch's `fully_shard` with `CPUOffloadPolicy`: fp32 weights and state in host RAM, bf16 computation,
                  `AdamW(fused=True)` on the CPU, checkpointing

The first three have fp32 master weights, and moments and waiting gradients in bf16. Each variant is a process of its
own. Prints JSON lines: seconds of each step, tokens/s, share of the measured rate of products (`mfu`), peak device
memory; of the first three also the forecast. Needs about 110 GB of host RAM and five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.models.attention import takes_ragged
from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.layout import Layout
from gptj_ft.models.linear import sums_products
from gptj_ft.models.registry import Architecture, families
from gptj_ft.planning.flops import count_flops
from gptj_ft.planning.memory import Free, allocator_limit
from gptj_ft.planning.plan import Plan, choose
from gptj_ft.planning.probe import ASSUMED_DISK, ComputeRates, Rates, measure_compute
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import fill_layer, open_for_training
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import training_dtypes
from gptj_ft.system.accelerator import limit_memory
from gptj_ft.system.machine import choose_device, free_memory
from gptj_ft.training.restore import optimizer_config

# EleutherAI/gpt-j-6b's config.json.
SHAPE = {"vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_head": 16, "n_layer": 28, "rotary_dim": 64}
ROW = 1024  # tokens a document, all of them but the first trained on
WARM_UP = 1
MICRO_BATCH = 8192
PEER_ROWS = 4  # of a micro-batch of `transformers`
CLIP = 1.0


def main() -> None:
    """Run all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="device,24,8,transformers,fsdp")
    parser.add_argument("--tokens", type=int, default=16384, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--layers", type=int, default=SHAPE["n_layer"])
    parser.add_argument("--timeout", type=int, default=240, help="seconds of a variant")
    parser.add_argument("--rates", help=argparse.SUPPRESS)  # of the parent process
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here")
    if arguments.rates:
        run_variant(arguments)
        return
    device = choose_device("cuda")
    compute = measure_compute(device)
    say(
        device=torch.cuda.get_device_name(device), torch=torch.__version__, rates=asdict(compute),
        ragged_attention=takes_ragged(device, torch.bfloat16, SHAPE["n_embd"] // SHAPE["n_head"]),
        fp32_sums=sums_products(device, torch.bfloat16),
    )  # fmt: skip
    torch.cuda.empty_cache()
    for variant in arguments.variants.split(","):
        command = [sys.executable, __file__, "--rates", json.dumps(asdict(compute)), "--variants", variant]
        for name in ("tokens", "steps", "layers"):
            command += [f"--{name}", str(getattr(arguments, name))]
        try:
            subprocess.run(command, timeout=arguments.timeout, check=False)
        except subprocess.TimeoutExpired:
            say(variant=variant, error=f"more than {arguments.timeout} s")


def run_variant(arguments: argparse.Namespace) -> None:
    """Run one variant in this process; print its measurements."""
    variant, peers = arguments.variants, {"transformers": train_transformers, "fsdp": train_fsdp}
    compute = ComputeRates(**json.loads(arguments.rates))
    train = peers.get(variant, train_streamed)
    begin = time.perf_counter()
    take, facts = train(arguments, compute)
    opening = time.perf_counter() - begin
    torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for _ in range(WARM_UP + arguments.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(take())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    steady = sum(seconds[WARM_UP:]) / arguments.steps
    flops = count_flops(layouts(arguments.layers), arguments.tokens, arguments.tokens, 0)
    say(
        variant=variant, tokens=arguments.tokens, layers=arguments.layers, seconds=seconds, losses=losses,
        tokens_per_second=arguments.tokens / steady, mfu=flops.model / steady / compute.bf16, opening=opening,
        allocated=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved(),
        **(facts() if callable(facts) else facts),
    )  # fmt: skip


def architecture(layers: int) -> Architecture:
    """Return GPT-J 6B with this many blocks."""
    family, shape = families()["gptj"], {**SHAPE, "n_layer": layers}
    return Architecture(family, family.read_config(shape), shape)


def layouts(layers: int) -> list[Layout]:
    """Return the layouts of its layers."""
    return [Layout.of(layer) for layer in architecture(layers).layers()]


def rows_of(tokens: int) -> list[list[int]]:
    """Return a step's random rows."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, SHAPE["vocab_size"], (ROW,), generator=generator).tolist() for _ in range(tokens // ROW)]


Taken = tuple[Callable[[], float], Any]
"""A function that takes a step and returns its loss, and facts, or a function that returns them after the steps."""


def train_streamed(arguments: argparse.Namespace, compute: ComputeRates) -> Taken:
    """Open the model in host RAM under a cap, or on the device."""
    device, cap = choose_device("cuda"), None if arguments.variants == "device" else float(arguments.variants)
    if cap is not None:
        limit_memory(device, allocator_limit(int(cap * 1e9)))
    model, tokens = architecture(arguments.layers), arguments.tokens
    recipe = recipe_of(cap)
    plan = plan_of(recipe, model, tokens, Rates(compute, ASSUMED_DISK), device)
    dtypes, boundary = training_dtypes(*[torch.bfloat16] * 3), boundary_layout(tokens, SHAPE["n_embd"], tokens // ROW)
    stack = open_for_training(model, plan.placement, dtypes, device, Path(), plan.budget, boundary=boundary)
    fill(stack)
    optimizer = AdamW(stack, optimizer_config(recipe), num_deferred=plan.costs.num_deferred)
    batches: list[PackedBatch] = [
        batch.to(device) for batch in micro_batches(rows_of(tokens), [1] * (tokens // ROW), MICRO_BATCH)
    ]

    def take() -> float:
        optimizer.begin_step(1e-5)
        loss = train_step(stack, optimizer, batches).mean
        optimizer.finish_step()
        return loss

    def facts() -> dict[str, Any]:
        costs, meter = plan.costs, stack.meter
        moved = (costs.bytes_read_per_step / compute.to_device, costs.bytes_written_per_step / compute.from_device)
        return {
            "placement": str(plan.placement), "kept": plan.budget.num_kept_layers, "num_deferred": costs.num_deferred,
            "chunk": [plan.budget.num_chunks, plan.budget.update_numel], "forecast_seconds": costs.seconds_per_step,
            "forecast_bytes": plan.device_bytes, "bound_seconds": max(costs.compute_seconds, *moved),
            "compute_seconds": costs.compute_seconds, "moved_seconds": moved, "waited": meter.waited_seconds,
        }  # fmt: skip

    return take, facts


def recipe_of(cap: float | None) -> Recipe:
    """Return the options of a run within a cap in GB, or on the device."""
    place = "device" if cap is None else "host"
    options = {"weights": place, "optimizer_state": place, "moments": "bf16", "gradients": "bf16"}
    limits = {"micro_batch_tokens": MICRO_BATCH, "device_memory": None if cap is None else int(cap * 1e9)}
    return Recipe.model_validate({**options, **limits})


def plan_of(recipe: Recipe, model: Architecture, tokens: int, rates: Rates, device: torch.device) -> Plan:
    """Plan steps of this many tokens."""
    layers = model.layers()
    workload = Workload(
        [Layout.of(layer) for layer in layers], SHAPE["n_embd"], torch.bfloat16,
        StepTokens(min(MICRO_BATCH, tokens), tokens, tokens, tokens), None, rows=RowLengths(ROW), layers=layers,
    )  # fmt: skip
    free = Free.of_accelerator(free_memory(device), free_memory(torch.device("cpu")), 10**15)
    return choose(recipe, workload, free, rates)


def fill(stack: OffloadedModel) -> None:
    """Give a model random weights."""
    generator = torch.Generator(stack.device).manual_seed(0)

    def draw(name: str, view: torch.Tensor) -> None:
        view.normal_(0, 0.02, generator=generator) if view.ndim > 1 else view.fill_(name.endswith("weight"))

    for layer in range(len(stack.layers)):
        fill_layer(stack, layer, draw)
    stack.drain()


def peer_model(layers: int, dtype: torch.dtype) -> Any:
    """Return `transformers`' GPT-J on the device, with random weights."""
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(**{**SHAPE, "n_layer": layers}, use_cache=False, embd_pdrop=0, resid_pdrop=0, attn_pdrop=0)
    with torch.device("cuda"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return GPTJForCausalLM(config).train()
        finally:
            torch.set_default_dtype(before)


def loop(model: Any, optimizer: torch.optim.Optimizer, tokens: int, rows: int) -> Callable[[], float]:
    """Return a function that takes a step of a plain loop, in micro-batches of some rows."""
    parts: list[torch.Tensor] = [*torch.tensor(rows_of(tokens), device="cuda").split(rows)]

    def take() -> float:
        losses: Iterator[torch.Tensor] = (backward(part) for part in parts)
        total = torch.stack([*losses]).sum()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    def backward(part: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=part, labels=part).loss / len(parts)
        loss.backward()
        return loss.detach()

    return take


def train_transformers(arguments: argparse.Namespace, compute: ComputeRates) -> Taken:
    """Train on the device, all in bf16."""
    model = peer_model(arguments.layers, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    take = loop(model, optimizer, arguments.tokens, PEER_ROWS)
    try:
        take()
        return take, {"checkpointing": False}
    except torch.OutOfMemoryError:
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    model.gradient_checkpointing_enable()
    return loop(model, optimizer, arguments.tokens, arguments.tokens // ROW), {"checkpointing": True}


def train_fsdp(arguments: argparse.Namespace, compute: ComputeRates) -> Taken:
    """Train with weights, gradients and state in host RAM by `fully_shard`, on one GPU."""
    from torch.distributed import init_process_group
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    init_process_group("cpu:gloo,cuda:nccl")
    model = peer_model(arguments.layers, torch.float32)
    model.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.transformer.h, model):
        fully_shard(module, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return loop(model, optimizer, arguments.tokens, arguments.tokens // ROW), {"checkpointing": True}


def say(**facts: Any) -> None:
    """Print a JSON line."""
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
