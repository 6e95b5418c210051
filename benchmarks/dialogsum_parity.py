"""The same 200 steps twice: `gptj-ft finetune` streaming from disk, and `transformers` with `torch.optim.AdamW`.

A random GPT-J of about 50 M parameters with the real GPT-2 vocabulary is trained on DialogSum. Both runs see the same
rows in the same order, learning rates and clipping; the claim is that their losses agree to 1e-3 at every step.

    python benchmarks/dialogsum_parity.py --data train.jsonl --tokenizer gpt2/ --work /tmp/parity

`--tokenizer` is a folder with GPT-2's vocab.json and merges.txt. Writes WORK/parity.csv and prints a summary as JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import GPTJConfig, GPTJForCausalLM

from gptj_ft.data.batches import Rows, rows_of_step
from gptj_ft.data.prepare import load
from gptj_ft.recipe import Recipe
from gptj_ft.run import Run
from gptj_ft.schedule import Schedule

SHAPE = {"vocab_size": 50400, "n_positions": 1024, "n_embd": 384, "n_layer": 8, "n_head": 6, "rotary_dim": 32}


def make_model(folder: Path, tokenizer: Path) -> None:
    """Write a random GPT-J with GPT-2's tokenizer."""
    torch.manual_seed(0)
    config = GPTJConfig(**SHAPE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    GPTJForCausalLM(config).save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(tokenizer / name, folder / name)


def train_streamed(folder: Path, data: Path, run: Path, steps: int) -> float:
    """Run the command line; return the seconds it took."""
    options = [
        "--recipe", "summarization", "--data", data, "--model", folder, "--output", run, "--max-steps", steps,
        "--batch-size", 4, "--max-length", 512, "--lr", "5e-4", "--weights", "disk", "--optimizer-state", "disk",
        "--set", "holdout=0", "--precision", "fp32", "--device", "cpu",
    ]  # fmt: skip
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "gptj_ft", "finetune", *map(str, options)], check=True)
    return time.perf_counter() - start


def train_with_transformers(folder: Path, run: Run, recipe: Recipe, steps: int) -> tuple[list[float], float]:
    """Train the same rows with `transformers`, right-padded; return the losses and the seconds of the steps."""
    rows = Rows.of(load(run.data / "train").rows)
    model = GPTJForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps, fused=True)
    schedule, losses, start = Schedule.of(recipe, steps), [], time.perf_counter()
    for step in range(steps):
        chosen = rows_of_step(step, len(rows), recipe.batch_size, recipe.seed)
        width = max(len(rows.documents[row]) for row in chosen)
        ids, labels = torch.zeros(len(chosen), width, dtype=torch.long), torch.full((len(chosen), width), -100)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(chosen):
            document, prompt = torch.tensor(rows.documents[row]), rows.prompt_lengths[row]
            ids[i, : len(document)], mask[i, : len(document)] = document, 1
            labels[i, prompt : len(document)] = document[prompt:]
        logits = model(ids, attention_mask=mask).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, recipe.clip_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(step + 1)
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"transformers step {step + 1}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
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
    make_model(folder, arguments.tokenizer)
    command_seconds = train_streamed(folder, arguments.data, run.folder, arguments.steps)
    recipe = run.recipe()
    ours = [line for line in run.metrics() if "loss" in line]
    theirs, their_seconds = train_with_transformers(folder, run, recipe, arguments.steps)
    differences = [abs(a["loss"] - b) for a, b in zip(ours, theirs, strict=True)]
    with (arguments.work / "parity.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "streamed_from_disk", "transformers", "difference"])
        for line, loss, difference in zip(ours, theirs, differences, strict=True):
            writer.writerow([line["step"], f"{line['loss']:.6f}", f"{loss:.6f}", f"{difference:.2e}"])
    summary = {
        "steps": arguments.steps,
        "parameters": sum(p.numel() for p in GPTJForCausalLM(GPTJConfig(**SHAPE)).parameters()),
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
