"""Compare one process with two that share the layers of a run: seconds per step, memory and disk.

    python benchmarks/several.py --tokenizer gpt2/ --data dialogues.jsonl --work /tmp/several

4 blocks of n_embd 4096 with GPT-J's vocabulary (1.2 billion parameters, random), fp32, clipping on, the state on disk,
8 rows of some 256 tokens per step in micro-batches of 256 (or 512, with ``--micro-batch``): each process waits while
the first or last micro-batch of a pass is in the other. Whole commands, one after the other: one process with one
thread, two with one thread each (`--nproc 2 --set share=layers`), one with two threads, and two independent runs of one
thread at once, which show what the second core, the memory and the disk can add. The commands alternate. The first two
steps of each are left out: one has no update to apply, the next allocates its buffers. Losses of one thread must be
bit-identical.

Targets: two processes of one thread are 1.85 times as fast as one of them, and 0.95 times as fast as one with two
threads; each takes half of its memory and disk, and a tenth more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

SHAPE = {"vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 4, "n_head": 16, "rotary_dim": 64}
WARM_UP = 2  # steps
RUNS = {  # runs at once, processes of each, threads of a process
    "one process, 1 thread": (1, 1, 1),
    "two processes, 1 thread each": (1, 2, 1),
    "one process, 2 threads": (1, 1, 2),
    "two runs at once, 1 thread each": (2, 1, 1),
}


def main() -> None:
    """Make the model, and alternate the commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with GPT-2's tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="rows with dialogue and summary")
    parser.add_argument("--work", type=Path, required=True, help="new folder, on a disk with 70 GB free")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=256, help="tokens")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--only", choices=RUNS, nargs="+", default=list(RUNS), help="only these runs")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    model = make_model(arguments.work / "model", arguments.tokenizer, arguments.width)
    measured: dict[str, list[dict[str, object]]] = {name: [] for name in RUNS}
    for turn in range(arguments.turns):
        for name in arguments.only:
            copies, processes, threads = RUNS[name]
            with ThreadPoolExecutor(copies) as pool:
                started = [pool.submit(run, model, arguments, processes, threads, copy) for copy in range(copies)]
                every = [each.result() for each in started]
            measured[name] += every
            print(turn, name, json.dumps(every), flush=True)
    shutil.rmtree(arguments.work)
    if arguments.only != list(RUNS):
        return
    first = measured["one process, 1 thread"][0]
    assert all(each["losses"] == first["losses"] for each in measured["two processes, 1 thread each"])
    for name, runs in measured.items():
        each = [float(str(run["seconds"])) for run in runs]
        print(f"{name}: {statistics.mean(each):.1f} s a step ({min(each):.1f} to {max(each):.1f})")
    means = {name: statistics.mean(float(str(run["seconds"])) for run in runs) for name, runs in measured.items()}
    one, two, threads2, at_once = (means[name] for name in RUNS)
    print(f"two processes against one of 1 thread {one / two:.2f}x, against one of 2 threads {threads2 / two:.2f}x")
    print(f"two runs at once do {2 * one / at_once:.2f} times the work of one: the most that sharing could give here")


def make_model(folder: Path, tokenizer: Path, width: int) -> Path:
    """Write a random model."""
    import torch
    from transformers import GPTJConfig, GPTJForCausalLM

    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        GPTJForCausalLM(GPTJConfig(**SHAPE | {"n_embd": width})).save_pretrained(folder, max_shard_size="2GB")
        for file in tokenizer.iterdir():
            shutil.copy(file, folder / file.name)
    return folder


def run(model: Path, arguments: argparse.Namespace, processes: int, threads: int, copy: int) -> dict[str, object]:
    """Train some steps with a command; return mean seconds per step, memory and disk of each process, and losses."""
    output = arguments.work / f"run-{copy}"
    shutil.rmtree(output, ignore_errors=True)
    options = (
        f"--recipe dialogsum --model {model} --data {arguments.data} --output {output} --max-steps {arguments.steps} "
        f"--batch-size 8 --set micro_batch_tokens={arguments.micro_batch} --set holdout=0 --precision fp32 "
        "--weights disk --optimizer-state disk --activations recompute --set export=last --quiet --lr 1e-5 "
        f"--max-length 512 --nproc {processes} --set share=layers"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "gptj_ft", "finetune", *options.split()]
    process = psutil.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    peaks: dict[int, int] = {}
    state = [0]

    def watch() -> None:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            for each in [process, *process.children()]:
                try:
                    peaks[each.pid] = max(peaks.get(each.pid, 0), each.memory_info().rss)
                except psutil.Error:
                    continue
            with suppress(OSError):
                state[0] = max(state[0], sum(file.stat().st_size for file in (output / "state").glob("*")))
            time.sleep(2.0)

    thread = threading.Thread(target=watch)
    thread.start()
    code = process.wait()
    thread.join()
    assert code == 0, code
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    return {
        "seconds": statistics.mean(line["seconds"] for line in steps[WARM_UP:]),
        "each": [round(line["seconds"], 2) for line in steps],
        "tokens": steps[-1]["tokens"],
        "gigabytes": [round(peak / 1e9, 2) for peak in peaks.values() if peak > 3e8],
        "state_gigabytes": round(state[0] / 1e9, 1),
        "losses": [line["loss"] for line in steps],
    }


if __name__ == "__main__":
    main()
