"""Fine-tune an encoder from disk in little memory, and compare with the same run in RAM.

The model has random weights in the shape of bert-large, or of 1.3 billion parameters (24 blocks of width 2048). Each
run is a separate process, monitored from outside; the weights afterwards must be the same bits.

    python benchmarks/encoders_from_disk.py --vocabulary vocab.txt --data train.tsv --work /tmp/disk --shape large

`--shape 1.3B` takes bf16 moments and gradients, so that the run beside it fits in 20 GB of RAM, and micro-batches of 96
tokens, so that the one from disk fits in 2 GiB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from side_by_side import command, watch
from torch import Tensor

from gptj_ft.checkpoints.model_folder import write_model
from gptj_ft.models.registry import Architecture, architecture_of

SHAPES = {
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "1.3B": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "intermediate_size": 8192},
}
MORE = {"1.3B": ("moments=bf16", "gradients=bf16", "micro_batch_tokens=96")}


def main() -> None:
    """Train from disk and in RAM, one after the other, and compare."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--vocabulary", type=Path, required=True, help="vocab.txt of BERT")
    options.add_argument("--data", type=Path, required=True, help="SST-2's train.tsv")
    options.add_argument("--work", type=Path, required=True, help="new folder")
    options.add_argument("--shape", choices=SHAPES, default="large")
    options.add_argument("--steps", type=int, default=4)
    options.add_argument("--batch-size", type=int, default=32)
    options.add_argument("--memory", default="2GiB", help="of the run from disk")
    arguments = options.parse_args()
    arguments.work.mkdir(parents=True)
    model = make_model(arguments.work / "model", SHAPES[arguments.shape], arguments.vocabulary)
    print("| placement | peak RSS | seconds a step | weights |\n|---|---|---|---|")
    for place in ("disk", "device"):
        run = arguments.work / place
        chosen = {
            "recipe": "sst2-bert", "model": model, "data": arguments.data, "output": run, "holdout": 0, "seed": 1,
            "max_steps": arguments.steps, "batch_size": arguments.batch_size, "device": "cpu", "precision": "fp32",
            "weights": place, "optimizer_state": place, "activations": "recompute",
            **dict(word.split("=") for word in MORE.get(arguments.shape, ())),
            **({"host_memory": arguments.memory} if place == "disk" else {}),
        }  # fmt: skip
        watched = watch(command("finetune", chosen), run / "metrics.jsonl")
        seconds = sorted(line["seconds"] for line in watched.lines[1:])[len(watched.lines) // 2 - 1]
        print(f"| {place} | {watched.peak_rss_bytes / 2**30:.2f} GiB | {seconds:.1f} | {digest(run / 'model')[:16]} |")
        shutil.rmtree(run)


def make_model(folder: Path, shape: dict[str, int], vocabulary: Path) -> Path:
    """Write an encoder of random weights, layer by layer."""
    raw = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2, **shape}
    source = folder.with_name("tokenizer")
    source.mkdir()
    shutil.copy(vocabulary, source / "vocab.txt")
    (source / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, "model_max_length": 512}))
    architecture = architecture_of(raw, folder)
    write_model(folder, architecture, layers_of(architecture), dtype=torch.float32, source=source)
    return folder


def layers_of(architecture: Architecture) -> Iterator[dict[str, Tensor]]:
    """Yield random weights of each layer."""
    generator = torch.Generator().manual_seed(0)
    for layer in architecture.layers():
        yield {
            name: torch.ones(like.shape) if "norm.weight" in name
            else torch.zeros(like.shape) if name.endswith("bias")
            else torch.empty(like.shape).normal_(0.0, 0.02, generator=generator)
            for name, like in layer.state_dict().items()
        }  # fmt: skip


def digest(model: Path) -> str:
    """Return the SHA-256 of the weight files of a model."""
    total = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            while part := file.read(2**24):
                total.update(part)
    return total.hexdigest()


if __name__ == "__main__":
    main()
