"""Train and tune small random models by the command line and by `transformers`, and compare scores.

A random GPT-J with a tokenizer learned on the spot is trained on Wikipedia text with the recipe
`continuous-pretraining`, then tuned three times: sentiment (SST-2), summaries (DialogSum), questions on passages
(SQuAD). Each training is done again by the loop of `transformers_loop.py`, from the same weights, with the same rows in
the same order, learning rates, clipping and AdamW. `gptj-ft evaluate` then puts the tuned model beside the one before,
and beside that of `transformers`.

Rows that are measured are kept apart from those that are trained on: the last articles of WikiText-2's validation file;
phrases of SST-2 of ten words and more, no three words in a row of which are in a phrase that is trained on; DialogSum's
validation file; SQuAD's development articles. Dialogues and passages are those of at most 600 characters.

    python benchmarks/it_learns.py --data DATA --work /tmp/it_learns

DATA has lm/wikitext-2/valid.txt, lm/wikipedia-demo/wiki_demo.txt (an article a line), sentiment/sst2/{train,dev}.tsv,
summarization/dialogsum/{train,val}.jsonl and squad/{train-v1.1-subset,dev-v1.1}.json. Finished parts in WORK
are kept: after a kill the same command resumes (a run of `transformers` restarts). Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SIZES = {"n_embd": 128, "n_layer": 4, "n_head": 4, "rotary_dim": 16, "n_positions": 512, "initializer_range": 0.02}
VOCABULARY = 4096
HELD_OUT_ARTICLES = 12  # of WikiText-2's 60
MOST_CHARACTERS = 600  # of a dialogue or passage
FEWEST_WORDS, NUM_PHRASES = 10, 872  # of SST-2's phrases that are measured; as many as GLUE's own development set has
COMMON_WORDS = 3
NUM_QUESTIONS = 300
CURVE_POINTS, VALIDATIONS = 8, 4
FIRST = 50  # steps, in which losses should hardly differ; later rounding adds up
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Task:
    """A training run and its evaluation.

    Attributes:
        recipe: preset of it.
        suffix: of its two files.
        scores: to be shown.
        steps: optimizer steps.
        batch_size: rows of each.
        max_length: tokens of a row.
        lr: peak learning rate.
        new_tokens: most tokens of an answer.
        options: of the recipe, what else differs.
    """

    recipe: str
    suffix: str
    scores: tuple[str, ...]
    steps: int
    batch_size: int
    max_length: int
    lr: float
    new_tokens: int = 1
    options: tuple[str, ...] = field(default=("schedule=cosine", "warmup=0.1", "final_lr=0.1"))


PRETRAINING = "wikipedia"
TASKS = {
    PRETRAINING: Task(
        "continuous-pretraining", "jsonl", ("perplexity", "word_perplexity", "token_accuracy"), 240, 16, 256, 2e-3
    ),
    "sst2": Task("sst2", "tsv", ("accuracy", "macro_f1", "loss"), 600, 32, 128, 1e-3),
    "dialogsum": Task("dialogsum", "jsonl", ("rouge1", "rouge2", "rougeL", "perplexity"), 120, 8, 384, 1e-3, 48),
    "squad": Task("squad", "json", ("exact_match", "f1", "perplexity"), 120, 8, 384, 1e-3, 16),
}


def main() -> None:
    """Run the missing steps, then print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the files")
    parser.add_argument("--work", type=Path, required=True, help="folder for all output")
    parser.add_argument("--only", default=",".join(TASKS), help=f"some of {','.join(TASKS)}; the others need the first")
    parser.add_argument("--steps", type=float, default=1.0, help="factor of the optimizer steps of each run")
    parser.add_argument("--transformers", choices=TASKS, help="internal")
    arguments = parser.parse_args()
    work: Path = arguments.work
    if arguments.transformers:
        train_with_transformers(work, arguments.transformers)
        return
    make_inputs(arguments.data, work)
    names = arguments.only.split(",")
    for name in names:
        steps = max(round(TASKS[name].steps * arguments.steps), 1)
        finetune(work, name, steps)
        if not tuned(work, name, "transformers").exists():
            run([sys.executable, __file__, "--work", work, "--transformers", name])
        evaluate(work, name, base_of(work, name), "before")
        evaluate(work, name, tuned(work, name, "transformers"), "transformers")
    if "dialogsum" in names:
        score_beginnings(work)
    print("\n".join(line for name in names for line in table_of(work, name)))


def base_of(work: Path, name: str) -> Path:
    """Return the model folder that a training starts from."""
    return work / "model" if name == PRETRAINING else tuned(work, PRETRAINING)


def tuned(work: Path, name: str, trainer: str = "gptj-ft") -> Path:
    """Return the model folder that a training ends with."""
    return work / "runs" / name / "model" if trainer == "gptj-ft" else work / trainer / name


def rows_of(work: Path, name: str, part: str) -> Path:
    """Return a file of rows: of ``train`` or of ``held``."""
    return work / "data" / f"{name}-{part}.{TASKS[name].suffix}"


