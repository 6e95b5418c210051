"""Compare loss scaling in fp16 with `torch.amp.GradScaler`, and placements with each other."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import random_model
from support.small_stack import (
    CPU,
    LENGTHS,
    LITTLE,
    PROMPTS,
    assert_identical,
    documents,
    lr_of,
    relative,
    save_models,
    weights_after,
)

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.loss_scale import LossScale
from gptj_ft.streaming.open import load_weights, open_for_training
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.training.restore import optimizer_config

SHAPE_OF = {"gptj": "narrow", "gpt2": "gpt2"}  # family -> shape; this GPT-2 has a tied head
FP16 = training_dtypes(torch.float16)
STEPS = 10
# Large enough to overflow; it grows fast enough to overflow again.
STEEP = LossScale(2.0**22, growth_interval=2)
POISONED = (6,)  # steps with an infinite gradient in one layer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory, SHAPE_OF)


@pytest.fixture
def folder(family: str, folders: dict[str, Path]) -> Path:
    return folders[family]


def open_training(folder: Path, tmp: Path, placement=("device", "device"), dtypes=FP16, budget=LITTLE):
    architecture = read_architecture(folder)
    stack = open_for_training(
        architecture, Placement(*placement), dtypes, CPU, tmp, budget,
        boundary=boundary_layout(sum(LENGTHS), architecture.config.n_embd, len(LENGTHS)),
    )  # fmt: skip
    with open_checkpoint(folder) as checkpoint:
        load_weights(stack, architecture, checkpoint)
    return stack


def test_scale_and_growth_follow_grad_scaler() -> None:
    draw = random.Random(0)
    for interval, likely in ((1, 0.0), (3, 0.2), (3, 0.6), (1, 0.4)):
        parameter = torch.zeros(1, requires_grad=True)
        theirs = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=interval)
        ours, optimizer = LossScale(growth_interval=interval), torch.optim.SGD([parameter])
        for step in range(300):
            assert theirs.scale(torch.ones(())).item() == ours.scale, step
            assert theirs._get_growth_tracker() == ours.growth_tracker, step
            overflows = draw.random() < likely
            parameter.grad = torch.tensor([math.inf if overflows else 1.0])
            theirs.step(optimizer)
            theirs.update()
            ours = ours.after_step(overflows)
            if ours.scale < 1.0:
                break
        assert ours.num_skipped or not likely
        assert likely or ours.scale == 2.0**127, "it stays inside fp32"


def train(
    stack, recipe: Recipe = Recipe(), scale: LossScale = STEEP, steps: int = STEPS, late: int = 0, poisoned=POISONED
):
    """Train in fp16; return (loss, norm, scale, skipped steps) of each step, and each layer's weights by name."""
    optimizer, curve = AdamW(stack, optimizer_config(recipe), num_deferred=late), []
    optimizer.loss_scale = scale
    docs, poison = documents(stack.layers[0].wte.num_embeddings), stack.trained[0]
    add_gradient = optimizer.add_gradient

    def poisoning(load) -> None:
        if optimizer.step in poisoned and load.index == poison:
            load.gradient.flat[1] = math.inf
        add_gradient(load)

    optimizer.add_gradient = poisoning
    for _ in range(steps):
        optimizer.begin_step(lr_of(optimizer.num_updates))
        used = optimizer.loss_scale.scale
        loss = train_step(stack, optimizer, micro_batches(docs, PROMPTS, 1))
        norm = optimizer.finish_step()
        curve.append((loss.mean, norm if math.isfinite(norm) else None, used, optimizer.loss_scale.num_skipped))
    return curve, weights_after(stack, optimizer)


