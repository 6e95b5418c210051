"""Compare `gptj-ft finetune` with a ladder of `transformers` loops: one model, one set of rows, one change per rung.

    plain        rows padded to the longest of their batch, eager attention, logits of every position, fused AdamW
    grouped      + batches of rows of like lengths: the same rows, sorted
    targets      + the head on positions that carry a target only
    sdpa         + torch's fused attention, which `transformers` has for these models
    compile      + torch.compile of the blocks, for any length
    recompute    sdpa with gradient checkpointing: less memory, more time
    trl          TRL's SFTTrainer with its defaults (it recomputes activations), on the same rows; needs `trl`
    ours         gptj-ft, in the placement that it chooses by itself
    ours-disk    gptj-ft, weights and state on disk
    ours-capped  gptj-ft, planned for a share (`--cap`) of the memory of the best of the loops that ran

Each rung runs in fp32 and in bf16: the loops by autocast. Models are random: of GPT-2's shape with exact GELU (as
Cerebras-GPT has it, and kinder to the loops' memory), or of a released model's; clipping is on. Each run is a separate
process, watched from outside; all rungs take their turn before the next begins. The first step is not timed: it
compiles and warms up.

    python benchmarks/ladder.py --data train.jsonl --tokenizer gpt2/ --work /tmp/ladder --size 760M --batch-size 4
    python benchmarks/ladder.py --data train.jsonl --model SmolLM2-135M-Instruct/ --work /tmp/ladder --method lora

`--size` names a shape of `same_work.py`, `--model` is a folder to copy. With `--method lora` every rung trains adapters
of rank 16 on all linear layers of the blocks, the loops those of PEFT, from equal values.

A loop keeps 16 bytes per parameter, 4 of a frozen one, and its activations in RAM. A rung that does not fit, by an
estimate that errs low, or that needs a missing compiler, is skipped with the reason. gptj-ft is compared with the best
finished loop. Each result is printed as a JSON line immediately. If gptj-ft fails on a rung, the others continue, the
failure is reported at the end, and the exit code is 1. Numbers are medians over turns, with the least and most.

Rates are shares of the best of 20 product shapes in the same precision, measured before and after: mfu counts what
every way of training needs (real tokens, the head on targets), hfu what was computed (padding, the head everywhere,
blocks computed twice).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from same_work import (
    SHAPES,
    Step,
    Work,
    adapter_options,
    loss_of_all_positions,
    loss_of_targets,
    open_model,
    take_steps,
    with_adapters,
)
from side_by_side import Watched, finetune, parser, run_of, watch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2TokenizerFast

from gptj_ft.errors import ResourceError
from gptj_ft.models.linear import multiply
from gptj_ft.system.cgroup import NoCgroup, limited_memory

LOOPS = ("plain", "grouped", "targets", "sdpa", "compile", "recompute")
TRL = "trl"
WITH_ALL_LOGITS, WITH_EAGER_ATTENTION = LOOPS[:2], LOOPS[:3]
OURS = {"ours": "auto", "ours-disk": "disk", "ours-capped": "auto"}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Saved for backward of a block, at least: elements of the width and of the MLP's width a token, and matrices of scores
# of the eager attention.
SAVED, SAVED_INNER, SCORES = 7, 2.5, 3
PROCESS_BYTES, SPARED_BYTES = 0.5e9, 0.5e9
# Product shapes: tokens x columns x rows of the matrix.
PRODUCT_TOKENS = (256, 512, 1024, 2048)
PRODUCTS, BEST_SHAPES = 5, 4  # how often the fastest shapes are computed again, and how many
MATRICES = ((768, 3072), (1024, 4096), (2048, 2048), (2048, 8192), (4096, 4096))
SAME_LOSS = {"fp32": 1e-3, "bf16": 1e-1}
Key = tuple[str, str]  # rung and precision


class Skipped(Exception):
    """A rung that cannot run on this machine; the message gives the reason."""


class Failed(Exception):
    """A rung of gptj-ft that failed; the message gives the reason."""


@dataclass(frozen=True)
class Ladder:
    """The work that all rungs share.

    Attributes:
        config: config of the model, of `transformers`.
        targets: linear layers of its blocks, by the ends of their names.
        block_parameters: parameters in matrix products of all blocks.
        work: steps in the order of `gptj-ft`; the first is not timed.
        trains_adapters: whether all but adapters is frozen: gradients of weights are not computed.
    """

    config: Any
    targets: tuple[str, ...]
    block_parameters: int
    work: Work
    trains_adapters: bool = False

    @classmethod
    def of(cls, folder: Path, work: Work, trains_adapters: bool) -> Ladder:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            named = AutoModelForCausalLM.from_config(config).base_model.named_parameters()
        inner = {
            name: parameter.numel() for name, parameter in named if parameter.ndim > 1 and re.search(r"\.\d+\.", name)
        }
        targets = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in inner)
        return cls(config, tuple(targets), sum(inner.values()), work, trains_adapters)

    @property
    def passes(self) -> float:
        """FLOPs per parameter and token: 2 forward, 2 for input gradients, 2 for weight gradients."""
        return 4.0 if self.trains_adapters else 6.0

    @property
    def head_parameters(self) -> int:
        return int(self.config.vocab_size * self.config.hidden_size)

    def steps_of(self, loop: str) -> list[Step]:
        """Return a loop's steps; from ``grouped`` on, the rows of the timed steps are sorted by length."""
        first, *timed = self.work.steps
        if loop in ("plain", TRL):
            return self.work.steps
        rows = sorted((row for step in timed for row in step.rows()), key=lambda row: row.num_tokens)
        size, together = len(first.documents), [first]
        for number, step in enumerate(timed):
            group = rows[number * size : (number + 1) * size]
            documents, prompts = [row.documents[0] for row in group], [row.prompt_lengths[0] for row in group]
            together.append(Step(step.lr, documents, prompts))
        return together

    def needs(self, loop: str) -> float:
        """Estimate the peak memory of a loop in fp32, in bytes."""
        state = (4 if self.trains_adapters else 16) * (self.block_parameters + self.head_parameters)
        config = self.config
        width, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        inner = getattr(config, "intermediate_size", 4 * width)
        peaks = []
        for step in self.steps_of(loop):
            tokens, longest = step.num_padded, max(map(len, step.documents))
            scores = SCORES * tokens * longest * heads if loop in WITH_EAGER_ATTENTION else 0
            block = tokens * (SAVED * width + SAVED_INNER * inner) + scores
            blocks = layers * tokens * width + block if loop == "recompute" else layers * block
            peaks.append(blocks + 3 * config.vocab_size * (tokens if loop in WITH_ALL_LOGITS else step.num_targets))
        return state + 4 * max(peaks) + PROCESS_BYTES

    def model_flops(self) -> float:
        """FLOPs that every trainer needs for the timed steps."""
        timed = self.work.steps[1:]
        tokens, targets = sum(step.num_tokens for step in timed), sum(step.num_targets for step in timed)
        return self.passes * (tokens * self.block_parameters + targets * self.head_parameters)

    def hardware_flops(self, rung: str, lines: Sequence[Mapping[str, Any]]) -> float:
        """FLOPs that a rung computes in the timed steps."""
        if rung in OURS:
            return sum(line["hardware_gflops"] * line["seconds"] * 1e9 for line in lines[1:])
        timed = self.steps_of(rung)[1:]
        padded, targets = sum(step.num_padded for step in timed), sum(step.num_targets for step in timed)
        logits = padded if rung in WITH_ALL_LOGITS else targets
        again = 2.0 if rung == "recompute" else 0.0
        return (self.passes + again) * padded * self.block_parameters + self.passes * logits * self.head_parameters


