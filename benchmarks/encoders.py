"""Compare encoders without padding with padded rows on the same engine, and with a plain `transformers` loop.

    python benchmarks/encoders.py padding --data data/ --tokenizer bert/ --work /tmp/encoders
    python benchmarks/encoders.py loop --data data/ --tokenizer bert/ --work /tmp/encoders --tasks sst2

Rows are those of SST-2 and of a sample of MNLI, 32 a step, and windows of SQuAD, 384 tokens at most, 12 a step, with
BERT's vocabulary; models are random, of MiniLM's shape (6 layers of 384) and of BERT base's, with dropout of 0.1.

Everything computes in one thread, and its processor seconds are compared, so other programs do not count. Steps from
disk are compared by wall-clock time: nothing else may run then.

`padding`: forward and backward of a step, without its update, of ragged rows and of rows padded to the longest
of their step. Both ways alternate; the faster turn of each step counts. Target: the speed-up is at least 0.95 of
longest / mean where products bound the step, 2.8 times on SST-2 and 2.0 on SQuAD.

`loop`: whole steps, in separate processes whose memory is monitored from outside, compared with a tuned loop:
rows padded to the longest of their batch, sdpa attention, `AdamW(fused=True)`, `clip_grad_norm_`; in bf16 by autocast.
Target: 1.5 times the examples per second, 0.6 times the memory. Losses must be similar; they are not
equal, because each program draws its own dropout.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptj_ft.models.batch import PackedBatch
    from gptj_ft.streaming.offloaded_model import OffloadedModel

FILES = {"sst2": "sentiment/sst2/train.tsv", "mnli": "nli/mnli/train.tsv", "squad": "squad/train-v1.1-subset.json"}
ROWS = {"sst2": 32, "mnli": 32, "squad": 12}  # of a step
MOST_ROWS = 4000  # that are read of a file
SHAPES = {
    "minilm": {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}
MNLI = ("contradiction", "entailment", "neutral")
TRAINERS = ("gptj-ft", "gptj-ft recompute", "gptj-ft disk", "transformers")
LR, SEED = 2e-5, 0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SAME_LOSS = 0.1  # of the means over steps: each trainer drops by random numbers of its own


@dataclass(frozen=True)
class Example:
    """A row: token ids, start of the second text, and label, or first and last token of the answer."""

    ids: list[int]
    border: int
    targets: list[int]


def main() -> None:
    """Run a part of the benchmark or, in a child process, one trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("padding", "loop", *TRAINERS), help="a trainer: used by the script itself")
    parser.add_argument("--data", type=Path, help=f"folder with {', '.join(FILES.values())}")
    parser.add_argument("--tokenizer", type=Path, help="folder with vocab.txt")
    parser.add_argument("--work", type=Path, required=True, help="new folder")
    parser.add_argument("--tasks", default="sst2,mnli,squad")
    parser.add_argument("--shapes", default="minilm,base")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--trainers", default=",".join(TRAINERS))
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after two warm-up steps")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=2048, help="tokens computed at once, padded or not")
    arguments = parser.parse_args()
    if arguments.part in TRAINERS:
        return run_trainer(arguments)
    import torch

    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for shape in arguments.shapes.split(","):
        for task in arguments.tasks.split(","):
            steps = steps_of(task, arguments)
            make_model(arguments.work / f"{shape}-{task}", shape, task)
            (against_padding if arguments.part == "padding" else against_loop)(shape, task, steps, arguments)
    return None


