"""Train all 6,050,882,784 parameters of GPT-J from disk in 6 GiB, kill the run during a step, and resume it.

Random weights, computed with in fp32 or bf16; moments and stored gradients in bf16: the run takes 10 bytes per
parameter on the disk, 61 GB, and 2 more for a layer on its way. AdamW, clipping on, steps of 2,048 tokens. A first
process trains until it is killed (SIGKILL) in the middle of the second step; a second one resumes, ends that step and
the rest, applies the last update to every layer; then every file is read and compared with its digests.

    python benchmarks/full_size.py --work /tmp/full --memory 6
    python benchmarks/full_size.py --work /tmp/full --memory 6 --precision bf16 --steps 5
    python benchmarks/full_size.py --work /tmp/full --shape 8b --layers 4 --memory 4 --precision bf16 --steps 4

Each step is held against the longer of two bounds: its FLOP by the best of twenty products, recomputation counted, and
its bytes by the rates of the disk; both are measured before and after, in the same run, and the better counts. Steps
from the third on are steady: they begin and end with an update on its way.

The steps are the trainer's own (`AdamW`, `train_step`, `checkpoint.commit`). What is on the device at once, and which
updates wait, is what `plan` chooses under the cap, by the times of these layers and a replay of the step. There are no
rows to prepare and no model folder to start from, which would be 24 GB more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import memory
from streamed_vs_resident import best_product

from gptj_ft.config.options import Recipe
from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import micro_batches
from gptj_ft.models.batch import PackedBatch
from gptj_ft.models.layout import Layout
from gptj_ft.models.products import ONEDNN, set_products
from gptj_ft.models.registry import Architecture, families
from gptj_ft.planning.flops import count_flops
from gptj_ft.planning.machine_profile import disk_rates, rates
from gptj_ft.planning.memory import Free
from gptj_ft.planning.plan import Plan, forecast
from gptj_ft.planning.resources import Target
from gptj_ft.planning.workload import RowLengths, StepTokens, Workload
from gptj_ft.streaming.adamw import AdamW, Update
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import fill_layer, open_for_training
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.training import checkpoint
from gptj_ft.training.restore import optimizer_config
from gptj_ft.training.run_state import RunState
from gptj_ft.training.throughput import Stopwatch, Throughput
from gptj_ft.training.verify import Checker

# The config.json of EleutherAI/gpt-j-6b and of Llama 3.1 8B; its fields for width and blocks first.
SHAPES: dict[str, dict[str, Any]] = {
    "gptj": {
        "n_embd": 4096, "n_layer": 28, "model_type": "gptj", "vocab_size": 50400, "n_positions": 2048, "n_head": 16,
        "rotary_dim": 64,
    },
    "8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "model_type": "llama", "vocab_size": 128_256,
        "max_position_embeddings": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "rope_theta": 500_000.0,
    },
}  # fmt: skip
ROW = 256  # tokens a document, all of them but the first trained on
ON_DISK = Placement("disk", "disk")
POLL_SECONDS = 0.2


class Work:
    """Inputs of both processes: model, recipe, plan, documents."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        shape = dict(SHAPES[arguments.shape])
        width, depth, *_ = shape
        shape |= {width: arguments.width, depth: arguments.layers or shape[depth]}
        family = families()[shape["model_type"]]
        self.architecture = Architecture(family, family.read_config(shape), shape)
        self.dtype, self.steps = PRECISIONS[arguments.precision], arguments.steps
        self.layers = self.architecture.layers()
        self.layouts = [Layout.of(layer) for layer in self.layers]
        self.device, self.tokens = torch.device("cpu"), arguments.tokens
        self.recipe = Recipe(
            moments="bf16", gradients="bf16", micro_batch_tokens=arguments.micro_batch, activations="recompute",
            products=arguments.products,
        )  # fmt: skip
        cap, count = int(arguments.memory * 2**30), self.tokens // ROW
        self.num_targets = count * (ROW - 1)
        free = Free(cap, cap, shutil.disk_usage(arguments.work).free, is_shared=True)
        self.plan = self._plan(Target(self.device, arguments.precision, free, rates(self.device, arguments.work)))
        generator = torch.Generator().manual_seed(1)
        documents = [torch.randint(0, 50257, (ROW,), generator=generator).tolist() for _ in range(count)]
        self.batches = micro_batches(documents, [1] * count, arguments.micro_batch)

    def _plan(self, target: Target) -> Plan:
        load = Workload(
            self.layouts, self.architecture.config.n_embd, self.dtype,
            StepTokens(self.recipe.micro_batch_tokens, self.tokens, self.tokens, self.num_targets), self.steps,
            RowLengths(ROW), layers=self.layers,
        )  # fmt: skip
        load = target.settled(load, self.recipe)
        return forecast(ON_DISK, load, self.recipe, target.rates, target.free)

    def open(self, run: Run) -> OffloadedModel:
        """Open the stores."""
        dtypes = training_dtypes(self.dtype, torch.bfloat16, torch.bfloat16)
        stack = open_for_training(self.architecture, ON_DISK, dtypes, self.device, run.state, self.plan.budget)
        set_products(stack.layers, self.plan.workload.products or ONEDNN)
        return stack


