"""Compare the engine with `transformers` and `torch.optim`, and placements with each other."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import SHAPES, random_gpt2, random_gptj
from support.head_chunks import limit_head_chunk
from support.rates import timed_by_flops
from support.small_stack import (
    CPU,
    FEW_STEPS,
    LENGTHS,
    PLACES,
    PROMPTS,
    STEPS,
    assert_identical,
    documents,
    lr_of,
    next_token_logits,
    oracle_loss,
    relative,
    save_models,
    train,
    train_oracle,
)
from torch.overrides import TorchFunctionMode

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.data.batches import micro_batches
from gptj_ft.errors import GptjFtError
from gptj_ft.models.batch import NO_TARGET, PackedBatch, pack
from gptj_ft.models.layout import TIED_SOURCE_LAYER, Layout
from gptj_ft.planning.costs import training_passes
from gptj_ft.planning.step_replay import ScheduleInputs
from gptj_ft.planning.workload import StepTokens, Workload
from gptj_ft.streaming.activations import NUM_BUFFERS, DeviceActivations, boundary_layout
from gptj_ft.streaming.adamw import BLOCK_NUMEL, AdamW
from gptj_ft.streaming.buffers import Buffer, BufferBudget
from gptj_ft.streaming.exchange import Channel
from gptj_ft.streaming.kept_activations import KeptActivations
from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.objective import CrossEntropy
from gptj_ft.streaming.open import load_weights, open_for_inference, open_for_training
from gptj_ft.streaming.prefetch import Prefetcher
from gptj_ft.streaming.schedule import LayerTask, PendingUpdates, inference_tasks, training_tasks
from gptj_ft.streaming.scoring import evaluate_losses
from gptj_ft.streaming.step import train_step
from gptj_ft.streaming.stores.base import LayerStore, Span
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.streaming.stores.state_file import StateFile, layer_path
from gptj_ft.streaming.update_check import UnchangedParameters
from gptj_ft.training.restore import optimizer_config


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Use two threads per kernel, as a user would; other tests have one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


FAMILIES = {"gptj": "narrow", "gpt2": "gpt2"}  # family -> shape with 101 tokens and 3 blocks
both_families = pytest.mark.parametrize("family", FAMILIES)


def open_training(
    folder: Path, tmp: Path, placement=("device", "device"), recipe=Recipe(), dtypes=training_dtypes(torch.float32),
    budget=BufferBudget(chunk_numel=2048, num_chunks=3),
):  # fmt: skip
    """Open a model for training; chunks are small, so that a layer has more chunks than the pool has buffers."""
    architecture = read_architecture(folder)
    places = placement if isinstance(placement, Placement) else Placement(*placement)
    stack = open_for_training(
        architecture, places, dtypes, CPU, tmp / f"{places.weights}-{places.optimizer_state}", budget,
        keep_gradients=recipe.clip_norm is not None,
        boundary=boundary_layout(sum(LENGTHS), architecture.config.n_embd, len(LENGTHS)),
    )  # fmt: skip
    with open_checkpoint(folder) as checkpoint:
        load_weights(stack, architecture, checkpoint)
    return stack


def test_logits_match_transformers(oracle, model_folder: Path) -> None:
    docs = documents(oracle.config.vocab_size)
    with open_for_inference(model_folder, CPU, torch.float32) as (_, stack), torch.no_grad():
        ours = next_token_logits(stack, pack(docs))
        theirs = torch.stack([oracle(torch.tensor([ids])).logits[0, -1] for ids in docs])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(2)
def test_loss_and_gradients_match_transformers(oracle, model_folder: Path, tmp_path: Path) -> None:
    docs = documents(oracle.config.vocab_size)
    expected = oracle_loss(oracle, docs)
    expected.backward()
    stack = open_training(model_folder, tmp_path)
    optimizer = AdamW(stack, optimizer_config(Recipe()))
    batches = micro_batches(docs, PROMPTS, 20)
    assert len(batches) > 3
    loss = train_step(stack, optimizer, batches)
    assert loss.mean == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(stack, model_folder, oracle)


@pytest.mark.sampled(2)
def test_full_window_loss_matches_transformers(oracle, model_folder: Path, tmp_path: Path) -> None:
    window = oracle.config.n_positions
    generator = torch.Generator().manual_seed(1)
    docs = torch.randint(0, oracle.config.vocab_size, (3, window + 1), generator=generator)
    expected = F.cross_entropy(oracle(docs[:, :-1]).logits.flatten(0, 1), docs[:, 1:].flatten())
    expected.backward()
    stack = open_training(model_folder, tmp_path)
    loss = train_step(
        stack,
        AdamW(stack, optimizer_config(Recipe())),
        micro_batches(docs.tolist(), [0] * 3, 2 * window, window=window),
    )
    assert loss.mean == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(stack, model_folder, oracle)


def assert_same_gradients(stack, folder: Path, oracle) -> None:
    family, total = read_architecture(folder).family, len(stack.layers)
    theirs = dict(oracle.named_parameters())
    compared = 0
    for layer in range(total):
        flat = torch.cat([part.clone() for _, part in stack.read_chunks("grad", layer)])
        for name, gradient in stack.layouts[layer].views(flat).items():
            assert relative(gradient, theirs[family.name_of(layer, name, total)].grad) < 1e-5, name
            compared += 1
    assert compared == len(theirs)


@pytest.mark.sampled(2)
def test_z_loss_gradients_match_autograd(oracle, model_folder: Path, tmp_path: Path) -> None:
    docs, z_loss = documents(oracle.config.vocab_size), 0.1
    plain = oracle_loss(oracle, docs).item()
    expected = oracle_loss(oracle, docs, z_loss)
    expected.backward()
    stack = open_training(model_folder, tmp_path)
    loss = train_step(
        stack, AdamW(stack, optimizer_config(Recipe())), micro_batches(docs, PROMPTS, 40), CrossEntropy(z_loss)
    )
    assert loss.mean == pytest.approx(plain, rel=1e-6)
    assert loss.z_mean == pytest.approx(expected.item() - plain, rel=1e-5)
    assert loss.z_mean > 0.1 * plain, "the z-loss is too small to test"
    assert_same_gradients(stack, model_folder, oracle)


class Calls(TorchFunctionMode):
    """Record the names of torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_zero_weight_computes_no_z_loss(weight: float, narrow_folder: Path, tmp_path: Path) -> None:
    stack, batches = open_training(narrow_folder, tmp_path), micro_batches(documents(101), PROMPTS, 40)
    with Calls() as calls:
        loss = train_step(stack, AdamW(stack, optimizer_config(Recipe())), batches, CrossEntropy(weight))
    assert ("logsumexp" in calls.names) == (loss.z_mean != 0.0) == (weight != 0.0)


