"""Measure the cost of padding: the same steps on ragged batches and on rows padded to the longest of their step.

    python benchmarks/ragged_vs_padded.py --data data/ --tokenizer gpt2/ --work /tmp/padding

One engine does both. Padding is emulated: rows are extended by tokens that carry no target; they come after a row's
own, so that they change no loss, which is checked. Rows are those of DialogSum, SQuAD, SST-2 and WikiText-2, their
tokens folded into a small vocabulary; the model is random, so wide that its time is that of matrix products. Its
vocabulary is so small that embedding and head have the same share of the parameters as GPT-J's, 3.4 % each: they are
updated at every step, however few its tokens are, and padding passes the head free of charge. Each step is run in both
ways one after the other, several times alternating; the learning rate is 0, so that all start from the same weights.
The fastest of each counts: what else a machine does makes a step longer, never shorter.

Padding is taken through embedding, blocks and attention, forward and backward. It is not taken through the head, which
this engine runs on positions with a target only; so a loop that computes logits for all of [rows, longest], as
`transformers` does, loses more by padding than is measured here.

Target: the speed-up is at least 0.95 of padded tokens / tokens.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prepare_data import PREPARE, make_model, run

if TYPE_CHECKING:
    from gptj_ft.data.batches import Rows
    from gptj_ft.models.batch import PackedBatch
    from gptj_ft.streaming.adamw import AdamW
    from gptj_ft.streaming.offloaded_model import OffloadedModel

FILES = {
    "dialogsum": "summarization/dialogsum/train.jsonl",
    "squad": "squad/train-v1.1-subset.json",
    "sst2": "sentiment/sst2/train.tsv",
    "continuous-pretraining": "lm/wikitext-2/valid.txt",
}
GPTJ = {"vocab_size": 50400, "n_embd": 4096, "n_layer": 28}
HEADS = 16
BATCH_SIZE = 16
ASKED = 0.95
SAME_LOSS = 1e-4


def main() -> None:
    """Prepare each file, and run its first steps both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {', '.join(FILES.values())}")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--work", type=Path, required=True, help="new folder")
    parser.add_argument("--recipes", default=",".join(FILES))
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after one warm-up step")
    parser.add_argument("--turns", type=int, default=3, help="repetitions of each step, both ways")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--micro-batch", type=int, default=2048, help="tokens computed at once, with padding or without"
    )
    parser.add_argument("--asked", type=float, default=ASKED, help="target share of the token ratio; less exits with 1")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    make_model(arguments)
    print(f"{'':<24}{'tokens':>9}{'padded':>9}{'more':>8}{'ragged':>10}{'padded':>10}{'speed-up':>10}{'of it':>8}")
    reached = [compare(recipe, arguments) for recipe in arguments.recipes.split(",")]
    shutil.rmtree(arguments.work)
    if min(reached) < arguments.asked:
        sys.exit(f"{min(reached):.3f} of what the tokens allow, asked for: {arguments.asked}")


def compare(recipe: str, arguments: argparse.Namespace) -> float:
    """Run steps on one file's rows, and print the times; return the speed-up over padded tokens / tokens."""
    from gptj_ft.data.batches import micro_batches, rows_of_step

    rows = rows_of(recipe, arguments)
    stack, optimizer = open_model(arguments)
    ways: dict[str, Callable[..., list[PackedBatch]]] = {"ragged": micro_batches, "padded": padded}
    seconds, tokens = {way: list[float]() for way in ways}, {way: list[int]() for way in ways}
    for step in range(arguments.steps + 1):
        chosen = rows_of_step(step, len(rows), BATCH_SIZE, seed=0)
        documents = [[token % vocabulary_of(arguments) for token in rows.documents[row]] for row in chosen]
        batches = {
            way: split(documents, [rows.prompt_lengths[row] for row in chosen], arguments.micro_batch)
            for way, split in ways.items()
        }
        times = {way: list[float]() for way in ways}
        for turn in range(arguments.turns if step else 1):
            losses = {}
            for way in ways if turn % 2 else reversed(ways):
                start = time.perf_counter()
                losses[way] = take_step(stack, optimizer, batches[way])
                times[way].append(time.perf_counter() - start)
            (loss, targets), (other, others) = losses.values()
            assert targets == others, f"{targets} and {others} targets"
            assert abs(loss - other) < SAME_LOSS, f"losses {loss} and {other}"
        for way in ways:
            seconds[way].append(min(times[way]))
            tokens[way].append(sum(len(batch.tokens_T) for batch in batches[way]))
    stack.close()
    real, wide = (sum(tokens[way][1:]) for way in ways)
    ours, theirs = (sum(seconds[way][1:]) for way in ways)
    reached = theirs / ours / (wide / real)
    print(json.dumps({"recipe": recipe, "tokens": tokens, "seconds": seconds, "reached": reached}))
    print(
        f"{recipe:<24}{real:>9,}{wide:>9,}{wide / real:>7.3f}x{ours:>8.2f} s{theirs:>8.2f} s{theirs / ours:>9.3f}x"
        f"{reached:>8.3f}",
        flush=True,
    )
    return reached


