"""8-bit moments: bitsandbytes' codes, unbiased rounding, and the same bits in every placement."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from conftest import random_gptj
from support.small_stack import CPU, LENGTHS, new_memory, take_steps
from torch import Tensor

from gptj_ft.checkpoints.architecture import read_architecture
from gptj_ft.checkpoints.model_folder import open_checkpoint
from gptj_ft.config.options import Recipe
from gptj_ft.models.layout import MOMENTS, Kind
from gptj_ft.streaming.activations import boundary_layout
from gptj_ft.streaming.adamw import BLOCK_NUMEL, AdamW, AdamWConfig
from gptj_ft.streaming.buffers import BufferBudget
from gptj_ft.streaming.moments import FORMS
from gptj_ft.streaming.moments.form import Noise
from gptj_ft.streaming.moments.int8 import BLOCK, dynamic_map, is_signed, nearest_codes, normalize
from gptj_ft.streaming.open import load_weights, open_for_training
from gptj_ft.streaming.stores.placement import Placement, training_dtypes
from gptj_ft.system.memory import bytes_of
from gptj_ft.training.restore import optimizer_config

INT8 = FORMS["int8"]
# XXH3-64 of map, codes, scales and values by bitsandbytes 0.50.2: `create_dynamic_map`, its generic kernel of
# `quantize_blockwise`, `dequantize_blockwise`. Its kernel for CPUs sorts values into 65,536 equal bins, so that it has
# no codes below 3e-5. benchmarks/moments.py computes them again where bitsandbytes is installed.
BITSANDBYTES = {"exp_avg": "01997ff33f4d5f8a", "exp_avg_sq": "4c97b33b403b3c5f"}


def moments(kind: Kind, number: int) -> Tensor:
    """Return values with blocks of zeros, of many magnitudes; made of integers, so equal on every machine."""
    generator = torch.Generator().manual_seed(number)
    draws = [torch.randint(-1000, 1001, (16 * BLOCK,), generator=generator) for _ in range(3)]
    scale = 2.0 ** torch.randint(-30, 1, (16 * BLOCK,), generator=generator)
    values = (draws[0] * draws[1] + draws[2]) * scale * 2.0 ** (number % 40 - 30)
    values[: BLOCK * (number % 2)] = 0
    return values if is_signed(kind) else values.abs()


def stored(kind: Kind, values: Tensor, noise: Noise | None = None) -> Tensor:
    items = torch.empty(len(values) // INT8.block * INT8.items, dtype=INT8.dtype)
    INT8.store(kind, values.clone(), items, noise, new_memory)
    return items


def loaded(kind: Kind, items: Tensor) -> Tensor:
    return INT8.load(kind, items, new_memory)


@pytest.mark.parametrize("kind", MOMENTS)
def test_nearest_codes_and_values_equal_bitsandbytes(kind: Kind) -> None:
    numbers, digest = dynamic_map(is_signed(kind)), xxhash.xxh3_64()
    digest.update(bytes_of(numbers))
    for number in range(80):
        values = moments(kind, number)
        scales = normalize(values, is_signed(kind), new_memory)
        codes = nearest_codes(values, numbers).view(-1, BLOCK)
        has_values = scales.view(-1) > 0  # bitsandbytes gives zeros the lowest code
        for tensor in (codes[has_values].to(torch.uint8), scales, (numbers[codes] * scales)[has_values]):
            digest.update(bytes_of(tensor))
    assert digest.hexdigest() == BITSANDBYTES[kind]


@pytest.mark.parametrize("kind", MOMENTS)
def test_initial_moments_have_the_nearest_codes(kind: Kind) -> None:
    for number in range(10):
        values, numbers = moments(kind, number), dynamic_map(is_signed(kind))
        normal = values.clone()
        scales = normalize(normal, is_signed(kind), new_memory)
        codes = nearest_codes(normal, numbers)
        if kind == "exp_avg_sq":
            codes[(codes == 0) & (normal > 0)] = 1
        assert torch.equal(loaded(kind, stored(kind, values)), (numbers[codes].view(-1, BLOCK) * scales).view(-1))


def near_codes(numbers: Tensor) -> Iterator[Tensor]:
    """Yield normalized values: at codes, beside them, between them, and of every magnitude."""
    bits = numbers.view(torch.int32)
    for ulps in (0, 1, -1, 3, -3, 1000, -1000, 5000, -5000):
        yield (bits + ulps).view(torch.float32)[(numbers.abs() > 0) & (numbers.abs() < 1)]
    yield (numbers[1:] + numbers[:-1]) / 2
    magnitudes = torch.logspace(-9, 0, 40_000)
    yield magnitudes if numbers[0] == 0 else torch.cat([magnitudes, -magnitudes])


def in_blocks(values: Tensor) -> Tensor:
    """Fill blocks with normalized values; the first of each is 1, its scale."""
    padded = torch.zeros(-(-len(values) // (BLOCK - 1)), BLOCK)
    flat = torch.zeros(padded.shape[0] * (BLOCK - 1))
    flat[: len(values)] = values
    padded[:, 0], padded[:, 1:] = 1, flat.view(-1, BLOCK - 1)
    return padded.view(-1)


def codes_of(items: Tensor) -> Tensor:
    return items.view(torch.uint8).view(-1, INT8.items)[:, :BLOCK].reshape(-1).long()


@pytest.mark.parametrize("kind", MOMENTS)
def test_random_code_is_one_of_two_neighbours(kind: Kind) -> None:
    numbers = dynamic_map(is_signed(kind))
    for part in near_codes(numbers):
        values = in_blocks(part)
        low = torch.bucketize(values, numbers, right=True) - 1
        high = (low + (numbers[low] < values)).clamp(max=255)
        low = low.clamp(min=0)
        if kind == "exp_avg_sq":
            low[(low == 0) & (values > 0)] = 1
        for draw in range(20):
            codes = codes_of(stored(kind, values, Noise((kind, draw), 7 * draw)))
            assert bool(((codes == low) | (codes == high)).all()), (kind, draw)


class ConstantNoise(Noise):
    """The same 16 bits for every element of a block, each number once."""

    def add_to(self, bits: Tensor) -> None:
        bits += torch.arange(1 << 16, dtype=torch.int32).repeat_interleave(BLOCK)[self.start :][: len(bits)]


@pytest.mark.parametrize("kind", MOMENTS)
def test_rounding_is_exact_in_expectation(kind: Kind) -> None:
    numbers, generator = dynamic_map(is_signed(kind)), torch.Generator().manual_seed(0)
    values = 10 ** (torch.rand(BLOCK - 1, generator=generator) * -7)
    values *= torch.randint(0, 2, values.shape, generator=generator) * 2 - 1 if is_signed(kind) else 1
    values = in_blocks(values.clamp(min=float(numbers[0 if is_signed(kind) else 1])))
    sums, part = torch.zeros(BLOCK, dtype=torch.float64), 1 << 12
    for start in range(0, 1 << 16, part):
        items = stored(kind, values.repeat(part), ConstantNoise((), start * BLOCK))
        sums += loaded(kind, items).view(-1, BLOCK).double().sum(0)
    low = torch.bucketize(values, numbers, right=True).sub(1).clamp(max=254)
    gaps = (numbers[low + 1] - numbers[low]).double()
    errors = (sums / (1 << 16) - values.double()) / gaps
    # In a cell with the end of a decade, the slope is that between its ends: at most 0.007 of the gap.
    assert errors.abs().max() < 0.01
    assert errors.abs().median() < 3e-5


@pytest.mark.thorough
@pytest.mark.parametrize("kind", MOMENTS)
def test_small_changes_add_up(kind: Kind) -> None:
    value, target = torch.ones(64 * BLOCK), torch.ones(64 * BLOCK)
    target[1::2] = 0.25
    for step in range(2000):
        exact = value.mul_(0.999).add_(0.001 * target)
        value = loaded(kind, stored(kind, exact, Noise((1, step, kind), 0)))
    expected = 0.25 + 0.75 * 0.999**2000
    assert value[1::2].mean().item() == pytest.approx(expected, rel=5e-3)
    assert bool((value[::2] == 1).all()), "the largest of a block is exact"


def test_positive_second_moment_never_becomes_zero() -> None:
    values = in_blocks(torch.logspace(-30, 0, 2000))
    for noise in (None, *(Noise((draw,), draw) for draw in range(20))):
        restored = loaded("exp_avg_sq", stored("exp_avg_sq", values, noise))
        assert bool((restored[values > 0] >= 0.36 * values[values > 0]).all())
        assert bool((restored[values == 0] == 0).all())


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("noise", [None, Noise((1,), 0)])
def test_block_of_zeros_is_exact(kind: Kind, noise: Noise | None) -> None:
    values = torch.zeros(2 * BLOCK)
    values[BLOCK:] = 1e-38
    restored = loaded(kind, stored(kind, values, noise))
    assert bool((restored[:BLOCK] == 0).all())
    assert torch.equal(restored[BLOCK:], values[BLOCK:])


def test_step_without_gradient_stays_small() -> None:
    """A first moment beside a second one far below its block's largest must not divide by epsilon."""
    config, numel = AdamWConfig((0.9, 0.999), 1e-8, 0.0, None, 0), 8 * BLOCK
    items = {
        "exp_avg": stored("exp_avg", in_blocks(torch.full((numel - 8,), 1e-5))),
        "exp_avg_sq": stored("exp_avg_sq", in_blocks(torch.full((numel - 8,), 1e-10))),
    }
    for draw in range(20):
        first, second = (loaded(kind, items[kind]) for kind in MOMENTS)
        parameter, step = torch.zeros(numel), torch.tensor(100.0)
        torch._fused_adamw_(
            [parameter], [torch.zeros(numel)], [first], [second], [], [step], lr=1.0, beta1=config.betas[0],
            beta2=config.betas[1], weight_decay=0.0, eps=config.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        assert parameter.abs().max() < 2
        for kind, values in zip(MOMENTS, (first, second), strict=True):
            items[kind] = stored(kind, values, Noise((draw, kind), 0))


# The blocks have more than 2 ** 18 elements: several chunks of whole pages, the last one with a part of a page.
WIDTH, CHUNK = 160, 1 << 18


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_gptj(vocab_size=101, n_positions=40, n_embd=WIDTH, n_layer=3, n_head=4, rotary_dim=8).save_pretrained(path)
    return path


def open_training(folder: Path, tmp: Path, placement: Placement, budget: BufferBudget, compute=torch.bfloat16) -> Any:
    architecture = read_architecture(folder)
    stack = open_for_training(
        architecture, placement, training_dtypes(compute, INT8.dtype, torch.bfloat16), CPU, tmp, budget,
        boundary=boundary_layout(sum(LENGTHS), WIDTH, len(LENGTHS)),
    )  # fmt: skip
    with open_checkpoint(folder) as checkpoint:
        load_weights(stack, architecture, checkpoint)
    return stack


def state_of(stack: Any, late: int = 0, block_numel: int = BLOCK_NUMEL) -> tuple[list[tuple[float, float]], str]:
    """Train for four steps; return losses and norms, and a digest of the state."""
    recipe = optimizer_config(Recipe())
    config = AdamWConfig(recipe.betas, recipe.eps, recipe.weight_decay, 1.0, 3, block_numel=block_numel)
    optimizer = AdamW(stack, config, num_deferred=late)
    curve = take_steps(stack, optimizer)
    optimizer.flush()
    digest = hashlib.sha256()
    for layer, kind in itertools.product(stack.trained, ("master", *MOMENTS)):
        for _, part in stack.read_chunks(kind, layer):
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    stack.close()
    return curve, digest.hexdigest()


SMALL, PAGES = BufferBudget(1, 1, 2, 2048), BufferBudget(1, 2, 3, CHUNK)


@pytest.fixture(scope="module")
def resident(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return state_of(open_training(folder, tmp_path_factory.mktemp("run"), Placement("device", "device"), SMALL))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("placement", "budget", "late", "block_numel"),
    [
        (Placement("host", "host"), BufferBudget(1, 1, 2, 2048, chunks_at_once=3), 1, BLOCK_NUMEL),
        (Placement("disk", "disk", boundaries="disk"), BufferBudget(0, 1, 1, CHUNK), 2, BLOCK_NUMEL),
        (Placement("device", "device"), BufferBudget(chunk_numel=CHUNK), 0, 768),
        (Placement("disk", "disk"), PAGES, 0, BLOCK_NUMEL),
        (Placement("device", "host"), PAGES, 2, 1 << 15),
        (Placement("host", "disk", in_memory=(1, 3)), BufferBudget(), 1, BLOCK_NUMEL),
    ],
    ids=str,
)
def test_every_placement_gives_the_same_bits(placement, budget, late, block_numel, folder, resident, tmp_path) -> None:
    assert state_of(open_training(folder, tmp_path, placement, budget), late, block_numel) == resident


@pytest.mark.parametrize("kind", MOMENTS)
def test_number_of_threads_changes_no_bit(kind: Kind) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 4):  # more than two use other operations
            torch.set_num_threads(count)
            items = stored(kind, moments(kind, 3), Noise(("a key",), 5))
            found.append((bytes_of(items), bytes_of(loaded(kind, items))))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_rounding_differs_by_layer_moment_and_update() -> None:
    values = torch.full((8 * BLOCK,), 0.5)
    values[::BLOCK] = 1
    codes = [
        codes_of(stored("exp_avg", values, Noise((3, *key), 0))) for key in itertools.product((1, 2), (1, 2), "ab")
    ]
    for one, other in itertools.combinations(codes, 2):
        assert not torch.equal(one, other)
    whole, parts = stored("exp_avg", values, Noise((3,), 5)), []
    for start in range(0, len(values), 2 * BLOCK):
        parts.append(stored("exp_avg", values[start : start + 2 * BLOCK], Noise((3,), 5 + start)))
    assert torch.equal(whole, torch.cat(parts))


def test_state_file_has_codes_then_scales(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    stack = open_training(folder, tmp_path, Placement("disk", "disk"), PAGES)
    curve, _ = state_of(stack)
    assert all(norm > 0 for _, norm in curve)
    layout = stack.layouts[1]
    tensors = load_file(tmp_path / "layer-001.safetensors")
    assert {kind: tensors[kind].dtype for kind in MOMENTS} == dict.fromkeys(MOMENTS, torch.int8)
    for kind in MOMENTS:
        items = tensors[kind][: layout.numel // BLOCK * INT8.items].view(-1, INT8.items)
        scales = items[:, BLOCK:].contiguous().view(torch.float32)
        assert bool((scales >= 0).all())
        assert bool((tensors[kind][layout.numel // BLOCK * INT8.items :] == 0).all()), "zeros fill the last page"
        assert torch.equal(
            dynamic_map(is_signed(kind))[items[:, :BLOCK].contiguous().view(torch.uint8).long()] * scales,
            loaded(kind, items.reshape(-1)).view(-1, BLOCK),
        )