def steps_of(task: str, arguments: argparse.Namespace) -> list[list[Example]]:
    """Read a file, and return the rows of each step."""
    from gptj_ft.data.tokenization import load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer)
    path = arguments.data / FILES[task]
    if task == "squad":
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        pairs = [
            (each["question"].lstrip(), paragraph["context"]) for paragraph in paragraphs for each in paragraph["qas"]
        ]
        found = tokenizer(
            *map(list, zip(*pairs[:MOST_ROWS], strict=True)), truncation="only_second", max_length=384, stride=128,
            return_overflowing_tokens=True, return_token_type_ids=True,
        )  # fmt: skip
        targets = [[types.index(1), types.index(1) + 2] for types in found["token_type_ids"]]  # an answer of three
    else:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[:MOST_ROWS]
        names = ("sentence",) if task == "sst2" else ("sentence1", "sentence2")
        found = tokenizer(
            *([row[name] for row in rows] for name in names),
            truncation=True,
            max_length=128,
            return_token_type_ids=True,
        )
        label = (lambda row: int(row["label"])) if task == "sst2" else (lambda row: MNLI.index(row["gold_label"]))
        targets = [[label(row)] for row in rows]
    columns = zip(found["input_ids"], found["token_type_ids"], targets, strict=True)
    examples = [Example(ids, types.index(1) if 1 in types else 0, target) for ids, types, target in columns]
    count = ROWS[task] * (arguments.steps + 2)
    chosen = random.Random(SEED).choices(range(len(examples)), k=count)
    return [[examples[row] for row in chosen[start : start + ROWS[task]]] for start in range(0, count, ROWS[task])]


def make_model(folder: Path, shape: str, task: str) -> None:
    """Write a random model."""
    import torch
    import transformers

    labels = {"sst2": 2, "mnli": 3, "squad": 2}[task]
    torch.manual_seed(SEED)
    config = transformers.BertConfig(**SHAPES[shape], num_labels=labels, problem_type="single_label_classification")
    kind = transformers.BertForQuestionAnswering if task == "squad" else transformers.BertForSequenceClassification
    kind(config).save_pretrained(folder)


def batches_of(step: list[Example], task: str, number: int, arguments: argparse.Namespace) -> list[PackedBatch]:
    """Return the micro-batches of a step."""
    from gptj_ft.data.batches import micro_batches
    from gptj_ft.models.batch import Marks
    from gptj_ft.models.dropout import seed_of

    marks = [
        Marks((row.border,) if row.border else (), () if task == "squad" else (0,), tuple(row.targets)) for row in step
    ]
    seeds = [seed_of((SEED, number, row)) for row in range(len(step))]
    documents = [row.ids for row in step]
    return micro_batches(documents, list(map(len, documents)), arguments.micro_batch, marks=marks, seeds=seeds)


def open_model(folder: Path, task: str, precision: str, num_kept: int, is_on_disk: bool = False) -> OffloadedModel:
    """Open a model, all of it in memory, or on disk with the fewest buffers."""
    import torch

    from gptj_ft.checkpoints.model_folder import open_checkpoint
    from gptj_ft.config.options import Recipe
    from gptj_ft.streaming.buffers import BufferBudget
    from gptj_ft.streaming.open import load_weights, open_for_training
    from gptj_ft.streaming.stores.placement import Placement, training_dtypes
    from gptj_ft.system.dtypes import PRECISIONS
    from gptj_ft.training.setup import trained_architecture

    recipe = Recipe.model_validate({"task": "spans" if task == "squad" else "classification"})
    labels = {"sst2": ("LABEL_0", "LABEL_1"), "mnli": ("LABEL_0", "LABEL_1", "LABEL_2"), "squad": ()}[task]
    architecture, dtypes = trained_architecture(recipe, folder, labels), training_dtypes(PRECISIONS[precision])
    budget, place = BufferBudget(num_kept_layers=num_kept), Placement("device", "device")
    if is_on_disk:
        budget, place = replace(budget, num_chunks=8, chunk_numel=1 << 20), Placement("disk", "disk")
    stack = open_for_training(architecture, place, dtypes, torch.device("cpu"), folder / "state", budget)
    with open_checkpoint(folder) as checkpoint:
        load_weights(stack, architecture, checkpoint)
    return stack


class NoUpdates:
    """Optimizer that discards gradients and leaves the weights unchanged."""

    loss_scale = None

    def __init__(self) -> None:
        from gptj_ft.streaming.schedule import PendingUpdates

        self.updates = PendingUpdates()

    def add_gradient(self, load: Any) -> None:
        pass

    def apply(self, *_: Any) -> None:
        pass

    def applied(self, *_: Any) -> None:
        pass


