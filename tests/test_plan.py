"""The forecast: which placement is chosen, what it costs, when it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gptj_ft.errors import ResourceError
from gptj_ft.families.gptj import GPTJConfig, build_layers
from gptj_ft.plan import FASTEST_FIRST, Free, Load, candidates, choose, forecast
from gptj_ft.recipe import Recipe
from gptj_ft.stores import Layout
from gptj_ft.stores.placement import Placement

GB = 10**9
PLENTY = Free(device=10**13, host=10**13, disk=10**14, is_shared=False)
RATE = 1e12


@pytest.fixture(scope="module")
def six_b() -> Load:
    """GPT-J 6B, eight rows of 256 tokens."""
    return Load(
        layouts=[Layout.of(layer) for layer in build_layers(GPTJConfig())],
        width=4096,
        dtype=torch.float32,
        micro_batch_tokens=2048,
        step_tokens=2048,
        mean_step_tokens=2048,
        mean_step_targets=512,
        num_steps=10,
    )


def test_gpt_j_has_the_parameters_it_is_known_for(six_b: Load) -> None:
    assert six_b.num_parameters == 6_050_882_784


def test_everything_stays_on_a_device_that_has_room(six_b: Load) -> None:
    plan = choose(Recipe(), six_b, PLENTY, RATE)
    assert plan.placement == Placement("device", "device")
    assert plan.device_bytes > 16 * six_b.num_parameters
    assert plan.bytes_read_per_step == plan.bytes_written_per_step == 0


def test_what_does_not_fit_is_streamed_from_the_fastest_place_that_has_room(six_b: Load) -> None:
    for device, host, expected in (
        (48, 128, ("device", "host")),
        (24, 128, ("host", "host")),
        (48, 16, ("device", "disk")),
        (24, 48, ("host", "disk")),
        (24, 16, ("disk", "disk")),
    ):
        free = replace(PLENTY, device=device * GB, host=host * GB)
        assert choose(Recipe(), six_b, free, RATE).placement == Placement(*expected), (device, host)


def test_a_cpu_never_copies_from_host_memory_unless_asked_to(six_b: Load) -> None:
    shared = replace(PLENTY, is_shared=True)
    assert all("host" not in (p.weights, p.optimizer_state) for p in candidates(Recipe(), shared))
    assert {p.weights for p in candidates(Recipe(weights="host"), shared)} == {"host"}
    assert choose(Recipe(weights="host", optimizer_state="host"), six_b, shared, RATE).placement == Placement(
        "host", "host"
    )


@pytest.mark.parametrize(("weights", "state"), FASTEST_FIRST)
def test_a_placement_that_the_user_names_is_the_one_that_is_planned(weights, state, six_b: Load) -> None:
    for free in (PLENTY, replace(PLENTY, is_shared=True)):
        recipe = Recipe(weights=weights, optimizer_state=state)
        assert choose(recipe, six_b, free, RATE).placement == Placement(weights, state)


def test_streamed_memory_does_not_grow_with_depth_but_for_the_boundaries() -> None:
    def device_bytes(n_layer: int) -> int:
        layouts = [Layout.of(layer) for layer in build_layers(GPTJConfig(n_layer=n_layer))]
        load = Load(layouts, 4096, torch.float32, 2048, 2048, 2048, 512, 1)
        return forecast(Placement("disk", "disk"), load, Recipe(), RATE).device_bytes

    assert device_bytes(32) - device_bytes(4) == 28 * 2048 * 4096 * 4


def test_a_step_moves_the_bytes_that_the_design_says(six_b: Load) -> None:
    plan = forecast(Placement("disk", "disk"), six_b, Recipe(), RATE)
    # Read: weights twice, two moments, the gradient. Written: weights, two moments, the gradient.
    assert plan.bytes_read_per_step == pytest.approx(20 * six_b.num_parameters, rel=1e-4)
    assert plan.bytes_written_per_step == pytest.approx(16 * six_b.num_parameters, rel=1e-4)


def test_flops_are_those_of_forward_recompute_and_backward(six_b: Load) -> None:
    blocks, head = 5_637_947_392, 206_488_800 + 8192
    assert six_b.flops == pytest.approx(8 * blocks * 2048 + 6 * head * 512, rel=1e-9)


def test_a_run_on_disk_needs_no_room_for_checkpoints(six_b: Load) -> None:
    on_disk = forecast(Placement("disk", "disk"), six_b, Recipe(), RATE).disk_bytes
    assert on_disk < 21 * six_b.num_parameters  # state 12, gradients 4, the model 4 bytes each, and one more layer
    in_ram = forecast(Placement("device", "device"), six_b, Recipe(), RATE).disk_bytes
    assert in_ram > 2 * 12 * six_b.num_parameters


def test_refusal_names_what_lacks_and_a_knob_that_helps(six_b: Load) -> None:
    with pytest.raises(ResourceError, match=r"needs .* on the device, 4\.0 GB is free.*--weights auto"):
        choose(Recipe(weights="device"), six_b, replace(PLENTY, device=4 * GB), RATE)
    with pytest.raises(ResourceError, match=r"needs .* of memory.*--batch-size below 16, or --max-length"):
        choose(Recipe(), six_b, replace(PLENTY, device=2 * GB, host=2 * GB, is_shared=True), RATE)
    with pytest.raises(ResourceError, match=r"needs .* of disk, 9\.0 GB is free; try --output"):
        choose(Recipe(), six_b, replace(PLENTY, disk=9 * GB), RATE)