def say(kind: str, **facts: Any) -> None:
    """Print a message for the parent process."""
    print(json.dumps({"kind": kind, **facts}), flush=True)


def fill(generator: torch.Generator, name: str, view: torch.Tensor) -> None:
    """Give a parameter random values: GPT-J's own spread for matrices, ones and zeros for norms and biases."""
    if view.ndim > 1:
        view.normal_(0, 0.02, generator=generator)
    else:
        view.fill_(1.0 if name.endswith("weight") else 0.0)


def train(arguments: argparse.Namespace) -> None:
    """Train to the last step, from the start or from the last commit."""
    work, run = Work(arguments), Run(arguments.work)
    stack = work.open(run)
    late = work.plan.costs.num_deferred
    start = time.perf_counter()
    if last := run.last_commit():
        optimizer = AdamW(stack, optimizer_config(work.recipe), last["step"], late)
        behind = checkpoint.layers_behind(run, stack, last["step"])
        optimizer.resume(Update(**last["update"]), behind)
        say("resumed", step=last["step"], layers_behind=len(behind), seconds=time.perf_counter() - start)
    else:
        generator = torch.Generator().manual_seed(0)
        for layer in range(len(stack.layers)):
            fill_layer(stack, layer, partial(fill, generator))
        stack.drain()
        stack.free_filling_pools()
        optimizer = AdamW(stack, optimizer_config(work.recipe), num_deferred=late)
        checkpoint.commit(run, RunState(0, None), None)
        say("filled", seconds=time.perf_counter() - start)
    while optimizer.step < work.steps:
        stopwatch = Stopwatch(stack)
        loss = take_step(run, stack, optimizer, work.batches)
        counts = stopwatch.read(work.tokens, work.num_targets)
        throughput = Throughput.of(
            counts, count_flops(stack.layouts, counts.tokens, counts.target_tokens), arguments.rate
        )
        say("step", step=optimizer.step, loss=loss, **vars(counts), **vars(throughput))
    start = time.perf_counter()
    optimizer.flush()
    say("flushed", seconds=time.perf_counter() - start)
    stack.close()


def take_step(run: Run, stack: OffloadedModel, optimizer: AdamW, batches: list[PackedBatch]) -> float:
    """Run a step and queue its commit, as the training loop does."""
    optimizer.begin_step(1e-5)
    loss = train_step(stack, optimizer, batches).mean
    optimizer.finish_step()
    stack.stores["grad"].then(partial(checkpoint.commit, run, RunState(optimizer.step, None), optimizer.pending))
    return loss