def run(command: Iterable[object]) -> None:
    """Run a command with its output on stderr."""
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)


def gptj_ft(work: Path, *arguments: object) -> None:
    """Run the command line."""
    os.environ["GPTJ_FT_HOME"] = str(work / "home")
    run([sys.executable, "-m", "gptj_ft", *arguments])


def finetune(work: Path, name: str, steps: int) -> None:
    """Train with the command line, or resume."""
    task, folder = TASKS[name], work / "runs" / name
    if tuned(work, name).exists():
        return
    if (folder / "recipe.yaml").exists():
        gptj_ft(work, "finetune", "--resume", folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    gptj_ft(
        work, "finetune", "--recipe", task.recipe, "--data", rows_of(work, name, "train"), "--val-data",
        rows_of(work, name, "held"), "--model", base_of(work, name), "--output", folder, "--max-steps", steps,
        "--batch-size", task.batch_size, "--max-length", task.max_length, "--lr", task.lr, "--precision", "fp32",
        "--device", "cpu", "--validate-every", max(steps // VALIDATIONS, 1),
        *(part for option in task.options for part in ("--set", option)),
    )  # fmt: skip


def train_with_transformers(work: Path, name: str) -> None:
    """Train on the same rows with `transformers`' model and `torch.optim.AdamW`."""
    from same_work import Work, open_model
    from transformers_loop import train

    from gptj_ft.config.run_folder import Run

    base, folder = base_of(work, name), tuned(work, name, "transformers")
    model, steps = open_model(base), Work.of(Run(work / "runs" / name))
    folder.parent.mkdir(exist_ok=True)
    steps.write_losses(train(model, steps, "targets"), folder.with_suffix(".losses.jsonl"))
    draft = folder.with_suffix(".draft")
    model.save_pretrained(draft)
    for file in TOKENIZER_FILES:
        shutil.copy(base / file, draft / file)
    draft.rename(folder)


def evaluate(work: Path, name: str, other: Path, suffix: str) -> None:
    """Evaluate the tuned model against another."""
    task, report = TASKS[name], work / f"{name}-{suffix}.json"
    if not report.exists():
        gptj_ft(
            work, "evaluate", tuned(work, name), "--recipe", task.recipe, "--data", rows_of(work, name, "held"),
            "--baseline", other, "--precision", "fp32", "--device", "cpu", "--set", f"max_length={task.max_length}",
            "--set", f"generation.max_new_tokens={task.new_tokens}", "--report", report,
        )  # fmt: skip


def score_beginnings(work: Path) -> None:
    """Score the first two turns of each dialogue as its summary: a baseline without a model."""
    rows, report = rows_of(work, "dialogsum", "held"), work / "dialogsum-beginnings.json"
    if report.exists():
        return
    dialogues = [json.loads(line)["dialogue"] for line in rows.read_text(encoding="utf-8").splitlines()]
    file = work / "data" / "beginnings.jsonl"
    write_lines(file, ({"prediction": "\n".join(text.splitlines()[:2])} for text in dialogues))
    gptj_ft(
        work, "evaluate", "--predictions", file, "--data", rows, "--recipe", "dialogsum", "--report", report,
    )  # fmt: skip


def table_of(work: Path, name: str) -> list[str]:
    """Return the scores and the curve of a training as Markdown."""
    before, beside = (json.loads((work / f"{name}-{other}.json").read_text()) for other in ("before", "transformers"))
    model = before["model"]
    measured = f"measured on {model['rows']:,} rows, {model['target_tokens']:,} target tokens"
    lines = [f"### {name}", "", f"Recipe `{TASKS[name].recipe}`, {measured}.", ""]
    lines += ["| | before | after | change | `transformers` | after - `transformers` |", "|---|---|---|---|---|---|"]
    for score in TASKS[name].scores:
        cells = (
            scored(before["baseline"], score), scored(model, score), changed(before, score),
            scored(beside["baseline"], score), changed(beside, score),
        )  # fmt: skip
        lines.append(f"| {score} | {' | '.join(cells)} |")
    if (beginnings := work / f"{name}-beginnings.json").exists():
        found = json.loads(beginnings.read_text())["model"]
        lines += ["", "The first two turns as the summary: "]
        lines[-1] += ", ".join(f"{score} {scored(found, score)}" for score in TASKS[name].scores[:3]) + "."
    return [*lines, "", *curve_of(work, name), ""]


def scored(found: dict[str, Any], score: str) -> str:
    """Return a score and its interval."""
    return interval(found["scores"][score], *found["intervals"][score])


def changed(found: dict[str, Any], score: str) -> str:
    """Return a paired difference and its interval."""
    difference = found["differences"][score]
    return interval(difference["value"], difference["low"], difference["high"], "+")


def interval(value: float, low: float, high: float, sign: str = "") -> str:
    """Format three numbers with two decimals, or more if they are small."""
    largest = max(map(abs, (value, low, high)))
    kind = f"{sign},.2f" if largest >= 0.01 or largest == 0 else f"{sign}.0e"
    return f"{value:{kind}} ({low:{kind}} to {high:{kind}})"


def curve_of(work: Path, name: str) -> list[str]:
    """Return losses by step as Markdown, averaged over the steps since the previous line."""
    metrics = read_lines(work / "runs" / name / "metrics.jsonl")
    held = {line["step"]: line["validation_loss"] for line in metrics if "validation_loss" in line}
    ours = [line for line in metrics if "loss" in line]
    theirs = read_lines(tuned(work, name, "transformers").with_suffix(".losses.jsonl"))
    apart = [abs(one["loss"] - two["loss"]) for one, two in zip(ours, theirs, strict=True)]
    tokens = sum(line["tokens"] for line in ours)
    lines = [
        f"{len(ours)} steps, {tokens:,} tokens. Largest difference of a step's loss: {max(apart[:FIRST]):.1e} in the "
        f"first {FIRST}, {max(apart):.1e} in all.",
        "",
        "| steps | loss, gptj-ft | `transformers` | held-out rows, gptj-ft |",
        "|---|---|---|---|",
    ]
    size = max(len(ours) // CURVE_POINTS, 1)
    lines.append(f"| 0 | | | {held[0]:.4f} |")
    for start in range(0, len(ours), size):
        end = min(start + size, len(ours))
        one, two = (sum(line["loss"] for line in of[start:end]) / (end - start) for of in (ours, theirs))
        lines.append(f"| {start + 1} to {end} | {one:.4f} | {two:.4f} | {f'{held[end]:.4f}' if end in held else ''} |")
    return lines


def make_inputs(data: Path, work: Path) -> None:
    """Write the rows of each training and the random model with its tokenizer."""
    if (work / "model").exists():
        return
    from gptj_ft.checkpoints.tiny import make_tiny

    (work / "data").mkdir(parents=True, exist_ok=True)
    texts = write_wikipedia(data, work)
    write_sst2(data / "sentiment" / "sst2", work)
    write_dialogsum(data / "summarization" / "dialogsum", work)
    write_squad(data / "squad", work)
    make_tiny(work / "model", texts, seed=0, vocab_target=VOCABULARY, **SIZES)


def write_wikipedia(data: Path, work: Path) -> list[str]:
    """Write articles; return the training articles, because SQuAD's passages are from Wikipedia, too."""
    wikitext = (data / "lm" / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")
    articles = [text.strip() for text in re.split(r"(?m)^(?= = [^=])", wikitext) if text.strip()]
    texts = articles[:-HELD_OUT_ARTICLES]
    texts += (data / "lm" / "wikipedia-demo" / "wiki_demo.txt").read_text(encoding="utf-8").splitlines()
    for article in json.loads((data / "squad" / "train-v1.1-subset.json").read_text(encoding="utf-8"))["data"]:
        texts.append("\n".join(paragraph["context"] for paragraph in article["paragraphs"]))
    for part, chosen in (("train", texts), ("held", articles[-HELD_OUT_ARTICLES:])):
        write_lines(rows_of(work, PRETRAINING, part), ({"text": text} for text in chosen))
    return texts


def write_sst2(source: Path, work: Path) -> None:
    """Write phrases; remove phrases of the evaluation sentences from the training file."""

    def sequences(line: str) -> set[tuple[str, ...]]:
        words = line.partition("\t")[0].split()
        return {tuple(words[at : at + COMMON_WORDS]) for at in range(len(words) - COMMON_WORDS + 1)}

    header, *dev = (source / "dev.tsv").read_text(encoding="utf-8").splitlines()
    held = [line for line in dev if len(line.partition("\t")[0].split()) >= FEWEST_WORDS][:NUM_PHRASES]
    known = set().union(*map(sequences, held))
    train = (source / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    train = [line for line in train if not known & sequences(line)]
    for part, lines in (("train", train), ("held", held)):
        rows_of(work, "sst2", part).write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")


def write_dialogsum(source: Path, work: Path) -> None:
    """Write the shorter dialogues."""
    for part, name in (("train", "train.jsonl"), ("held", "val.jsonl")):
        rows = read_lines(source / name)
        write_lines(
            rows_of(work, "dialogsum", part), (row for row in rows if len(row["dialogue"]) <= MOST_CHARACTERS)
        )  # fmt: skip


def write_squad(source: Path, work: Path) -> None:
    """Write the questions on short passages; evaluation questions come from all articles."""
    for part, name in (("train", "train-v1.1-subset.json"), ("held", "dev-v1.1.json")):
        rows = [
            (paragraph["context"], question)
            for article in json.loads((source / name).read_text(encoding="utf-8"))["data"]
            for paragraph in article["paragraphs"]
            if len(paragraph["context"]) <= MOST_CHARACTERS
            for question in paragraph["qas"]
        ]
        if part == "held":
            rows = random.Random(0).sample(rows, NUM_QUESTIONS)
        paragraphs = [{"context": context, "qas": [question]} for context, question in rows]
        text = json.dumps({"version": "1.1", "data": [{"title": name, "paragraphs": paragraphs}]})
        rows_of(work, "squad", part).write_text(text, encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    main()