def train(model: Any, work: Work, loop: str, precision: str) -> Iterator[float]:
    """Train a model with a loop; yield the loss of each step."""
    if loop == "compile":
        for block in next(module for module in model.base_model.modules() if isinstance(module, torch.nn.ModuleList)):
            block.compile(dynamic=True)
    if loop == "recompute":
        model.enable_input_require_grads()  # that of frozen embeddings has none
        model.gradient_checkpointing_enable()

    def add_gradients(step: Step) -> float:
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            loss = (loss_of_all_positions if loop in WITH_ALL_LOGITS else loss_of_targets)(model, step)
        loss.backward()
        return float(loss.item())

    yield from take_steps(model, work, add_gradients)


def run_loop(arguments: argparse.Namespace) -> None:
    """Run a loop in this process."""
    loop, precision = arguments.loop.split(",")
    work = Work.load(arguments.work / f"work-{loop}.json")
    lines = arguments.work / "loop.jsonl"
    if loop == TRL:
        run_trl(arguments, precision, work, lines)
        return
    model = open_model(arguments.work / "model", attention="eager" if loop in WITH_EAGER_ATTENTION else "sdpa")
    if arguments.method == "lora":
        targets = Ladder.of(arguments.work / "model", work, True).targets
        model = with_adapters(model, targets).get_base_model()
    work.write_losses(train(model, work, loop, precision), lines)


