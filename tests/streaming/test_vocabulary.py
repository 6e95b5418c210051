"""Test the gradients of a large vocabulary, summed in tiles of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.family_models import FamilyModel, random_of_family
from support.small_stack import PROMPTS, assert_identical, documents, oracle_loss, relative, train

from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.models import layout
from gptj_ft.models.gemma import capped
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.objective import CrossEntropy
from gptj_ft.streaming.step import train_step
from gptj_ft.training.restore import optimizer_config

UNTIED = "gemma, odd"  # of 101 rows
RECIPE = Recipe()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> FamilyModel:
    model, folder = random_of_family(UNTIED, hidden_size=96, head_dim=16), tmp_path_factory.mktemp("untied")
    model.save_pretrained(folder)
    return FamilyModel(model, folder)


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles of 64 and 37 rows."""
    monkeypatch.setattr(layout, "MOST_WHOLE_ROWS", 100)
    monkeypatch.setattr(layout, "TILE_ROWS", 40)
    monkeypatch.setattr(layout, "TILE_ALIGNMENT", 2048)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_tiled_gradients_match_transformers(z_loss: float, case: FamilyModel, tmp_path: Path) -> None:
    docs = documents(101)
    case.model.zero_grad()
    oracle_loss(case.model, docs, z_loss).backward()
    stack = case.open_training(tmp_path)
    assert [len(stack.tiles(index)) for index in range(len(stack.layers))] == [2, 0, 0, 0, 2]
    loss = train_step(
        stack, AdamW(stack, optimizer_config(RECIPE)), micro_batches(docs, PROMPTS, 40), CrossEntropy(z_loss)
    )
    assert loss.mean == pytest.approx(oracle_loss(case.model, docs).item(), rel=1e-6)
    theirs, num_layers = case.of(case.model), len(stack.layers)
    for layer in range(num_layers):
        flat = torch.cat([part.clone() for _, part in stack.read_chunks("grad", layer)])
        for local, gradient in stack.layouts[layer].views(flat).items():
            named = case.architecture.family.name_of(layer, local, num_layers)
            assert relative(gradient, theirs[named].grad) < 1e-5, named


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clip_norm", [0.2, None])
def test_tiles_give_the_same_bits_everywhere(clip_norm: float | None, case: FamilyModel, tmp_path: Path) -> None:
    recipe = Recipe(clip_norm=clip_norm)
    resident = train(case.open_training(tmp_path / "resident", recipe=recipe), recipe)
    budget = BufferBudget(1, num_gradients=1, num_chunks=3, chunk_numel=2048, num_kept_layers=1)
    for place in (("disk", "disk"), ("host", "host")):
        assert_identical(train(case.open_training(tmp_path, place, recipe, budget), recipe), resident)


@pytest.mark.thorough
@pytest.mark.parametrize("clip_norm", [0.2, None])
def test_sampled_tiles_match_whole_vocabulary(
    clip_norm: float | None, case: FamilyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = {"layers": 1, "period": 1, "vocabulary_every": 2}
    recipe = Recipe(clip_norm=clip_norm, method="sampled", sampled=sampled)
    tiled = train(case.open_training(tmp_path / "resident", recipe=recipe), recipe)
    assert_identical(train(case.open_training(tmp_path, ("disk", "disk"), recipe), recipe), tiled)
    monkeypatch.setattr(layout, "MOST_WHOLE_ROWS", 1000)
    whole = train(case.open_training(tmp_path / "whole", recipe=recipe), recipe)
    for ours, theirs in zip(tiled[1], whole[1], strict=True):
        assert all(relative(ours[name], theirs[name]) < 1e-4 for name in theirs)


@pytest.mark.parametrize("device", ["cpu", "meta"])  # both check for overwritten tensors
def test_losses_may_overwrite_capped_logits(device: str) -> None:
    logits = capped(torch.ones(2, 3, device=device, requires_grad=True), 2.0)
    gradient = logits.detach().sub_(1.0)
    torch.autograd.backward(logits, gradient)