@pytest.mark.sampled(4)
def test_ten_adamw_steps_with_clipping_match_torch(oracle, model_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(clip_norm=0.2, weight_decay=0.1)
    curve, weights = train(open_training(model_folder, tmp_path, recipe=recipe), recipe, steps=STEPS)
    in_fp64 = copy.deepcopy(oracle).double()
    train_oracle(in_fp64, recipe)
    for ours, theirs in zip(curve, train_oracle(oracle, recipe), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert max(norm for _, norm in curve) > 0.2, "no step was clipped"
    family = read_architecture(model_folder).family
    theirs, exact = (dict(model.named_parameters(remove_duplicate=False)) for model in (oracle, in_fp64))
    for layer, tensors in enumerate(weights):
        for name, ours in tensors.items():
            of_family = family.name_of(layer, name, len(weights))
            three = [ours, theirs[of_family].detach(), exact[of_family].detach()]
            if name == "attn.c_attn.bias":
                # The keys' bias shifts all scores of a query equally. Softmax ignores it; its gradient is noise.
                three = [x.view(3, -1)[[0, 2]] for x in three]
            # AdamW divides by the gradient's size: near rounding noise, torch in fp32 is off by 1e-5, too.
            assert relative(three[0].double(), three[2]) < 1e-5 + relative(three[1].double(), three[2]), name


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory, FAMILIES)


@pytest.fixture(scope="module")
def resident_runs(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    return {
        family: train(open_training(folder, tmp_path_factory.mktemp("resident")), Recipe())
        for family, folder in folders.items()
    }


@pytest.fixture
def family() -> str:
    return "gptj"  # default of tests without a parameter


@pytest.fixture
def narrow_folder(family: str, folders: dict[str, Path]) -> Path:
    return folders[family]


@pytest.fixture
def resident_run(family: str, resident_runs):
    return resident_runs[family]


ROOMS = {
    "no read-ahead": BufferBudget(0, num_gradients=1, num_chunks=1, chunk_numel=2048),
    "little": BufferBudget(1, num_gradients=1, num_chunks=2, chunk_numel=2048),
    "much": BufferBudget(3, num_gradients=2, num_chunks=100, chunk_numel=4096),
    "large": BufferBudget(1, num_chunks=3, chunk_numel=1024, chunks_at_once=5),
    "whole layers": BufferBudget(1),
    "all layers": BufferBudget(6, num_gradients=2, num_chunks=100, chunk_numel=4096),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("family", "weights", "state", "name"),
    [("gpt2", "disk", "disk", "large")]
    + [("gptj", *places, "little") for places in itertools.product(PLACES, PLACES)]
    + [("gptj", "host", "host", "no read-ahead"), ("gptj", "disk", "disk", "much"), ("gptj", "host", "host", "large")]
    + [("gpt2", *places, "little") for places in (("device", "host"), ("host", "device"), ("disk", "host"))]
    + [("gpt2", "host", "host", name) for name in ("little", "whole layers", "all layers")]
    + [("gpt2", "disk", "disk", name) for name in ROOMS if name != "large"],
)
def test_placement_and_room_never_change_a_bit(
    weights: str, state: str, name: str, narrow_folder: Path, resident_run, tmp_path: Path
) -> None:
    stack = open_training(narrow_folder, tmp_path, (weights, state), budget=ROOMS[name])
    assert_identical(train(stack, Recipe()), resident_run)


SPLITS = (Placement("device", "disk"), Placement("host", "disk"), Placement("disk", "host"))


@pytest.mark.thorough
@pytest.mark.parametrize("memory", ["device", "host"])
@both_families
def test_layers_in_memory_change_no_bit(memory: Any, narrow_folder: Path, resident_run, tmp_path: Path) -> None:
    room = ROOMS["little" if memory == "device" else "much"]
    for late, (placement, in_memory) in enumerate(zip(SPLITS, ((1, 3), (2,), (1, 2, 3)), strict=True)):
        places = replace(placement, in_memory=in_memory, memory=memory)
        stack = open_training(narrow_folder, tmp_path / str(late), places, budget=room)
        parts = {type(stack.stores["exp_avg"].part(layer)) for layer in range(5)}
        assert len(parts) == 1 + (places.optimizer_state == "disk"), parts
        assert_identical(train(stack, Recipe(), late=late), resident_run)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["device", "host"])
@pytest.mark.parametrize("placement", SPLITS, ids=str)
def test_every_split_of_six_layers(placement: Placement, memory: Any, tmp_path: Path) -> None:
    random_gptj(**{**SHAPES["narrow"], "n_layer": 4}).save_pretrained(tmp_path / "model")
    expected = train(open_training(tmp_path / "model", tmp_path), Recipe())
    for number in range(1, 2**6):
        chosen = tuple(layer for layer in range(6) if number >> layer & 1)
        places = replace(placement, in_memory=chosen, memory=memory)
        stack = open_training(tmp_path / "model", tmp_path / str(number), places)
        assert_identical(train(stack, Recipe(), late=number % 3), expected)
        stack.close()


def test_deferred_updates_spare_layers_in_place(narrow_folder: Path, tmp_path: Path) -> None:
    for memory, number, expected in (("device", 2, (2,)), ("host", 1, (2,)), ("host", 2, (1, 2))):
        places = Placement("host", "disk", in_memory=(1, 3), memory=memory)  # type: ignore[arg-type]
        stack = open_training(narrow_folder, tmp_path / f"{memory}-{number}", places)
        assert PendingUpdates.of(stack, 0, number).deferred == expected
        stack.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", ["host", "disk"])
@both_families
def test_deferred_updates_rewrite_resident_weights(place: str, narrow_folder: Path, tmp_path: Path) -> None:
    dtypes = training_dtypes(torch.bfloat16, master="fp32")
    expected = train(open_training(narrow_folder, tmp_path, dtypes=dtypes), Recipe())
    stack = open_training(narrow_folder, tmp_path, ("device", place), dtypes=dtypes)
    assert PendingUpdates.of(stack, 0, 2).deferred == (1, 2)
    assert_identical(train(stack, Recipe(), late=2), expected)
    for dtype in (torch.float32, torch.bfloat16):
        stack = open_training(narrow_folder, tmp_path / str(dtype), ("device", place), dtypes=training_dtypes(dtype))
        assert PendingUpdates.of(stack, 0, 2).deferred == (), "the update reads the weights that it changes"


@pytest.mark.thorough
@both_families
def test_two_threads_change_no_bit_between_placements(
    narrow_folder: Path, resident_run, tmp_path: Path, two_threads
) -> None:
    expected = train(open_training(narrow_folder, tmp_path), Recipe())
    assert_identical(train(open_training(narrow_folder, tmp_path, ("disk", "disk")), Recipe()), expected)
    assert expected[0][-1] == pytest.approx(resident_run[0][-1], rel=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("family", "place", "room", "late"),
    [
        ("gptj", "host", "little", 1), ("gptj", "host", "much", 2), ("gptj", "disk", "little", 2),
        ("gptj", "disk", "much", 1), ("gpt2", "disk", "little", 1), ("gpt2", "disk", "much", 2),
    ],
)  # fmt: skip
def test_deferred_updates_equal_forward_updates(
    place: str, room: str, late: int, narrow_folder: Path, resident_run, tmp_path: Path
) -> None:
    stack = open_training(narrow_folder, tmp_path, (place, place), budget=ROOMS[room])
    assert_identical(train(stack, Recipe(), late=late), resident_run)


def test_only_deferred_updates_are_applied_twice(narrow_folder: Path, tmp_path: Path) -> None:
    stack = open_training(narrow_folder, tmp_path, ("host", "host"))
    optimizer = AdamW(stack, optimizer_config(Recipe()))
    optimizer.begin_step(1e-3)
    train_step(stack, optimizer, micro_batches(documents(101), PROMPTS, 40))
    optimizer.finish_step()
    assert all(task.updates and task.writes for task in training_tasks(stack, optimizer.updates)[: len(stack.layers)])
    stack.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("family", "place", "kept", "late"),
    [
        ("gptj", "device", 1, 2), ("gptj", "device", 3, 0), ("gptj", "disk", 1, 0), ("gptj", "disk", 3, 2),
        ("gpt2", "disk", 1, 2), ("gpt2", "disk", 3, 0),
    ],
)  # fmt: skip
def test_kept_activations_replace_recomputation(
    place: str, kept: int, late: int, narrow_folder: Path, resident_run, tmp_path: Path
) -> None:
    budget = BufferBudget(1, num_chunks=3, chunk_numel=2048, num_kept_layers=kept)
    stack = open_training(narrow_folder, tmp_path, (place, place), budget=budget)
    runs = []
    for block in stack.layers[1:-1]:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    assert_identical(train(stack, Recipe(), late=late), resident_run)
    num_blocks, num_batches = 3, len(micro_batches(documents(101), PROMPTS, 40))
    assert len(runs) == FEW_STEPS * num_batches * (2 * num_blocks - kept)


