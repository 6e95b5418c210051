"""Compare `gptj-ft predict` on short texts in one process and in two that share the rows: seconds and bytes.

    python benchmarks/predict_several.py --tokenizer bert-base-uncased/ --data train.tsv --work /tmp/several

A random encoder of MiniLM's shape (6 layers of 384) in fp32. Whole commands, one after the other, alternating; each
once more for ten texts, which is what loading Python, torch and the model takes. Target: two processes of one thread
1.8 times as fast as one of one thread, without loading.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
RUNS = {"one process, 1 thread": (1, 1), "two processes, 1 thread each": (2, 1), "one process, 2 threads": (1, 2)}
FEW = 10


def main() -> None:
    """Make the model, alternate the commands, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with BERT's tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="SST-2's train.tsv")
    parser.add_argument("--work", type=Path, required=True, help="new folder")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    model = make_model(arguments.work / "model", arguments.tokenizer)
    with arguments.data.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        texts = [row["sentence"] for _, row in zip(range(arguments.rows), table, strict=False)]
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(arguments.turns):
        written = set()
        for name, (processes, threads) in RUNS.items():
            for count in (FEW, len(texts)):
                rows, output = (arguments.work / f"{what}-{turn}-{processes}-{threads}-{count}.jsonl" for what in "io")
                rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:count]), encoding="utf-8")
                seconds.setdefault((name, count), []).append(run(model, rows, output, processes, threads))
            if threads == 1:
                written.add(output.read_bytes())
        assert len(written) == 1, "two processes have written something else"
    alone = labelling("one process, 1 thread", seconds, len(texts))
    print(f"| {len(texts):,} texts | seconds, median | of these labelling | texts/s | times |\n|---|---|---|---|---|")
    for name in RUNS:
        own, whole = labelling(name, seconds, len(texts)), seconds[name, len(texts)]
        spread = f"{statistics.median(whole):.1f} ({min(whole):.1f} to {max(whole):.1f})"
        print(f"| {name} | {spread} | {own:.1f} | {len(texts) / own:.0f} | {alone / own:.2f} |")
    shutil.rmtree(arguments.work)


def make_model(folder: Path, tokenizer: Path) -> Path:
    """Write a random encoder with a head for two labels."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**SHAPE)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer, config=BertConfig()).save_pretrained(folder)
    return folder


def run(model: Path, rows: Path, output: Path, processes: int, threads: int) -> float:
    """Label a file with one command; return its seconds."""
    options = f"--precision fp32 --device cpu --set cache=false --set threads={threads} --nproc {processes} --quiet"
    words = f"predict --model {model} --input {rows} --output {output} {options}"
    command = [sys.executable, "-m", "gptj_ft", *words.split()]
    began = time.monotonic()
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def labelling(name: str, seconds: dict[tuple[str, int], list[float]], count: int) -> float:
    """Return the median seconds of a run without loading."""
    return statistics.median(seconds[name, count]) - statistics.median(seconds[name, FEW])


if __name__ == "__main__":
    main()