def watch(words: list[str], kill_at: float | None) -> tuple[list[dict[str, Any]], int]:
    """Run a training process.

    Args:
        words: its arguments.
        kill_at: kill it this share of a step after its first step; ``None``: let it end.

    Returns: what it said, and its peak resident bytes.
    """
    said: list[dict[str, Any]] = []
    log = Path(words[words.index("--work") + 1]) / f"said-{'first' if kill_at else 'second'}.jsonl"
    with log.open("w") as out, subprocess.Popen([sys.executable, __file__, *words], stdout=out) as process:
        peak, first_step = 0, 0.0
        while process.poll() is None:
            peak = max(peak, memory(process.pid, "VmHWM"))
            said = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
            steps = [line for line in said if line["kind"] == "step"]
            if kill_at and steps:
                first_step = first_step or time.perf_counter()
                if time.perf_counter() - first_step > kill_at * steps[0]["seconds"]:
                    process.send_signal(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
    assert process.returncode == (-signal.SIGKILL if kill_at else 0), f"ended with {process.returncode}"
    return [json.loads(line) for line in log.read_text().splitlines()], peak


def main() -> None:
    """Train, kill, resume, verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="new folder, removed at the end")
    parser.add_argument("--memory", type=float, default=6.0, help="GiB that the plan may use")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=1024)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--products", default="auto", help="as in a recipe")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="gptj")
    parser.add_argument("--layers", type=int, help="fewer blocks than the model has")
    parser.add_argument("--width", type=int, default=4096, help="smaller only to try the script")
    parser.add_argument("--kill-at", type=float, default=0.6, help="share of the second step after which it is killed")
    parser.add_argument("--rate", type=float, help="internal")
    arguments = parser.parse_args()
    if arguments.rate:
        train(arguments)
        return
    arguments.work.mkdir(parents=True)
    disks = [rates(torch.device("cpu"), arguments.work, again=True).disk]  # those that both processes plan with
    work = Work(arguments)
    before = 1e9 * best_product(work.dtype, arguments.width)
    words = [*sys.argv[1:], "--rate", str(before)]
    first, first_peak = watch(words, arguments.kill_at)
    second, second_peak = watch(words, None)
    after = 1e9 * best_product(work.dtype, arguments.width)
    disks.append(disk_rates(arguments.work, again=True))
    start = time.perf_counter()
    checker = Checker(Run(arguments.work), work.layouts)
    problems = list(checker.state())
    result = {
        "parameters": work.plan.workload.num_parameters,
        "forecast": {
            "memory_bytes": work.plan.device_bytes + work.plan.host_bytes,
            "seconds_per_step": work.plan.costs.seconds_per_step,
        },
        "peak_rss_bytes": [first_peak, second_peak],
        "best_products": [before, after],
        "disk_rates": list(map(vars, disks)),
        "said": [*first, *second],
        "verified": {"bytes": checker.bytes, "seconds": time.perf_counter() - start, "problems": problems},
        "disk_bytes": sum(path.stat().st_blocks * 512 for path in arguments.work.rglob("*") if path.is_file()),
        "room": vars(work.plan.budget),
        "num_deferred": work.plan.costs.num_deferred,
    }
    print(json.dumps(result))
    for line in result["said"]:
        if line["kind"] == "step":
            shares = {f"{name} of the rate before": line[name] for name in ("hfu", "mfu")}
            flop = line["hardware_gflops"] * line["seconds"]
            moved = min(disk.seconds(line["bytes_read"], line["bytes_written"]) for disk in disks)
            bounds = flop / max(before, after) * 1e9, moved
            shares |= {"stall": line["stall"], "of the longer bound": line["seconds"] / max(bounds)}
            print(f"step {line['step']}: {line['seconds']:.0f} s, loss {line['loss']:.6f},", shares)
            print(f"    bounds: {bounds[0]:.0f} s of products, {bounds[1]:.0f} s of the disk", end="; ")
            print(f"{line['bytes_read'] / 1e9:.1f} GB read, {line['bytes_written'] / 1e9:.1f} written")
    for name, disk, product in zip(("before", "after"), disks, (before, after), strict=True):
        print(f"{name}: products {product / 1e9:.0f} GFLOP/s; the disk {disk.read / 1e9:.2f} GB/s read, "
              f"{disk.write / 1e9:.2f} written, {disk.mixed / 1e9:.2f} both at once")  # fmt: skip
    print(f"peak RSS {max(first_peak, second_peak) / 2**30:.2f} GiB; damaged: {problems or 'nothing'}")
    shutil.rmtree(arguments.work)
    assert not problems


if __name__ == "__main__":
    main()
