"""On a CUDA device, placements agree bit for bit and with the CPU up to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.small_stack import PLACES, PROMPTS, STEPS, documents, lr_of

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.models import attention
from gptj_ft.models.attention import attend, takes_ragged
from gptj_ft.models.batch import pack
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.open import load_weights, open_for_training
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.system.machine import choose_device
from gptj_ft.training.restore import optimizer_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True, scope="module")
def device() -> torch.device:
    return choose_device("cuda")


def train(folder: Path, tmp: Path, device: torch.device, places=("device",) * 3, dtypes=None, kept=0, late=0):
    architecture = read_architecture(folder)
    stack = open_for_training(
        architecture, Placement(*places), dtypes or training_dtypes(torch.float32), device, tmp / "-".join(places),
        BufferBudget(num_chunks=3, chunk_numel=2048, num_kept_layers=kept),
        boundary=boundary_layout(200, architecture.config.n_embd, 6),
    )  # fmt: skip
    with open_checkpoint(folder) as checkpoint:
        load_weights(stack, architecture, checkpoint)
    optimizer, curve = AdamW(stack, optimizer_config(Recipe()), num_deferred=late), []
    docs = documents(stack.layouts[0].shapes["wte.weight"][0])
    for step in range(STEPS):
        optimizer.begin_step(lr_of(step))
        batches = [batch.to(device) for batch in micro_batches(docs, PROMPTS, 40)]
        curve.append((train_step(stack, optimizer, batches).mean, optimizer.finish_step()))
    optimizer.flush()
    weights = [
        torch.cat([part.cpu() for _, part in stack.read_chunks("weight", layer)]) for layer in range(len(stack.layers))
    ]
    stack.close()
    return curve, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("place", PLACES[1:])
def test_placement_never_changes_a_bit_on_cuda(
    place: str, late: int, dtype: torch.dtype, model_folder: Path, tmp_path: Path
) -> None:
    dtypes = training_dtypes(dtype)
    curve, weights = train(model_folder, tmp_path / "a", CUDA, dtypes=dtypes)
    for places in ((place, place, place), ("device", place, "device"), (place, "device", "device")):
        for kept in (0, 1):
            other = train(model_folder, tmp_path / f"{places}{kept}", CUDA, places, dtypes, kept, late)
            assert other[0] == curve
            assert all(torch.equal(a, b) for a, b in zip(weights, other[1], strict=True))


def test_cuda_agrees_with_the_cpu(model_folder: Path, tmp_path: Path) -> None:
    ours, _ = train(model_folder, tmp_path / "cuda", CUDA, ("host",) * 3)
    theirs, _ = train(model_folder, tmp_path / "cpu", torch.device("cpu"))
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("width", [64, 256])
def test_ragged_kernel_matches_single_documents(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not takes_ragged(CUDA, torch.bfloat16, width):
        pytest.skip("no such kernel for this device and width")
    batch = pack([[1] * length for length in (5, 300, 1, 64)]).to(CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    shape = (len(batch.tokens_T), 2, width)
    inputs = [torch.randn(shape, device=CUDA, dtype=torch.bfloat16, generator=generator) for _ in range(3)]
    results = []
    for takes in (True, False):
        monkeypatch.setattr(attention, "takes_ragged", lambda *_, takes=takes: takes)
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves, batch, 0)
        out.sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
