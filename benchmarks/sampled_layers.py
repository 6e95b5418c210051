"""Compare full, layer-sampled and LoRA training of a small model: validation losses after equal steps.

    python benchmarks/sampled_layers.py --first dialogsum/train.jsonl --second scitldr-a/train.jsonl \
        --held-out scitldr-a/val.jsonl --work /tmp/sampled

A GPT-J of 12 blocks of 128 is trained from random weights on the first texts, 250 steps of 8 rows. Then each method
tunes it on the second texts, 100 steps of 8 rows, with the same rows and learning rate (LoRA: ten times that rate), for
each seed. A text is the longest value of a JSON line, or its list of sentences. Prints Markdown: mean and range over
the seeds of the loss of the held-out texts, in nats per token, and the share of full training's improvement.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

SHAPE = {"n_layer": 12, "n_embd": 128, "n_head": 4, "rotary_dim": 16, "initializer_range": 0.03}
COMMON = ("--set", "max_length=192", "--set", "threads=1", "--precision", "fp32", "--weights", "device", "--quiet")
METHODS = {
    "all parameters": ("--method", "full", "--lr", "3e-4"),
    "sampled, 2 of 12 blocks": ("--method", "sampled", "--lr", "3e-4"),
    "the same, vocabulary in every second period": (
        "--method", "sampled", "--set", "sampled.vocabulary_every=2", "--lr", "3e-4",
    ),
    "LoRA": ("--method", "lora", "--optimizer-state", "device", "--lr", "3e-3"),
}  # fmt: skip


def main() -> None:
    """Train the base model, tune it with each method and seed, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("first", "second", "held-out", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    first, second, held_out = work / "first.jsonl", work / "second.jsonl", work / "held-out.jsonl"
    write_texts(options.first, first, 1500, None)
    write_texts(options.second, second, 1600, 700)
    write_texts(options.held_out, held_out, 200, 700)
    base = make_base(first, held_out, work)
    losses: dict[str, list[float]] = {}
    for method, flags in METHODS.items():
        for seed in range(options.seeds):
            how = ("--max-steps", "100", "--seed", str(seed), *flags)
            run = finetune(base / "model", second, held_out, work / f"{method}, {seed}", how)
            losses.setdefault(method, []).append(validation_losses(run)[-1])
    before = validation_losses(run)[0]
    gained = before - statistics.mean(losses["all parameters"])
    print(f"| before | {before:.3f} | | |\n|---|---|---|---|")
    for method, every in losses.items():
        mean = statistics.mean(every)
        print(f"| {method} | {mean:.3f} | {min(every):.3f} to {max(every):.3f} | {(before - mean) / gained:.0%} |")


def write_texts(source: Path, target: Path, number: int, length: int | None) -> None:
    """Write the texts of JSON lines, cut to a number of characters."""

    def text_of(values: dict[str, Any]) -> str:
        texts = [" ".join(map(str, each)) if isinstance(each, list) else str(each) for each in values.values()]
        return max(texts, key=len)[:length]

    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text_of(json.loads(line))}) + "\n" for line in islice(lines, number))


def make_base(texts: Path, held_out: Path, work: Path) -> Path:
    """Train the base model on the first texts, from random weights."""
    tokens = finetune("tiny", texts, held_out, work / "tokenizer", ("--max-steps", "1"))
    shape = work / "shape"
    shape.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (file := tokens / "model" / name).is_file():
            shutil.copy(file, shape)
    config = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps({**config, **SHAPE}))
    return finetune(shape / "config.json", texts, held_out, work / "base", ("--max-steps", "250", "--lr", "2e-3"))


def finetune(model: Path | str, data: Path, held_out: Path, run: Path, how: tuple[str, ...]) -> Path:
    """Train a run with the command line; return its folder."""
    command = [sys.executable, "-m", "gptj_ft", "finetune", "--model", str(model), "--data", str(data)]
    command += ["--val-data", str(held_out), "--batch-size", "8", "--output", str(run), *COMMON, *how]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run


def validation_losses(run: Path) -> list[float]:
    """Return the validation losses before and after training."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["validation_loss"] for line in lines if "validation_loss" in line]


if __name__ == "__main__":
    main()
