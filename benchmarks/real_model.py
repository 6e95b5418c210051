"""Tune a real pretrained chat model by the command line and by `transformers`, and compare losses and scores.

    python benchmarks/real_model.py --model SmolLM2-135M-Instruct/ --data dialogsum/ --work /tmp/real
    python benchmarks/real_model.py --model SmolLM2-135M-Instruct/ --data dialogsum/ --work /tmp/forms --steps 200 \
        --trainers gptj-ft --methods full,int8-moments,sampled,lora,lora-int8,lora-nf4 --precision bf16 --rows 300

The model is any folder with a decoder whose head is apart from the rest (Llama's, Qwen's, GPT-2's shape). DATA has
DialogSum's train.jsonl and val.jsonl. Three parts:

1. The loss of 200 validation rows, one by one, by `gptj-ft` and by `transformers` in fp32.
2. For each seed and each of full training and LoRA (all linear layers): `gptj-ft finetune` and a loop of `transformers`
   with `torch.optim.AdamW`, from the same weights, with the same rows in the same order, learning rates and clipping.
3. `gptj-ft evaluate` of both and of the untuned model on the same validation rows: means over rows of loss and ROUGE,
   and paired differences with intervals, also between the two trainers, and between a form and the plain one
   (8-bit moments and sampled layers against all parameters, a quantized base against a plain one). Losses of the
   steps of 8-bit moments are compared with those of fp32 moments.

Finished parts in WORK are kept: after a kill the same command goes on. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from same_work import Step, Work, adapter_options, clip_exactly, loss_of_targets, open_model, take_steps, with_adapters

from gptj_ft.config.run_folder import Run
from gptj_ft.evaluation.metrics.statistic import Estimate, estimate_scores, mean

LOSS_ROWS = 200
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Method(NamedTuple):
    """A way to train."""

    name: str  # option `method`
    lr: float
    plain: str | None = None  # method that this one is compared with
    options: tuple[str, ...] = ()
    quantization: str | None = None  # of the base


METHODS = {
    "full": Method("full", 1e-4),
    "int8-moments": Method("full", 1e-4, "full", ("moments=int8",)),
    "sampled": Method("sampled", 1e-4, "full"),
    "lora": Method("lora", 1e-3),
    "lora-int8": Method("lora", 1e-3, "lora", quantization="int8"),
    "lora-nf4": Method("lora", 1e-3, "lora", quantization="nf4"),
}
SCORES = ("loss", "rouge1", "rouge2", "rougeL")
MOST_TOKENS = 64  # of an answer


def main() -> None:
    """Run the missing parts, then print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of DialogSum's files")
    parser.add_argument("--work", type=Path, required=True, help="folder for all output")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=500, help="validation rows that are scored")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default="full,lora", help=", ".join(METHODS))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trainers", default="gptj-ft,transformers")
    parser.add_argument("--loop", help="internal")
    arguments = parser.parse_args()
    if arguments.loop:
        train_with_transformers(arguments, *arguments.loop.split(","))
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    held = arguments.work / "held.jsonl"
    with (arguments.data / "val.jsonl").open(encoding="utf-8") as lines:
        held.write_text("".join(islice(lines, arguments.rows)), encoding="utf-8")
    untuned = rows_of(arguments, arguments.model, "untuned")
    tuned_rows = dict[tuple[str, str, str], list[dict[str, float]]]()
    for seed, method in product(arguments.seeds.split(","), arguments.methods.split(",")):
        finetune(arguments, method, seed)
        for trainer in arguments.trainers.split(","):
            if trainer == "transformers" and not tuned(arguments, trainer, method, seed).exists():
                run(sys.executable, __file__, *words_of(arguments), "--loop", f"{method},{seed}")
            folder = tuned(arguments, trainer, method, seed)
            tuned_rows[method, seed, trainer] = rows = rows_of(arguments, folder, f"{trainer}-{method}-{seed}")
            facts = {name: list(map(asdict, found)) for name, found in compare(rows, untuned).items()}
            print(json.dumps({"method": method, "seed": seed, "trainer": trainer, **facts}), flush=True)
    if "transformers" in arguments.trainers:
        print(json.dumps(compare_losses(arguments)))
    print("\n".join(table_of(tuned_rows, untuned)))
    for seed in arguments.seeds.split(","):
        if {"full", "int8-moments"} <= set(arguments.methods.split(",")):
            print(f"losses with 8-bit and with fp32 moments, seed {seed}: {apart_of(arguments, seed)}")


