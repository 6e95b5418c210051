"""Check the order of reads, updates and writes of a layer, beside the computation and with threads that lag behind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import random_gpt2, random_gptj
from support.late_threads import LatePool
from support.small_stack import CPU, FEW_STEPS, LENGTHS, assert_identical, train

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import AdamW
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.loaded_layer import LoadedLayer
from gptj_ft.streaming.offloaded_model import OffloadedModel
from gptj_ft.streaming.open import load_weights, open_for_training
from gptj_ft.streaming.schedule import LayerTask
from gptj_ft.streaming.stores import queue
from gptj_ft.streaming.stores.base import Span
from gptj_ft.streaming.stores.host import HostStore
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.streaming.update_pump import Updated

CLIPPED, AT_ONCE = 1.0, None  # `clip_norm`: updates wait for the norm of all gradients, or start in backward


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of small models; GPT-J has so many blocks that slots are reused between two visits."""
    models = {
        "gptj": random_gptj(vocab_size=61, n_positions=64, n_embd=16, n_layer=5, n_head=2, rotary_dim=4),
        "gpt2": random_gpt2(vocab_size=61, n_positions=64, n_embd=16, n_layer=3, n_head=2),
    }
    found = {name: tmp_path_factory.mktemp(name) for name in models}
    for name, model in models.items():
        model.save_pretrained(found[name])
    return found


def open_at(folder: Path, tmp: Path, place: str, recipe: Recipe) -> OffloadedModel:
    """Open a model for training.

    Layers have more chunks than there are buffers, and a layer's second visit may be requested during its first.

    Args:
        place: of the weights, and after a slash of the optimizer state if that is elsewhere.
    """
    architecture, (weights, *state) = read_architecture(folder), place.split("/")
    stack = open_for_training(
        architecture, Placement(weights, *(state or [weights])), training_dtypes(torch.float32), CPU,  # type: ignore[arg-type]
        tmp / place, BufferBudget(read_ahead=3, chunk_numel=1024, num_chunks=3),
        keep_gradients=recipe.clip_norm is not None or place == "disk",
        boundary=boundary_layout(sum(LENGTHS), architecture.config.n_embd, len(LENGTHS)),
    )  # fmt: skip
    with open_checkpoint(folder) as checkpoint:
        load_weights(stack, architecture, checkpoint)
    return stack


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("family", "place", "clip_norm", "late"),
    [
        ("gptj", "disk/host", CLIPPED, 2),
        ("gptj", "disk", CLIPPED, 0),
        ("gptj", "host", CLIPPED, 2),
        ("gpt2", "disk", CLIPPED, 2),
        ("gpt2", "host", AT_ONCE, 0),
    ],
)
def test_late_threads_change_no_bit(family, place, clip_norm, late, folders, tmp_path: Path, monkeypatch) -> None:
    recipe = Recipe(clip_norm=clip_norm)
    expected = train(open_at(folders[family], tmp_path, "device", recipe), recipe)
    monkeypatch.setattr(queue, "ThreadPoolExecutor", LatePool)
    assert_identical(train(open_at(folders[family], tmp_path, place, recipe), recipe, late=late), expected)