def test_kept_graphs_find_moved_weights(narrow_folder: Path, tmp_path: Path) -> None:
    stack, batch, graphs = (
        open_training(narrow_folder, tmp_path, ("host", "host")),
        pack([[1, 2, 3]]),
        KeptActivations(),
    )
    x_TD = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))

    def load(index: int) -> LoadedLayer:
        layer = LoadedLayer(stack, LayerTask(index, trains=True, needs_input_gradient=True), None)
        layer.request()
        layer.finish()
        return layer

    first = load(1)
    graphs.run(first, [x_TD], [batch], lambda: None, Channel())
    first.release()
    second, _ = load(2), load(3)  # into the slot of the first
    second.release()
    moved = load(1)
    assert moved.weights.trained.data_ptr() != first.weights.trained.data_ptr()
    graphs.bind(moved)
    ours, output = graphs.take(0)
    output.sum().backward()
    theirs = x_TD.clone().requires_grad_()
    moved.run(moved.parameters(), theirs, batch, lambda: None).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    stack.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kept", "budget"), [(0, 40), (1, 1000)])
@pytest.mark.parametrize("placement", [("device", "device", "host"), ("device", "device", "disk"), ("disk",) * 3])
def test_layer_inputs_kept_elsewhere_change_no_bit(
    placement, kept: int, budget: int, narrow_folder: Path, resident_run, tmp_path: Path
) -> None:
    expected = resident_run if budget == 40 else train(open_training(narrow_folder, tmp_path / "a"), Recipe(), budget)
    stack = open_training(
        narrow_folder,
        tmp_path / "b",
        placement,
        budget=BufferBudget(num_chunks=3, chunk_numel=2048, num_kept_layers=kept),
    )
    assert_identical(train(stack, Recipe(), budget), expected)
    assert stack.meter.bytes_written > 0


