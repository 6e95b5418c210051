"""Train a small streamed model, and compute the same with `transformers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import random_model

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.generation.hf_model import ForwardPasses
from gptj_ft.models.batch import PackedBatch
from gptj_ft.streaming.adamw import BLOCK_NUMEL, AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import inference_tasks
from gptj_ft.streaming.step import train_step
from gptj_ft.training.restore import optimizer_config

CPU = torch.device("cpu")
PLACES = ("device", "host", "disk")
LENGTHS = (5, 17, 9, 30, 2, 11)
PROMPTS = (2, 3, 1, 10, 0, 5)
STEPS = 10  # beside torch: so many that errors would add up
# Of runs that agree to the bit: none has an update pending, one has the first, two are like all that follow.
FEW_STEPS = 4
LITTLE = BufferBudget(1, num_gradients=1, num_chunks=2, chunk_numel=2048)


def new_memory(name: str, numel: int) -> torch.Tensor:
    """Return new memory as the scratch memory of a form of moments."""
    return torch.empty(numel)


def save_models(factory: pytest.TempPathFactory, shapes: Mapping[str, str]) -> dict[str, Path]:
    """Save a random model of each shape; return their folders by name.

    Args:
        shapes: name -> shape of `conftest.random_model`.
    """
    folders = {name: factory.mktemp(name) for name in shapes}
    for name, folder in folders.items():
        random_model(shapes[name]).save_pretrained(folder)
    return folders


def documents(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def lr_of(step: int) -> float:
    return 1e-2 * (step + 1) / STEPS


def train(
    stack, recipe: Recipe, budget: int = 40, steps: int = FEW_STEPS, late: int = 0, batches_of=micro_batches,
    block_numel: int = BLOCK_NUMEL,
):  # fmt: skip
    """Train; return (loss, norm) of each step and every layer's flat weights."""
    config = replace(optimizer_config(recipe), block_numel=block_numel)
    optimizer = AdamW(stack, config, num_deferred=late)
    return take_steps(stack, optimizer, steps, budget, batches_of), weights_after(stack, optimizer)


def take_steps(stack, optimizer: AdamW, steps: int = FEW_STEPS, budget: int = 40, batches_of=micro_batches):
    """Train; return (loss, norm) of each step."""
    docs, curve = documents(next(stack.layers[0].children()).num_embeddings), []
    for step in range(steps):
        optimizer.begin_step(lr_of(step))
        loss = train_step(stack, optimizer, batches_of(docs, PROMPTS, budget))
        curve.append((loss.mean, optimizer.finish_step()))
    return curve


def weights_after(stack, optimizer: AdamW) -> list[dict[str, torch.Tensor]]:
    """Flush and close a stack; return each layer's weights by name."""
    optimizer.flush()
    weights = [
        {name: view.clone() for name, view in loaded.parameters().items()}
        for loaded in Prefetcher(stack, inference_tasks(range(len(stack.layers))))
    ]
    stack.close()
    return weights


def oracle_loss(oracle, docs: list[list[int]], z_loss: float = 0.0, prompts: Sequence[int] = PROMPTS):
    """Return the mean loss over the target tokens of all documents, each run alone."""
    total, count = torch.zeros(()), 0
    for ids, prompt in zip(docs, prompts, strict=True):
        logits, targets = oracle(torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:])
        first = max(prompt, 1) - 1
        total = total + F.cross_entropy(logits[first:], targets[first:], reduction="sum")
        total = total + z_loss * logits[first:].exp().sum(-1).log().square().sum()
        count += len(ids) - 1 - first
    return total / count


def train_oracle(oracle, recipe: Recipe, trains=lambda name, step: True) -> list[tuple[float, float]]:
    """Train a model of `transformers` with torch's AdamW; return (loss, norm) of each step.

    Args:
        trains: (name of a parameter, step) -> whether the step trains it. torch skips one without a gradient, and does
            not count its step.
    """
    named, curve = dict(oracle.named_parameters()), []
    groups = [
        {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch_adamw = torch.optim.AdamW(groups, eps=recipe.eps, betas=recipe.betas)
    for step in range(STEPS):
        for group in torch_adamw.param_groups:
            group["lr"] = lr_of(step)
        torch_adamw.zero_grad()
        loss = oracle_loss(oracle, documents(oracle.config.vocab_size))
        loss.backward()
        for name, parameter in named.items():
            if not trains(name, step):
                parameter.grad = None
        curve.append((loss.item(), torch.nn.utils.clip_grad_norm_(named.values(), recipe.clip_norm).item()))
        torch_adamw.step()
    return curve


def next_token_logits(stack, batch: PackedBatch) -> torch.Tensor:
    """Return the logits after the last token of each document, [documents, V]."""
    return ForwardPasses(stack).read([batch], [torch.tensor(batch.cu_seqlens[1:]) - 1])[0]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach() - b.detach()).norm() / b.detach().norm().clamp_min(1e-12))


def assert_identical(run, expected) -> None:
    assert run[0] == expected[0]
    for ours, theirs in zip(run[1], expected[1], strict=True):
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name
