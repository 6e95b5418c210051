"""Test the masks that accelerators hash: documents do not depend on the batch, elements do not depend on each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gptj_ft.models.attention import _kept
from gptj_ft.models.batch import Documents, PackedBatch, few_groups, pack
from gptj_ft.models.dropout import RATE_STEPS, Dropout, Noise, NoiseSpan, row_keys

CPU = torch.device("cpu")
LENGTHS = (5, 17, 0, 33, 8, 48, 9, 1, 70)


def hashed(*spans: NoiseSpan) -> Noise:
    """Return noise as on an accelerator."""
    return Noise(spans, row_keys(spans))


def whole(seed: int, length: int) -> NoiseSpan:
    return NoiseSpan(seed, 0, length, length)


def hashing_batch(lengths: Sequence[int] = LENGTHS, targets: int = 2) -> PackedBatch:
    """Return a batch whose masks are hashed, with some targets at the end of each document."""
    batch = pack([[1] * length for length in lengths], [max(1, length - targets) for length in lengths])
    batch = replace(batch, seeds=tuple(range(70, 70 + len(lengths))))
    vars(batch)["keys"] = batch._host_keys()
    return batch


@pytest.mark.parametrize("width", [7, 8])
def test_hashed_mask_is_same_in_any_batch(width: int) -> None:
    dropout = Dropout(0.3, 2, "mlp")
    for start, short in ((0, 0), (1, 0), (0, 1)):
        spans = [NoiseSpan(i, min(start, n), max(n - short, 0), n) for i, n in enumerate(LENGTHS) if n > 1]
        together = dropout.mask(hashed(*spans), (width,), CPU)
        alone = [dropout.mask(hashed(whole(i, n)), (width,), CPU)[first:end] for i, first, end, n in spans]
        assert torch.equal(together, torch.cat(alone))


def test_chunks_of_head_rows_have_whole_mask() -> None:
    batch, dropout = hashing_batch(), Dropout(0.3, "classifier")
    count, noise = batch.num_targets, batch.head_rows(0, batch.num_targets).noise
    assert noise is not None
    parts = []
    for start, end in pairwise((0, 3, count - 2, count)):
        part = batch.head_rows(start, end).noise
        assert part is not None
        parts.append(dropout.mask(part, (11,), CPU))
    assert torch.equal(torch.cat(parts), dropout.mask(noise, (11,), CPU))
    assert torch.equal(torch.cat(parts), dropout.mask(hashed(*noise.spans), (11,), CPU))


def test_mask_of_attention_weights_ignores_padding() -> None:
    heads, dropout, found = 3, Dropout(0.3, 1, "attention weights"), dict[int, Tensor]()
    lengths = tuple(filter(None, LENGTHS))
    for chosen in (lengths, lengths[:3], lengths[1:2], lengths[4:]):
        seeds = tuple(map(lengths.index, chosen))
        spans = [whole(*each) for each in zip(seeds, chosen, strict=True)]
        ends = (0, *torch.tensor(chosen).cumsum(0).tolist())
        documents = Documents(ends, seeds, CPU, keys_T=row_keys(spans))
        groups = [documents._bucket(length, group) for length, group in few_groups(chosen)]
        vars(documents)["buckets"] = groups
        for number, bucket in enumerate(groups):
            for keep, document in zip(_kept(number, documents, dropout, heads), bucket.documents, strict=True):
                length = chosen[document]
                mask = keep[:, :length, :length]
                assert torch.equal(mask, found.setdefault(seeds[document], mask)), length
    assert not found[1].all()


class Launches(TorchDispatchMode):
    """Count operations that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_launches_of_dropout_ignore_number_of_documents() -> None:
    dropout, counts = Dropout(0.1, 1, "mlp"), set()
    for number in (2, 16):
        batch = hashing_batch((96 // number,) * number)
        dropout(torch.ones(96, 8), batch.noise)  # the columns are hashed once
        with Launches() as launches:
            assert batch.noise is not None
            dropout.mask(batch.noise, (8,), CPU)
        counts.add(launches.count)
    assert counts == {2}


def correlation(*masks: Tensor) -> float:
    """Return the mean product of masks, in standard errors of independent ones."""
    product = torch.stack([mask - mask.mean() for mask in masks]).prod(0)
    return float(product.mean() / product.std() * math.sqrt(product.numel()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_hashed_elements_are_independent(rate: float) -> None:
    noise = hashed(*(whole(seed, 128) for seed in range(8)))
    one, two, three = (
        Dropout(rate, *site).mask(noise, (768,), CPU).double() for site in ((1, "a"), (2, "a"), (1, "b"))
    )
    share, spread = round(rate * RATE_STEPS) / RATE_STEPS, math.sqrt(rate * (1 - rate))
    for mask in (one, two, three):
        assert abs(mask.mean() - (1 - share)) < 4 * spread / math.sqrt(mask.numel())
    checked = [correlation(one, two), correlation(one, three), correlation(two, three), correlation(one, two, three)]
    for apart in (1, 2, 7, 64, 128):
        checked.append(correlation(one[:-apart], one[apart:]))  # rows; 128: documents
        checked.append(correlation(one[:, :-apart], one[:, apart:]))
        checked.append(correlation(one[:, : -2 * apart], one[:, apart:-apart], one[:, 2 * apart :]))
        corners = (one[:-apart, :-apart], one[apart:, :-apart], one[:-apart, apart:], one[apart:, apart:])
        checked.append(correlation(*corners))
    assert max(map(abs, checked)) < 4.5, checked
    # No direction repeats among rows or columns: the largest singular value is that of independent elements.
    largest = torch.linalg.matrix_norm((one - one.mean()) / one.std(), 2)
    assert largest < 1.02 * sum(map(math.sqrt, one.shape))
