"""The same steps with everything in RAM and with everything on disk, at GPT-J's real block size.

4 blocks of n_embd 4096 (838 M parameters with a small vocabulary, so that the resident run fits a 24 GB machine),
random weights, fp32, clipping on, full recompute. Each variant runs in a fresh process, one after the other; the
first step is left out, because it has no update to apply.

    python benchmarks/streamed_vs_resident.py --work /tmp/bench --tokens 1024 --steps 4
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

SHAPE = {"vocab_size": 4096, "n_positions": 2048, "n_embd": 4096, "n_layer": 4, "n_head": 16, "rotary_dim": 64}
ROW = 256  # tokens a document, all of them but the first trained on


def run_variant(place: str, tokens: int, steps: int, work: Path, read_ahead: int) -> dict[str, object]:
    """Train some steps in one placement; return what was measured."""
    import torch

    from gptj_ft.data.batches import micro_batches
    from gptj_ft.families import families
    from gptj_ft.optimizer import AdamW
    from gptj_ft.recipe import Recipe
    from gptj_ft.stack import LayerStack, Visit
    from gptj_ft.stores import Layout
    from gptj_ft.stores.placement import Placement, open_stores, training_dtypes
    from gptj_ft.streaming import stream, train_step

    family, device = families()["gptj"], torch.device("cpu")
    layers = family.build_layers(family.read_config(SHAPE))
    dtypes = training_dtypes(torch.float32)
    stores = open_stores(Placement(place, place), [Layout.of(x) for x in layers], dtypes, device, work / place)  # type: ignore[arg-type]
    stack = LayerStack(layers, dtypes, stores, device, read_ahead)
    generator = torch.Generator().manual_seed(0)
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    for loaded in stream(stack, [Visit(layer, (), kinds) for layer in range(len(layers))]):
        for kind, flat in loaded.tensors.items():
            flat.zero_()
            if kind == "weight":
                for view in loaded.layout.views(flat).values():
                    view.normal_(0, 0.02, generator=generator) if view.ndim > 1 else view.fill_(1.0)
        loaded.write(kinds)
        loaded.commit(kinds, 0)
    stack.drain()
    documents = [torch.randint(0, 4096, (ROW,), generator=generator).tolist() for _ in range(tokens // ROW)]
    batches = micro_batches(documents, [1] * len(documents), tokens)
    optimizer = AdamW(stack, Recipe())
    seconds, waited, losses = [], [], []
    for _ in range(steps):
        start, before = time.perf_counter(), stack.waited_seconds
        optimizer.begin(1e-5)
        losses.append(train_step(stack, optimizer, batches).mean)
        optimizer.end()
        stack.drain()
        seconds.append(time.perf_counter() - start)
        waited.append(stack.waited_seconds - before)
        print(f"{place}: step {seconds[-1]:.1f} s, waiting {waited[-1]:.1f} s", file=sys.stderr, flush=True)
    stack.close()
    blocks = sum(layout.num_parameters for layout in stack.layouts[1:-1])
    return {
        "place": place,
        "seconds": seconds,
        "waited": waited,
        "losses": losses,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "gflops": [8 * blocks * tokens / s / 1e9 for s in seconds],
        "parameters": sum(layout.num_parameters for layout in stack.layouts),
    }


def main() -> None:
    """Run the variants one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--read-ahead", type=int, default=1)
    parser.add_argument("--places", default="device,disk")
    parser.add_argument("--variant", help="used by the script itself")
    arguments = parser.parse_args()
    if arguments.variant:
        settings = (arguments.tokens, arguments.steps, arguments.work, arguments.read_ahead)
        print(json.dumps(run_variant(arguments.variant, *settings)))
        return
    results = {}
    for place in arguments.places.split(","):
        options = {
            "--work": arguments.work,
            "--tokens": arguments.tokens,
            "--steps": arguments.steps,
            "--read-ahead": arguments.read_ahead,
            "--variant": place,
        }
        words = [str(word) for option in options.items() for word in option]
        done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE)
        results[place] = json.loads(done.stdout)
    for place, result in results.items():
        steady = result["seconds"][1:]
        result["steady_seconds"] = sum(steady) / len(steady)
        result["stall"] = sum(result["waited"][1:]) / sum(steady)
        print(json.dumps({"place": place, **result}))
    if len(results) == 2:
        a, b = results.values()
        assert a["losses"] == b["losses"], "placements differ"
        print(f"ratio {b['steady_seconds'] / a['steady_seconds']:.3f}, same losses to the bit")


if __name__ == "__main__":
    main()
