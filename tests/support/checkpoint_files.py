"""Write checkpoints of a small random GPT-J in every Hugging Face form, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM

FORMS = ("safetensors", "safetensors in shards", "bin", "bin in shards")
State = dict[str, Tensor]


def make_state() -> tuple[GPTJConfig, State]:
    """Return a random GPT-J without constant tensors, so that every mix-up shows."""
    config = GPTJConfig(
        vocab_size=64,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        rotary_dim=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    generator = torch.Generator().manual_seed(0)
    state = GPTJForCausalLM(config).state_dict()
    return config, {name: torch.randn(tensor.shape, generator=generator) * 0.2 for name, tensor in state.items()}


def write_source(folder: Path, state: State, form: str = "safetensors", config: GPTJConfig | None = None) -> Path:
    """Write a checkpoint by hand, independent of the code under test."""
    folder.mkdir()
    (config or make_state()[0]).save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["GPTJForCausalLM"]}))
    kind, _, sharded = form.partition(" ")
    stem = {"safetensors": "model", "bin": "pytorch_model"}[kind]

    def save(tensors: State, path: Path) -> None:
        if kind == "bin":
            torch.save(tensors, path)
        else:
            save_file(tensors, path, metadata={"format": "pt"})

    if not sharded:
        save(state, folder / f"{stem}.{kind}")
        return folder
    names = list(state)
    weight_map = {}
    for number, part in enumerate((names[:7], names[7:]), start=1):
        file_name = f"{stem}-{number:05d}-of-00002.{kind}"
        save({name: state[name] for name in part}, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index))
    return folder


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits
