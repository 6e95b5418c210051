"""Compare `gptj-ft finetune` from disk with DeepSpeed ZeRO-3 with NVMe offload, on the same rows of DialogSum.

Model: a random GPT-J of 8 blocks x n_embd 1024 with 50,400 rows of vocabulary, 204 M parameters, fp32 on the CPU, or
with `--size` one of the depth and width that `ladder.py` has under that name (GPT-J's head comes on top). The script
installs DeepSpeed with the same torch and `transformers` into an environment of its own and compiles what it needs
there before anything is timed. It needs a C++ compiler and libaio's headers:

    apt-get install g++ libaio-dev
    python benchmarks/deepspeed_peer.py --data train.jsonl --tokenizer gpt2/ --work /tmp/peer

DeepSpeed runs `transformers`' model on rows padded to the longest of their batch, in one process with its CPU
accelerator, gloo and `DeepSpeedCPUAdam`; weights come in through its own `zero.Init`. Its head computes on positions
with a target only, as ours does; with `--loss all` on every position, as `model(labels=...)` does. Modes:

    nvme        parameters and optimizer state on disk
    recompute   the same, with gradient checkpointing: less memory, more time
    optimizer   optimizer state on disk, parameters in RAM
    ram         both in RAM (ZeRO-3 with CPU offload)

By itself ``offload_param`` leaves the first 1e9 parameters in RAM; ``max_in_cpu: 0`` sends them to the disk. A buffer
for parameters has to hold the largest of them, the head of 50,400 x n_embd, so five take 1.0 GB at a width of 1024.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from same_work import GPT2_SHAPES, LOSSES, SHAPE, Step, Work, decay_groups, make_model, open_model

DEEPSPEED = "0.19.8"
MODES = ("nvme", "recompute", "optimizer", "ram")
SUB_GROUP = 2**24  # parameters updated at once


class LossModel(torch.nn.Module):
    """Model whose forward pass returns the loss: DeepSpeed gathers weights around the forward pass of a module.

    Args:
        model: model of `transformers`.
        loss: name of the loss in `LOSSES`.
    """

    def __init__(self, model: torch.nn.Module, loss: str) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, step: Step) -> torch.Tensor:
        return LOSSES[self.loss](self.model, step)


def settings(work: Work, mode: str, folder: Path) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a model folder."""
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    disk = {"device": "nvme", "nvme_path": str(folder / "nvme"), "pin_memory": True}
    memory = {"device": "cpu", "pin_memory": True}
    # Small buffers, not tuned: weights, gradients and both moments of a sub-group; a few parameters in flight.
    optimizer = {**disk, "buffer_count": 4, "fast_init": True}
    largest = config["vocab_size"] * config["n_embd"]
    parameters = {**disk, "buffer_count": 5, "buffer_size": largest, "max_in_cpu": 0}
    offload = {"optimizer": (optimizer, memory), "ram": (memory, memory)}.get(mode, (optimizer, parameters))
    return {
        "train_micro_batch_size_per_gpu": len(work.steps[0].documents),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": work.clip_norm,
        "optimizer": {"type": "AdamW", "params": {"lr": work.steps[0].lr, "betas": work.betas, "eps": work.eps}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": offload[0],
            "offload_param": offload[1],
            "sub_group_size": SUB_GROUP,
            "stage3_max_live_parameters": SUB_GROUP,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 2**23,
            "reduce_bucket_size": SUB_GROUP,
            "overlap_comm": False,
        },
        "aio": {"block_size": 2**20, "queue_depth": 16, "intra_op_parallelism": 2, "overlap_events": True},
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "steps_per_print": 10**9,
    }


