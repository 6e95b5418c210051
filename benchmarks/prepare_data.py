"""Measure preparing a file: speed compared with the bare tokenizer, memory, and time to the first batch.

    python benchmarks/prepare_data.py --data data/ --tokenizer gpt2/ --work /tmp/prepare

a  ``gptj-ft prepare-data --no-cache``, from start to exit, beside a process that does nothing but read the same texts
   and give them to ``tokenizers``' ``encode_batch_fast``; files of their own size, and grown to ``--megabytes``.
b  The most memory that it takes to prepare files of ``--sizes`` gigabytes.
d  From the start of a process until it has its first batch: what ``gptj-ft finetune`` does with a file, beside
   ``datasets.map`` and a padding collator of ``transformers``. Neither finds anything in a cache.

``--data`` is a folder with ``summarization/dialogsum/train.jsonl`` and ``squad/train-v1.1-subset.json``. What is
compared alternates. Times and memory are what the kernel says of whole processes. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from corpora import CORPORA, write_dialogues

SHAPE = {"vocab_size": 50400, "n_positions": 2048, "n_embd": 8, "n_layer": 1, "n_head": 1, "rotary_dim": 8}
PREPARE = [sys.executable, "-m", "gptj_ft", "prepare-data", "--no-cache", "--json"]
ROWS_AT_ONCE = 1000  # given to the bare tokenizer; many more or fewer are slower
PROMPT = "Summarize the following dialogue.\n\n{dialogue}\n\nSummary:"  # of the recipe `dialogsum`
BATCH_SIZE = 16


@dataclass(frozen=True)
class Ended:
    """A finished process.

    Attributes:
        first_line: seconds from its start to the first line that it printed.
        seconds: from its start to its exit.
        peak_rss_bytes: most resident memory.
        says: the JSON in its last line.
    """

    first_line: float
    seconds: float
    peak_rss_bytes: int
    says: dict[str, Any]


def main() -> None:
    """Run the chosen measurements or, in a child process, the measured work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with summarization/dialogsum and squad")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--work", type=Path, required=True, help="new folder")
    parser.add_argument("--only", default="a,b,d")
    parser.add_argument("--megabytes", type=int, default=100, help="of text, in the large files of a; a quarter in d's")
    parser.add_argument("--sizes", default="0.5,2", help="gigabytes of the files of b")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--child", choices=list(CHILDREN), help="internal")
    arguments = parser.parse_args()
    if arguments.child:
        CHILDREN[arguments.child](arguments)
        return
    arguments.work.mkdir(parents=True)
    run(child("model"), arguments.work)
    for part in arguments.only.split(","):
        {"a": beside_the_tokenizer, "b": peak_memory, "d": first_batch}[part](arguments)
    shutil.rmtree(arguments.work)


def beside_the_tokenizer(arguments: argparse.Namespace) -> None:
    """Run part a: compare the whole command with the bare tokenizer."""
    work = arguments.work
    prepared = work / "prepared"
    print(
        f"{'':<24}{'text':>9}{'tokens':>13}{'prepare-data':>16}{'tokenizer':>16}{'ratio':>8}   of each pair; peak RSS"
    )
    for wanted in (0, arguments.megabytes * 10**6):
        for recipe, (name, write) in CORPORA.items():
            write(work / name, arguments.data, wanted)
            command = [*PREPARE, "--recipe", recipe, "--model", work / "model", "--data", work / name]
            command += ["--output", prepared]
            ours, bare = [run(command, work)], list[Ended]()
            report, characters = ours[0].says, run(child("texts"), work).says["characters"]
            for repetition in range(arguments.repetitions):
                if repetition:
                    shutil.rmtree(prepared)
                    ours.append(run(command, work))
                bare.append(run(child("bare"), work))
                # They are the same texts: token for token, and an EOS after each.
                assert bare[-1].says["tokens"] + report["windows"] == ours[-1].says["tokens"], (bare[-1], report)
            tokens = bare[0].says["tokens"]
            rates = [tokens * len(runs) / sum(each.seconds for each in runs) for runs in (ours, bare)]
            pairs = [theirs.seconds / each.seconds for theirs, each in zip(bare, ours, strict=True)]
            result = {"recipe": recipe, "file_bytes": (work / name).stat().st_size, "tokens": tokens, "rates": rates}
            print(
                json.dumps({**result, "pairs": pairs, "seconds": [[x.seconds for x in runs] for runs in (ours, bare)]})
            )
            print(
                f"{recipe:<24}{characters / 1e6:>6.0f} MB{tokens:>13,}{rates[0]:>12,.0f} t/s{rates[1]:>12,.0f} t/s"
                f"{rates[0] / rates[1]:>8.3f}   {' '.join(f'{pair:.3f}' for pair in pairs)}; "
                f"{ours[-1].peak_rss_bytes / 1e6:,.0f} MB, {bare[-1].peak_rss_bytes / 1e6:,.0f} MB",
                flush=True,
            )
            shutil.rmtree(prepared)
            (work / name).unlink()


