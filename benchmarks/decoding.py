"""Measure generation: compared with `transformers.generate` (a), with the memory bandwidth (b), and from disk (c).

    python benchmarks/decoding.py a --work NEW_FOLDER     # tokens/s beside transformers.generate
    python benchmarks/decoding.py b --work NEW_FOLDER     # bytes of weights a second, beside what memory gives
    python benchmarks/decoding.py c --work NEW_FOLDER     # from disk: batch 8 beside batch 1 and the disk's rate

A random GPT-J of 8 layers x 1024 with GPT-J's vocabulary, on the CPU, in fp32 or, with `--precision bf16`, in bf16, in
memory and on disk, by both programs: 0.8 GB or half of that, which a holds twice in memory and b once; c reads it past
the page cache. Runs alternate, and medians are compared. To try the script:
`--layers 2 --width 64 --vocabulary 512 --tokens 4 --runs 1 --memory-bytes 4000000`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPTJConfig, GPTJForCausalLM

from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.streaming.open import open_for_inference
from gptj_ft.system.dtypes import PRECISIONS
from gptj_ft.system.memory import allocate

CASES = [(1, 1), (8, 1), (1, 4), (8, 4)]  # rows, beams
CPU = torch.device("cpu")
BLOCK_BYTES, READERS = 2**20, 8  # of requests to the disk, those that are on their way together


def model_folder(arguments: argparse.Namespace) -> Path:
    """Return the model folder; create it if it does not exist."""
    folder = arguments.work / f"model-{arguments.precision}"
    if not folder.exists():
        torch.manual_seed(0)
        config = GPTJConfig(
            vocab_size=arguments.vocabulary, n_positions=2048, n_embd=arguments.width, n_layer=arguments.layers,
            n_head=max(1, arguments.width // 64), rotary_dim=min(64, arguments.width), bos_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        GPTJForCausalLM(config).to(PRECISIONS[arguments.precision]).save_pretrained(folder)
    return Path(folder)


def write(
    model: Any, arguments: argparse.Namespace, rows: int, beams: int, tokens: int, device: torch.device = CPU
) -> tuple[float, Tensor]:
    """Generate a number of tokens without stopping early; return the seconds and the tokens."""
    prompts = torch.randint(
        1, arguments.vocabulary, (rows, arguments.prompt), generator=torch.Generator().manual_seed(rows)
    ).to(device)
    start = time.perf_counter()
    output = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=tokens, num_beams=beams,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return time.perf_counter() - start, output


def seconds_a_pass(model: Any, arguments: argparse.Namespace, rows: int, beams: int = 1) -> float:
    """Return the seconds of a pass that appends one token per row, without the prompts."""
    first, _ = write(model, arguments, rows, beams, 1)
    whole, _ = write(model, arguments, rows, beams, arguments.tokens)
    return (whole - first) / (arguments.tokens - 1)


def figure_a(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time whole calls of `generate`, prompts included."""
    dtype = PRECISIONS[arguments.precision]
    theirs = GPTJForCausalLM.from_pretrained(model_folder(arguments), dtype=dtype).eval()
    found: dict[str, Any] = {}
    with open_for_inference(model_folder(arguments), CPU, dtype, "device") as (architecture, stack):
        models = {"transformers": theirs, "gptj-ft": StreamedModel(architecture, stack)}
        for rows, beams in CASES:
            seconds: dict[str, list[float]] = {name: [] for name in models}
            outputs = {}
            for turn in range(arguments.runs + 1):
                for name, model in models.items():
                    taken, outputs[name] = write(model, arguments, rows, beams, arguments.tokens)
                    if turn:  # the first warms up
                        seconds[name].append(taken)
            rates = {name: rows * arguments.tokens / statistics.median(of) for name, of in seconds.items()}
            ratios = [a / b for a, b in zip(seconds["transformers"], seconds["gptj-ft"], strict=True)]
            found[f"batch {rows}, beams {beams}"] = {
                "tokens_per_second": rates,
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "same_tokens": torch.equal(outputs["transformers"], outputs["gptj-ft"]),
            }
    return found