def against_padding(shape: str, task: str, steps: list[list[Example]], arguments: argparse.Namespace) -> None:
    """Compare the seconds of forward and backward on ragged and on padded rows."""
    from gptj_ft.streaming.objective import CrossEntropy, Spans
    from gptj_ft.streaming.step import train_step

    stack = open_model(arguments.work / f"{shape}-{task}", task, "fp32", SHAPES[shape]["num_hidden_layers"])
    seconds: dict[str, list[float]] = {"ragged": [], "padded": []}
    for number, step in enumerate(steps):
        longest = max(len(row.ids) for row in step)
        filled = [Example(row.ids + [0] * (longest - len(row.ids)), row.border, row.targets) for row in step]
        ways = {"ragged": step, "padded": filled}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(arguments.turns):
            for way in ways if turn % 2 else reversed(ways):
                batches = batches_of(ways[way], task, number, arguments)
                start = time.process_time()
                train_step(stack, NoUpdates(), batches, Spans() if task == "squad" else CrossEntropy())
                times[way].append(time.process_time() - start)
        for way in ways:
            seconds[way].append(min(times[way]))
    stack.close()
    tokens, padded = padding_of(steps[2:])
    ours, theirs = (sum(seconds[way][2:]) for way in ("ragged", "padded"))
    each = sorted(b / a for a, b in zip(seconds["ragged"][2:], seconds["padded"][2:], strict=True))
    reached = theirs / ours / (padded / tokens)
    print(json.dumps({"shape": shape, "task": task, "tokens": tokens, "padded": padded, "seconds": seconds}))
    print(
        f"{shape:<8}{task:<8}{tokens:>8,} tokens, padding {padded / tokens:.2f}; {ours:.2f} s, padded {theirs:.2f}: "
        f"{theirs / ours:.2f}x (steps {each[0]:.2f} to {each[-1]:.2f}), {reached:.3f} of what the tokens allow",
        flush=True,
    )


def padding_of(steps: list[list[Example]]) -> tuple[int, int]:
    """Count the tokens of steps without and with padding."""
    lengths = [[len(row.ids) for row in step] for step in steps]
    return sum(map(sum, lengths)), sum(len(step) * max(step) for step in lengths)


def against_loop(shape: str, task: str, steps: list[list[Example]], arguments: argparse.Namespace) -> None:
    """Compare trainers, each in processes of its own, alternating."""
    from side_by_side import watch

    (arguments.work / "steps.json").write_text(json.dumps([[asdict(row) for row in step] for step in steps]))
    tokens, padded = padding_of(steps[2:])
    for precision in arguments.precisions.split(","):
        rates: dict[str, list[float]] = {}
        peaks: dict[str, list[int]] = {}
        losses: dict[str, float] = {}
        for turn in range(arguments.turns):
            names = arguments.trainers.split(",")
            for name in names if turn % 2 else reversed(names):
                out = arguments.work / f"{name.replace(' ', '-')}-{turn}.jsonl"
                out.unlink(missing_ok=True)
                command = [sys.executable, __file__, name, "--work", arguments.work, "--shapes", shape, "--tasks", task]
                command += ["--precisions", precision, "--micro-batch", str(arguments.micro_batch)]
                run = watch(
                    [str(word) for word in command], out, {**os.environ, **ONE_THREAD, "GPTJ_FT_LINES": str(out)}
                )
                timed = run.lines[-1]["seconds"] - run.lines[1]["seconds"]
                rates.setdefault(name, []).append(ROWS[task] * (len(steps) - 2) / timed)
                peaks.setdefault(name, []).append(run.peak_rss_bytes)
                losses[name] = statistics.fmean(line["loss"] for line in run.lines)
        assert max(losses.values()) - min(losses.values()) < SAME_LOSS, losses
        base = arguments.trainers.split(",")[-1]
        print(json.dumps({"shape": shape, "task": task, "precision": precision, "rates": rates, "peaks": peaks}))
        for name, found in rates.items():
            rate, peak = statistics.median(found), statistics.median(peaks[name])
            print(
                f"{shape:<8}{task:<7}{precision:<6}{name:<20}{rate:>8.1f} rows/s ({min(found):.1f} to {max(found):.1f})"
                f"{rate / statistics.median(rates[base]):>7.2f}x{peak / 1e9:>7.2f} GB"
                f"{peak / statistics.median(peaks[base]):>6.2f}x   longest/mean {padded / tokens:.2f}",
                flush=True,
            )