def test_offloaded_boundaries_use_three_buffers(tmp_path: Path) -> None:
    for depth in (2, 6):
        folder = tmp_path / str(depth)
        random_gptj(**{**SHAPES["narrow"], "n_layer": depth}).save_pretrained(folder)
        stack = open_training(folder, folder, ("device", "device", "disk"))
        train(stack, Recipe(), steps=1)
        assert len(stack.boundaries._buffers._buffers) == 3


class Interrupted(CrossEntropy):
    """An objective whose first use ends the step."""

    def weight(self, batch: PackedBatch) -> float:
        raise ZeroDivisionError


def test_interrupted_step_leaves_no_boundaries(narrow_folder: Path, tmp_path: Path) -> None:
    expected = train(open_training(narrow_folder, tmp_path / "a"), Recipe(), steps=2)
    stack = open_training(narrow_folder, tmp_path / "b", ("device", "device", "disk"))
    batches = micro_batches(documents(101), PROMPTS, 40)
    with pytest.raises(ZeroDivisionError):
        train_step(stack, AdamW(stack, optimizer_config(Recipe())), batches, Interrupted())
    assert_identical(train(stack, Recipe(), steps=2), expected)


@pytest.mark.parametrize("discard", [DeviceActivations.begin, DeviceActivations.close])
def test_unused_boundaries_are_discarded(discard) -> None:
    boundaries = DeviceActivations()
    boundaries.put(1, [torch.ones(4)])
    discard(boundaries)
    with pytest.raises(KeyError):
        boundaries.take(1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_update_blocks_change_no_bit(compute, moments, narrow_folder: Path, tmp_path: Path) -> None:
    runs = []
    for numel in (BLOCK_NUMEL, 96):  # more than a chunk; a number that does not divide a chunk
        stack = open_training(narrow_folder, tmp_path, dtypes=training_dtypes(compute, moments, moments))
        runs.append(train(stack, Recipe(), steps=4, block_numel=numel))
    assert_identical(*runs)


class DigestSpy(LayerStore):
    """A store that records the digests of its writes."""

    def __init__(self, store: LayerStore) -> None:
        self.store, self.digest_numel, self.digests = store, store.digest_numel, []
        self.read, self.commit, self.drain, self.close = store.read, store.commit, store.drain, store.close

    def write(self, span: Span, values: torch.Tensor, digests=()) -> Future[None]:
        self.digests.append(digests)
        return self.store.write(span, values, digests)


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_block_digests_match_file_digests(moments, narrow_folder: Path, tmp_path: Path) -> None:
    dtypes = training_dtypes(torch.bfloat16, moments, moments)
    stack = open_training(narrow_folder, tmp_path, ("disk", "disk"), dtypes=dtypes)
    state, gradients = DigestSpy(stack.stores["weight"]), stack.stores["grad"]
    stack.stores.update({**dict.fromkeys(stack.stores, state), "grad": gradients})
    train(stack, Recipe(), steps=2, block_numel=96)
    assert all(state.digests), "the store computes digests itself"
    kinds = {kind: dtype for kind, dtype in dtypes.items() if kind != "grad"}
    for layer, layout in enumerate(stack.layouts):
        path = layer_path(tmp_path / "disk-disk" / "layer", layer)
        assert StateFile(layout, kinds, stack.budget.chunk_numel).damage(path) == []


@pytest.mark.thorough
@both_families
@pytest.mark.parametrize("placement", [("device", "device"), ("disk", "disk")])
def test_bf16_state_agrees_in_every_placement(placement, narrow_folder: Path, resident_run, tmp_path: Path) -> None:
    dtypes = training_dtypes(torch.float32, moments=torch.bfloat16, gradients=torch.bfloat16)
    expected = train(open_training(narrow_folder, tmp_path / "a", ("host", "host"), dtypes=dtypes), Recipe())
    for late, budget in enumerate((ROOMS["no read-ahead"], ROOMS["much"])):
        stack = open_training(narrow_folder, tmp_path / str(late), placement, dtypes=dtypes, budget=budget)
        assert_identical(train(stack, Recipe(), late=late), expected)
    assert expected[0] != resident_run[0]
    assert expected[0][-1][0] == pytest.approx(resident_run[0][-1][0], rel=1e-2)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("family", "place"), [("gptj", "device"), ("gptj", "disk"), ("gpt2", "host"), ("gpt2", "disk")]
)
def test_update_in_backward_equals_pending_update(place: str, narrow_folder: Path, tmp_path: Path) -> None:
    placement = place, place
    pending = Recipe(clip_norm=1e9)
    at_once = Recipe(clip_norm=None)
    expected = train(open_training(narrow_folder, tmp_path / "a", placement, pending), pending)
    assert_identical(train(open_training(narrow_folder, tmp_path / "b", placement, at_once), at_once), expected)


