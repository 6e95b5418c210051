"""Compare the same steps with everything in RAM and with everything on disk, at GPT-J's block size.

4 blocks of n_embd 4096 (838 M parameters with a small vocabulary, so that the resident run fits a 24 GB machine),
random weights, fp32, clipping on. Each variant runs in a fresh process, one after the other; the
first step is left out, because it has no update to apply.

    python benchmarks/streamed_vs_resident.py --work /tmp/bench --tokens 1024 --steps 4

A variant is a placement and what sets it apart from the options of the whole: ``disk:late=2:parts=60``. Variants that
differ in placement, late updates or kept activations only must have the same losses, to the bit. With ``--turns``
variants alternate, and numbers are medians, with the least and most. ``--profile`` tells where the time of the last
step goes.

A step from disk is held against the longer of two bounds: the step of the first variant in RAM, and its bytes by the
rates of the disk, measured in the same run: the better of before and after the variants.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from processor_time import ProcessorTime
from side_by_side import memory

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.models.layout import Layout
from gptj_ft.models.linear import project
from gptj_ft.models.products import Products, set_products
from gptj_ft.models.registry import families
from gptj_ft.planning.probe import DiskRates, measure_disk
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import fill_layer
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Place, Placement, open_stores, training_dtypes
from gptj_ft.training.restore import optimizer_config

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPE = {"vocab_size": 4096, "n_positions": 2048, "n_embd": 4096, "n_head": 16, "rotary_dim": 64}
PARTS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn"),
    "attention": ("scaled_dot_product",),
    "AdamW": ("_fused_adamw_",),
    "GELU": ("gelu",),
    "layer norm": ("layer_norm",),
    "gradient norm": ("linalg_vector_norm",),
    "copies, zeros, sums": (
        "aten::copy_",
        "aten::zero_",
        "aten::fill_",
        "aten::cat",
        "aten::add",
        "aten::mul",
        "aten::sum",
    ),
    "loss": ("log_softmax", "nll_loss"),
}
ROW = 256  # tokens a document, all of them but the first trained on


def open_model(arguments: argparse.Namespace, place: Place, budget: BufferBudget) -> OffloadedModel:
    """Open a model of GPT-J's blocks, with its stores uninitialized."""
    family = families()["gptj"]
    layers = family.build_layers(family.read_config({**SHAPE, "n_embd": arguments.width, "n_layer": arguments.layers}))
    types = (TYPES[each] for each in (arguments.compute, arguments.moments, arguments.gradients))
    dtypes = training_dtypes(*types, arguments.master)
    device = torch.device("cpu")
    stores = open_stores(
        Placement(place, place), [Layout.of(layer) for layer in layers], dtypes, device, arguments.work
    )
    set_products(layers, Products.parse(arguments.products))
    return OffloadedModel(layers, dtypes, stores, device, budget)


def fill_randomly(model: OffloadedModel) -> torch.Generator:
    """Give a model random weights; return the generator."""
    generator = torch.Generator().manual_seed(0)

    def fill(name: str, view: torch.Tensor) -> None:
        view.normal_(0, 0.02, generator=generator) if view.ndim > 1 else view.fill_(1.0)

    for layer in range(len(model.layers)):
        fill_layer(model, layer, fill)
    model.drain()
    return generator


