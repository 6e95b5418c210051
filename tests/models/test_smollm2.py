"""Compare a real Llama with `transformers`: SmolLM2-135M-Instruct on dialogues of DialogSum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.real_data import real_data
from support.small_stack import CPU, next_token_logits, relative
from support.smollm2 import smollm2_folder
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.models.batch import pack
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.open import load_weights, open_for_inference, open_for_training
from gptj_ft.streaming.scoring import evaluate_losses
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.training.restore import optimizer_config

NUM_ROWS = 20


@pytest.mark.slow
def test_smollm2_matches_transformers(tmp_path: Path) -> None:
    data = real_data("summarization/dialogsum/val.jsonl")
    folder = smollm2_folder(tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    docs, prompts = [], []
    with data.open(encoding="utf-8") as lines:
        for _, line in zip(range(NUM_ROWS), lines, strict=False):
            row = json.loads(line)
            prompt = tokenizer(f"{row['dialogue']}\nSummary:").input_ids
            summary = row.get("summary", row.get("summary1"))
            docs.append([*prompt, *tokenizer(f" {summary}").input_ids, tokenizer.eos_token_id])
            prompts.append(len(prompt))

    losses, last = [], []
    for ids, prompt in zip(docs, prompts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        losses.append(float(F.cross_entropy(logits[prompt - 1 : -1], torch.tensor(ids[prompt:]))))
        last.append(logits[-1])
    with open_for_inference(folder, CPU, torch.float32) as (architecture, stack), torch.no_grad():
        own_logits = next_token_logits(stack, pack(docs))
        batches = [pack([ids], [prompt]) for ids, prompt in zip(docs, prompts, strict=True)]
        own_losses = [loss.mean for loss in evaluate_losses(stack, batches)]
    torch.testing.assert_close(own_logits, torch.stack(last), rtol=1e-5, atol=1e-4)
    assert own_losses == pytest.approx(losses, rel=1e-5)

    shortest = min(range(NUM_ROWS), key=lambda number: len(docs[number]))
    trained, untrained = [docs[shortest]], [prompts[shortest]]
    stack = open_for_training(
        architecture, Placement("device", "device"), training_dtypes(torch.float32), CPU, tmp_path / "state",
        BufferBudget(), keep_gradients=True,
        boundary=boundary_layout(sum(map(len, trained)), architecture.config.n_embd, len(trained)),
    )  # fmt: skip
    with open_checkpoint(folder) as checkpoint:
        load_weights(stack, architecture, checkpoint)
    train_step(stack, AdamW(stack, optimizer_config(Recipe())), micro_batches(trained, untrained, 4096))
    single = gradients(model, trained[0], untrained[0])
    double = gradients(model.double(), trained[0], untrained[0])
    for layer in range(len(stack.layers)):
        flat = torch.cat([part.clone() for _, part in stack.read_chunks("grad", layer)])
        for local, gradient in stack.layouts[layer].views(flat).items():
            name = architecture.family.name_of(layer, local, len(stack.layers))
            # After 30 blocks, `transformers` in fp32 is as far from fp64.
            assert relative(gradient, double[name]) < 1e-5 + relative(single[name], double[name]), name
    stack.close()


def gradients(model: Any, ids: list[int], prompt: int) -> dict[str, Tensor]:
    """Return the gradients of the mean loss over the tokens behind the prompt."""
    model.zero_grad()
    logits = model(torch.tensor([ids])).logits[0, prompt - 1 : -1]
    F.cross_entropy(logits, torch.tensor(ids[prompt:])).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
