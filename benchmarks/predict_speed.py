"""Compare `gptj-ft predict` on short texts with the pipeline of `transformers` at its best batch size.

Both label the same texts with the same tuned encoder, in fp32 on the CPU, and alternate; seconds are those of
labelling and of writing the file, without loading Python and the model.

    python benchmarks/predict_speed.py --model runs/sst2-bert-1/model --data train.tsv --rows 10000 --work /tmp/predict
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from pathlib import Path

import torch
import transformers

import gptj_ft

BATCH_SIZES = (1, 8, 32, 128)


def main() -> None:
    """Label the texts both ways alternating, and print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path, required=True, help="tuned model with one label a text")
    options.add_argument("--data", type=Path, required=True, help="SST-2's train.tsv")
    options.add_argument("--work", type=Path, required=True, help="new folder")
    options.add_argument("--rows", type=int, default=10_000)
    options.add_argument("--turns", type=int, default=3)
    arguments = options.parse_args()
    arguments.work.mkdir(parents=True)
    with arguments.data.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        texts = [row["sentence"] for _, row in zip(range(arguments.rows), table, strict=False)]
    rows = arguments.work / "rows.jsonl"
    rows.write_text("".join(json.dumps({"sentence": text}) + "\n" for text in texts), encoding="utf-8")
    pipeline = transformers.pipeline("text-classification", str(arguments.model), device="cpu", dtype=torch.float32)
    seconds: dict[str, list[float]] = {}
    labels: dict[str, list[str]] = {}
    for turn in range(arguments.turns):
        output = arguments.work / f"labels-{turn}.jsonl"
        began = time.monotonic()
        gptj_ft.predict_file(rows, output, arguments.model, precision="fp32", device="cpu", cache=False)
        seconds.setdefault("gptj-ft", []).append(time.monotonic() - began)
        labels["gptj-ft"] = [json.loads(line)["label"] for line in output.read_text(encoding="utf-8").splitlines()]
        for size in BATCH_SIZES if turn == 0 else [best_of(seconds)]:
            name = f"transformers, {size} at once"
            began = time.monotonic()
            with torch.inference_mode():
                labels[name] = [found["label"] for found in pipeline(texts, batch_size=size)]
            seconds.setdefault(name, []).append(time.monotonic() - began)
    ours = labels.pop("gptj-ft")
    same = {name: sum(map(str.__eq__, ours, theirs)) for name, theirs in labels.items()}
    print(f"| {len(texts):,} texts | seconds, median | spread | texts/s | same labels |\n|---|---|---|---|---|")
    for name, found in seconds.items():
        median = statistics.median(found)
        spread = f"{min(found):.1f} to {max(found):.1f}"
        print(f"| {name} | {median:.1f} | {spread} | {len(texts) / median:.0f} | {same.get(name, len(texts)):,} |")


def best_of(seconds: dict[str, list[float]]) -> int:
    """Return the fastest batch size of the first turn."""
    return min(BATCH_SIZES, key=lambda size: seconds[f"transformers, {size} at once"][0])


if __name__ == "__main__":
    main()