@pytest.mark.sampled(2)
@both_families
def test_bf16_placements_agree_and_keep_master(narrow_folder: Path, resident_run, tmp_path: Path) -> None:
    dtypes = training_dtypes(torch.bfloat16)
    expected = train(open_training(narrow_folder, tmp_path, dtypes=dtypes), Recipe())
    for placement in (("host", "disk"), ("disk", "disk")):
        stack = open_training(narrow_folder, tmp_path, placement, dtypes=dtypes)
        assert all(part.dtype == torch.float32 for _, part in stack.read_chunks("master", 1))
        assert_identical(train(stack, Recipe()), expected)
    assert expected[0][-1][0] == pytest.approx(resident_run[0][-1][0], rel=2e-2)


@pytest.mark.sampled(2)
def test_packed_documents_equal_separate_documents(model_folder: Path) -> None:
    with open_for_inference(model_folder, CPU, torch.float32) as (architecture, stack):
        docs = documents(architecture.config.vocab_size)
        packed = evaluate_losses(stack, [pack(docs, PROMPTS)])[0]
        alone = evaluate_losses(stack, [pack([ids], [n]) for ids, n in zip(docs, PROMPTS, strict=True)])
        assert packed.num_targets == sum(loss.num_targets for loss in alone)
        assert packed.total == pytest.approx(sum(loss.total for loss in alone), rel=1e-6)
        # Documents do not attend to each other: a changed document leaves the others' logits unchanged.
        changed = [docs[0], [(token + 1) % 50 for token in docs[1]], *docs[2:]]
        before, after = (next_token_logits(stack, pack(x)) for x in (docs, changed))
    others = [0, *range(2, len(docs))]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[1], after[1])