class Event(NamedTuple):
    """A request or a completed computation, in the order of the program."""

    what: str  # "read", "write", "commit", "gradient" or "update"
    layer: int
    kind: str = ""
    span: slice = slice(0, 0)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Record the traffic of stores in host memory and the work of the optimizer."""
    recorded: list[Event] = []
    read, write, commit = HostStore.read, HostStore.write, HostStore.commit
    apply, add_gradient = AdamW.apply, AdamW.add_gradient

    def recorded_read(self: HostStore, span: Span, out: torch.Tensor) -> Any:
        recorded.append(Event("read", span.layer, span.kind, slice(span.start, span.start + len(out))))
        return read(self, span, out)

    def recorded_write(self: HostStore, span: Span, values: torch.Tensor, digests: Any = ()) -> Any:
        recorded.append(Event("write", span.layer, span.kind, slice(span.start, span.start + len(values))))
        return write(self, span, values, digests)

    def recorded_commit(self: HostStore, layer: int, step: int) -> None:
        recorded.append(Event("commit", layer))
        commit(self, layer, step)

    def recorded_update(
        self: AdamW, task: LayerTask, span: slice, tensors: Mapping[Any, torch.Tensor], updated: Updated
    ) -> None:
        apply(self, task, span, tensors, updated)
        recorded.append(Event("update" if task.writes else "update without writing", task.layer, "", span))

    def recorded_gradient(self: AdamW, layer: LoadedLayer) -> None:
        recorded.append(Event("gradient", layer.index))
        add_gradient(self, layer)

    for owner, name, function in (
        (HostStore, "read", recorded_read),
        (HostStore, "write", recorded_write),
        (HostStore, "commit", recorded_commit),
        (AdamW, "apply", recorded_update),
        (AdamW, "add_gradient", recorded_gradient),
    ):
        monkeypatch.setattr(owner, name, function)
    return recorded


def overlap(one: slice, other: slice) -> bool:
    return one.start < other.stop and other.start < one.stop


@pytest.mark.parametrize(("clip_norm", "late"), [(CLIPPED, 0), (CLIPPED, 2), (AT_ONCE, 0)])
def test_updated_layer_is_read_after_its_commit(clip_norm, late, folders, tmp_path: Path, events) -> None:
    recipe = Recipe(clip_norm=clip_norm)
    stack = open_at(folders["gptj"], tmp_path, "host", recipe)
    kinds, layers = stack.updated_kinds, range(len(stack.layers))
    events.clear()  # of the initial weights
    train(stack, recipe, late=late)
    for layer in layers:
        own = [event for event in events if event.layer == layer]
        updated, written = list[slice](), dict.fromkeys(kinds, 0)
        for event in own:
            if event.what == "update":
                updated.append(event.span)
            elif event.what == "read" and event.kind in kinds:
                assert not any(overlap(event.span, span) for span in updated), f"read before the commit: {event}"
            elif event.what == "write" and event.kind in kinds:
                written[event.kind] += event.span.stop - event.span.start
            elif event.what == "commit" and updated:
                numel = sum(span.stop - span.start for span in updated)
                assert set(written.values()) == {numel} == {stack.layouts[layer].numel}
                updated, written = [], dict.fromkeys(kinds, 0)
        assert not updated
        assert sum(event.what == "update" for event in own) >= 2 * FEW_STEPS  # several chunks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clip_norm", [CLIPPED, AT_ONCE])
def test_update_starts_after_the_layers_gradient(clip_norm, folders, tmp_path: Path, events) -> None:
    recipe = Recipe(clip_norm=clip_norm)
    stack = open_at(folders["gptj"], tmp_path, "host", recipe)
    num_layers = len(stack.layers)
    train(stack, recipe)
    steps_of_gradients, steps_of_updates = [0] * num_layers, [0] * num_layers
    covered = [0] * num_layers
    for event in events:
        if event.what == "gradient":
            steps_of_gradients[event.layer] += 1
        elif event.what == "update":
            # Clipping needs the gradients of all layers.
            needed = min(steps_of_gradients) if recipe.clip_norm else steps_of_gradients[event.layer]
            assert steps_of_updates[event.layer] < needed, event
            covered[event.layer] += event.span.stop - event.span.start
            if covered[event.layer] == stack.layouts[event.layer].numel:
                covered[event.layer], steps_of_updates[event.layer] = 0, steps_of_updates[event.layer] + 1
    assert steps_of_updates == steps_of_gradients == [max(steps_of_updates)] * num_layers


def test_update_at_once_has_the_whole_gradient(folders, tmp_path: Path, monkeypatch) -> None:
    apply = AdamW.apply
    gradients: dict[tuple[int, int], torch.Tensor] = {}

    def kept(self: AdamW, task: LayerTask, span: slice, tensors: Mapping[Any, torch.Tensor], updated: Updated) -> None:
        gradients.setdefault((task.layer, span.start), tensors["grad"].clone())
        apply(self, task, span, tensors, updated)

    monkeypatch.setattr(AdamW, "apply", kept)
    found = []
    for clip_norm, place in ((CLIPPED, "device"), (AT_ONCE, "host")):
        recipe = Recipe(clip_norm=clip_norm)
        train(open_at(folders["gptj"], tmp_path, place, recipe), recipe, steps=1)
        found.append(gradients.copy())
        gradients.clear()
    stored, at_once = found
    assert set(at_once) == set(stored)
    for key, gradient in stored.items():
        assert torch.equal(at_once[key], gradient), key
