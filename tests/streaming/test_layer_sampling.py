"""Compare layer-sampled training (LISA) with torch.optim, placements with each other, and bytes with the draw."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import random_model
from support.small_stack import (
    CPU,
    LENGTHS,
    LITTLE,
    PROMPTS,
    STEPS,
    assert_identical,
    documents,
    relative,
    save_models,
    train,
    train_oracle,
)

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.errors import UsageError
from gptj_ft.models.layer_sampling import EVERY_LAYER, EveryLayer, SampledLayers, layer_choice
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import load_weights, open_for_training
from gptj_ft.streaming.schedule import PendingUpdates, training_tasks
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.training.restore import optimizer_config

# Of 3 blocks, one at a time, redrawn every second step; embedding and head in every second period.
SAMPLED = SampledLayers(5, seed=3, num_blocks=1, period=2, vocabulary_every=2)
ALWAYS = replace(SAMPLED, vocabulary_every=1)
FAMILIES = {"gptj": "narrow", "gpt2": "gpt2"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory, FAMILIES)


def open_sampled(
    folder: Path, tmp: Path, places: Sequence[str] = ("device", "device"), choice: EveryLayer = SAMPLED,
    recipe: Recipe = Recipe(), dtypes=training_dtypes(torch.float32), budget: BufferBudget = LITTLE,
) -> OffloadedModel:  # fmt: skip
    architecture = read_architecture(folder)
    stack = open_for_training(
        architecture, Placement(*places), dtypes, CPU, tmp / "-".join(places), budget,
        keep_gradients=recipe.clip_norm is not None,
        boundary=boundary_layout(sum(LENGTHS), architecture.config.n_embd, len(LENGTHS)), choice=choice,
    )  # fmt: skip
    with open_checkpoint(folder) as checkpoint:
        load_weights(stack, architecture, checkpoint)
    return stack


def active(choice: EveryLayer, step: int, num_layers: int = 5) -> set[int]:
    return {layer for layer in range(num_layers) if choice.trains(layer, step)}


def test_draw_is_function_of_seed_and_step() -> None:
    many = SampledLayers(30, seed=7, num_blocks=2, period=10, vocabulary_every=3)
    sets = [active(many, step, 30) for step in range(2000)]
    assert sets == [active(replace(many), step, 30) for step in range(2000)]
    assert sets != [active(replace(many, seed=8), step, 30) for step in range(2000)]
    for step, layers in enumerate(sets):
        assert layers == sets[step - step % 10], "the same layers for a whole period"
        assert len(layers - {0, 29}) == 2
        assert layers & {0, 29} == ({0, 29} if step // 10 % 3 == 0 else set())
    counts = [sum(layer in sets[step] for step in range(0, 2000, 10)) for layer in range(1, 29)]
    assert set(counts) <= set(range(5, 31)), "200 draws of 2 from 28: each about 14 times"


@pytest.mark.parametrize("choice", [SAMPLED, ALWAYS, SampledLayers(30, 1, 2, 10, 4)])
def test_last_step_matches_the_draws(choice: SampledLayers) -> None:
    last = dict.fromkeys(range(choice.num_layers), 0)
    for step in range(120):
        assert {layer: choice.last_step(layer, step) for layer in last} == last
        last |= dict.fromkeys(active(choice, step, choice.num_layers), step + 1)


def test_typical_draws_have_distinct_blocks() -> None:
    for num_layers in range(3, 20):
        for number in range(1, num_layers - 1):
            typical = SampledLayers(num_layers, 0, number, 10, 4).typical
            assert [share for share, _ in typical] == [0.25, 0.75]
            with_ends, without = (layers.layers for _, layers in typical)
            assert with_ends - without == {0, num_layers - 1}
            assert len(without) == number
            assert without <= set(range(1, num_layers - 1))
    assert [layers.layers for _, layers in SampledLayers(30, 0, 2, 10, 1).typical] == [{0, 10, 19, 29}]


def test_too_many_blocks_are_refused() -> None:
    recipe = Recipe(method="sampled", sampled={"layers": 4})
    with pytest.raises(UsageError, match=r"sampled\.layers is 4, but the model has 3 blocks"):
        layer_choice(recipe, 5)
    assert layer_choice(recipe, 6) == SampledLayers(6, 0, 4, 10, 1)
    assert layer_choice(Recipe(), 5) == EVERY_LAYER


def layers_by_name(folder: Path) -> dict[str, int]:
    """Return the layer of each parameter by Hugging Face's name."""
    architecture = read_architecture(folder)
    layers = architecture.layers()
    return {
        architecture.family.name_of(layer, name, len(layers)): layer
        for layer, module in enumerate(layers)
        for name, _ in module.named_parameters()
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("choice", [SAMPLED, ALWAYS], ids=["alternating", "always"])
def test_sampled_steps_match_torch(family: str, choice: EveryLayer, folders: dict[str, Path], tmp_path: Path) -> None:
    folder, oracle = folders[family], random_model(FAMILIES[family])
    recipe = Recipe(clip_norm=0.2, weight_decay=0.1)
    counts = [sum(choice.trains(layer, step) for step in range(STEPS)) for layer in range(5)]
    assert len(set(counts)) > 1, "every layer would have as many updates"
    curve, weights = train(open_sampled(folder, tmp_path, choice=choice, recipe=recipe), recipe, steps=STEPS)
    in_fp64, layers = copy.deepcopy(oracle).double(), layers_by_name(folder)
    assert dict(oracle.named_parameters()).keys() == layers.keys()

    def trains(name: str, step: int) -> bool:
        return choice.trains(layers[name], step)

    train_oracle(in_fp64, recipe, trains)
    for ours, theirs in zip(curve, train_oracle(oracle, recipe, trains), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert max(norm for _, norm in curve) > 0.2, "no step was clipped"
    name_of = read_architecture(folder).family.name_of
    theirs, exact = (dict(model.named_parameters(remove_duplicate=False)) for model in (oracle, in_fp64))
    for layer, tensors in enumerate(weights):
        for name, ours in tensors.items():
            of_family = name_of(layer, name, len(weights))
            three = [ours, theirs[of_family].detach(), exact[of_family].detach()]
            if name == "attn.c_attn.bias":  # the keys' bias has no gradient but noise
                three = [x.view(3, -1)[[0, 2]] for x in three]
            assert relative(three[0].double(), three[2]) < 1e-5 + relative(three[1].double(), three[2]), name


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", range(3))
def test_placements_and_buffers_change_no_bit(part: int, family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder, steps = folders[family], 7  # three changes of the period, with the vocabulary and without it
    expected = train(open_sampled(folder, tmp_path), Recipe(), steps=steps)
    rooms = [
        (("host", "host"), LITTLE, 2),
        (("host", "host"), BufferBudget(0, num_gradients=1, num_chunks=1, chunk_numel=2048), 0),
        (("disk", "disk"), LITTLE, 0),
        (("disk", "disk"), BufferBudget(6, num_gradients=2, num_chunks=100, chunk_numel=4096), 0),
        (("disk", "host"), BufferBudget(1, num_kept_layers=2, chunk_numel=2048), 0),
        (("host", "disk", "host"), BufferBudget(2, num_chunks=100, num_kept_layers=1), 0),
    ]
    for number, (places, budget, late) in enumerate(rooms[part::3]):
        stack = open_sampled(folder, tmp_path / str(number), places, budget=budget)
        assert_identical(train(stack, Recipe(), steps=steps, late=late), expected)


@pytest.mark.thorough
def test_placements_change_no_bit_in_bf16(folders: dict[str, Path], tmp_path: Path) -> None:
    bf16 = torch.bfloat16
    for number, narrow in enumerate((torch.float32, bf16)):
        dtypes = training_dtypes(bf16, moments=narrow, gradients=narrow)
        expected = train(open_sampled(folders["gpt2"], tmp_path / str(number), dtypes=dtypes), Recipe(), steps=7)
        for places in (("host", "host"), ("disk", "disk")):
            stack = open_sampled(folders["gpt2"], tmp_path / str(number), places, dtypes=dtypes)
            assert_identical(train(stack, Recipe(), steps=7), expected)


@pytest.mark.thorough
def test_updates_at_once_equal_waiting_ones(folders: dict[str, Path], tmp_path: Path) -> None:
    never, waiting = Recipe(clip_norm=None), Recipe(clip_norm=1e9)
    for places in (("device", "device"), ("host", "host")):
        at_once = train(open_sampled(folders["gpt2"], tmp_path, places, recipe=never), never, steps=7)
        later = train(open_sampled(folders["gpt2"], tmp_path, places, recipe=waiting), waiting, steps=7)
        assert_identical(at_once, later)


def test_no_sampled_block_is_deferred(folders: dict[str, Path], tmp_path: Path) -> None:
    every, sampled = (
        open_sampled(folders["gptj"], tmp_path / str(n), ("disk", "disk"), each)
        for n, each in enumerate((EVERY_LAYER, SAMPLED))
    )
    assert PendingUpdates.of(every, 0, 2).deferred == (1, 2)
    assert PendingUpdates.of(sampled, 0, 2).deferred == ()
    every.close()
    sampled.close()


def test_backward_ends_at_lowest_sampled_layer(folders: dict[str, Path], tmp_path: Path) -> None:
    stack = open_sampled(folders["gptj"], tmp_path)
    updates = PendingUpdates.of(stack)
    for step in range(8):
        updates.step = step
        lowest, tasks = min(active(SAMPLED, step)), training_tasks(stack, updates)
        assert [task.layer for task in tasks if task.descends] == [*range(3, max(lowest, 0) - 1, -1)]
        assert {task.layer for task in tasks if task.gradient} == active(SAMPLED, step)
        assert {task.layer for task in tasks if task.trains} == active(SAMPLED, step), "the others sum no gradient"
    stack.close()


@pytest.mark.thorough
def test_step_moves_bytes_of_its_layers_only(folders: dict[str, Path], tmp_path: Path) -> None:
    stack = open_sampled(folders["gptj"], tmp_path, ("disk", "disk"))
    optimizer, prefix = AdamW(stack, optimizer_config(Recipe())), tmp_path / "disk-disk"
    fp32, numels = 4, [layout.numel for layout in stack.layouts]

    def files() -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in prefix.glob("*.safetensors")}

    for step in range(8):
        before, read, written = files(), stack.meter.bytes_read, stack.meter.bytes_written
        optimizer.begin_step(1e-2)
        train_step(stack, optimizer, micro_batches(documents(101), PROMPTS, 40))
        optimizer.finish_step()
        optimizer.flush()
        trained = active(SAMPLED, step)
        state = fp32 * sum(numels[layer] for layer in trained)
        assert stack.meter.bytes_written - written == 4 * state, "weights, two moments and gradients"
        weights = fp32 * (sum(numels) + sum(numels[min(trained) : -1]))  # of forward and backward
        assert weights <= stack.meter.bytes_read - read <= weights + 4 * state
        changed = {name for name, inode in files().items() if before.get(name) != inode}
        assert changed == {f"{kind}-{layer:03d}.safetensors" for kind in ("layer", "gradient") for layer in trained}
    stack.close()