def test_micro_batching_changes_results_by_rounding_only(narrow_folder: Path, tmp_path: Path) -> None:
    runs = [train(open_training(narrow_folder, tmp_path / str(n)), Recipe(), budget=n, steps=3) for n in (1, 40, 1000)]
    for curve, weights in runs[1:]:
        for ours, theirs in zip(curve, runs[0][0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        for layer, tensors in enumerate(weights):
            for name, tensor in tensors.items():
                assert relative(tensor, runs[0][1][layer][name]) < 1e-4, name


def test_positions_without_targets_have_no_logits(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_for_inference(model_folder, CPU, torch.float32) as (architecture, stack):
        batch = pack(documents(architecture.config.vocab_size), PROMPTS)
        seen = limit_head_chunk(monkeypatch, stack, 7, architecture.config.vocab_size)
        (loss,) = evaluate_losses(stack, [batch])
    assert sum(seen) == loss.num_targets == int((batch.targets_T != NO_TARGET).sum()) < len(batch.tokens_T)
    assert max(seen) == 7


def test_evaluation_saves_no_boundaries(model_folder: Path) -> None:
    with open_for_inference(model_folder, CPU, torch.float32) as (architecture, stack):
        stack.boundaries = SimpleNamespace(put=lambda *_: pytest.fail("saved"), close=lambda: None)
        evaluate_losses(stack, [pack(documents(architecture.config.vocab_size), PROMPTS)])


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("place", ["device", "disk"])
def test_unchanged_tensors_are_named(place: str, clip: float | None, narrow_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(clip_norm=clip, weight_decay=0.0)
    stack = open_training(narrow_folder, tmp_path, (place, place), recipe)
    mlp = stack.layers[2].mlp
    mlp.forward = lambda x, *_: F.linear(F.gelu(x, approximate="tanh"), mlp.fc_out.weight)
    optimizer = AdamW(stack, optimizer_config(recipe))
    optimizer.begin_step(1e-3)
    train_step(stack, optimizer, micro_batches(documents(101), PROMPTS, 40))
    optimizer.finish_step()
    if clip is not None:
        assert optimizer.take_unchanged() is None, "the update has not reached any layer"
    optimizer.flush()
    movement = optimizer.take_unchanged()
    family = read_architecture(narrow_folder).family
    assert movement is not None
    warning = movement.warning(family, 1e-3)
    assert warning == ("the first step left 1 tensors unchanged: no gradient reaches transformer.h.1.mlp.fc_out.bias")
    assert optimizer.take_unchanged() is None, "it is said once"
    stack.close()


def test_rounded_changes_differ_from_missing_gradients(narrow_folder: Path, tmp_path: Path) -> None:
    stack = open_training(narrow_folder, tmp_path)
    optimizer = AdamW(stack, optimizer_config(Recipe(weight_decay=0.0)))
    optimizer.begin_step(1e-12)
    train_step(stack, optimizer, micro_batches(documents(101), PROMPTS, 40))
    optimizer.finish_step()
    optimizer.flush()
    movement = optimizer.take_unchanged()
    assert movement is not None
    warning = str(movement.warning(read_architecture(narrow_folder).family, 1e-12))
    assert "ln_1.weight" in warning
    assert "is lost in rounding" in warning
    assert "no gradient" not in warning
    num_unchanged = int(warning.split()[4])
    assert f"left {num_unchanged} tensors" in warning
    assert f" and {num_unchanged - 3} more is lost" in warning


@pytest.mark.parametrize(("num_unchanged", "end"), [(3, "fc_in.bias"), (4, "fc_in.bias and 1 more")])
def test_warning_names_three_unchanged_tensors(num_unchanged: int, end: str, narrow_folder: Path) -> None:
    architecture = read_architecture(narrow_folder)
    names = ("ln_1.weight", "ln_1.bias", "mlp.fc_in.bias", "mlp.fc_out.bias")[:num_unchanged]
    warning = UnchangedParameters([Layout.of(layer, names) for layer in architecture.layers()], [1]).warning(
        architecture.family, 1e-3
    )
    assert warning is not None
    assert warning.endswith(end)


def test_neighbour_in_chunk_does_not_count() -> None:
    layout = Layout({"still": torch.Size([64]), "moving": torch.Size([64])}, {"still": 2048, "moving": 2112}, 0, 4096)
    movement = UnchangedParameters([layout], [0])
    before, gradient = torch.zeros(2048), torch.ones(2048)
    after = before.clone()
    after[64:128] = 1.0
    movement.observe(0, slice(2048, 4096), before, after, gradient)
    assert movement._same == {(0, "still"): False}


@both_families
def test_changed_tensors_give_no_warning(narrow_folder: Path, tmp_path: Path) -> None:
    stack = open_training(narrow_folder, tmp_path)
    optimizer = AdamW(stack, optimizer_config(Recipe()))
    for lr in (1e-3, 1e-3):
        optimizer.begin_step(lr)
        train_step(stack, optimizer, micro_batches(documents(101), PROMPTS, 40))
        optimizer.finish_step()
    movement = optimizer.take_unchanged()
    assert movement is not None
    assert movement.warning(read_architecture(narrow_folder).family, 1e-3) is None


def test_infinite_gradient_changes_no_weight(narrow_folder: Path, tmp_path: Path) -> None:
    stack = open_training(narrow_folder, tmp_path)
    (loaded,) = Prefetcher(stack, inference_tasks([2]))
    loaded.parameters()["mlp.fc_out.bias"][0] = torch.inf
    optimizer = AdamW(stack, optimizer_config(Recipe()))
    optimizer.begin_step(1e-3)
    before = stack.stores["weight"].own("weight", 1).clone()
    with pytest.raises(GptjFtError, match="not finite"):
        train_step(stack, optimizer, micro_batches(documents(101), PROMPTS, 40))
    optimizer.flush()
    assert torch.equal(before, stack.stores["weight"].own("weight", 1))


def test_layout_aligns_parameters_with_matrices_first(model_folder: Path) -> None:
    for layer in read_architecture(model_folder).layers():
        layout = Layout.of(layer)
        assert all(offset % 32 == 0 for offset in layout.offsets.values())
        assert layout.numel % 2048 == 0
        decayed = {name for name, offset in layout.offsets.items() if offset < layout.num_decayed}
        assert decayed == {name for name, shape in layout.shapes.items() if len(shape) > 1}
        ends = sorted((layout.offsets[name], shape.numel()) for name, shape in layout.shapes.items())
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ends))


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("family", "dtype", "parts", "late"),
    [("gptj", torch.float32, *case) for case in ((3, 0), (12, 4), (30, 4), (160, 0))]
    + [("gptj", torch.bfloat16, *case) for case in ((3, 4), (12, 0), (60, 4))]
    + [("gpt2", torch.float32, 12, 4), ("gpt2", torch.bfloat16, 3, 0), ("gpt2", torch.bfloat16, 160, 0)],
)
def test_step_bytes_match_forecast(tmp_path: Path, family: str, dtype: torch.dtype, parts: int, late: int) -> None:
    folder, budget, dtypes = tmp_path / "model", BufferBudget(num_chunks=parts, chunk_numel=512), training_dtypes(dtype)
    make, more = {"gptj": (random_gptj, {"rotary_dim": 4}), "gpt2": (random_gpt2, {"n_positions": 64})}[family]
    make(vocab_size=90, n_embd=32, n_layer=5, n_head=2, **more).save_pretrained(folder)
    stack = open_training(folder, tmp_path, ("disk", "disk"), dtypes=dtypes, budget=budget)
    optimizer, docs = AdamW(stack, optimizer_config(Recipe()), num_deferred=late), documents(90)
    for step in range(3):
        before = stack.meter.bytes_read, stack.meter.bytes_written
        optimizer.begin_step(lr_of(step))
        train_step(stack, optimizer, micro_batches(docs, PROMPTS, 40))
        optimizer.finish_step()
    moved = stack.meter.bytes_read - before[0], stack.meter.bytes_written - before[1]
    stack.close()
    load = Workload(stack.layouts, 32, dtypes["weight"], StepTokens(40, 74, 74.0, 50.0), 3)
    num_deferred = len(load.layouts) if late else 0
    schedule = ScheduleInputs(Placement("disk", "disk"), tuple(dtypes.items()), budget, num_deferred)
    *passes, _ = training_passes(timed_by_flops(load), schedule, on_cpu=False)
    assert moved == (sum(each.read["disk"] for each in passes), sum(each.written["disk"] for each in passes))


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["host", "disk"])
def test_boundaries_of_many_layers_come_back(place: str, tmp_path: Path) -> None:
    random_gptj(**{**SHAPES["narrow"], "n_layer": 2 * NUM_BUFFERS}).save_pretrained(tmp_path / "deep")
    stayed = open_training(tmp_path / "deep", tmp_path / "a")
    left = open_training(tmp_path / "deep", tmp_path / "b", ("device", "device", place))
    expected, found = (train(stack, Recipe(), steps=2) for stack in (stayed, left))
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert left.meter.bytes_read > 0, "nothing was read back"