def run_variant(variant: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Train some steps in one placement; return the measurements."""
    place, *differences = variant.split(":")
    for key, value in (difference.split("=") for difference in differences):
        setattr(arguments, key, type(getattr(arguments, key))(value))

    tokens = arguments.tokens
    budget = BufferBudget(
        arguments.read_ahead, arguments.gradient_slots, arguments.parts, num_kept_layers=arguments.kept
    )
    stack = open_model(arguments, place, budget)  # type: ignore[arg-type]
    generator = fill_randomly(stack)
    documents = [torch.randint(0, 4096, (ROW,), generator=generator).tolist() for _ in range(tokens // ROW)]
    batches = micro_batches(documents, [1] * len(documents), arguments.micro_batch)
    optimizer = AdamW(stack, optimizer_config(Recipe()), num_deferred=arguments.late)
    seconds, waited, losses, read, written, best = [], [], [], [], [], []
    spent: list[ProcessorTime] = []
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for step in range(arguments.steps):
        if arguments.profile and step == arguments.steps - 1:
            profile.start()
        start, before, spent_before = time.perf_counter(), stack.meter.waited_seconds, ProcessorTime.now()
        read_before, written_before = stack.meter.bytes_read, stack.meter.bytes_written
        optimizer.begin_step(1e-5)
        losses.append(train_step(stack, optimizer, batches).mean)
        optimizer.finish_step()
        if place == "disk":  # what the trainer does there: the commit waits for the gradients, the next step does not
            stack.stores["grad"].then(lambda: None)
        seconds.append(time.perf_counter() - start)
        spent.append(ProcessorTime.now().since(spent_before))
        waited.append(stack.meter.waited_seconds - before)
        read.append(stack.meter.bytes_read - read_before)
        written.append(stack.meter.bytes_written - written_before)
        best.append(best_product(TYPES[arguments.compute], arguments.width))
        print(f"{variant}: step {seconds[-1]:.1f} s, waiting {waited[-1]:.1f} s", file=sys.stderr, flush=True)
    if arguments.profile:
        profile.stop()
    stack.drain()
    stack.close()
    blocks = sum(layout.num_parameters for layout in stack.layouts[1:-1])
    return {
        "seconds": seconds,
        "waited": waited,
        "losses": losses,
        "read_bytes": read,
        "written_bytes": written,
        "moved_bytes": [sum(both) for both in zip(read, written, strict=True)],
        "processor": [asdict(each) for each in spent],
        "best_product_gflops": best,
        "peak_rss_bytes": memory(os.getpid(), "VmHWM"),  # getrusage() would count what the parent had, too
        "gflops": [(8 - 2 * arguments.kept / arguments.layers) * blocks * tokens / s / 1e9 for s in seconds],
        "parameters": sum(layout.num_parameters for layout in stack.layouts),
        "profile": shares(profile, seconds[-1]) if arguments.profile else None,
    }


def best_product(dtype: torch.dtype, width: int) -> float:
    """Return GFLOP/s of the fastest of twenty products, the bound of a step; measure it right after the step.

    Args:
        dtype: data type of the computation.
        width: width of the model; products are those of its blocks.
    """
    best = 0.0
    for tokens in (256, 512, 1024, 2048, 4096):
        for inner, outer in ((width, width), (width, 4 * width), (4 * width, width), (width // 2, width // 2)):
            x = torch.full((tokens, inner), 0.5, dtype=dtype)
            weight = torch.full((outer, inner), 0.5, dtype=dtype)
            with torch.no_grad():
                for _ in range(2):
                    start = time.perf_counter()
                    project(x, weight, None, "training")
                    best = max(best, 2e-9 * tokens * inner * outer / (time.perf_counter() - start))
    return best


def shares(profile: Any, seconds: float) -> dict[str, float]:
    """Return each kind of operation's share of a step's seconds, the largest first."""
    taken = dict.fromkeys(PARTS, 0.0)
    for event in profile.key_averages():
        part = next(
            (part for part, names in PARTS.items() if any(name in event.key for name in names)), "other operations"
        )
        taken[part] = taken.get(part, 0.0) + event.self_cpu_time_total / 1e6 / seconds
    taken["between operations"] = 1 - sum(taken.values())
    return dict(sorted(taken.items(), key=lambda item: -item[1]))


def main() -> None:
    """Run the variants in order, each in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="new folder, removed at the end")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=SHAPE["n_embd"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--read-ahead", type=int, default=1)
    parser.add_argument("--gradient-slots", type=int, default=2)
    parser.add_argument("--parts", type=int, default=24)
    parser.add_argument("--kept", type=int, default=0, help="blocks whose activations are kept")
    parser.add_argument("--late", type=int, default=0, help="blocks whose update is kept in backward")
    parser.add_argument("--compute", default="fp32", choices=list(TYPES))
    parser.add_argument("--moments", default="fp32", choices=list(TYPES))
    parser.add_argument("--gradients", default="fp32", choices=list(TYPES))
    parser.add_argument("--master", default="split", choices=["split", "fp32"], help="layout of a bf16 run's masters")
    parser.add_argument("--products", default="onednn", help="libraries of gradients, of inputs/weights")
    parser.add_argument("--profile", action="store_true", help="profile the last step")
    parser.add_argument("--variants", default="device,disk")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--variant", help="internal")
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(run_variant(arguments.variant, arguments)))
        return
    arguments.work.mkdir(parents=True)
    variants = arguments.variants.split(",")
    is_any_on_disk = any(place_of(variant) == "disk" for variant in variants)
    disks = [measure_disk(arguments.work)] if is_any_on_disk else []
    results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for turn in range(arguments.turns):
        for variant in variants:
            results[variant].append(run_apart(variant, arguments.work))
            print(json.dumps({"variant": variant, "turn": turn, **results[variant][-1]}), flush=True)
    disks += [measure_disk(arguments.work)] if is_any_on_disk else []
    arguments.work.rmdir()
    report(results, disks, arguments)