def train_with_grad_scaler(oracle, recipe: Recipe, scale: LossScale):
    """Train a `transformers` model in fp16 with an fp32 master copy, as `train` does with `poisoned`."""
    half = random_model(SHAPE_OF["gpt2" if oracle.config.model_type == "gpt2" else "gptj"]).half()
    masters, computing = list(oracle.parameters()), list(half.parameters())
    groups = [
        {"params": [p for p in masters if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in masters if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, eps=recipe.eps, betas=recipe.betas)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale.scale, growth_interval=scale.growth_interval)
    # As in the Trainer of transformers, a skipped step does not advance the schedule.
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda updates: lr_of(updates) / adamw.defaults["lr"])
    docs, curve, num_skipped = documents(oracle.config.vocab_size), [], 0
    num_targets = sum(len(ids) - max(prompt, 1) for ids, prompt in zip(docs, PROMPTS, strict=True))
    for step in range(STEPS):
        for master, parameter in zip(masters, computing, strict=True):
            parameter.data.copy_(master)
            master.grad = torch.zeros_like(master)
        total = 0.0
        for ids, prompt in zip(docs, PROMPTS, strict=True):
            first = max(prompt, 1) - 1
            logits = half(torch.tensor([ids])).logits[0, first:-1].float()
            loss = F.cross_entropy(logits, torch.tensor(ids[first + 1 :]), reduction="sum")
            scaler.scale(loss / num_targets).backward()
            total += loss.item()
            for master, parameter in zip(masters, computing, strict=True):
                master.grad += parameter.grad
                parameter.grad = None
        if step in POISONED:
            masters[0].grad.view(-1)[1] = math.inf
        used = scaler.get_scale()
        scaler.unscale_(adamw)
        norm = torch.nn.utils.clip_grad_norm_(masters, recipe.clip_norm).item()
        scaler.step(adamw)
        scaler.update()
        if scaler.get_scale() < used:
            num_skipped += 1
        else:
            schedule.step()
        curve.append((total / num_targets, norm if math.isfinite(norm) else None, used, num_skipped))
    return curve, dict(oracle.named_parameters(remove_duplicate=False))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "scale"), [("gptj", STEEP), ("gpt2", STEEP), ("gpt2", LossScale())])
def test_loss_scaling_matches_grad_scaler(scale: LossScale, family: str, folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(clip_norm=0.2)
    ours, weights = train(open_training(folder, tmp_path), recipe, scale)
    theirs, parameters = train_with_grad_scaler(random_model(SHAPE_OF[family]), recipe, scale)
    assert [line[2:] for line in ours] == [line[2:] for line in theirs]
    assert [line[0] for line in ours] == pytest.approx([line[0] for line in theirs], rel=1e-3)
    for (_, norm, *_), (_, expected, *_) in zip(ours, theirs, strict=True):
        assert (norm is None) == (expected is None)
        assert norm is None or norm == pytest.approx(expected, rel=1e-2)
    assert max(norm for _, norm, *_ in ours if norm is not None) > 0.2, "clipping was never needed"
    of_family, total = read_architecture(folder).family, len(weights)
    for layer, tensors in enumerate(weights):
        for name, tensor in tensors.items():
            if (
                "k_proj" not in name and "q_proj" not in name and "c_attn" not in name
            ):  # mostly rounding noise in transformers
                theirs_in_fp32 = parameters[of_family.name_of(layer, name, total)]
                # transformers computes attention in fp16: 1.3 to 2.3 times our distance from fp64.
                assert relative(tensor.float(), theirs_in_fp32) < 2e-3, (layer, name)


@pytest.fixture(scope="module")
def resident_runs(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    return {
        family: train(open_training(folder, tmp_path_factory.mktemp("resident"))) for family, folder in folders.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "placement", "late", "kept"),
    [
        ("gptj", ("device", "host"), 0, 0),
        ("gptj", ("host", "disk"), 2, 0),
        ("gptj", ("disk", "disk"), 0, 2),
        ("gpt2", ("host", "device", "host"), 0, 0),
        ("gpt2", ("disk", "disk", "disk"), 2, 3),
    ],
)
def test_fp16_placements_agree_bit_for_bit(
    placement, late: int, kept: int, family: str, folder: Path, resident_runs, tmp_path: Path
) -> None:
    budget = BufferBudget(1, num_gradients=1, num_chunks=2, chunk_numel=2048, num_kept_layers=kept)
    found = train(open_training(folder, tmp_path, placement, budget=budget), late=late)
    assert_identical(found, resident_runs[family])
    skips = [line[3] for line in found[0]]
    assert 3 < skips[-1] < STEPS - 3, "of both kinds there are some"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "places", "dtypes"),
    [
        ("gptj", ("device", "device"), FP16),
        ("gpt2", ("disk", "disk"), training_dtypes(torch.float16, torch.bfloat16, torch.bfloat16)),
    ],
)
def test_skipped_step_changes_only_the_scale(places, dtypes, family: str, folder: Path, tmp_path: Path) -> None:
    """A skipped step changes no moment, no bias correction and no learning rate."""
    scale = LossScale(2.0**10)
    expected = train(open_training(folder, tmp_path / "a", places, dtypes=dtypes), scale=scale, steps=4, poisoned=())
    scale_before = replace(scale, scale=4 * scale.scale)
    found = train(
        open_training(folder, tmp_path / "b", places, dtypes=dtypes), scale=scale_before, steps=6, poisoned=(0, 1)
    )
    assert [line[:3] for line in found[0][2:]] == [line[:3] for line in expected[0]]
    assert [line[2:] for line in found[0][:3]] == [(4096.0, 1), (2048.0, 2), (1024.0, 2)]
    assert_identical((None, found[1]), (None, expected[1]))