def words_of(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield this script's options for another process."""
    for name in ("model", "data", "work", "steps", "batch_size", "max_length", "precision", "device"):
        yield from (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))


def run(*command: object) -> None:
    """Run a command with its output on stderr."""
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)


def gptj_ft(*words: object) -> None:
    """Run the command line."""
    run(sys.executable, "-m", "gptj_ft", *words)


def run_of(arguments: argparse.Namespace, method: str, seed: str) -> Run:
    """Return the run folder of a training."""
    return Run(arguments.work / f"run-{method}-{seed}")


def tuned(arguments: argparse.Namespace, trainer: str, method: str, seed: str) -> Path:
    """Return the folder of a tuned model or adapter."""
    if trainer == "gptj-ft":
        return run_of(arguments, method, seed).folder
    return arguments.work / f"{trainer}-{method}-{seed}"


def finetune(arguments: argparse.Namespace, method: str, seed: str) -> None:
    """Train with the command line, or resume."""
    folder = run_of(arguments, method, seed).folder
    if (folder / "model").exists():
        return
    if (folder / "recipe.yaml").exists():
        gptj_ft("finetune", "--resume", folder)
        return
    way = METHODS[method]
    options = {
        "batch_size": arguments.batch_size, "max_length": arguments.max_length, "max_steps": arguments.steps,
        "lr": way.lr, "precision": arguments.precision, "device": arguments.device, "holdout": 0,
    }  # fmt: skip
    sets = [*(f"{key}={value}" for key, value in options.items()), *way.options]
    if way.name == "lora":
        sets += adapter_options(LINEAR, int(seed))
    else:
        sets += [f"seed={seed}", f"method={way.name}"]
    gptj_ft(
        "finetune", "--recipe", "summarization", "--data", arguments.data / "train.jsonl",
        "--model", base_of(arguments, way.quantization), "--output", folder,
        *(word for each in sets for word in ("--set", each)),
    )  # fmt: skip


def base_of(arguments: argparse.Namespace, quantization: str | None) -> Path:
    """Return the model folder, quantized if asked."""
    if quantization is None:
        return Path(arguments.model)
    folder = Path(arguments.work / f"base-{quantization}")
    if not folder.exists():
        gptj_ft("convert", arguments.model, folder, "--quantize", quantization)
    return folder


def apart_of(arguments: argparse.Namespace, seed: str) -> str:
    """Compare the losses of the steps of two runs."""
    ours, theirs = (
        [line["loss"] for line in run_of(arguments, method, seed).metrics() if "loss" in line]
        for method in ("int8-moments", "full")
    )
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return f"mean {fmean(apart):.2e}, at most {max(apart):.2e} in {len(apart)} steps"


def train_with_transformers(arguments: argparse.Namespace, method: str, seed: str) -> None:
    """Train on the same rows with `transformers`' model and `torch.optim.AdamW`; write a model or adapter folder."""
    work = Work.of(run_of(arguments, method, seed))
    model = open_model(arguments.model, attention="sdpa").to(arguments.device)
    adapted = with_adapters(model, LINEAR, int(seed)) if method == "lora" else model
    inner = adapted.get_base_model() if method == "lora" else model

    def add_gradients(step: Step) -> float:
        loss = loss_of_targets(inner, step)
        loss.backward()
        return float(loss.item())

    folder = tuned(arguments, "transformers", method, seed)
    work.write_losses(take_steps(adapted, work, add_gradients, clip_exactly), folder.with_suffix(".losses.jsonl"))
    draft = folder.with_suffix(".draft")
    # The adapter is merged, so that both trainers' models are scored by the same kernels.
    (adapted.merge_and_unload() if method == "lora" else model).save_pretrained(draft)
    for file in arguments.model.iterdir():
        if "tokenizer" in file.name or file.suffix == ".jinja":
            shutil.copy(file, draft)
    draft.rename(folder)