def train(folder: Path, work: Work, mode: str, loss_name: str) -> Iterator[float]:
    """Train a model folder with DeepSpeed, in its environment; yield the loss of each step."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = settings(work, mode, folder)
    deepspeed.init_distributed(dist_backend="gloo")
    partitioning = HfDeepSpeedConfig(config)  # as long as it lives, from_pretrained partitions what it reads
    model = open_model(folder / "model")
    if mode == "recompute":
        model.gradient_checkpointing_enable()
    groups = decay_groups(model, work.weight_decay)
    engine, *_ = deepspeed.initialize(model=LossModel(model, loss_name), model_parameters=groups, config=config)
    del partitioning
    for step in work.steps:
        for group in engine.optimizer.param_groups:
            group["lr"] = step.lr
        loss = engine(step)
        engine.backward(loss)
        engine.step()
        yield loss.item()


def make_environment(folder: Path) -> dict[str, str]:
    """Install DeepSpeed and compile its kernels; return the variables its processes need.

    Raises:
        subprocess.CalledProcessError: there is no compiler, or libaio's headers are missing.
    """
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(folder / "kernels"),
        "DS_ACCELERATOR": "cpu",
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"},
    }
    environment.pop("PYTHONPATH", None)
    if not folder.exists():
        venv.create(folder, with_pip=True)
        same = [f"{name}=={version(name).split('+')[0]}" for name in ("torch", "transformers", "accelerate")]
        packages = [*same, f"deepspeed=={DEEPSPEED}", "setuptools", "ninja", "psutil"]
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True, env=environment, stdout=sys.stderr)
    kernels = (
        "from deepspeed.ops.op_builder.cpu import AsyncIOBuilder, CPUAdamBuilder, ShareMemCommBuilder\n"
        "for builder in (AsyncIOBuilder, CPUAdamBuilder, ShareMemCommBuilder): builder().load(verbose=False)"
    )
    subprocess.run([folder / "bin" / "python", "-c", kernels], check=True, env=environment, stdout=sys.stderr)
    return environment


def main(words: Sequence[str]) -> None:
    """Run both in separate processes, and compare."""
    from side_by_side import facts_of, finetune, parser, report, watch

    options = parser(__doc__)
    options.add_argument("--environment", type=Path, help="folder of DeepSpeed's, made if missing; default in WORK")
    options.add_argument("--variant", default="disk", help="of gptj-ft, e.g. disk:device_memory=2.5GiB")
    options.add_argument("--modes", default="nvme", help="any of " + ", ".join(MODES))
    options.add_argument(
        "--loss", choices=LOSSES, default="targets", help="positions that DeepSpeed's head computes on"
    )
    options.add_argument("--size", choices=GPT2_SHAPES, help="depth and width; default: 8 blocks x n_embd 1024")
    arguments = options.parse_args(words)
    folder: Path = arguments.work
    folder.mkdir(parents=True)
    place = (arguments.environment or folder / "environment").absolute()
    environment = make_environment(place)
    make_model(folder / "model", arguments.tokenizer, {**SHAPE, **GPT2_SHAPES.get(arguments.size, {})})
    watched, run = finetune(arguments, arguments.variant)
    runs, work = {f"gptj-ft, {arguments.variant}": watched}, Work.of(run)
    work.save(folder / "work.json")
    for mode in arguments.modes.split(","):
        command = [str(place / "bin" / "python"), __file__, "--mode", mode, "--work", str(folder)]
        command += ["--loss", arguments.loss]
        runs[f"DeepSpeed ZeRO-3, {mode}"] = watch(command, folder / f"{mode}.jsonl", environment)
    report(runs, work, arguments.warm_up, {**facts_of(run), "deepspeed": DEEPSPEED, "loss": arguments.loss})


def peer(words: Sequence[str]) -> None:
    """Train in this process, inside DeepSpeed's environment."""
    options = argparse.ArgumentParser()
    options.add_argument("--mode", choices=MODES)
    options.add_argument("--loss", choices=LOSSES)
    options.add_argument("--work", type=Path)
    arguments = options.parse_args(words)
    work = Work.load(arguments.work / "work.json")
    losses = train(arguments.work, work, arguments.mode, arguments.loss)
    work.write_losses(losses, arguments.work / f"{arguments.mode}.jsonl")


if __name__ == "__main__":
    (peer if "--mode" in sys.argv else main)(sys.argv[1:])