def run_trl(arguments: argparse.Namespace, precision: str, work: Work, lines: Path) -> None:
    """Train with TRL's trainer and its defaults, on the same rows in the same order."""
    from datasets import Dataset
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = [
        (row, prompt) for step in work.steps for row, prompt in zip(step.documents, step.prompt_lengths, strict=True)
    ]
    data = {
        "input_ids": [row for row, _ in rows],
        "completion_mask": [[0] * prompt + [1] * (len(row) - prompt) for row, prompt in rows],
    }

    class Losses(TrainerCallback):
        """Writes a line per step."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if logs and "loss" in logs:
                step = work.steps[state.global_step - 1]
                line = {"step": state.global_step, "loss": logs["loss"], "tokens": step.num_tokens}
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")

    class InOrder(SFTTrainer):
        """Keeps the order of the rows."""

        def _get_train_sampler(self, *args: Any, **more: Any) -> SequentialSampler:
            return SequentialSampler(data_set)

    data_set = Dataset.from_dict(data)
    settings = SFTConfig(
        output_dir=str(arguments.work / "trl"), per_device_train_batch_size=len(work.steps[0].documents),
        max_steps=len(work.steps), max_length=None, use_cpu=True, bf16=precision == "bf16", logging_steps=1,
        save_strategy="no", report_to="none", completion_only_loss=True, disable_tqdm=True,
        learning_rate=work.steps[0].lr,
    )  # fmt: skip
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if arguments.method == "lora" else None
    model = open_model(arguments.work / "model", attention="sdpa")
    InOrder(model=model, args=settings, train_dataset=data_set, callbacks=[Losses()], peft_config=adapters).train()


def take(results: Results, rung: str, precision: str, arguments: argparse.Namespace) -> Watched:
    """Run a rung in a separate process.

    Raises:
        Skipped: it cannot be taken here.
        Failed: it is one of gptj-ft, and ended with an error.
    """
    ladder, loops = results.ladder, results.loops(precision)
    if rung in OURS:
        variant = f"{OURS[rung]}:precision={precision}"
        if rung == "ours-capped":
            if not loops:
                raise Skipped("no loop ran before it")
            variant += f":host_memory={int(arguments.cap * results.peak(loops[0]))}"
        try:
            return finetune(arguments, variant)[0]
        except subprocess.CalledProcessError as error:
            if rung == "ours-capped" and error.returncode == ResourceError.exit_code:
                raise Skipped(f"it does not fit in {arguments.cap} times the memory of {loops[0][0]}") from error
            raise Failed(f"`gptj-ft finetune` ended with {error.returncode}, see above") from error
        finally:
            shutil.rmtree(run_of(arguments, variant).folder, ignore_errors=True)
    if rung == "compile" and not shutil.which(os.environ.get("CXX", "g++")):
        raise Skipped("torch.compile needs a C++ compiler, and there is none")
    need, free = ladder.needs(rung), psutil.virtual_memory().available - SPARED_BYTES
    if need > free:
        raise Skipped(f"it needs at least {need / 1e9:.1f} GB of RAM, {free / 1e9:.1f} are free")
    replace(ladder.work, steps=ladder.steps_of(rung)).save(arguments.work / f"work-{rung}.json")
    lines = arguments.work / "loop.jsonl"
    lines.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--loop", f"{rung},{precision}", "--method", arguments.method]
    command += ["--work", str(arguments.work)]
    with ExitStack() as stack:
        with suppress(NoCgroup):  # what needs more than is free ends here, and takes no other program with it
            command = stack.enter_context(limited_memory(int(free), f"ladder-{os.getpid()}")).command(command)
        try:
            return watch(command, lines)
        except subprocess.CalledProcessError as error:
            raise Skipped(f"it ended with {error.returncode}; {free / 1e9:.1f} GB of RAM were free") from error


def best_product(precision: str) -> float:
    """Return the FLOP/s of the best of 20 product shapes; in fp32 torch's own kernel, and oneDNN's.

    Each is tried once, and the fastest again, for the first product of a shape also chooses its kernel.
    """
    kernels = (F.linear, multiply) if precision == "fp32" else (F.linear,)
    shapes = [(tokens, *matrix) for tokens in PRODUCT_TOKENS for matrix in MATRICES]
    tried = sorted(
        ((rate_of(kernel, shape, precision), shape, kernel) for shape in shapes for kernel in kernels),
        key=lambda each: each[0], reverse=True,
    )  # fmt: skip
    return max(rate_of(kernel, shape, precision, PRODUCTS) for _, shape, kernel in tried[:BEST_SHAPES])


def rate_of(kernel: Callable[..., Tensor], shape: tuple[int, int, int], precision: str, times: int = 1) -> float:
    """Return the FLOP/s of a product, the fastest of some."""
    tokens, columns, rows = shape
    x, weight = (torch.randn(size, columns).to(PRECISIONS[precision]) for size in (tokens, rows))
    best = 0.0
    for _ in range(times):
        start = time.perf_counter()
        kernel(x, weight, None)
        best = max(best, 2.0 * tokens * columns * rows / (time.perf_counter() - start))
    return best


def make_model(arguments: argparse.Namespace) -> None:
    """Write a random model with its tokenizer (a folder with vocab.json and merges.txt), or copy a folder."""
    folder = arguments.work / "model"
    if arguments.model:
        shutil.copytree(arguments.model, folder)
        return
    torch.manual_seed(0)
    config = dict(SHAPES[arguments.size])
    AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).save_pretrained(folder)
    # As tokenizer.json, too: the class that `transformers` has for Llama reads nothing else of these.
    files = (str(arguments.tokenizer / name) for name in ("vocab.json", "merges.txt"))
    GPT2TokenizerFast(*files).save_pretrained(folder)


def first_look(arguments: argparse.Namespace, precision: str) -> tuple[Watched | Failed, Work]:
    """Train with `gptj-ft`; return the result and the steps that all other rungs repeat. A failed run has steps, too.

    Raises:
        subprocess.CalledProcessError: it failed before it had any.
    """
    variant = f"{OURS['ours']}:precision={precision}"
    run, found = run_of(arguments, variant), list[Watched | Failed]()
    try:
        found.append(finetune(arguments, variant)[0])
    except subprocess.CalledProcessError as error:
        if not run.recipe_file.is_file():
            raise
        found.append(Failed(f"`gptj-ft finetune` ended with {error.returncode}, see above"))
    work = Work.of(run)
    shutil.rmtree(run.folder)
    return found[0], work


def check_losses(runs: Mapping[Key, Sequence[Watched]]) -> None:
    """Check that rungs with the same batches have the same losses.

    Raises:
        AssertionError: they have not.
    """
    for names in (("plain", *OURS), LOOPS[1:]):  # in their order of the rows, and sorted
        for precision, most in SAME_LOSS.items():
            taken = [runs[name, precision][0].lines for name in names if (name, precision) in runs]
            for lines in taken[1:]:
                apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(taken[0], lines, strict=True))
                assert apart < most, f"losses of {names} in {precision} are apart by {apart}"


@dataclass
class Results:
    """Results of the rungs.

    Attributes:
        ladder: what every rung works on.
        runs: finished trainings, a list entry for each turn.
        skipped: reasons of rungs that could not be taken.
        failed: reasons of rungs of gptj-ft that ended with an error.
    """

    ladder: Ladder
    runs: dict[Key, list[Watched]] = field(default_factory=dict)
    skipped: dict[Key, str] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)

    def add(self, key: Key, found: Watched | Skipped | Failed) -> None:
        """Store the result of a rung, and print it as a JSON line."""
        facts: dict[str, Any]
        if isinstance(found, Watched):
            self.runs.setdefault(key, []).append(found)
            facts = {
                "examples_per_second": self.speeds(key)[-1],
                "seconds": found.arrivals[-1] - found.arrivals[0],
                "peak_rss_bytes": found.peak_rss_bytes,
                "losses": [line["loss"] for line in found.lines],
            }
        elif isinstance(found, Skipped):
            self.skipped[key] = str(found)
            facts = {"skipped": str(found)}
        else:
            self.failed[key] = str(found)
            facts = {"failed": str(found)}
        print(json.dumps({"rung": key[0], "precision": key[1], **facts}), flush=True)

    def speeds(self, key: Key) -> list[float]:
        """Return the examples/s of each turn of a rung."""
        examples = sum(len(step.documents) for step in self.ladder.work.steps[1:])
        return [examples / (run.arrivals[-1] - run.arrivals[0]) for run in self.runs[key]]

    def speed(self, key: Key) -> float:
        """Return the examples/s of a rung, the median over turns."""
        return median(self.speeds(key))

    def peak(self, key: Key) -> int:
        """Return the peak memory of a rung, in bytes."""
        return max(run.peak_rss_bytes for run in self.runs[key])

    def loops(self, precision: str) -> list[Key]:
        """Return the loops that ran in a precision, the fastest first."""
        ran = [(loop, precision) for loop in LOOPS if (loop, precision) in self.runs]
        return sorted(ran, key=self.speed, reverse=True)


def report(results: Results, rates: Mapping[str, float], size: str) -> None:
    """Print a JSON line, a table, and the ratios of gptj-ft to the best and to the first rung."""
    ladder, timed = results.ladder, results.ladder.work.steps[1:]
    examples, tokens = sum(len(step.documents) for step in timed), sum(step.num_tokens for step in timed)
    named: dict[str, dict[str, Any]] = {}
    for (rung, precision), watched in results.runs.items():
        speed = results.speed((rung, precision))
        share = speed / examples / rates[precision]
        named[f"{rung}, {precision}"] = {
            "examples_per_second": results.speeds((rung, precision)),
            "tokens_per_second": tokens / examples * speed,
            "peak_rss_bytes": results.peak((rung, precision)),
            "mfu": ladder.model_flops() * share,
            "hfu": ladder.hardware_flops(rung, watched[0].lines) * share,
            "losses": [line["loss"] for line in watched[0].lines],
        }
    left_out = {
        what: {", ".join(key): reason for key, reason in reasons.items()}
        for what, reasons in (("skipped", results.skipped), ("failed", results.failed))
    }
    facts = {
        "size": size,
        "adapters": ladder.trains_adapters,
        "rates": rates,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps({"results": named, **left_out, "examples": examples, "tokens": tokens, **facts}))
    print(f"| rung | examples/s | | tokens/s | peak RSS | mfu | hfu |\n{'|---' * 7}|")
    for rung, precision in results.runs:
        speeds, result = results.speeds((rung, precision)), named[f"{rung}, {precision}"]
        base = ("plain", precision)
        ratio = f"{results.speed((rung, precision)) / results.speed(base):.2f}x" if base in results.runs else ""
        print(
            f"| {rung}, {precision} | {median(speeds):.3f} ({min(speeds):.3f} to {max(speeds):.3f}) | {ratio} | "
            f"{result['tokens_per_second']:.0f} | {result['peak_rss_bytes'] / 1e9:.2f} GB | {result['mfu']:.0%} | "
            f"{result['hfu']:.0%} |"
        )
    for what, reasons in left_out.items():
        for name, reason in reasons.items():
            print(f"{what}: {name}: {reason}")
    compare(results)


def compare(results: Results) -> None:
    """Print the ratios of `gptj-ft` to the best finished rung and to the first."""
    for precision in PRECISIONS:
        loops = results.loops(precision)
        for rung in OURS:
            ours = rung, precision
            if loops and ours in results.runs:
                memory = results.peak(ours) / results.peak(loops[0])
                print(f"{rung}, {precision}: {ratio_of(results, ours, loops[0])} the best of the {len(loops)} loops "
                      f"that ran ({loops[0][0]}), {memory:.2f}x its memory")  # fmt: skip
        trl = TRL, precision
        for ours in ((rung, precision) for rung in OURS if trl in results.runs and (rung, precision) in results.runs):
            memory = results.peak(ours) / results.peak(trl)
            print(f"{', '.join(ours)}: {ratio_of(results, ours, trl)} TRL, {memory:.2f}x its memory")
    plain, ours_that_ran = ("plain", "fp32"), [key for key in results.runs if key[0] in OURS]
    if plain in results.runs and ours_that_ran:
        best = max(ours_that_ran, key=results.speed)
        print(f"end to end: {', '.join(best)}: {ratio_of(results, best, plain)} plain, fp32")


def ratio_of(results: Results, one: Key, other: Key) -> str:
    """Return the ratio of the speeds of two rungs, with its minimum and maximum over turns."""
    turns = [a / b for a, b in zip(results.speeds(one), results.speeds(other), strict=False)]
    return f"{results.speed(one) / results.speed(other):.2f}x ({min(turns):.2f} to {max(turns):.2f})"


def main() -> None:
    """Run all rungs in each turn."""
    options = parser(__doc__)
    options.set_defaults(steps=2, batch_size=4, max_length=512)
    options.add_argument("--size", choices=SHAPES, default="1.3B")
    options.add_argument("--model", type=Path, help="model folder instead of a size")
    options.add_argument("--rungs", default=",".join((*LOOPS, TRL, *OURS)))
    options.add_argument("--precisions", default="fp32,bf16")
    options.add_argument("--cap", type=float, default=0.6, help="share of memory that `ours-capped` may use")
    options.add_argument("--turns", type=int, default=2)
    options.add_argument("--method", choices=("full", "lora"), default="full")
    options.add_argument("--loop", help="internal")
    arguments = options.parse_args()
    if arguments.loop:
        run_loop(arguments)
        return
    arguments.work.mkdir(parents=True)
    arguments.steps += 1  # the first is not timed
    precisions, rungs = arguments.precisions.split(","), arguments.rungs.split(",")
    make_model(arguments)
    if arguments.method == "lora":
        none = Work([], (0.0, 0.0), 0.0, 0.0, 0.0)
        arguments.set += adapter_options(Ladder.of(arguments.work / "model", none, True).targets)
    rates = {precision: best_product(precision) for precision in precisions}
    # The steps are those of a run of gptj-ft: one that counts, if it is among the rungs.
    found, work = first_look(arguments, precisions[0])
    results = Results(Ladder.of(arguments.work / "model", work, arguments.method == "lora"))
    first = "ours", precisions[0]
    if "ours" in rungs:
        results.add(first, found)
    for turn in range(arguments.turns):
        for rung in rungs:
            for precision in precisions:
                key = rung, precision
                if key in results.skipped or key in results.failed or (turn == 0 and key in results.runs):
                    continue
                try:
                    results.add(key, take(results, rung, precision, arguments))
                except (Skipped, Failed) as reason:
                    results.add(key, reason)
    rates = {precision: max(rate, best_product(precision)) for precision, rate in rates.items()}
    order = [(rung, precision) for precision in precisions for rung in rungs]
    results.runs = {key: results.runs[key] for key in order if key in results.runs}
    report(results, rates, str(arguments.model or arguments.size))
    check_losses(results.runs)
    shutil.rmtree(arguments.work)
    if results.failed:
        sys.exit(f"failed: {'; '.join(map(', '.join, results.failed))}")


if __name__ == "__main__":
    main()
