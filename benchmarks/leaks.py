"""Measure the report of memorization on a real model: canaries by repeats, membership, continuations, cost.

Trains a model on short texts in which 20 canaries are planted in 1, 4, 16 and 64 rows in turn, then runs `gptj-ft
evaluate --leaks`. Continuations are compared with greedy decoding by transformers on a sample of the rows, and the time
of the report with that of `gptj-ft evaluate` on 2,000 rows.

    python benchmarks/leaks.py --model SmolLM2-135M-Instruct --rows texts.jsonl --work /tmp/leaks

The file has 2,200 or more lines with the column `text`, of which 200 are held out. `--decoded N` rows are decoded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import gptj_ft
from gptj_ft.config.run_folder import Run
from gptj_ft.data.dataset import load_dataset
from gptj_ft.evaluation.leak_report import TEXT

ROWS, HELD_OUT = 2200, 200
PREFIX, LENGTH = 8, 8  # tokens; the texts are short


def command(*words: object) -> float:
    """Run a command of the program; return its seconds."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "gptj_ft", *map(str, words)], stdout=subprocess.PIPE, check=True)
    return time.monotonic() - start


def train(arguments: argparse.Namespace, rows: Path) -> Path:
    """Train a run with canaries, or resume it; return its folder."""
    run = arguments.work / "run"
    if not run.exists():
        options = {"canary_repeats": "1,4,16,64", "holdout": HELD_OUT / ROWS, "chat_template": "none"}
        sets = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        command(
            "finetune", "--model", arguments.model, "--data", rows, "--output", run, "--epochs", 5, "--lr", 1e-4,
            "--batch-size", 32, "--canaries", 20, *sets,
        )  # fmt: skip
    elif not Run(run).model.exists():
        command("finetune", "--resume", run)
    return run


def decoded(run: Path, count: int) -> dict[str, bool]:
    """Decode rows greedily with transformers; return whether each repeats its continuation, by place."""
    model = AutoModelForCausalLM.from_pretrained(Run(run).model, dtype=torch.float32).eval()
    rows = (row for row in load_dataset(run / "data" / "train").rows if not row["source"].startswith("canary"))
    long = (row for row in rows if len(row["input_ids"]) >= PREFIX + LENGTH)
    repeats = {}
    for row in islice(long, count):
        ids = list(row["input_ids"])
        prompt = torch.tensor([ids[:PREFIX]])
        mask = torch.ones_like(prompt)
        written = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=LENGTH, pad_token_id=0)
        repeats[f"{row['source']}:{row['line']}"] = written[0, PREFIX:].tolist() == ids[PREFIX : PREFIX + LENGTH]
    return repeats


def main() -> None:
    """Train, report, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--decoded", type=int, default=200)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows = arguments.work / "rows.jsonl"
    with arguments.rows.open(encoding="utf-8") as lines:
        rows.write_text("".join(islice(lines, ROWS)), encoding="utf-8")
    run = train(arguments, rows)
    report = gptj_ft.leaks(run, limit=ROWS, prefix=PREFIX, length=LENGTH, precision="fp32")
    for repeats, bits in report.exposures():
        print(f"exposure, {repeats} rows: {sum(bits) / len(bits):.2f}, {min(bits):.2f} to {max(bits):.2f}")
    for name, score in report.scores.items():
        print(f"{name}: {score.value:.2f}, {score.low} to {score.high}")
    for is_trained in (True, False):
        print(f"repeated, trained {is_trained}: {report.count(TEXT, is_trained)}")
    found = {row.place: row.is_repeated(TEXT) for row in report.rows if row.is_trained}
    expected = decoded(run, arguments.decoded)
    differing = sum(found[place] != is_repeated for place, is_repeated in expected.items())
    repeated = sum(expected.values())
    print(f"transformers repeats {repeated} of {len(expected)} training rows; {differing} differ from the report")
    options = ("--precision", "fp32", "--json")
    lengths = ("--leak-prefix", PREFIX, "--leak-tokens", LENGTH)
    of_report = command("evaluate", run, "--leaks", "--limit", 1000, *lengths, *options)
    of_scores = command("evaluate", run, "--data", rows, "--limit", 2000, *options)
    print(f"report on 1,000 training rows: {of_report:.0f} s; evaluate on 2,000 rows: {of_scores:.0f} s")


if __name__ == "__main__":
    main()
