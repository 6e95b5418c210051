"""Compare small models, bound by Python and dispatch, with a plain `transformers` loop: tokens per second, and memory.

    python benchmarks/small_models.py --data train.jsonl --tokenizer gpt2/ --work /tmp/small
    python benchmarks/small_models.py --part memory --data train.jsonl --tokenizer gpt2/ --work /tmp/small

Models are random GPT-Js: `tiny` is that of `--model tiny` and of the demo (2 blocks of 96, at most 1,536 rows of
vocabulary, a tokenizer learned from the rows), 16 rows of DialogSum a step; `demo` is the same on the demo's own, short
rows; `50M` has 8 blocks of 384 and GPT-2's vocabulary, 8 rows of DialogSum a step. `gptj-ft finetune` is run as it is,
in fp32 and in what `--precision auto` takes; the loop is the plain one of `transformers_loop.py`, in fp32. Each trainer
is a separate process, monitored from outside, alternating; that every step had the same tokens and in fp32 the same
loss is checked. A rate is that of all steps after the warm-up.

`memory`: the peak of resident memory after 30, 300 and 1,000 steps, of which no two have the same numbers of tokens.

Target: twice the tokens per second of the loop, no precision that `auto` takes slower than fp32, memory that stays.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from itertools import islice
from pathlib import Path

from same_work import Work, make_model
from side_by_side import SAME_LOSS, Watched, facts_of, finetune, parser, watch

from gptj_ft.checkpoints.tiny import make_tiny

TINY = {"n_embd": 96, "n_layer": 2}
SHAPES = {
    "tiny": TINY,
    "demo": TINY,
    "50M": {"vocab_size": 50400, "n_positions": 1024, "n_embd": 384, "n_layer": 8, "n_head": 6, "rotary_dim": 32},
}
ROWS = {"tiny": 16, "demo": 16, "50M": 8}  # of a step
DEMO_ROWS = Path(__file__).parents[1] / "examples" / "clinic_notes_train.jsonl"
WAYS = {"gptj-ft fp32": "auto", "gptj-ft auto": "auto:precision=auto", "transformers": None}
LOOK_AT = (30, 300, 1000)
CORPUS_LINES = 500  # that the tiny tokenizer learns from
SAME_LOSS_BF16 = 5e-2


def main() -> None:
    """Alternate the trainers on each model, or measure memory over many steps."""
    options = parser(__doc__)
    options.add_argument("--part", choices=("speed", "memory"), default="speed")
    options.add_argument("--shapes", default=",".join(SHAPES))
    options.add_argument("--ways", default=",".join(WAYS))
    options.add_argument("--turns", type=int, default=3)
    options.set_defaults(steps=40, warm_up=5)
    arguments = options.parse_args()
    top, dialogues = arguments.work, arguments.data
    for shape in arguments.shapes.split(","):
        arguments.work, arguments.batch_size = top / shape, ROWS[shape]
        arguments.data = DEMO_ROWS if shape == "demo" else dialogues
        if not arguments.work.exists():
            make(shape, arguments)
        (speed if arguments.part == "speed" else memory)(shape, arguments)


def make(shape: str, arguments: argparse.Namespace) -> None:
    """Write the model of a shape."""
    arguments.work.mkdir(parents=True)
    if SHAPES[shape] is TINY:
        with arguments.data.open(encoding="utf-8") as lines:
            texts = [" ".join(map(str, json.loads(line).values())) for line in islice(lines, CORPUS_LINES)]
        make_tiny(arguments.work / "model", texts, 0, **SHAPES[shape])
    else:
        make_model(arguments.work / "model", arguments.tokenizer, SHAPES[shape])


def take(way: str, arguments: argparse.Namespace) -> Watched:
    """Run a trainer; the first `gptj-ft` run also records the work for the loop."""
    if WAYS[way] is None:
        script = Path(__file__).with_name("transformers_loop.py")
        lines = arguments.work / "plain.jsonl"
        lines.unlink(missing_ok=True)
        return watch([sys.executable, str(script), "--loop", "plain", "--work", str(arguments.work)], lines)
    watched, run = finetune(arguments, WAYS[way])
    if not (arguments.work / "work.json").exists():
        Work.of(run).save(arguments.work / "work.json")
        (arguments.work / "facts.json").write_text(json.dumps(facts_of(run)), encoding="utf-8")
    shutil.rmtree(run.folder)
    return watched


def speed(shape: str, arguments: argparse.Namespace) -> None:
    """Compare tokens per second.

    Raises:
        AssertionError: the trainers did not do the same work.
    """
    (arguments.work / "work.json").unlink(missing_ok=True)
    ways = arguments.ways.split(",")
    rates: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, list[int]] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {}
    for turn in range(arguments.turns):
        for way in ways if turn % 2 == 0 else [ways[0], *reversed(ways[1:])]:
            run = take(way, arguments)
            tokens = sum(line["tokens"] for line in run.lines[arguments.warm_up :])
            rates[way].append(tokens / (run.arrivals[-1] - run.arrivals[arguments.warm_up - 1]))
            peaks[way].append(run.peak_rss_bytes)
            losses[way] = [line["loss"] for line in run.lines]
    apart = {way: max(abs(a - b) for a, b in zip(losses[way], losses[ways[0]], strict=True)) for way in ways}
    print(json.dumps({"shape": shape, "rates": rates, "peaks": peaks, "apart": apart}))
    base = statistics.median(rates[ways[-1]])
    for way in ways:
        rate = statistics.median(rates[way])
        print(
            f"{shape:<6}{way:<16}{rate:>9,.0f} tokens/s ({min(rates[way]):,.0f} to {max(rates[way]):,.0f})"
            f"{rate / base:>7.2f}x{statistics.median(peaks[way]) / 1e9:>7.2f} GB{apart[way]:>10.1e}",
            flush=True,
        )
        assert apart[way] < (SAME_LOSS_BF16 if way == "gptj-ft auto" else SAME_LOSS), f"{way}: {apart[way]}"


def memory(shape: str, arguments: argparse.Namespace) -> None:
    """Print peak memory after different numbers of steps."""
    arguments.steps = max(LOOK_AT)
    for way in arguments.ways.split(","):
        if WAYS[way] is not None:
            run = take(way, arguments)
            peaks = [run.lines[step - 1]["memory_bytes"] for step in LOOK_AT]
            shown = ", ".join(f"{peak / 1e9:.3f} GB after {step}" for peak, step in zip(peaks, LOOK_AT, strict=True))
            print(f"{shape:<6}{way:<16}{shown}: {peaks[-1] / peaks[0] - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
