"""Train the same 200 steps with `gptj-ft finetune` from disk and with `transformers` and `torch.optim.AdamW`.

A random GPT-J of about 50 M parameters with the real GPT-2 vocabulary is trained on DialogSum. Both runs see the same
rows in the same order, learning rates and clipping; the claim is that their losses agree to 1e-3 at every step.

    python benchmarks/dialogsum_parity.py --data train.jsonl --tokenizer gpt2/ --work /tmp/parity

`--tokenizer` is a folder with GPT-2's vocab.json and merges.txt. Writes WORK/parity.csv and prints a summary as JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from same_work import Work, make_model, open_model
from transformers_loop import train

from gptj_ft.config.run_folder import Run

SHAPE = {"vocab_size": 50400, "n_positions": 1024, "n_embd": 384, "n_layer": 8, "n_head": 6, "rotary_dim": 32}


def train_streamed(folder: Path, data: Path, run: Path, steps: int) -> float:
    """Run the command line; return its seconds."""
    options = [
        "--recipe", "summarization", "--data", data, "--model", folder, "--output", run, "--max-steps", steps,
        "--batch-size", 4, "--max-length", 512, "--lr", "5e-4", "--weights", "disk", "--optimizer-state", "disk",
        "--set", "holdout=0", "--precision", "fp32", "--device", "cpu",
    ]  # fmt: skip
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "gptj_ft", "finetune", *map(str, options)], check=True)
    return time.perf_counter() - start


def train_with_transformers(folder: Path, work: Work) -> tuple[list[float], float]:
    """Train the same rows with `transformers`, right-padded; return the losses and the seconds of the steps."""
    losses, start = list[float](), time.perf_counter()
    for loss in train(open_model(folder), work):
        if len(losses) % 20 == 0:
            print(f"transformers step {len(losses) + 1}: {loss:.4f}", file=sys.stderr, flush=True)
        losses.append(loss)
    return losses, time.perf_counter() - start


def main() -> None:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    folder, run = arguments.work / "model", Run(arguments.work / "run")
    make_model(folder, arguments.tokenizer, SHAPE)
    command_seconds = train_streamed(folder, arguments.data, run.folder, arguments.steps)
    ours = [line for line in run.metrics() if "loss" in line]
    theirs, their_seconds = train_with_transformers(folder, Work.of(run))
    differences = [abs(a["loss"] - b) for a, b in zip(ours, theirs, strict=True)]
    with (arguments.work / "parity.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "streamed_from_disk", "transformers", "difference"])
        for line, loss, difference in zip(ours, theirs, differences, strict=True):
            writer.writerow([line["step"], f"{line['loss']:.6f}", f"{loss:.6f}", f"{difference:.2e}"])
    summary = {
        "steps": arguments.steps,
        "parameters": sum(p.numel() for p in open_model(folder).parameters()),
        "largest_difference": max(differences),
        "at_step": 1 + differences.index(max(differences)),
        "first_loss": theirs[0],
        "last_loss": theirs[-1],
        "streamed_seconds_of_steps": sum(line["seconds"] for line in ours),
        "streamed_command_seconds": command_seconds,
        "transformers_seconds_of_steps": their_seconds,
        "tokens": sum(line["tokens"] for line in ours),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