@pytest.mark.parametrize("place", PLACES)
def test_only_streamed_weights_allocate_slots(place: str, model_folder: Path) -> None:
    with open_for_inference(model_folder, CPU, torch.float32, place) as (_, stack):
        stack.free_pools()
        stack.pools.allocate_slots()
        assert bool(stack.pools.allocated) == (place != "device")


@pytest.mark.parametrize("place", ["device", "disk"])
def test_filling_buffers_are_freed(place: str, narrow_folder: Path, tmp_path: Path) -> None:
    offloaded = open_training(narrow_folder, tmp_path, (place, place, "device"))
    assert bool(offloaded.pools.allocated) == (place == "disk")
    assert not offloaded.pools.allocated.keys() & offloaded.dtypes.keys(), "an update may need fewer kinds"


def test_waiting_layer_blocks_later_layers(narrow_folder: Path, tmp_path: Path) -> None:
    layers, asked = Prefetcher(open_training(narrow_folder, tmp_path), []), []
    layers._loading.extend(
        SimpleNamespace(advance=lambda number=number: asked.append(number) or number == 0) for number in range(3)
    )
    layers.poll()
    assert asked == [0, 1]


def test_meter_counts_waiting_time(narrow_folder: Path, tmp_path: Path) -> None:
    stack, start = open_training(narrow_folder, tmp_path), time.perf_counter()
    before = stack.meter.waited_seconds
    for _ in range(2):
        with stack.meter.waiting():
            time.sleep(0.01)
    assert 0.02 <= stack.meter.waited_seconds - before <= time.perf_counter() - start


