"""Test the norm of gradients and the stochastic rounding of bf16 moments; test_streaming compares AdamW with torch."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from conftest import random_gptj
from support.small_stack import CPU, new_memory

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.config.options import Recipe
from gptj_ft.models.layout import MOMENTS
from gptj_ft.streaming.adamw import LONG_GRADIENT, AdamW, Update, norm_of
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.moments import FORMS
from gptj_ft.streaming.moments.form import NOISE, Noise
from gptj_ft.streaming.open import open_for_training
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.training.restore import optimizer_config


def round_stochastically(
    exact: torch.Tensor, rounded: torch.Tensor, key: tuple[object, ...], start: int, num_tiles: int = 1
) -> None:
    FORMS["bf16"].store("exp_avg", exact, rounded, Noise(key, start, num_tiles), new_memory)


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    exact = torch.full((4096,), 1.0 + 1 / 1024)  # an eighth of the way from 1 to the next bf16 number
    rounded = torch.empty(4096, dtype=torch.bfloat16)
    sums = torch.zeros(4096)
    for step in range(400):
        round_stochastically(exact.clone(), rounded, (0, step), 0)
        assert set(rounded.tolist()) <= {1.0, 1.0078125}
        sums += rounded.float()
    assert (sums / 400).mean().item() == pytest.approx(exact[0].item(), abs=2e-5)
    assert (sums / 400).std().item() < 4e-4  # different noise for every element and call
    again = torch.empty_like(rounded)
    for start in (0, 1024):  # in chunks or at once
        part = slice(start, start + 1024 if start == 0 else None)
        round_stochastically(exact[part].clone(), again[part], (0, 399), start)
    assert torch.equal(rounded, again)


def test_several_tiles_of_noise_at_once_round_to_the_same_bits() -> None:
    exact = torch.randn(2 * NOISE + 1000, generator=torch.Generator().manual_seed(0))
    rounded = [torch.empty(len(exact), dtype=torch.bfloat16) for _ in range(3)]
    for num_tiles, each in zip((1, 2, 4), rounded, strict=True):
        round_stochastically(exact.clone(), each, (0, 7), 12345, num_tiles)
    assert torch.equal(rounded[0], rounded[1])
    assert torch.equal(rounded[0], rounded[2])


def test_rounding_differs_by_layer_moment_and_step(tmp_path: Path) -> None:
    random_gptj(vocab_size=40, n_positions=8, n_embd=8, n_layer=2, n_head=1, rotary_dim=4).save_pretrained(tmp_path)
    dtypes = training_dtypes(torch.float32, moments=torch.bfloat16)
    ups = {}
    for step in (1, 2):
        place = Placement("device", "device")
        stack = open_for_training(read_architecture(tmp_path), place, dtypes, CPU, tmp_path, BufferBudget())
        # Equal blocks, whose moments become 1.0039: between the bf16 numbers 1 and 1.0078.
        values = {"weight": 0.0, "exp_avg": 1.0, "exp_avg_sq": 0.9921875, "grad": 1.0078125}
        for layer, (kind, value) in itertools.product((1, 2), values.items()):
            stack.write_chunks(kind, layer, lambda _, part, value=value: part.fill_(value))
        config = optimizer_config(Recipe(betas=(0.5, 0.5)))
        optimizer = AdamW(stack, config, step - 1)
        optimizer.resume(Update(step, 1e-3, 1.0), {1, 2})
        optimizer.flush()
        for layer, kind in itertools.product((1, 2), MOMENTS):
            ups[step, layer, kind] = torch.cat([part > 1 for _, part in stack.read_chunks(kind, layer)])
        stack.close()
    assert all(0.3 < up.float().mean() < 0.7 for up in ups.values())
    for one, other in itertools.combinations(ups, 2):
        assert not torch.equal(ups[one], ups[other]), (one, other)


def test_bf16_moments_keep_small_changes() -> None:
    value, target = torch.ones(1024, dtype=torch.bfloat16), 2.0
    for step in range(2000):
        exact = value.float().mul_(0.999).add_(0.001 * target)
        round_stochastically(exact, value, (1, step), 0)
    assert value.float().mean().item() == pytest.approx(2 - 0.999**2000, abs=0.01)


@pytest.mark.parametrize("numel", [LONG_GRADIENT, 5_000_001])
def test_norm_of_long_gradient_is_exact(numel: int) -> None:
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = gradient.double().norm().item()
    assert norm_of(gradient).item() == pytest.approx(exact, rel=1e-6)
    gradient[-1] = math.inf
    assert norm_of(gradient).item() == math.inf


def test_threads_change_no_bit_of_norm() -> None:
    gradient, norms = torch.randn(LONG_GRADIENT * 4, generator=torch.Generator().manual_seed(0)), set()
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        norms.add(norm_of(gradient).item())
    torch.set_num_threads(before)
    assert len(norms) == 1