def figure_b(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time a pass of one row, and reading memory before and after."""
    memory = allocate(arguments.memory_bytes // 4, torch.float32, CPU).fill_(1)  # in huge pages, as weights are

    def read_rate() -> float:
        start = time.perf_counter()
        memory.sum()
        return memory.nbytes / (time.perf_counter() - start)

    dtype = PRECISIONS[arguments.precision]
    with open_for_inference(model_folder(arguments), CPU, dtype, "device") as (architecture, stack):
        model = StreamedModel(architecture, stack)
        # of the embedding one row is read
        weights = dtype.itemsize * sum(layout.num_parameters for layout in stack.frozen[1:])
        shares, rates = [], []
        for turn in range(arguments.runs + 1):
            before, seconds, after = read_rate(), seconds_a_pass(model, arguments, 1), read_rate()
            if turn:
                rates.append(weights / seconds)
                shares.append(weights / seconds / max(before, after))
    return {"weight_bytes": weights, "bytes_per_second": statistics.median(rates),
            "share_of_memory": statistics.median(shares), "shares": shares}  # fmt: skip


class Disk:
    """Reads the tensors of a pass with direct I/O, as fast as possible, into reused memory.

    Args:
        folder: the model.
        needed: names of tensors.
    """

    def __init__(self, folder: Path, needed: Callable[[str], bool]) -> None:
        with open_checkpoint(folder) as checkpoint:
            blocks = {
                (checkpoint.file_of(name), block)
                for name in filter(needed, checkpoint.names)
                for entry in [checkpoint.entry(name)]
                for block in range(entry.offset // BLOCK_BYTES, (entry.offset + entry.num_bytes) // BLOCK_BYTES + 1)
            }
        self._blocks = cycle(sorted(blocks))
        self._threads = ThreadPoolExecutor(READERS)
        self._kept = list(allocate(READERS * BLOCK_BYTES // 4, torch.float32, CPU).view(READERS, -1))

    def rate(self, num_bytes: int) -> float:
        """Read a number of bytes from the current position; return bytes/s."""
        time.sleep(0.5)  # until what a model reads ahead has come
        blocks = islice(self._blocks, -(-num_bytes // BLOCK_BYTES))
        start = time.perf_counter()
        done = sum(self._threads.map(self._read, blocks))
        return done / (time.perf_counter() - start)

    def _read(self, block: tuple[Path, int]) -> int:
        memory = self._kept.pop()
        descriptor = os.open(block[0], os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(descriptor, [memory.numpy().data.cast("B")], block[1] * BLOCK_BYTES)
        finally:
            os.close(descriptor)
            self._kept.append(memory)


def figure_c(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time a pass of one row and of eight, the disk before and after each."""
    folder, dtype = model_folder(arguments), PRECISIONS[arguments.precision]
    disk = Disk(folder, lambda name: "wte" not in name)  # of the embedding a few rows are needed
    found: dict[str, dict[int, list[float]]] = {name: {1: [], 8: []} for name in ("seconds", "share", "waiting")}
    disks: list[float] = []
    with open_for_inference(folder, CPU, dtype, "disk") as (architecture, stack):
        model = StreamedModel(architecture, stack)
        num_bytes = dtype.itemsize * sum(layout.num_parameters for layout in stack.frozen[1:])
        for turn in range(arguments.runs + 1):
            for rows in (1, 8):
                before = disk.rate(arguments.disk_bytes)
                first, _ = write(model, arguments, rows, 1, 1)
                waited = stack.meter.waited_seconds
                whole, _ = write(model, arguments, rows, 1, arguments.tokens)
                waited = stack.meter.waited_seconds - waited
                seconds = (whole - first) / (arguments.tokens - 1)
                after = disk.rate(arguments.disk_bytes)
                if turn:
                    disks.append((before + after) / 2)
                    of_turn = {"seconds": seconds, "share": num_bytes / seconds / disks[-1], "waiting": waited / whole}
                    for name, value in of_turn.items():
                        found[name][rows].append(value)
    seconds_of = found["seconds"]
    return {
        "bytes_needed_a_pass": num_bytes,
        "batch_8_over_1": statistics.median(b / a for a, b in zip(seconds_of[1], seconds_of[8], strict=True)),
        "disk": statistics.median(disks),
        **{name: {rows: statistics.median(values) for rows, values in of.items()} for name, of in found.items()},
        "shares": found["share"],
        "disks": disks,
    }


FIGURES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"a": figure_a, "b": figure_b, "c": figure_c}


def main() -> None:
    """Run one part and print its result as JSON."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("figure", choices=FIGURES)
    options.add_argument("--work", type=Path, required=True, help="folder for the model; kept")
    options.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="compute type of both programs")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--vocabulary", type=int, default=50400)
    options.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    options.add_argument("--tokens", type=int, default=64, help="new tokens, two at least")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--disk-bytes", type=int, default=2**30, help="bytes of the timed read")
    options.add_argument("--memory-bytes", type=int, default=2**30, help="bytes of the array of the timed read")
    arguments = options.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(json.dumps({arguments.figure: FIGURES[arguments.figure](arguments)}, indent=2))


if __name__ == "__main__":
    main()
