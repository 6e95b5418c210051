"""Measure one LoRA step of GPT-J 6B streamed from its folder: memory, and bytes written to disk.

A model folder of GPT-J's shape with random weights is made on the spot (24.2 GB in fp32, with the tokenizer of a
folder that is named), and rows of random words. Then `gptj-ft finetune --method lora` takes one step of four windows of
256 tokens, in a process that is monitored from outside: its peak resident memory, and the bytes that the kernel has
written for it, from its start to the exported adapter. Target: 4 GiB, and 1 % of the weights.

    python benchmarks/lora_full_size.py --tokenizer gpt2/ --work /tmp/lora-full

`--layers 2 --width 64` tries the script. `--set key=value` is passed to `gptj-ft`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from full_size import SHAPES, fill
from side_by_side import command, watch

from gptj_ft.checkpoints.model_folder import write_model
from gptj_ft.config.run_folder import Run
from gptj_ft.models.registry import Architecture, families

SHAPE = SHAPES["gptj"]
ROWS, ROW_WORDS, WINDOW = 8, 2000, 256
MOST_RSS, MOST_WRITTEN = 4 * 2**30, 0.01


def random_layers(architecture: Architecture) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the layers of a random model."""
    generator = torch.Generator().manual_seed(0)
    for layer in architecture.layers():
        tensors = {name: torch.empty(parameter.shape) for name, parameter in layer.named_parameters()}
        for name, tensor in tensors.items():
            fill(generator, name, tensor)
        yield tensors


def prepare(arguments: argparse.Namespace) -> int:
    """Make model and rows; return the bytes of the model's files."""
    shape = {**SHAPE, "n_layer": arguments.layers, "n_embd": arguments.width}
    if arguments.width < SHAPE["n_embd"]:
        shape |= {"n_head": 4, "rotary_dim": 8}
    family, model = families()["gptj"], arguments.work / "model"
    architecture = Architecture(family, family.read_config(shape), shape)
    write_model(model, architecture, random_layers(architecture), dtype=torch.float32)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(arguments.tokenizer / name, model / name)
    draw = random.Random(0)
    words = ["room", "cold", "printer", "paper", "lift", "parcel", "door", "desk", "floor", "light", "key", "note"]
    rows = [{"text": " ".join(draw.choices(words, k=ROW_WORDS))} for _ in range(ROWS)]
    (arguments.work / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def main() -> None:
    """Make the model, run the step, print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--work", type=Path, required=True, help="new folder, removed at the end; needs 25 GB")
    parser.add_argument("--layers", type=int, default=SHAPE["n_layer"], help="smaller only to try the script")
    parser.add_argument("--width", type=int, default=SHAPE["n_embd"], help="smaller only to try the script")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the recipe")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    weights_bytes, run = prepare(arguments), Run(arguments.work / "run")
    options = {
        "recipe": "continuous-pretraining", "method": "lora", "model": arguments.work / "model",
        "data": arguments.work / "rows.jsonl", "output": run.folder, "holdout": 0, "max_steps": 1, "batch_size": 4,
        "max_length": WINDOW, "micro_batch_tokens": 4 * WINDOW, "packing": "apart", "on_long": "split",
        "precision": "fp32", "device": "cpu", "weights": "disk", "activations": "recompute", "cache": "false",
        "schedule": "constant", "warmup": 0,
        **dict(word.split("=", 1) for word in arguments.set),
    }  # fmt: skip
    watched = watch(command("finetune", options), run.metrics_file)
    (line,) = watched.lines
    result = {
        "weights_bytes": weights_bytes,
        "peak_rss_bytes": watched.peak_rss_bytes,
        "written_bytes": watched.written_bytes,
        "written_by_stores_bytes": line["bytes_written"],
        **{key: line[key] for key in ("tokens", "seconds", "bytes_read", "stall", "hfu", "loss")},
    }
    print(json.dumps(result))
    share = watched.written_bytes / weights_bytes
    print(f"{line['tokens']} tokens in {line['seconds']:.0f} s; peak RSS {watched.peak_rss_bytes / 2**30:.2f} GiB")
    print(f"written: {watched.written_bytes / 1e6:.0f} MB, {share:.2%} of the weights")
    shutil.rmtree(arguments.work)
    if arguments.width == SHAPE["n_embd"]:
        assert watched.peak_rss_bytes <= MOST_RSS, "too much memory"
        assert share <= MOST_WRITTEN, "too much written"


if __name__ == "__main__":
    main()