def peak_memory(arguments: argparse.Namespace) -> None:
    """Run part b: peak memory for files of several sizes."""
    file, prepared, peaks = arguments.work / "rows.jsonl", arguments.work / "prepared", list[int]()
    for size in map(float, arguments.sizes.split(",")):
        write_dialogues(file, arguments.data, int(size * 1e9))
        words = ["--recipe", "dialogsum", "--model", arguments.work / "model", "--data", file, "--output", prepared]
        done = run([*PREPARE, *words], arguments.work)
        peaks.append(done.peak_rss_bytes)
        facts = {"rows": done.says["rows_read"], "tokens": done.says["tokens"], "seconds": done.seconds}
        print(json.dumps({"file_bytes": file.stat().st_size, **facts, "peak_rss_bytes": peaks[-1]}))
        print(
            f"{file.stat().st_size / 1e9:.2f} GB, {facts['rows']:,} rows, {facts['tokens']:,} tokens: "
            f"peak RSS {peaks[-1] / 2**30:.3f} GiB, {peaks[-1] / peaks[0]:.3f} x the first, {done.seconds:.0f} s",
            flush=True,
        )
        shutil.rmtree(prepared)
        file.unlink()


def first_batch(arguments: argparse.Namespace) -> None:
    """Run part d: compare the time to the first batch with `datasets` and `transformers`."""
    for wanted in (0, arguments.megabytes * 10**6 // 4):
        write_dialogues(arguments.work / "dialogues.jsonl", arguments.data, wanted)
        ours, theirs = list[Ended](), list[Ended]()
        for _ in range(arguments.repetitions):
            ours.append(run(child("ours"), arguments.work))
            theirs.append(run(child("theirs"), arguments.work))
            for key in ("rows", "tokens"):
                assert ours[-1].says[key] == theirs[-1].says[key], (ours[-1], theirs[-1])
        means = [sum(each.first_line for each in runs) / len(runs) for runs in (ours, theirs)]
        inner = [sum(each.says["after_imports"] for each in runs) / len(runs) for runs in (ours, theirs)]
        facts = {"rows": ours[0].says["rows"], "tokens": ours[0].says["tokens"]}
        times = [[each.first_line for each in runs] for runs in (ours, theirs)]
        print(json.dumps({**facts, "seconds": times, "after_imports": inner}))
        print(
            f"{facts['rows']:,} rows, {facts['tokens']:,} tokens: first batch after {means[0]:.2f} s, that of "
            f"datasets.map and a collator after {means[1]:.2f} s: {means[0] / means[1]:.3f} x; without imports "
            f"{inner[0]:.2f} and {inner[1]:.2f} s: {inner[0] / inner[1]:.3f} x",
            flush=True,
        )


def run(command: Sequence[object], work: Path) -> Ended:
    """Run a process to its end, with an empty home folder.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    home = work / "home"
    environment = {**os.environ, "GPTJ_FT_HOME": str(home), "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        out = process.stdout.readline()
        first_line = time.perf_counter() - start
        out += process.stdout.read()
        # The kernel counts in a process's peak what its parent had when it started it: nothing heavy is imported here.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    shutil.rmtree(home, ignore_errors=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(map(str, command)))
    return Ended(first_line, seconds, usage.ru_maxrss * 1024, json.loads(out.splitlines()[-1]) if out else {})


def child(name: str) -> list[str]:
    """Return the command line of a child process."""
    return [sys.executable, *sys.argv, "--child", name]


def make_model(arguments: argparse.Namespace) -> None:
    """Write the smallest GPT-J with GPT-2's tokenizer, in one file as GPT-J's is."""
    import same_work
    from transformers import GPT2TokenizerFast

    same_work.make_model(arguments.work / "model", arguments.tokenizer, SHAPE)
    GPT2TokenizerFast.from_pretrained(str(arguments.tokenizer)).save_pretrained(arguments.work / "model")


def write_texts(arguments: argparse.Namespace) -> None:
    """Write the tokenized texts of the prepared rows, cut in the same way."""
    import datasets
    from tokenizers import Tokenizer

    tokenizer, characters = Tokenizer.from_file(str(arguments.work / "model/tokenizer.json")), 0
    with (arguments.work / "texts.jsonl").open("w", encoding="utf-8") as file:
        for rows in datasets.Dataset.from_file(str(next((arguments.work / "prepared").glob("*.arrow")))).iter(
            ROWS_AT_ONCE
        ):
            pairs = list(zip(rows["input_ids"], rows["prompt_length"], strict=True))
            prompts = tokenizer.decode_batch([ids[:prompt] for ids, prompt in pairs])
            completions = tokenizer.decode_batch([ids[prompt:-1] for ids, prompt in pairs])
            for texts in zip(prompts, completions, strict=True):
                characters += sum(map(len, texts))
                file.write(json.dumps(texts, ensure_ascii=False) + "\n")
    print(json.dumps({"characters": characters}))


def tokenise(arguments: argparse.Namespace) -> None:
    """Read texts and tokenise them; nothing else."""
    from tokenizers import Tokenizer

    tokenizer, tokens = Tokenizer.from_file(str(arguments.work / "model/tokenizer.json")), 0
    with (arguments.work / "texts.jsonl").open(encoding="utf-8") as lines:
        while texts := [text for line in islice(lines, ROWS_AT_ONCE) for text in json.loads(line)]:
            tokens += sum(map(len, tokenizer.encode_batch_fast(texts, add_special_tokens=False)))
    print(json.dumps({"tokens": tokens}))


def first_batch_here(arguments: argparse.Namespace) -> None:
    """Prepare rows like `finetune`, up to the micro-batches of the first step."""
    import torch  # noqa: F401, would be imported later

    from gptj_ft.config.resolve import resolve
    from gptj_ft.data.batches import Rows, rows_of_step
    from gptj_ft.training.inputs import gather

    start = time.perf_counter()
    files = {"model": str(arguments.work / "model"), "data": str(arguments.work / "dialogues.jsonl")}
    limits = {"batch_size": BATCH_SIZE, "max_length": SHAPE["n_positions"]}
    resolved = resolve({"recipe": "dialogsum", "cache": False, "holdout": 0.0, **files, **limits}, environment={})
    prepared, recipe = gather(resolved).train, resolved.recipe
    rows = Rows.of(prepared.rows)
    batches = rows.batches(rows_of_step(0, len(rows), recipe.batch_size, recipe.seed), recipe.micro_batch_tokens)
    print(sum(len(batch.tokens_T) for batch in batches), flush=True)
    seconds = time.perf_counter() - start
    print(json.dumps({"after_imports": seconds, "rows": len(rows), "tokens": prepared.report.tokens}))


def first_batch_there(arguments: argparse.Namespace) -> None:
    """Do the same with `datasets.map`, whose tokenizer uses all cores, and a padding collator."""
    import datasets
    import torch
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq

    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(str(arguments.work / "model"))
    tokenizer.pad_token = tokenizer.eos_token
    datasets.disable_progress_bars()

    def tokenise_rows(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        prompts = tokenizer([PROMPT.format(dialogue=text) for text in rows["dialogue"]])["input_ids"]
        completions = tokenizer([f" {text}{tokenizer.eos_token}" for text in rows["summary"]])["input_ids"]
        pairs = list(zip(prompts, completions, strict=True))
        labels = [[-100] * len(prompt) + completion for prompt, completion in pairs]
        return {"input_ids": [prompt + completion for prompt, completion in pairs], "labels": labels}

    rows = datasets.load_dataset("json", data_files=str(arguments.work / "dialogues.jsonl"), split="train")
    rows = rows.map(tokenise_rows, batched=True, remove_columns=rows.column_names)
    collate = DataCollatorForSeq2Seq(tokenizer)
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    print(next(iter(loader))["input_ids"].numel(), flush=True)
    seconds = time.perf_counter() - start
    tokens = sum(len(ids) for ids in rows["input_ids"])
    print(json.dumps({"after_imports": seconds, "rows": len(rows), "tokens": tokens}))


CHILDREN = {
    "model": make_model,
    "texts": write_texts,
    "bare": tokenise,
    "ours": first_batch_here,
    "theirs": first_batch_there,
}


if __name__ == "__main__":
    main()
