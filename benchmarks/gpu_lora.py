"""Tune GPT-J 6B by LoRA and generate with it on one GPU: by `gptj-ft`, by `peft` and by `transformers`.

    python benchmarks/gpu_lora.py --data dialogsum/train.jsonl --tokenizer gpt2/ --work /tmp/gpu-lora

The model has random weights in bf16, 12 GB; rows are dialogues of DialogSum, 16 a step, adapters of rank 16 on all
linear layers. Parts, each in a process of its own:

    device, 8     `gptj-ft finetune --method lora` with the model on the device, and within 8 GB of it, from RAM
    peft          PEFT in a loop of `transformers` with `AdamW(fused=True)`, all of the step's rows padded to the
                  longest, the head on targets only; the same rows, learning rates and initial adapters
    write         tokens each after 1 and 8 prompts of 64, greedy: ours with weights on the device and in RAM, and
                  `transformers.generate`, in turns; from RAM an eighth of the tokens

Prints JSON lines. `--layers 2 --width 64 --device cpu` tries the script.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from decoding import write
from gpu import SHAPE, say
from same_work import Step, Work, adapter_options, loss_of_targets, open_model, take_steps, with_adapters
from transformers import GPTJConfig, GPTJForCausalLM

from gptj_ft.config.run_folder import Run
from gptj_ft.generation.hf_model import StreamedModel
from gptj_ft.streaming.open import open_for_inference
from gptj_ft.system.machine import choose_device

LINEAR = ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out")
ROWS, WARM_UP = 16, 2
PROMPT = 64


def main() -> None:
    """Make the model, then run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="rows with dialogue and summary")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--work", type=Path, required=True, help="new folder; needs 13 GB")
    parser.add_argument("--parts", default="device,8,peft,write")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="that are written after each prompt")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=120, help="seconds of a part")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=SHAPE["n_layer"], help="smaller only to try the script")
    parser.add_argument("--width", type=int, default=SHAPE["n_embd"], help="smaller only to try the script")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # internal
    arguments = parser.parse_args()
    if arguments.part:
        {"peft": train_with_peft, "write": write_answers}[arguments.part](arguments)
        return
    make_model(arguments)
    for part in arguments.parts.split(","):
        try:
            if part in ("peft", "write"):
                words = [sys.executable, __file__, *sys.argv[1:], "--part", part]
                subprocess.run(words, timeout=arguments.timeout, check=False)
            else:
                finetune(arguments, part)
        except subprocess.SubprocessError as error:
            say(part=part, error=str(error))


def make_model(arguments: argparse.Namespace) -> None:
    """Write the model folder, with weights drawn on the device."""
    start, folder = time.perf_counter(), arguments.work / "model"
    small = {"n_head": 1, "rotary_dim": 8} if arguments.width < 256 else {}
    config = GPTJConfig(**{**SHAPE, "n_layer": arguments.layers, "n_embd": arguments.width, **small})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(arguments.device):
        model = GPTJForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(arguments.tokenizer / name, folder / name)
    say(part="model", seconds=time.perf_counter() - start)


def finetune(arguments: argparse.Namespace, part: str) -> None:
    """Train with the command line; print what it measured of its steps."""
    run = Run(arguments.work / f"run-{part}")
    options = {
        "batch_size": ROWS, "max_length": 512, "max_steps": arguments.steps, "lr": 1e-4, "precision": "bf16",
        "holdout": 0, "device": arguments.device, **({} if part == "device" else {"device_memory": f"{part}GB"}),
    }  # fmt: skip
    sets = [*(f"{key}={value}" for key, value in options.items()), *adapter_options(LINEAR)]
    words = ["finetune", "--recipe", "summarization", "--data", arguments.data, "--model", arguments.work / "model",
             "--output", run.folder, *(word for each in sets for word in ("--set", each)), "--json"]  # fmt: skip

    def json_of(*more: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "gptj_ft", *words, *more]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=arguments.timeout)
        return dict(json.loads(done.stdout))

    plan, start = json_of("--dry-run"), time.perf_counter()
    json_of()
    wall, steps = time.perf_counter() - start, [line for line in run.metrics() if "loss" in line]
    say(
        part=part, wall=wall, losses=[line["loss"] for line in steps], placement=plan["placement"],
        forecast_seconds=plan["seconds_per_step"], forecast_bytes=plan["device_bytes"],
        allocated=steps[-1]["device_memory_bytes"], reserved=steps[-1]["device_reserved_bytes"],
        **rates([line["seconds"] for line in steps], [step.num_tokens for step in Work.of(run).steps]),
    )  # fmt: skip


def rates(seconds: Sequence[float], tokens: Sequence[int]) -> dict[str, Any]:
    """Return the seconds of steps, and the tokens per second after warming up."""
    steady = sum(tokens[WARM_UP:]) / sum(seconds[WARM_UP:])
    return {"seconds": list(seconds), "tokens": list(tokens), "tokens_per_second": steady}


def train_with_peft(arguments: argparse.Namespace) -> None:
    """Train the run's rows with PEFT."""
    work = Work.of(Run(arguments.work / "run-device"))
    model = with_adapters(open_model(arguments.work / "model", torch.bfloat16).to(arguments.device), LINEAR)

    def add_gradients(step: Step) -> float:
        loss = loss_of_targets(model.get_base_model(), step)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.item())

    losses, seconds, start = [], [], time.perf_counter()
    for loss in take_steps(model, work, add_gradients):
        losses.append(loss)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    peak = torch.cuda.max_memory_allocated() if arguments.device == "cuda" else None
    say(part="peft", losses=losses, allocated=peak, **rates(seconds, [step.num_tokens for step in work.steps]))


def write_answers(arguments: argparse.Namespace) -> None:
    """Generate with each program in turns."""
    device, folder = choose_device(arguments.device), arguments.work / "model"
    given = Namespace(vocabulary=50257, prompt=PROMPT)
    theirs = GPTJForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    with (
        open_for_inference(folder, device, torch.bfloat16, "device") as (architecture, stack),
        open_for_inference(folder, device, torch.bfloat16, "host") as (_, streamed),
    ):
        models = {"transformers": theirs, "device": StreamedModel(architecture, stack),
                  "host": StreamedModel(architecture, streamed)}  # fmt: skip
        for rows in (1, 8):
            taken: dict[str, list[float]] = {name: [] for name in models}
            outputs = {}
            numbers = {name: arguments.tokens // 8 if name == "host" else arguments.tokens for name in models}
            for _ in range(arguments.turns + 1):
                for name, model in models.items():
                    seconds, outputs[name] = write(model, given, rows, 1, numbers[name], device)
                    taken[name].append(seconds)
            ours = outputs["device"].cpu()
            same = {name: torch.equal(rows.cpu(), ours[:, : rows.shape[1]]) for name, rows in outputs.items()}
            rate = {name: rows * numbers[name] / statistics.median(each[1:]) for name, each in taken.items()}
            say(part="write", rows=rows, tokens_per_second=rate, seconds=taken, same_tokens=same)


if __name__ == "__main__":
    main()