class PendingReads(LayerStore):
    """A store whose reads of one layer do not end."""

    def __init__(self, store: LayerStore, layer: int, pending: Future[torch.Tensor]) -> None:
        self.store, self.layer, self.pending = store, layer, pending

    def read(self, span: Span, out: torch.Tensor) -> Future[torch.Tensor]:
        return self.pending if span.layer == self.layer else self.store.read(span, out)

    def close(self) -> None:
        self.store.close()


@pytest.mark.parametrize("family", ["gpt2"])
def test_cancelled_tied_read_holds_its_slot(narrow_folder: Path, tmp_path: Path) -> None:
    stack = open_training(narrow_folder, tmp_path, ("host", "host"))
    pending = Future[torch.Tensor]()
    stack.stores["weight"] = PendingReads(stack.stores["weight"], TIED_SOURCE_LAYER, pending)
    tied = len(stack.layers) - 1
    assert stack.layouts[tied].tied
    LoadedLayer(stack, LayerTask(tied), None).request()
    stack.cancel()
    slots = [stack.pools["weights"].acquire(None)[0] for _ in range(stack.budget.read_ahead + 1)]
    assert any(pending in slot.transfers for slot in slots), "another layer could be read into the slot at once"
    pending.set_result(torch.empty(0))
    stack.close()


def test_cancelled_chunk_read_holds_its_slot(narrow_folder: Path, tmp_path: Path) -> None:
    stack = open_training(narrow_folder, tmp_path, ("host", "host"))
    pending = Future[torch.Tensor]()
    stack.stores["weight"] = PendingReads(stack.stores["weight"], 1, pending)
    layer = LoadedLayer(stack, LayerTask(1, updates=True), AdamW(stack, optimizer_config(Recipe())))
    layer.request()
    layer.advance()  # requests the old weights, chunk by chunk
    stack.cancel()
    slots = [stack.pools["weights"].acquire(None)[0] for _ in range(stack.budget.read_ahead + 1)]
    assert any(pending in slot.transfers for slot in slots), "another layer could be read into the slot at once"
    pending.set_result(torch.empty(0))
    stack.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["host", "disk"])
def test_closed_model_leaves_no_thread_or_buffer(place: str, narrow_folder: Path, tmp_path: Path) -> None:
    alive: weakref.WeakSet[Buffer] = weakref.WeakSet()
    threads = set(threading.enumerate())
    stack = open_training(narrow_folder, tmp_path, (place, place, place))
    optimizer = AdamW(stack, optimizer_config(Recipe()))
    optimizer.begin_step(1e-3)
    train_step(stack, optimizer, micro_batches(documents(101), PROMPTS, 40))
    optimizer.finish_step()
    optimizer.flush()
    for pool in (*stack.pools.allocated.values(), stack.boundaries._buffers):
        alive.update(pool._buffers)
    del pool
    assert alive
    assert set(threading.enumerate()) > threads
    stack.close()
    assert set(threading.enumerate()) == threads
    stack.boundaries = DeviceActivations()  # frees the previous one's buffers
    gc.collect()
    assert not alive


@pytest.mark.parametrize("place", ["host", "disk"])
def test_drain_waits_for_writes(place: str, narrow_folder: Path, tmp_path: Path) -> None:
    stack, earlier = open_training(narrow_folder, tmp_path, (place, place)), Future[None]()
    threading.Timer(0.1, earlier.set_result, [None]).start()
    span = Span("exp_avg", 1, after=[earlier])
    written = stack.stores["exp_avg"].write(span, torch.ones(stack.layouts[1].numel))
    stack.drain()
    assert written.done()
    stack.close()


def test_reading_in_chunks_uses_one_buffer(narrow_folder: Path, tmp_path: Path) -> None:
    budget = BufferBudget(num_chunks=1, chunk_numel=2048)
    stack = open_training(narrow_folder, tmp_path, ("host", "host"), budget=budget)
    assert stack.layouts[1].numel > budget.chunk_numel
    whole = torch.cat([part.clone() for _, part in stack.read_chunks("weight", 1)])
    slot = torch.empty(stack.layouts[1].numel)
    assert torch.equal(whole, stack.transfers.read(Span("weight", 1), slot).result())
    stack.close()
