"""Padding tokens change results by rounding only, and bound the number of kernel shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_stack import CPU, weights_after
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.models.batch import PackedBatch, most_padded, pack, rounded_up
from gptj_ft.streaming import step
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.objective import CrossEntropy
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import load_weights, open_for_training
from gptj_ft.streaming.scoring import evaluate_losses
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.training.restore import optimizer_config

LENGTHS = (19, 7, 31, 2, 14)  # 73 tokens and 61 targets: padding adds 3 tokens and 1 row of the head
PROMPTS = (4, 1, 3, 0, 2)
SEEDS = (3, 1, 4, 1, 5)  # of dropout, one a document
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def documents(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def opened(folder: Path, scratch: Path, num_kept: int = 0) -> OffloadedModel:
    architecture, budget = read_architecture(folder), BufferBudget(num_kept_layers=num_kept)
    dtypes = training_dtypes(torch.float32)
    stack = open_for_training(architecture, Placement("device", "device"), dtypes, CPU, scratch, budget)
    with open_checkpoint(folder) as checkpoint:
        load_weights(stack, architecture, checkpoint)
    return stack


def trained(folder: Path, scratch: Path, objective: CrossEntropy, seeds: tuple[int, ...] | None, num_kept: int = 0):
    """Take three steps; return their losses and norms, a loss without training, and the weights."""
    stack = opened(folder, scratch, num_kept)
    optimizer, found = AdamW(stack, optimizer_config(Recipe())), []
    docs = documents(stack.layers[0].wte.num_embeddings)
    batches = micro_batches(docs, PROMPTS, 1000, seeds=seeds)
    for _ in range(3):
        optimizer.begin_step(1e-2)
        loss = train_step(stack, optimizer, batches, objective)
        found += [loss.mean, loss.z_mean, optimizer.finish_step()]
    optimizer.flush()
    found.append(evaluate_losses(stack, batches, objective)[0].mean)
    return found, weights_after(stack, optimizer)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that turns padding off."""

    def turn_off() -> None:
        monkeypatch.setattr(step, "compiles_per_shape", lambda device: False)

    return turn_off


@pytest.mark.sampled(21)
@pytest.mark.parametrize(
    ("objective", "seeds", "num_kept"),
    [
        (CrossEntropy(), None, 0), (CrossEntropy(), SEEDS, 2),
        (CrossEntropy(z_loss=1e-2), None, 2), (CrossEntropy(z_loss=1e-2), SEEDS, 0),
    ],
)  # fmt: skip
def test_padding_changes_results_by_rounding_only(
    model_folder: Path, tmp_path: Path, without, objective: CrossEntropy, seeds, num_kept: int
) -> None:
    if seeds:
        raw = json.loads((model_folder / "config.json").read_text())
        (model_folder / "config.json").write_text(json.dumps({**raw, **dict.fromkeys(DROPOUTS, 0.2)}))
    ours, weights = trained(model_folder, tmp_path / "filled", objective, seeds, num_kept)
    without()
    plain, expected = trained(model_folder, tmp_path / "plain", objective, seeds, num_kept)
    assert ours == pytest.approx(plain, rel=1e-5)
    for layer, tensors in enumerate(expected):
        for name, tensor in tensors.items():
            assert (weights[layer][name] - tensor).abs().max() < 2e-4, (layer, name)


class Products(TorchDispatchMode):
    """Record the shapes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "_linear_pointwise"):
            self.shapes.add(tuple(tuple(x.shape) for x in args if isinstance(x, Tensor) and x.ndim == 2))
        return func(*args, **(kwargs or {}))


@pytest.mark.thorough
def test_products_have_few_shapes(model_folder: Path, tmp_path: Path) -> None:
    stack = opened(model_folder, tmp_path)
    optimizer, seen = AdamW(stack, optimizer_config(Recipe())), list[int]()
    vocabulary = stack.layers[0].wte.num_embeddings
    with Products() as products:
        for more in range(1, 33):
            optimizer.begin_step(1e-3)
            train_step(stack, optimizer, [pack(documents(vocabulary, (32, more)), (1, 1))])
            optimizer.finish_step()
            seen.append(len(products.shapes))
    stack.close()
    assert seen[-1] <= 17 * seen[0], "of 32 numbers of tokens, 16 and one for those of the targets"


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 1000, 1025, 2047, 2048, 2049, 100_000])
def test_padding_adds_less_than_a_sixteenth(count: int) -> None:
    assert count <= rounded_up(count) <= most_padded(count)
    assert rounded_up(rounded_up(count)) == rounded_up(count)
    assert len({rounded_up(each) for each in range(count, 2 * count)}) <= 33


def test_full_batch_is_not_padded() -> None:
    batch: PackedBatch = pack([[1] * 64])
    assert batch.padded() is batch
    assert len(pack([[1] * 65]).padded().tokens_T) == 68
