"""Freezing: what `train` does not match costs no state, no gradient and no writes, and the rest trains as elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import random_model
from support.small_run import assert_same_weights, new_run, small_session, weights_of
from support.small_run import train as train_run
from support.small_stack import (
    CPU,
    LENGTHS,
    LITTLE,
    PROMPTS,
    STEPS,
    assert_identical,
    documents,
    lr_of,
    oracle_loss,
    relative,
    train,
)  # fmt: skip

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.errors import UsageError
from gptj_ft.models.trainable import match, select
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.open import load_weights, open_for_training, open_frozen
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.training.restore import optimizer_config

# Of three blocks: one alone with the head; some tensors of some layers; the embedding alone; the head alone.
PATTERNS = {
    "a block and the head": ("narrow", ("h.1.*", "lm_head.*")),
    "parts of layers": ("narrow", ("h.[12].mlp.*", "*.ln_1.bias", "ln_f.*")),
    "the embedding": ("narrow", ("wte.weight",)),
    "the head": ("narrow", ("lm_head.*", "ln_f.*")),
    "an embedding that is the head, too": ("gpt2", ("wte.weight",)),
    "blocks under an embedding that is the head, too": ("gpt2", ("mlp.*", "ln_f.*")),
}
BOTH = pytest.mark.parametrize(("shape", "patterns"), PATTERNS.values(), ids=PATTERNS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {shape: tmp_path_factory.mktemp(shape) for shape, _ in PATTERNS.values()}
    for shape, folder in made.items():
        random_model(shape).save_pretrained(folder)
    return made


@pytest.fixture
def folder(folders: dict[str, Path], request: pytest.FixtureRequest) -> Path:
    return folders[request.getfixturevalue("shape") if "shape" in request.fixturenames else "narrow"]


def open_training(
    folder: Path, tmp: Path, patterns, placement=Placement("device", "device"), budget=LITTLE, recipe=None
):
    architecture = read_architecture(folder)
    selection = select(architecture, Recipe(train=patterns))
    stack = open_for_training(
        architecture, placement, training_dtypes(torch.float32), CPU, tmp, budget,
        keep_gradients=(recipe or Recipe()).clip_norm is not None,
        boundary=boundary_layout(sum(LENGTHS), architecture.config.n_embd, len(LENGTHS)), selection=selection,
    )  # fmt: skip
    checkpoint = open_checkpoint(folder)
    open_frozen(stack, architecture, checkpoint, placement)
    load_weights(stack, architecture, checkpoint)
    return stack


def train_trained(stack, recipe=Recipe(), late: int = 0):
    """As `train`, the weights being those that are trained."""
    layouts = stack.layouts
    curve, weights = train(stack, recipe, late=late)
    return curve, [{name: each[name] for name in layout.shapes} for each, layout in zip(weights, layouts, strict=True)]


@pytest.mark.sampled(10)
@BOTH
def test_ten_partial_training_steps_match_torch(shape: str, patterns, folder: Path, tmp_path: Path) -> None:
    oracle = random_model(shape)
    recipe = Recipe(train=patterns, clip_norm=0.2)
    stack = open_training(folder, tmp_path, patterns)
    curve, weights = train(stack, recipe, steps=STEPS)
    named = dict(oracle.named_parameters())
    chosen = match(patterns, named, "--train", "parameter")
    for name, parameter in named.items():
        parameter.requires_grad_(name in chosen)
    trained = [named[name] for name in chosen]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], eps=recipe.eps, betas=recipe.betas)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr_of(step)
        optimizer.zero_grad()
        loss = oracle_loss(oracle, documents(oracle.config.vocab_size))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.2)
        optimizer.step()
        assert curve[step] == pytest.approx((loss.item(), norm.item()), rel=1e-5)
    family, before = read_architecture(folder).family, dict(random_model(shape).named_parameters())
    for layer, tensors in enumerate(weights):
        for local, ours in tensors.items():
            name = family.name_of(layer, local, len(weights))
            if name not in named:
                continue  # the tied embedding
            assert relative(ours, named[name]) < 1e-5, name
            assert torch.equal(ours, before[name]) == (name not in chosen), name


@pytest.mark.sampled(40)
@BOTH
@pytest.mark.parametrize("part", range(4))
def test_placement_and_recomputation_change_no_bit(
    part: int, shape: str, patterns, folder: Path, tmp_path: Path
) -> None:
    expected = train_trained(open_training(folder, tmp_path / "resident", patterns))
    for number, (placement, budget, late) in enumerate(
        [
            (Placement("host", "host"), LITTLE, 0),
            (Placement("disk", "disk"), LITTLE, 1),
            (Placement("disk", "disk", "disk", frozen="host"), replace(LITTLE, read_ahead=0), 0),
            (Placement("device", "disk", "host", frozen="disk"), replace(LITTLE, read_ahead=3), 0),
            (Placement("disk", "host", frozen="device"), replace(LITTLE, num_kept_layers=1), 1),
            (Placement("host", "device", frozen="disk"), replace(LITTLE, num_kept_layers=3), 0),
            (Placement("disk", "disk", in_memory=(1, 3)), LITTLE, 1),
            (Placement("host", "disk", frozen="disk", in_memory=(2,), memory="device"), LITTLE, 1),
        ][part::4]
    ):
        stack = open_training(folder, tmp_path / str(number), patterns, placement, budget)
        assert_identical(train_trained(stack, late=late), expected)


def test_frozen_weights_have_no_state_and_writes(folder: Path, tmp_path: Path) -> None:
    stack = open_training(folder, tmp_path, ("h.1.*",), Placement("disk", "disk"))
    runs = []
    for block in stack.layers[1:-1]:
        block.register_forward_pre_hook(lambda block, inputs: runs.append((block.attn.index, inputs[0].requires_grad)))
    optimizer, batches = AdamW(stack, optimizer_config(Recipe())), micro_batches(documents(101), PROMPTS, 1000)
    before = stack.meter.bytes_written
    optimizer.begin_step(1e-3)
    train_step(stack, optimizer, batches)
    optimizer.finish_step()
    optimizer.flush()
    block_bytes = 4 * stack.layouts[2].numel
    assert stack.meter.bytes_written - before == 4 * block_bytes, "a gradient, then weights and two moments"
    assert runs[:3] == [(0, False), (1, False), (2, False)], "forward"
    assert runs[3:] == [(2, True), (1, False)], "backward ends at the lowest trained block"
    assert [path.name for path in sorted(tmp_path.glob("*.safetensors"))] == [
        "gradient-002.safetensors", "layer-002.safetensors",
    ]  # fmt: skip
    stack.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["device", "disk"])
def test_partial_training_leaves_frozen_weights_unchanged(place: str, tmp_path: Path) -> None:
    options = {"train": ("h.1.mlp.*", "ln_f.*"), "weights": place, "optimizer_state": place}
    session = small_session(tmp_path / "model", **options)
    run = new_run(tmp_path)
    train_run(session, run)
    tuned, before = weights_of(run.model), weights_of(session.model)
    assert tuned.keys() == before.keys()
    moved = {name for name in tuned if not torch.equal(tuned[name], before[name])}
    assert moved == {name for name in tuned if name.startswith(("transformer.h.1.mlp.", "transformer.ln_f."))}
    elsewhere = small_session(tmp_path / "model", **{**options, "weights": "host", "optimizer_state": "disk"})
    (tmp_path / "2").mkdir()
    other = new_run(tmp_path / "2")
    train_run(elsewhere, other)
    assert_same_weights(weights_of(other.model), tuned)


def test_forecast_of_partial_training_excludes_frozen_state(tmp_path: Path) -> None:
    whole, part = (
        small_session(tmp_path / "model", train=train).plan for train in ((), ("h.1.*", "lm_head.*", "ln_f.*"))
    )
    counts = whole.workload.num_trained, part.workload.num_parameters
    assert counts == 2 * (whole.workload.num_parameters,)
    session = small_session(tmp_path / "model", train=("h.1.*", "lm_head.*", "ln_f.*"))
    trained = sum(layout.numel for layout in session.selection.trained)
    assert part.costs.disk_bytes_written_per_step == 16 * trained < whole.costs.disk_bytes_written_per_step
    assert part.costs.compute_seconds < whole.costs.compute_seconds
    assert part.disk_bytes < whole.disk_bytes


def test_patterns_match_at_any_dot() -> None:
    names = [f"transformer.h.{n}.{end}" for n in (2, 3, 20, 27, 28) for end in ("ln_1.bias", "attn.q_proj.weight")]
    assert match(("h.2[0-7].*",), names, "--train", "parameter") == names[4:8]
    assert match(("q_proj.weight", "transformer.h.3.*"), names, "--train", "parameter") == [
        names[1], names[2], names[3], names[5], names[7], names[9],
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"--train 'h\.3\.atn\.\*' matches no parameter .*did you mean '.*h\.3\.attn"):
        match(("h.2.*", "h.3.atn.*"), names, "--train", "parameter")


def test_rank_above_every_adapted_weight_is_refused(tmp_path: Path) -> None:
    most = small_session(tmp_path / "model", method="lora", lora={"rank": 16, "targets": ["all-linear"]})
    with pytest.raises(UsageError, match=r"lora.rank: 17 is more than any adapted weight .* at most 16; --method full"):
        small_session(tmp_path / "again", method="lora", lora={"rank": 17, "targets": ["all-linear"]})
    assert {rank.rank for rank in most.selection.adapters.values()} == {16}


def test_partial_training_resumes_and_verifies(shell, rows_file: Path) -> None:
    options = "--recipe summarization --data rows.jsonl --model tiny --lr 1e-2 --batch-size 8 --max-steps 2"
    done = shell(
        f"finetune {options} --train h.1.*,lm_head.* --output out --weights disk --optimizer-state disk --json"
    )
    assert done.code == 0, done.err
    assert done.json["loss_after"] < done.json["loss_before"]
    assert shell("runs verify out").code == 0
    done = shell(f"finetune {options} --train h.1.*,lm_haed.*")
    assert (done.code, "did you mean 'lm_head." in done.err) == (2, True), done.err
