"""The same 200 steps twice: `gptj-ft finetune` streaming from disk, and `transformers` with `torch.optim.AdamW`.

A random GPT-J of about 50 M parameters with the real GPT-2 vocabulary is trained on DialogSum. Both runs see the same
rows in the same order, learning rates and clipping; the claim is that their losses agree to 1e-3 at every step.

    python benchmarks/dialogsum_parity.py --data train.jsonl --tokenizer gpt2/ --work /tmp/parity

`--tokenizer` is a folder with GPT-2's vocab.json and merges.txt. Writes WORK/parity.csv and prints a summary as JSON.
"""

from __future__ import annotations

import csv
import json
import sys
import time

import torch
from same_work import Work, make_model
from side_by_side import finetune, parser
from transformers_loop import train

SHAPE = {"vocab_size": 50400, "n_positions": 1024, "n_embd": 384, "n_layer": 8, "n_head": 6, "rotary_dim": 32}


def main() -> None:
    """Run both and compare."""
    options = parser(__doc__)
    options.set_defaults(steps=200, batch_size=4, max_length=512, set=["lr=5e-4"])
    arguments = options.parse_args()
    arguments.work.mkdir(parents=True)
    folder = arguments.work / "model"
    make_model(folder, arguments.tokenizer, SHAPE)
    start = time.perf_counter()
    streamed, run = finetune(arguments, "disk")
    command_seconds, ours = time.perf_counter() - start, streamed.lines
    work, theirs, start = Work.of(run), [], time.perf_counter()
    for loss in train(folder, work):
        theirs.append(loss)
        if len(theirs) % 20 == 1:
            print(f"transformers step {len(theirs)}: {loss:.4f}", file=sys.stderr, flush=True)
    their_seconds = time.perf_counter() - start
    differences = [abs(a["loss"] - b) for a, b in zip(ours, theirs, strict=True)]
    with (arguments.work / "parity.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "streamed_from_disk", "transformers", "difference"])
        for line, loss, difference in zip(ours, theirs, differences, strict=True):
            writer.writerow([line["step"], f"{line['loss']:.6f}", f"{loss:.6f}", f"{difference:.2e}"])
    summary = {
        "steps": arguments.steps,
        "largest_difference": max(differences),
        "at_step": 1 + differences.index(max(differences)),
        "first_loss": theirs[0],
        "last_loss": theirs[-1],
        "streamed_seconds_of_steps": sum(line["seconds"] for line in ours),
        "streamed_command_seconds": command_seconds,
        "transformers_seconds_with_loading": their_seconds,
        "tokens": sum(line["tokens"] for line in ours),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