def run_trainer(arguments: argparse.Namespace) -> None:
    """Run the steps of a file; write a line after each."""
    text = (arguments.work / "steps.json").read_text(encoding="utf-8")
    steps = [[Example(**row) for row in step] for step in json.loads(text)]
    train = train_transformers if arguments.part == "transformers" else train_ours
    with Path(os.environ["GPTJ_FT_LINES"]).open("w", encoding="utf-8", buffering=1) as lines:
        clock = time.perf_counter if "disk" in arguments.part else time.process_time
        for loss in train(arguments, steps):
            lines.write(json.dumps({"loss": loss, "seconds": clock()}) + "\n")


def train_ours(arguments: argparse.Namespace, steps: list[list[Example]]) -> Iterator[float]:
    """Train with `gptj-ft`'s engine; yield the loss of each step."""
    from gptj_ft.config.options import Recipe
    from gptj_ft.streaming.adamw import AdamW
    from gptj_ft.streaming.objective import CrossEntropy, Spans
    from gptj_ft.streaming.step import train_step
    from gptj_ft.training.restore import optimizer_config

    shape, task = arguments.shapes, arguments.tasks
    num_kept = 0 if "recompute" in arguments.part else SHAPES[shape]["num_hidden_layers"]
    is_on_disk = "disk" in arguments.part
    stack = open_model(arguments.work / f"{shape}-{task}", task, arguments.precisions, num_kept, is_on_disk)
    optimizer = AdamW(stack, optimizer_config(Recipe.model_validate({"clip_norm": 1.0, "weight_decay": 0.01})))
    for number, step in enumerate(steps):
        batches = batches_of(step, task, number, arguments)
        optimizer.begin_step(LR)
        loss = train_step(stack, optimizer, batches, Spans() if task == "squad" else CrossEntropy())
        optimizer.finish_step()
        if is_on_disk:  # as the trainer's commit does: it waits for the gradients, the next step does not
            stack.stores["grad"].then(lambda: None)
        yield loss.mean
    optimizer.flush()
    stack.close()


def train_transformers(arguments: argparse.Namespace, steps: list[list[Example]]) -> Iterator[float]:
    """Train with a plain loop; yield the loss of each step."""
    import torch
    import transformers

    task = arguments.tasks
    kind = transformers.BertForQuestionAnswering if task == "squad" else transformers.BertForSequenceClassification
    model = kind.from_pretrained(arguments.work / f"{arguments.shapes}-{task}", attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=True)
    for step in steps:
        longest = max(len(row.ids) for row in step)
        ids, types, mask = (torch.zeros(len(step), longest, dtype=torch.int64) for _ in range(3))
        for place, row in enumerate(step):
            ids[place, : len(row.ids)], mask[place, : len(row.ids)] = torch.tensor(row.ids), 1
            types[place, row.border : len(row.ids)] = int(row.border > 0)
        targets = torch.tensor([row.targets for row in step]).unbind(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.precisions == "bf16"):
            out = model(input_ids=ids, attention_mask=mask, token_type_ids=types)
        if task == "squad":  # not by the model: for it an answer may begin in the padding
            places = [scores.float().masked_fill(mask == 0, -1e30) for scores in (out.start_logits, out.end_logits)]
            loss = sum(map(torch.nn.functional.cross_entropy, places, targets)) / 2
        else:
            loss = torch.nn.functional.cross_entropy(out.logits.float(), targets[0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


if __name__ == "__main__":
    main()
