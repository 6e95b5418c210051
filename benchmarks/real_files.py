"""Prepare every data file in a folder with ``--recipe`` alone, and account for every row.

    python benchmarks/real_files.py --data data/ --tokenizer gpt2/ --work /tmp/files

The recipe follows from the name of the file's folder. A file whose columns have other names than the recipe knows is
prepared once more with the ``--map`` that the message asks for. The rows of each file are counted here once more, with
nothing of gptj-ft: rows in the file = rows kept + rows reported, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepare_data import PREPARE, make_model

# The name of a folder -> the recipe for the files in it; the first that is part of the path.
RECIPES = {
    "dialogsum": "dialogsum",
    "cnndm": "cnn-dailymail",
    "summarization": "summarization",
    "squad": "squad",
    "sst2": "sst2",
    "mnli": "mnli",
    "nli": "entailment",
    "lm": "continuous-pretraining",
}
NOT_DATA = ("tokenizers",)
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")
# What a person answers where a message asks for the column of a field and suggests none.
COLUMNS = {"premise": "#1 String", "hypothesis": "#2 String", "label": "Quality"}


@dataclass(frozen=True)
class Outcome:
    """Result for a file: the ``--map`` that it needed, and the report or the error."""

    map: str
    report: dict[str, Any]
    refusal: str = ""


def main() -> None:
    """Prepare all files, print a table, and report rows that do not add up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of files, in folders named as in RECIPES")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--work", type=Path, required=True, help="new folder")
    parser.add_argument("--only", default="", help="only files whose path contains this")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    make_model(arguments)
    wrong = []
    print("| file | recipe | rows in the file | kept | reported | shortened | tokens |\n|---|---|---|---|---|---|---|")
    for path, recipe in chosen(arguments.data, arguments.only):
        name, rows = path.relative_to(arguments.data), count_rows(path)
        outcome = prepare(path, recipe, arguments.work)
        if outcome.refusal:
            wrong.append(f"{name}: {outcome.refusal}")
            print(f"| {name} | {recipe} | {rows:,} | refused | | | |", flush=True)
            continue
        report = outcome.report
        skips = {reason: skipped["count"] for reason, skipped in report["rows_skipped"].items()}
        if not rows == report["rows_read"] == report["rows_kept"] + sum(skips.values()):
            wrong.append(f"{name}: {rows} rows, {report['rows_read']} read, {report['rows_kept']} kept, {skips}")
        words = f"{recipe}, `--map '{outcome.map}'`" if outcome.map else recipe
        reported = "; ".join(f"{count:,}: {reason}" for reason, count in skips.items()) or "0"
        print(
            f"| {name} | {words} | {rows:,} | {report['rows_kept']:,} | {reported} | {report['rows_cut']:,} | "
            f"{report['tokens']:,} |",
            flush=True,
        )
    shutil.rmtree(arguments.work)
    if wrong:
        sys.exit("\n".join(wrong))


def chosen(data: Path, part: str) -> list[tuple[Path, str]]:
    """Return the data files of a folder, and the recipe for each.

    Raises:
        KeyError: a file in a folder of no known name.
    """
    found = []
    for path in sorted(data.rglob("*")):
        folders = path.relative_to(data).parts[:-1]
        if path.suffix in SUFFIXES and not set(NOT_DATA) & set(folders) and part in str(path):
            recipe = next((RECIPES[key] for key in RECIPES if any(key in folder for folder in folders)), None)
            if recipe is None:
                raise KeyError(f"{path}: which recipe? Its folder is named like none of {', '.join(RECIPES)}")
            found.append((path, recipe))
    return found


def prepare(path: Path, recipe: str, work: Path) -> Outcome:
    """Run the command; repeat it with the columns that its error names."""
    environment, mapped = {**os.environ, "GPTJ_FT_HOME": str(work / "home")}, dict[str, str]()
    while True:
        shutil.rmtree(work / "prepared", ignore_errors=True)
        words = ["--recipe", recipe, "--data", str(path), "--model", str(work / "model")]
        words += ["--map", written(mapped)] if mapped else []
        done = subprocess.run(
            [*PREPARE, *words, "--output", str(work / "prepared")], capture_output=True, text=True, env=environment
        )
        if done.returncode == 0:
            return Outcome(written(mapped), json.loads(done.stdout))
        asked = {
            field: COLUMNS.get(field, "") if column == "COLUMN" else column
            for suggested in re.findall(r"--map '?(\w+=[^\n'`]+)", done.stderr)
            for field, _, column in (pair.partition("=") for pair in suggested.strip().split(","))
        }
        known = all(column and column in done.stderr for column in asked.values())
        if done.returncode != 3 or not known or not asked.keys() - mapped.keys():
            return Outcome(written(mapped), {}, f"exit {done.returncode}: {done.stderr.strip()[-600:]}")
        mapped |= asked


def written(mapped: dict[str, str]) -> str:
    """Format fields and their columns for ``--map``."""
    return ",".join(f"{field}={column}" for field, column in mapped.items())


def count_rows(path: Path) -> int:
    """Count the rows of a file: questions, records, lines, or blocks between blank lines."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return int(parquet.ParquetFile(path).metadata.num_rows)
    text = path.read_bytes().decode("utf-8-sig")
    lines = [line for line in text.split("\n") if line.strip()]
    if path.suffix == ".csv":
        csv.field_size_limit(2**31 - 1)
        return sum(1 for cells in csv.reader(io.StringIO(text, newline="")) if cells) - 1
    if path.suffix == ".txt":
        return sum(1 for block in re.split(r"\n[^\S\n]*\n", text) if block.strip())
    if path.suffix == ".json":
        try:
            whole = json.loads(text)
        except ValueError:
            return len(lines)  # an object a line
        rows = whole["data"] if isinstance(whole, dict) else whole
        return sum(sum(len(each["qas"]) for each in row["paragraphs"]) if "paragraphs" in row else 1 for row in rows)
    return len(lines) - (path.suffix == ".tsv")


if __name__ == "__main__":
    main()
