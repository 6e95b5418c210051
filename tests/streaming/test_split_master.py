"""Test master weights that are stored as bf16 weights and their low 16 bits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_model
from support.family_models import random_of_family
from support.small_stack import CPU, LENGTHS, take_steps

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.models import layout
from gptj_ft.models.layout import MOMENTS
from gptj_ft.models.trainable import select
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.open import load_weights, open_for_training, open_frozen, trained_parameters
from gptj_ft.streaming.schedule import PendingUpdates
from gptj_ft.streaming.split_master import LOW_BITS, join, split, store
from gptj_ft.streaming.stores.placement import Master, Placement, training_dtypes
from gptj_ft.training.restore import optimizer_config

BF16 = torch.bfloat16
# Upper halves: zeros, denormal numbers, one, the largest finite number, infinities, NaN, all ones; then any others.
UPPER = (0x0000, 0x8000, 0x0001, 0x807F, 0x3F80, 0xBF81, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x7FFF, 0xFFFF)
ANY_UPPER = tuple(range(5, 0x10000, 4099))


def bits_of(upper: int) -> torch.Tensor:
    """Return all 65,536 fp32 numbers with this upper half, as int32."""
    bits = (upper << 16) + torch.arange(1 << 16)
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).int()


@pytest.mark.parametrize("upper", [*UPPER, *ANY_UPPER], ids=hex)
def test_split_restores_every_bit_pattern(upper: int) -> None:
    bits = bits_of(upper)
    weight, low = torch.empty(len(bits), dtype=BF16), torch.empty(len(bits), dtype=torch.int16)
    split(bits.clone().view(torch.float32), weight, low)
    assert torch.equal(join(weight, low).view(torch.int32), bits)
    # Kind by kind, as stores are filled.
    for kind, expected in (("weight", weight), (LOW_BITS, low)):
        target = torch.empty_like(expected)
        store(bits.view(torch.float32), kind, target)  # type: ignore[arg-type]
        assert torch.equal(target.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("upper", [0x0000, 0x8001, 0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x7F7F])
def test_weights_round_half_away_from_zero(upper: int) -> None:
    master = bits_of(upper).view(torch.float32)
    weight = torch.empty(len(master), dtype=BF16)
    store(master, "weight", weight)
    differs = weight != master.bfloat16()
    is_tie = bits_of(upper) & 0xFFFF == 0x8000
    assert not (differs & ~is_tie).any()
    assert (weight[is_tie].float().abs() > master[is_tie].abs()).all()


def test_master_without_bf16_is_not_split() -> None:
    assert "master" in training_dtypes(torch.float16), "16 bits do not restore it from fp16"
    assert training_dtypes(torch.float32).keys() == {"weight", *MOMENTS, "grad"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models: untied, with a tied embedding, and with a vocabulary whose gradient is summed in tiles."""
    models = {
        "gptj": random_model("narrow"),
        "gpt2": random_model("gpt2"),
        "gemma": random_of_family("gemma, odd", hidden_size=96, head_dim=16),
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in models}
    for name, model in models.items():
        model.save_pretrained(folders[name])
    return folders


CASES: dict[str, tuple[str, Recipe, int]] = {  # model, options, deferred blocks
    "clipped": ("gptj", Recipe(clip_norm=0.2), 0),
    "deferred": ("gptj", Recipe(), 2),
    "at once": ("gptj", Recipe(clip_norm=None), 0),
    "tied": ("gpt2", Recipe(), 1),
    "tiles": ("gemma", Recipe(), 0),
    "tiles at once": ("gemma", Recipe(clip_norm=None), 0),
    "adapters": ("gptj", Recipe(method="lora"), 0),
    "top block": ("gptj", Recipe(train=("transformer.h.2.*", "lm_head.*")), 0),
}
PLACEMENTS = {
    "device": Placement("device", "device"),
    "weights on device": Placement("device", "host"),
    "host": Placement("host", "host"),
    "state on disk": Placement("host", "disk"),
    "weights on disk": Placement("disk", "host"),
    "disk": Placement("disk", "disk"),
    "some layers in memory": Placement("device", "disk", in_memory=(1, 3), memory="host"),
}


def use_tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles of 64 and 37 rows."""
    monkeypatch.setattr(layout, "MOST_WHOLE_ROWS", 100)
    monkeypatch.setattr(layout, "TILE_ROWS", 40)
    monkeypatch.setattr(layout, "TILE_ALIGNMENT", 2048)


def open_training(folder: Path, tmp: Path, recipe: Recipe, placement: Placement, dtypes: Any) -> Any:
    architecture = read_architecture(folder)
    stack = open_for_training(
        architecture, placement, dtypes, CPU, tmp, BufferBudget(num_chunks=3, chunk_numel=2048),
        keep_gradients=recipe.clip_norm is not None,
        boundary=boundary_layout(sum(LENGTHS), architecture.config.n_embd, len(LENGTHS)),
        selection=select(architecture, recipe),
    )  # fmt: skip
    with open_checkpoint(folder) as checkpoint:
        open_frozen(stack, architecture, checkpoint, Placement("device", "device"))
        load_weights(stack, architecture, checkpoint)
    return stack


def state_of(stack: Any, recipe: Recipe, num_deferred: int) -> tuple[Any, ...]:
    """Train; return losses and norms, and a digest of master weights, weights and moments."""
    optimizer = AdamW(stack, optimizer_config(recipe), num_deferred=num_deferred)
    assert list(PendingUpdates.of(stack, 0, num_deferred).deferred) in ([], list(range(1, 1 + num_deferred)))
    curve = take_steps(stack, optimizer)
    optimizer.flush()
    digest = hashlib.sha256()
    for layer in stack.trained:
        for kind in ("master", "weight", *MOMENTS):
            for _, part in stack.read_chunks(kind, layer):
                digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    for tensors in trained_parameters(stack):
        for name, tensor in tensors.items():
            assert tensor.dtype == torch.float32, name
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    stack.close()
    return curve, digest.hexdigest()


@pytest.fixture(scope="module")
def with_fp32_master(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """Cache of the runs to compare with."""
    return {}


@pytest.mark.sampled(32)
@pytest.mark.parametrize("place", PLACEMENTS)
@pytest.mark.parametrize("case", CASES)
def test_split_master_changes_no_bit(
    case: str, place: str, folders, with_fp32_master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, recipe, late = CASES[case]
    if "tiles" in case:
        use_tiny_tiles(monkeypatch)
    moments = BF16 if case in ("clipped", "tied") else torch.float32

    def run(placement: Placement, master: Master) -> tuple[Any, ...]:
        dtypes = training_dtypes(BF16, moments, moments, master)
        assert (LOW_BITS in dtypes) == (master == "split")
        return state_of(open_training(folders[name], tmp_path / master, recipe, placement, dtypes), recipe, late)

    if case not in with_fp32_master:
        with_fp32_master[case] = run(Placement("device", "device"), "fp32")
    assert run(PLACEMENTS[place], "split") == with_fp32_master[case]


def test_split_master_needs_four_bytes() -> None:
    sizes = {
        master: sum(training_dtypes(BF16, master=master)[kind].itemsize for kind in kinds)
        for master, kinds in (("fp32", ("weight", "master")), ("split", ("weight", LOW_BITS)))
    }
    assert sizes == {"fp32": 6, "split": 4}