def rows_of(arguments: argparse.Namespace, model: Path, name: str) -> list[dict[str, float]]:
    """Evaluate a model; return the scores of each row."""
    file = arguments.work / f"rows-{name}.jsonl"
    if not file.exists():
        gptj_ft(
            "evaluate", model, "--recipe", "summarization", "--data", arguments.work / "held.jsonl", "--baseline",
            "none", "--precision", arguments.precision, "--device", arguments.device, "--set",
            f"max_length={arguments.max_length}", "--set", f"generation.max_new_tokens={MOST_TOKENS}", "--output", file,
        )  # fmt: skip
    return [json.loads(line)["scores"] for line in file.read_text(encoding="utf-8").splitlines()]


def compare_losses(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare the losses of single rows; return the largest difference.

    A run with a learning rate of 1e-30 and one row a step reports the loss of each row and changes no weight.
    """
    file, run = arguments.work / "losses.json", Run(arguments.work / "run-losses")
    if file.exists():
        return dict(json.loads(file.read_text(encoding="utf-8")))
    shutil.rmtree(run.folder, ignore_errors=True)
    options = {
        "batch_size": 1, "max_length": arguments.max_length, "max_steps": LOSS_ROWS, "lr": 1e-30, "precision": "fp32",
        "device": arguments.device, "holdout": 0, "weight_decay": 0, "method": "lora", "schedule": "constant",
        "warmup": 0,
    }  # fmt: skip
    gptj_ft(
        "finetune", "--recipe", "summarization", "--data", arguments.work / "held.jsonl", "--model", arguments.model,
        "--output", run.folder, *(word for key, value in options.items() for word in ("--set", f"{key}={value}")),
    )  # fmt: skip
    ours = [line["loss"] for line in run.metrics() if "loss" in line]
    import torch

    model = open_model(arguments.model).to(arguments.device).eval()
    with torch.inference_mode():
        theirs = [float(loss_of_targets(model, step)) for step in Work.of(run).steps]
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    found = {"rows": len(apart), "mean_loss": sum(ours) / len(ours), "largest_difference": max(apart)}
    file.write_text(json.dumps(found), encoding="utf-8")
    with suppress(OSError):
        shutil.rmtree(run.folder)
    return found


def compare(rows: list[dict[str, float]], others: list[dict[str, float]]) -> dict[str, tuple[Estimate, ...]]:
    """Return for each score: the mean over the other model's rows, over these, and the paired difference."""
    sides = ({name: mean([row[name] for row in side]) for name in SCORES} for side in (rows, others))
    found = estimate_scores(*sides, num_rows=len(rows), seed=0)
    return {name: (found.baseline[name], found.scores[name], found.differences[name]) for name in SCORES}


def table_of(tuned_rows: Any, untuned: list[dict[str, float]]) -> Iterator[str]:
    """Yield the scores as Markdown: each model beside the untuned one, the other trainer's and the plain form's."""
    yield "| training | seed | trainer | " + " | ".join(f"{score}: before, after, change" for score in SCORES) + " |"
    yield "|---" * (3 + len(SCORES)) + "|"
    for (method, seed, trainer), rows in tuned_rows.items():
        yield f"| {method} | {seed} | {trainer} | {cells_of(compare(rows, untuned))} |"
        if trainer == "transformers" and (method, seed, "gptj-ft") in tuned_rows:
            pair = cells_of(compare(tuned_rows[method, seed, "gptj-ft"], rows))
            yield f"| {method} | {seed} | transformers, gptj-ft | {pair} |"
        if (plain := METHODS[method].plain) and (plain, seed, trainer) in tuned_rows:
            pair = cells_of(compare(rows, tuned_rows[plain, seed, trainer]))
            yield f"| {plain}, {method} | {seed} | {trainer} | {pair} |"


def cells_of(found: dict[str, tuple[Estimate, ...]]) -> str:
    """Format comparisons as cells of a table."""
    return " | ".join(
        f"{before.value:.3f}, {after.value:.3f}, {change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})"
        for before, after, change in found.values()
    )


if __name__ == "__main__":
    main()