def rows_of(recipe: str, arguments: argparse.Namespace) -> Rows:
    """Prepare a file as `prepare-data` does."""
    from gptj_ft.data.batches import Rows
    from gptj_ft.data.dataset import load_dataset

    prepared = arguments.work / recipe
    words = ["--recipe", recipe, "--model", arguments.work / "model", "--data", arguments.data / FILES[recipe]]
    run([*PREPARE, *words, "--output", prepared], arguments.work)
    return Rows.of(load_dataset(prepared).rows)


def vocabulary_of(arguments: argparse.Namespace) -> int:
    """Return the vocabulary size that gives embedding and head GPT-J's share of the parameters."""
    return GPTJ["vocab_size"] * arguments.width * arguments.layers // (GPTJ["n_embd"] * GPTJ["n_layer"])


def open_model(arguments: argparse.Namespace) -> tuple[OffloadedModel, AdamW]:
    """Return a random model, all of it in memory, every block recomputed, and its optimizer."""
    import torch
    from streamed_vs_resident import fill_randomly

    from gptj_ft.config.options import Recipe
    from gptj_ft.models.layout import Layout
    from gptj_ft.models.registry import families
    from gptj_ft.streaming.adamw import AdamW
    from gptj_ft.streaming.buffers import BufferBudget
    from gptj_ft.streaming.offloaded_model import OffloadedModel
    from gptj_ft.streaming.stores.placement import Placement, open_stores, training_dtypes
    from gptj_ft.training.restore import optimizer_config

    family, device = families()["gptj"], torch.device("cpu")
    width, heads = arguments.width, {"n_head": HEADS, "rotary_dim": arguments.width // HEADS}
    shape = {"vocab_size": vocabulary_of(arguments), **heads, "n_embd": width, "n_layer": arguments.layers}
    layers = family.build_layers(family.read_config(shape))
    dtypes = training_dtypes(torch.float32, torch.float32, torch.float32)
    layouts = [Layout.of(layer) for layer in layers]
    stores = open_stores(Placement("device", "device"), layouts, dtypes, device, arguments.work / "state")
    stack = OffloadedModel(layers, dtypes, stores, device, BufferBudget())
    fill_randomly(stack)
    return stack, AdamW(stack, optimizer_config(Recipe()))


def padded(documents: Sequence[Sequence[int]], prompt_lengths: Sequence[int], budget_tokens: int) -> list[PackedBatch]:
    """Return micro-batches of rows padded to the longest of their step."""
    from gptj_ft.data.batches import micro_batches
    from gptj_ft.models.batch import NO_TARGET

    longest = max(map(len, documents))
    extended = [[*document, *[0] * (longest - len(document))] for document in documents]
    batches, lengths = micro_batches(extended, prompt_lengths, budget_tokens), map(len, documents)
    for batch in batches:
        for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
            batch.targets_T[start + next(lengths) - 1 : end] = NO_TARGET
    return batches


def take_step(stack: OffloadedModel, optimizer: AdamW, batches: list[PackedBatch]) -> tuple[float, int]:
    """Run an optimizer step including the previous update; return its mean loss and number of targets."""
    from gptj_ft.streaming.step import train_step

    optimizer.begin_step(0.0)
    loss = train_step(stack, optimizer, batches)
    optimizer.finish_step()
    return loss.mean, loss.num_targets


if __name__ == "__main__":
    main()