def place_of(variant: str) -> str:
    """Return the placement of a variant."""
    return variant.partition(":")[0]


def run_apart(variant: str, work: Path) -> dict[str, Any]:
    """Run a variant in a separate process; return measured and derived values."""
    state = work / "state"
    words = [*sys.argv[1:], "--variant", variant, "--work", str(state)]
    done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE)
    shutil.rmtree(state, ignore_errors=True)
    result = dict(json.loads(done.stdout))
    steady = result["seconds"][1:]
    result["steady_seconds"] = sum(steady) / len(steady)
    result["stall"] = sum(result["waited"][1:]) / sum(steady)
    rates = zip(result["gflops"][1:], result["best_product_gflops"][1:], strict=True)
    result["share_of_best_product"] = sorted(rate / best for rate, best in rates)
    return result


def report(results: dict[str, list[dict[str, Any]]], disks: list[DiskRates], arguments: argparse.Namespace) -> None:
    """Print a line for each variant, and the bounds of a step from disk.

    Raises:
        AssertionError: variants that compute the same have other losses.
    """

    def rounding(variant: str) -> tuple[str, ...]:
        options = dict(word.split("=") for word in variant.split(":")[1:])
        return tuple(options.get(name, getattr(arguments, name)) for name in ("moments", "products"))

    seconds = {variant: [run["steady_seconds"] for run in runs] for variant, runs in results.items()}
    for variant, runs in results.items():
        # Variants that round differently have a reference of their own: the first with the same moments and products.
        like = next(other for other in results if rounding(other) == rounding(variant))
        for run in runs:
            assert run["losses"] == results[like][0]["losses"], f"{variant} and {like} differ"
        shares_of_best = sorted(share for run in runs for share in run["share_of_best_product"])
        print(
            f"{variant:<32}{median(seconds[variant]):>8.1f} s ({min(seconds[variant]):.1f} to "
            f"{max(seconds[variant]):.1f})  {median(seconds[variant]) / median(seconds[like]):>5.3f} x {like}, "
            f"waiting {median(run['stall'] for run in runs):.1%}, "
            f"peak {max(run['peak_rss_bytes'] for run in runs) / 1e9:.1f} GB, same losses to the bit; blocks at "
            f"{shares_of_best[0]:.0%} to {shares_of_best[-1]:.0%} of the best product"
        )
        if place_of(variant) == "disk":
            print_bounds(runs, disks, next((seconds[other] for other in results if place_of(other) == "device"), []))
        for part, share in (runs[-1]["profile"] or {}).items():
            print(f"    {share:>6.1%}  {part}")
    for name, disk in zip(("before", "after"), disks, strict=False):
        print(f"the disk {name}: {disk.read / 1e9:.2f} GB/s read, {disk.write / 1e9:.2f} written, "
              f"{disk.mixed / 1e9:.2f} both at once")  # fmt: skip


def print_bounds(runs: list[dict[str, Any]], disks: list[DiskRates], in_ram: list[float]) -> None:
    """Print the lower bounds of a step from disk: its seconds in RAM, and the disk's seconds for its bytes."""
    read, written = (
        median(sum(run[name][1:]) / len(run[name][1:]) for run in runs) for name in ("read_bytes", "written_bytes")
    )
    bounds = [min(disk.seconds(read, written) for disk in disks), *([median(in_ram)] if in_ram else [])]
    taken = median(run["steady_seconds"] for run in runs)
    print(
        f"    bounds: {f'{bounds[1]:.1f} s in RAM, ' if in_ram else ''}{bounds[0]:.1f} s of the disk "
        f"({read / 1e9:.1f} GB read, {written / 1e9:.1f} written); {taken / max(bounds):.2f} x the longer"
    )


if __name__ == "__main__":
    main()
